"""Tables and plots of one run, and of several over seeds and settings."""
import json
from pathlib import Path

import pandas as pd
import pytest
from toys import error_line

from cory.__main__ import main
from cory.run import report
from cory.run.log import read_jsonl, write_text


def held_out(reward: float) -> dict:
    return {"task_reward": reward, "kl": 10 * reward, "combined_reward": 0.5, "accuracy": 0.5}


def write_run(folder: Path, reward=1.0, length=12, **changes) -> Path:
    """LLM1 starts at held-out reward 0.5, not as its base, and ends at `reward`; LLM2 starts as its base at
    0.01 and ends 0.1 above LLM1.
    """
    config = {"config_class": "cory.config:ImdbConfig",
              "agents": {"llm1": "base", "llm2": "base_llm2"}, "task": "imdb", "method": "cory", "seed": 0,
              "preset": "tiny", "gamma": 1.0, "learning_rate": 0.1} | changes
    first = {"base": held_out(0.0), "base_llm2": held_out(0.01), "llm1": held_out(0.5),
             "llm2": held_out(0.01), "team": {"copies": 0.1}, "base_team": {"copies": 0.1}}
    last = {name: first[name] for name in ("base", "base_llm2", "base_team")} | {
        "llm1": held_out(reward), "llm2": held_out(reward + 0.1), "team": {"copies": 0.3}}
    rows = [{"iteration": i, "role/llm1": 0, "kl/llm1": i / 3, "kl/llm2": 2.0, "spread": 0.1 * i}
            for i in range(1, length + 1)]
    for at, parts, iteration in ((0, first, 0), (len(rows) + 1, last, length)):
        values = {f"eval_{key}/{who}": x for who, part in parts.items() for key, x in part.items()}
        rows.insert(at, {"iteration": iteration} | values)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines_of(figure, title: str) -> list[list]:
    """The points of each line in a panel."""
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    return [line.get_xydata().tolist() for line in ax.lines]


def legend_of(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_run_has_a_panel_for_each_metric_and_a_line_for_each_agent_base_and_team(tmp_path):
    figure = report.draw_run(write_run(tmp_path / "run"), tmp_path / "p.png")
    kl = "KL from the base (nats per response)"
    assert {ax.get_title() for ax in figure.axes} == {
        "task reward", kl, "combined reward: reward - eta KL", "accuracy", "copies", "role", "spread"}
    assert {*legend_of(figure)} == {"base", "base_llm2", "base_team", "llm1", "llm2", "team"}
    assert lines_of(figure, "task reward") == [
        [[0, 0], [12, 0]], [[0, 0.01], [12, 0.01]], [[0, 0.5], [12, 1.0]], [[0, 0.01], [12, 1.1]]]
    assert [[i, 2.0] for i in range(1, 13)] in lines_of(figure, kl)                 # of llm2
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_table_has_means_and_sample_std():
    """Of 1 and 2: 1.5 and 1 / sqrt(2). Teams have no task reward, and a table of their own."""
    frame = pd.DataFrame([{"task_reward": 1.0, "kl": 0.5}, {"task_reward": 0.126, "kl": 0.0},
                          {"task_reward": 2.0, "kl": 0.5}, {"score": 0.5}], index=["A", "B", "A", "A TEAM"])
    assert report.tables("held-out", frame) == (
        "held-out              A      B\n"
        "task_reward  1.5 ± 0.71  0.126\n"
        "kl              0.5 ± 0      0\n"
        "\n"
        "held-out A TEAM\n"
        "score       0.5")


def test_runs_that_differ_in_more_than_the_seed_are_groups(tmp_path, capsys, monkeypatch):
    """Two rates, two seeds each: llm1's held-out reward ends at 1 and 2, 3 and 4; the agents' mean is 0.05
    above it. A setting that a run is older than has its default.
    """
    drawn, draw = [], report.draw_comparison
    monkeypatch.setattr(report, "draw_comparison", lambda *args: drawn.append(draw(*args)))
    runs = [write_run(tmp_path / str(end), learning_rate=rate, seed=seed, reward=end, device=device, **more)
            for rate, seed, end, device, more in ((1e-5, 0, 1.0, "cpu", {}), (1e-5, 1, 2.0, "cuda", {}),
                                                  (1e-4, 0, 3.0, "cpu", {"kl_target": 6.0}),
                                                  (1e-4, 1, 4.0, "cpu", {}))]
    out = tmp_path / "new" / "c.pdf"
    main(["report", *map(str, runs), "--out", str(out)])
    said = capsys.readouterr().out
    groups = [f"CORY, learning_rate {rate}" for rate in ("1e-05", "0.0001")]
    for words in (f"{groups[0]} llm1", f"{groups[1]} base_llm2", "1.5 ± 0.71", "3.5 ± 0.71", str(out)):
        assert words in said
    assert out.read_bytes()[:4] == b"%PDF"
    assert legend_of(drawn[0]) == [f"{group} (2 runs)" for group in groups]
    assert [[0, 0.255], [12, 3.55]] in lines_of(drawn[0], "task reward, held out")
    tops = [band.get_paths()[0].get_extents().y1 for band in drawn[0].axes[0].collections]
    assert pytest.approx(3.55 + 0.5**0.5) in tops


@pytest.mark.parametrize("trained, mean", [((), 1.05), (("llm1",), 1.0), (("llm1", "llm2"), 1.05)])
def test_a_mean_is_over_the_agents_that_have_been_trained(trained, mean, tmp_path, capsys):
    """In the tables and curves of a run and of several."""
    rows = read_jsonl(write_run(tmp_path / "run") / "metrics.jsonl")
    rows[3] |= {f"trained/{name}": 1.0 for name in trained} | {"trained/llm1": float("llm1" in trained)}
    write_text(tmp_path / "run/metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert report.last_held_out(rows, ["llm1", "llm2"])["mean"]["task_reward"] == pytest.approx(mean)
    main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "p.png")])
    header, _, reward, *_ = capsys.readouterr().out.splitlines()
    assert header.split("CORY ")[-1].strip() == "mean" and reward.split()[-1] == f"{mean:.4g}"


def test_ones_own_methods_of_the_same_name_are_two_groups(tmp_path, capsys):
    methods = ["one:Own", "two:Own", "ppo"]
    runs = [write_run(tmp_path / str(i), method=method) for i, method in enumerate(methods)]
    main(["report", *map(str, runs), "--out", str(tmp_path / "p.png")])
    said = capsys.readouterr().out
    assert all(f"{group} llm1" in said for group in ("one:Own", "two:Own", "PPO")) and "±" not in said


def test_a_folder_without_a_run_is_named(capsys):
    for command in ("report", "evaluate"):
        assert "'TYPO': contains no run" in error_line(main, [command, "TYPO"], capsys)
