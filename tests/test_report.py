"""Tables and plots of one run, and of several over seeds and settings."""
import json
from pathlib import Path

import pandas as pd
import pytest
from toys import error_line

from cory import report
from cory.__main__ import main
from cory.log import read_jsonl


def held_out(reward: float) -> dict:
    return {"task_reward": reward, "kl": 10 * reward, "combined_reward": 0.5, "accuracy": 0.5,
            "greedy_accuracy": 0.75}


def write_run(folder: Path, reward=1.0, base=0.0, length=12, **changes) -> Path:
    """A run of 12 iterations, or `length`. LLM1 starts at held-out reward 0.5, not as its base, which has
    `base`, and ends at `reward`; LLM2 starts as its base at 0.01 and ends 0.1 above LLM1.
    """
    config = {"config_class": "cory.config:ImdbConfig",
              "agents": {"llm1": "base", "llm2": "base_llm2"}, "task": "imdb", "method": "cory", "seed": 0,
              "preset": "tiny", "gamma": 1.0, "learning_rate": 0.1} | changes
    first = {"base": held_out(base), "base_llm2": held_out(0.01), "llm1": held_out(0.5),
             "llm2": held_out(0.01), "team": {"copies": 0.1}, "base_team": {"copies": 0.1}}
    last = {"llm1": held_out(reward), "llm2": held_out(reward + 0.1), "team": {"copies": 0.3}}
    rows = [{"iteration": i, "role/llm1": 0, "kl/llm1": i / 3, "kl/llm2": 2.0, "spread": 0.1 * i,
             "score/llm1": 1.0, "kl_coef/llm1": 0.1 * i, "kl_coef/llm2": 0.1,
             "seconds": 1.0, "broken": float("nan")} for i in range(1, length + 1)]
    for at, parts, iteration in ((0, first, 0), (len(rows) + 1, last, length)):
        values = {f"eval_{key}/{who}": x for who, part in parts.items() for key, x in part.items()}
        rows.insert(at, {"iteration": iteration} | values)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = report.last_held_out(rows)
    (folder / "eval.json").write_text(json.dumps({"iteration": 12} | parts))
    return folder


def lines_of(figure, title: str) -> list[list]:
    """The points of each line in a panel."""
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    return [line.get_xydata().tolist() for line in ax.lines if len(line.get_xdata())]


def legend_of(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.fixture
def figures(monkeypatch) -> list:
    """The comparisons that are drawn."""
    drawn, draw = [], report.draw_comparison
    monkeypatch.setattr(report, "draw_comparison", lambda *args: drawn.append(draw(*args)))
    return drawn


def test_a_run_has_a_panel_for_what_varies_and_a_line_for_each_agent_and_the_team(tmp_path, monkeypatch):
    figure = report.draw_run(write_run(tmp_path / "run"), tmp_path / "p.png")
    kl = "KL from the base (nats per response)"
    assert [ax.get_title() for ax in figure.axes] == [
        "task reward", kl, "KL coefficient eta", "accuracy", "copies", "spread",
        "held-out reward against KL"]
    assert {*legend_of(figure)} == {
        "base", "base llm2", "base team", "LLM1, training", "LLM1, held out", "LLM1, held out, greedy",
        "LLM2, training", "LLM2, held out", "LLM2, held out, greedy", "team, training", "team, held out"}
    # a base's value is a line across the panel; what the method measures is the team's
    base, base_2, llm1, llm2 = lines_of(figure, "task reward")
    assert base == [[0, 0], [1, 0]] and base_2 == [[0, 0.01], [1, 0.01]]            # of the axis
    assert llm1 == [[0, 0.5], [12, 1.0]] and llm2 == [[0, 0.01], [12, 1.1]]
    assert lines_of(figure, "copies") == [[[0, 0.1], [12, 0.3]], [[0, 0.1], [1, 0.1]]]
    assert lines_of(figure, "held-out reward against KL")[-1] == [[0.1, 0.01], [11, 1.1]]
    assert [[i, 2.0] for i in range(1, 13)] in lines_of(figure, kl)                 # of llm2
    assert [[i, pytest.approx(i / 3)] for i in range(1, 13)] in lines_of(figure, kl)   # short: not smoothed
    long = write_run(tmp_path / "long", length=40)
    figure = report.draw_run(long, tmp_path / "p.png")
    assert [y for _, y in lines_of(figure, "spread")[0]] == pytest.approx(
        [0.15, *(0.1 * i for i in range(2, 40)), 3.95])
    etas = lines_of(figure, "KL coefficient eta")                   # each smoothed by itself
    assert [y for _, y in etas[1]] == pytest.approx([0.1] * 40) != [y for _, y in etas[0]]
    monkeypatch.setitem(globals(), "held_out", lambda reward: dict.fromkeys(
        ("task_reward", "kl", "combined_reward"), 0.0))
    flat = report.draw_run(write_run(tmp_path / "flat"), tmp_path / "p.png")
    assert lines_of(flat, "task reward")[0] == [[0, 0], [1, 0]]


def test_a_table_has_means_and_sample_std_and_a_dash_where_a_run_has_no_value():
    """Of 1 and 2: 1.5 and 1 / sqrt(2). Teams have no task reward, and a table of their own."""
    frame = pd.DataFrame([{"task_reward": 1.0, "x": 0.5}, {"task_reward": 0.126, "kl": 0.0},
                          {"task_reward": 2.0}, {"score": 0.5}], index=["A", "B", "A", "A TEAM"])
    assert report.tables("held-out", frame) == (
        "held-out               A     B\n"
        "runs                   2     1\n"
        "task reward  1.50 ± 0.71  0.13\n"
        "x                      –     –\n"
        "kl                     –   0.0\n"
        "\n"
        "held-out A TEAM\n"
        "score     0.500")


def test_values_of_a_setting_are_grouped_and_never_averaged(tmp_path, capsys, figures):
    """Two rates, two seeds each: llm1's held-out reward ends at 1 and 2, 3 and 4, the std is 1 / sqrt(2); the
    agents' mean is 0.05 above it, and its interval is 12.706 / sqrt(2) of that on either side.
    """
    runs = [write_run(tmp_path / str(end), learning_rate=rate, seed=seed, reward=end, base=1e4 * rate)
            for rate, seed, end in ((1e-5, 0, 1.0), (1e-5, 1, 2.0), (1e-4, 0, 3.0), (1e-4, 1, 4.0))]
    assert "in learning_rate; make a group" in error_line(main, ["report", *runs], capsys)
    out, csv = tmp_path / "new" / "c.pdf", tmp_path / "new" / "c.csv"
    main(["report", *map(str, runs), "--out", str(out), "--csv", str(csv), "--by", "learning_rate"])
    said = capsys.readouterr().out
    table = [" ".join(line.split()) for line in said.splitlines()]          # a line for a group
    for start in ("held-out runs task reward", "base, learning_rate 1e-05 2 0.10 ± 0.00",
                  "CORY LLM1, learning_rate 1e-05 2 1.50 ± 0.71",
                  "CORY LLM1, learning_rate 0.0001 2 3.50 ± 0.71"):
        assert sum(line.startswith(start) for line in table) == 1, table
    assert max(map(len, said.splitlines()[:-1])) <= 100
    assert table[-1] == f"written: {out} {csv}" and out.read_bytes()[:4] == b"%PDF"
    rows = pd.read_csv(csv)
    assert len(rows) == 4 * (6 + 3) and rows[rows.who == "llm2"].task_reward.max() == pytest.approx(4.1)
    (figure,) = figures
    assert legend_of(figure) == [f"CORY, learning_rate {rate} (2 seeds)" for rate in (1e-5, 1e-4)] + ["base"]
    assert [[0, 0.255], [12, 3.55]] in lines_of(figure, "task reward, held out")
    tops = [band.get_paths()[0].get_extents().y1 for band in figure.axes[0].collections]
    assert pytest.approx(3.55 + 12.706 * 0.5**0.5 / 2**0.5, rel=1e-4) in tops


def test_a_base_that_all_runs_share_is_shown_once(tmp_path, capsys, figures):
    runs = [write_run(tmp_path / f"{rate}", learning_rate=rate) for rate in (1e-5, 1e-4)]
    main(["report", *map(str, runs), "--out", str(tmp_path / "c.png"), "--by", "learning_rate"])
    said = capsys.readouterr().out
    assert "base  " in said and "base, learning_rate" not in said and "CORY LLM1, learning_rate 1e-05" in said
    assert legend_of(figures[0])[0] == "CORY, learning_rate 1e-05 (1 seed)"


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys, monkeypatch):
    """A setting that a run is older than has its default."""
    monkeypatch.setattr(report, "draw_comparison", lambda *_: None)
    first, again = write_run(tmp_path / "a"), write_run(tmp_path / "b", device="cuda", wandb="offline")
    other = write_run(tmp_path / "c", gamma=0.9, kl_target=0.0)
    own = write_run(tmp_path / "d", seed=1, agent_settings={"llm2": {"gamma": 0.9}})
    for words, says in (([first, again], "have the same seed"), ([first, first], "have the same seed"),
                        ([first, other], "in gamma, kl_target;"), ([first, own], "see agent_settings"),
                        ([first, "--by", "gama"], "by is 'gama': is not a setting"),
                        ([first, "--by", "agents"], "by is 'agents': is not a setting")):
        assert says in error_line(main, ["report", *words], capsys)
    main(["report", str(first), str(write_run(tmp_path / "p", method="my:Chain", kl_target=6.0))])
    assert "CHAIN LLM1" in capsys.readouterr().out
    for command in ("report", "evaluate"):
        assert "'TYPO': contains no run" in error_line(main, [command, "TYPO"], capsys)
    for out in ("noext", tmp_path):
        assert "ends in .png, .pdf or .svg" in error_line(main, ["report", first, "--out", out], capsys)
    (again / "eval.json").unlink()
    assert "is not finished (no eval.json)" in error_line(main, ["evaluate", again], capsys)
    (again / "metrics.jsonl").write_text("")
    assert "has no held-out metrics yet" in error_line(main, ["report", again], capsys)
    (again / "metrics.jsonl").write_text('{"iteration"\n{"iteration": 1}\n')
    assert "metrics.jsonl': is damaged" in error_line(main, ["report", again], capsys)


def test_an_unfinished_run_is_said_and_means_are_of_all_seeds(tmp_path, capsys, figures):
    """One of two has done 6 of 12 iterations: the curves end where both have been evaluated."""
    whole, part = (write_run(tmp_path / str(seed), seed=seed, iterations=12) for seed in (0, 1))
    (part / "eval.json").unlink()
    rows = [row for row in read_jsonl(part / "metrics.jsonl") if row["iteration"] <= 6]
    (part / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["report", str(whole), str(part), "--out", str(tmp_path / "c.png")])
    said = capsys.readouterr().out
    assert said.startswith(f"unfinished: {part}, at iteration 6 of 12, last evaluated at 0\n")
    assert said.count("unfinished: ") == 1 and "0.75 ± 0.35" in said          # llm1: of 1.0 and 0.5
    assert [line[-1][0] for line in lines_of(figures[0], "task reward, held out")] == [0, 1, 1]
