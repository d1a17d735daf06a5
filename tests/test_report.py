"""Tables and plots of one run, and of several over seeds and settings."""
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from toys import error_line

from cory.__main__ import main
from cory.run import report

GREY = to_hex(report.BASE["color"])


def write_run(folder: Path, reward=1.0, base=0.0, **changes) -> Path:
    """12 iterations, exchanges after 4 and 8. LLM1 ends at held-out `reward`, LLM2 0.1 above it."""
    config = {"config_class": "cory.config:ImdbConfig", "agents": {"llm1": "base", "llm2": "base"}, "seed": 0,
              "method": "cory", "preset": "tiny", "learning_rate": 0.1} | changes
    rows = [{"iteration": i, "role/llm0": 2, f"role/llm{(i - 1) // 4 % 2 + 1}": 0, "observer_copies": 0,
             "kl/llm1": i / 3, "kl/llm2": i / 3 + 1, "score/llm1": i, "score/llm2": i, "grad_norm/llm1": i,
             "seconds": i, "spread": i}
            for i in range(1, 13)]
    for i, llm1, llm2 in (0, 0.5, 0.01), (12, reward, reward + 0.1):
        row = {"iteration": i, "eval_spread/team": i + 0.1, "eval_spread/base_team": 0.1,
               "eval_observer_reward/team": 20 + i}
        for who, x in ("base", base), ("llm1", llm1), ("llm2", llm2), ("mean", (llm1 + llm2) / 2):
            row |= {f"eval_task_reward/{who}": x, f"eval_kl/{who}": 10 * x, f"eval_combined_reward/{who}": x,
                    f"eval_accuracy/{who}": 0.5, f"eval_greedy_task_reward/{who}": x + 0.5}
        rows.insert(13 if i else 0, row)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines_of(figure, title: str) -> dict[str, tuple]:
    """The points, style and colour of each line in a panel, by label."""
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    return {line.get_label(): (line.get_xydata().tolist(), line.get_linestyle(), to_hex(line.get_color()))
            for line in ax.lines}


def test_a_run_has_panels_of_what_varies_and_curves_of_everyone(tmp_path):
    """`observer_copies` and `accuracy` are constant, `seconds` and `grad_norm` technical."""
    figure = report.draw_run(write_run(tmp_path / "run"), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    titles = map(report.PANELS.get, ["task_reward", "kl", "combined_reward", "score", "observer_reward"])
    assert [ax.get_title() for ax in figure.axes] == [*titles, "spread", "held-out reward against KL"]
    held_out, training = [[f"{who}, {kind}" for who in ("llm1", "llm2", "team")]
                          for kind in ("held out", "training")]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *held_out, *training, "exchange of roles", "base", "llm1, greedy", "llm2, greedy", "base_team"]
    rewards = lines_of(figure, "task reward")
    assert rewards["llm1, greedy"] == ([[0, 1], [12, 1.5]], "--", report.PALETTE["cory"])
    lines = lines_of(figure, report.PANELS["kl"])
    assert len(lines) == 6                                              # with an exchange, without the mean
    assert lines["llm1, held out"] == ([[0, 5], [12, 10]], "-", report.PALETTE["cory"])
    assert lines["base"] == ([[0, 0], [12, 0]], "-", GREY)
    points, style, color = lines["llm2, training"]
    assert points[1:-1] == [[i, pytest.approx(i / 3 + 1)] for i in range(2, 12)] and style == ":"
    assert color == lines["llm2, held out"][2] != report.PALETTE["cory"]
    assert lines_of(figure, report.PANELS["score"]).keys() == {"team, training", "exchange of roles"}
    assert lines_of(figure, "spread")["base_team"] == ([[0, 0.1], [12, 0.1]], "--", GREY)
    assert [line.get_xdata()[0] for line in figure.axes[0].lines[:3]] == [4.5, 8.5, 0]      # exchanges
    assert lines_of(figure, report.PANELS["observer_reward"])["team, held out"][0] == [[0, 20], [12, 32]]
    assert [[0.1, 0.01], [11, 1.1]] in [line.get_xydata().tolist() for line in figure.axes[-1].lines]


def test_scores_of_agents_that_are_trained_in_turn_are_theirs():
    rows = [{"iteration": i, f"score/llm{i % 2 + 1}": i} for i in range(1, 7)]
    assert [who for _, _, who in report.read_curves(rows)] == ["llm2", "llm1"]
    rows = [{"iteration": i, "score/llm1": i, "score/llm2": i + 1e-9} for i in range(1, 7)]
    assert [who for _, _, who in report.read_curves(rows)] == ["team"]
    rows = [row | {"score": 9} for row in rows]                                 # one of the method's own
    assert [who for _, _, who in report.read_curves(rows)] == ["llm1", "llm2", "team"]


def test_training_curves_are_running_means_over_a_twentieth():
    """Of 60 iterations: over 3. An infinite value is left out. LLM2 is trained in two of them."""
    rows = [{"iteration": i, "kl/llm1": float("inf") if i == 30 else i % 3} for i in range(1, 61)]
    rows[4]["kl/llm2"], rows[8]["kl/llm2"] = 5, 9
    curves = report.read_curves(rows)
    values = curves["kl", "training", "llm1"].tolist()
    assert values[:3] == pytest.approx([1.5, 1, 1]) and len(values) == 59
    assert curves["kl", "training", "llm2"].tolist() == [5, 9]


def test_a_table_has_means_and_sample_std():
    """Of 1 and 2: 1.5 and 1 / sqrt(2). Teams have a table of their own; a mean of one agent is left out."""
    frame = pd.DataFrame([{"task_reward": 1.0, "kl": 0.5, "gap": 1e-6}, {"task_reward": 0.126, "kl": 15.0},
                          {"task_reward": 2.0, "kl": 0.5, "big": 1234.5}, {"score": 0.5, "kl": 0.25},
                          {"task_reward": 0.126, "kl": 15.0}], index=["A", "B", "A", "team", "mean"])
    assert report.tables("held-out", frame, ["A", "B", "A", "A", "mean"]) == (
        "held-out               A     B\n"
        "runs                   2     1\n"
        "task_reward  1.50 ± 0.71  0.13\n"
        "kl             0.5 ± 0.0  15.0\n"
        "big                    –     –\n"
        "\n"
        "held-out      A\n"
        "kl        0.250\n"
        "score     0.500")


def test_a_table_of_zeros_has_its_rows():
    frame = pd.DataFrame([{"copies": 0.0, "pioneer_reward": 0.0}], index=["team"])
    assert report.tables("held-out", frame) == (
        "held-out         team\n"
        "copies          0.000\n"
        "pioneer_reward  0.000")


@pytest.mark.parametrize("bases", [(0.0, 0.0), (0.0, 0.2)])
def test_runs_that_differ_in_more_than_the_seed_are_groups(bases, tmp_path, capsys, monkeypatch):
    """CORY's mean ends at 3.05 and 4.05. The band is t(0.975) for two runs, 12.706, times 0.71 / sqrt(2)."""
    drawn, draw = [], report.draw_comparison
    monkeypatch.setattr(report, "draw_comparison", lambda *args: drawn.append(draw(*args)))
    both = ("ppo", 1, bases[0], {}), ("cory", 3, bases[1], {"kl_target": 6.0, "device": "cuda"})
    runs = [write_run(tmp_path / f"{method}{seed}", end + seed, base, method=method, seed=seed, **more)
            for method, end, base, more in both for seed in (0, 1)]
    main(["report", *map(str, runs), "--out", str(tmp_path / "new/c.pdf")])
    labels, seeds, reward = [re.split(" {2,}", x) for x in capsys.readouterr().out.splitlines()[:3]]
    of_bases = ["base"] if bases[0] == bases[1] else ["ppo base", "cory base"]
    assert {*labels[1:]} == {*of_bases, "ppo", "cory"} and len(labels) == len(seeds)
    assert dict(zip(labels, reward, strict=True))["cory"] == "3.55 ± 0.71"
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["cory", "ppo"]
    lines = lines_of(drawn[0], "task reward")
    assert lines["cory"] == ([[0, 0.255], [12, 3.55]], "-", report.PALETTE["cory"])
    assert lines[f"_{of_bases[0]}"][2] == GREY and (tmp_path / "new/c.pdf").read_bytes()[:4] == b"%PDF"
    assert {text.get_text() for text in drawn[0].axes[0].texts} == {*of_bases}
    tops = [band.get_paths()[0].get_extents().y1 for band in drawn[0].axes[1].collections]
    assert pytest.approx(3.55 + 12.706 / 2, abs=1e-3) in tops


def test_teams_of_bases_with_other_roles_are_no_group(tmp_path, capsys):
    runs = [write_run(tmp_path / method, method=method) for method in ("cory", "own:Own")]
    log = runs[1] / "metrics.jsonl"
    log.write_text(log.read_text().replace("eval_spread", "eval_other"))
    main(["report", *map(str, runs), "--out", str(tmp_path / "c.png")])
    said = capsys.readouterr().out
    assert "cory base_team" in said and "own:Own base_team" in said


def test_groups_have_a_colour_for_each_setting_and_a_line_for_each_method(tmp_path):
    """Equal settings have equal colours, also where a method lacks some of them."""
    runs = [write_run(tmp_path / f"{rate}", method=method, learning_rate=rate)
            for method, rate in (("own:Own", 1.0), ("cory", 2), ("cory", 1))]
    groups = report.groups_of(runs)
    assert groups.group.tolist() == [
        "cory, learning_rate 1.0", "cory, learning_rate 2.0", "own:Own, learning_rate 1.0"]
    styles = report.styles_of_groups(groups)
    alike = [write_run(tmp_path / x, learning_rate=1, run_dir="") for x in ("a", "b")]   # say, by other code
    assert report.groups_of(alike).settings.tolist() == [f", run_dir {run}" for run in alike]
    longer = write_run(tmp_path / "longer", learning_rate=1, iterations=200)
    assert report.groups_of([runs[2], longer]).settings.tolist() == [", iterations 100", ", iterations 200"]
    one, two, own = ((tuple(styles[group]["color"]), styles[group]["linestyle"]) for group in groups.group)
    assert one[0] == own[0] != two[0] and one[1] == two[1] != own[1]
    rates = pd.DataFrame({"method": "PPO", "settings": [f", rate {i}" for i in range(7)]})
    styles = report.styles_of_groups(rates.assign(group=rates.settings))
    assert len({style["color"] for style in styles.values()}) == 7


def test_a_folder_without_a_run_is_named(capsys):
    for command in ("report", "evaluate"):
        assert "'TYPO': contains no run" in error_line(main, [command, "TYPO"], capsys)
