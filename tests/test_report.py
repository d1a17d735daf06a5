"""Tables and plots of one run, and of several over seeds and settings."""
import json
import re
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from toys import error_line

from cory.__main__ import main
from cory.run import report

GREY = to_hex(report.BASE["color"])


def write_run(folder: Path, reward=1.0, base=0.0, last=12, **changes) -> Path:
    """`last` iterations, exchanges after 4 and 8. LLM1 ends at held-out `reward`, LLM2 0.1 above it; in the
    iteration before, both are at 0.2. combined_reward is the reward less 1.
    """
    config = {
        "config_class": "cory.config:ImdbConfig",
        "agents": {"llm1": "base", "llm2": "base"},
        "seed": 0, "method": "cory", "preset": "tiny", "learning_rate": 0.1}
    config |= changes
    rows = []
    for i in range(1, last + 1):
        pioneer = (i - 1) // 4 % 2 + 1
        rows.append({
            "iteration": i, "seconds": i,
            "train/role/llm0": 2, f"train/role/llm{pioneer}": 0,
            "train/kl/llm1": i / 3, "train/kl/llm2": i / 3 + 1,
            "train/score/llm1": i, "train/grad_norm/llm1": i,
            "train/sampled_tokens/llm1": 100, "train/sampled_tokens/llm2": 50 * (i % 2),
            "train/constant/team": 0, "train/spread/team": i})
    evaluations = {0: (0.5, 0.01), last - 1: (0.2, 0.2), last: (reward, reward + 0.1)}
    for i, (llm1, llm2) in evaluations.items():
        rewards = {"base": base, "llm1": llm1, "llm2": llm2, "mean": (llm1 + llm2) / 2}
        row = {"iteration": i}
        for who, x in rewards.items():
            row[f"eval/task_reward/{who}"] = x
            row[f"eval/kl/{who}"] = 10 * x
            row[f"eval/combined_reward/{who}"] = x - 1
            row[f"eval/accuracy/{who}"] = 0.5
            row[f"eval/greedy_task_reward/{who}"] = x + 0.5
        row["eval/observer_task_reward/team"] = 20 + i
        row["eval/spread/team"] = i + 0.1
        row["eval/spread/base_team"] = 0.1
        rows.append(row)
    rows.sort(key=lambda row: row["iteration"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class Line(NamedTuple):
    points: dict[float, float]              # y by x, in the order in which they are joined
    style: str
    color: str


def lines_of(figure, metric: str) -> dict[str, Line]:
    """The lines in the panel of a metric, or in one of this title, by label."""
    title = report.PANELS.get(metric, metric)
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    lines = {}
    for line in ax.lines:
        points = dict(line.get_xydata().tolist())
        color = to_hex(line.get_color())
        lines[line.get_label()] = Line(points, line.get_linestyle(), color)
    return lines


def legend_of(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_run_has_panels_of_what_varies_and_curves_of_everyone(tmp_path):
    """`constant` and `accuracy` do not vary, `grad_norm` and `score` are technical, greedy metrics are in
    tables alone.
    """
    figure = report.draw_run(write_run(tmp_path / "run"), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    metrics = ["task_reward", "kl", "combined_reward", "observer_task_reward"]
    titles = [report.PANELS[metric] for metric in metrics]
    titles += ["spread", "held-out reward against KL"]
    assert [ax.get_title() for ax in figure.axes] == titles
    assert {*legend_of(figure)} == {
        "base, eval", "llm1, eval", "llm2, eval", "llm1, train", "llm2, train",
        "team, eval", "team, train", "base_team, eval"}
    rewards = lines_of(figure, "task_reward")
    assert rewards["llm1, eval"].points == {0: 0.5, 11: 0.2, 12: 1}
    combined = lines_of(figure, "combined_reward")
    assert combined["llm1, eval"].points == {0: -0.5, 11: -0.8, 12: 0}
    kl = lines_of(figure, "kl")
    assert kl.keys() == {"base, eval", "llm1, eval", "llm2, eval", "llm1, train", "llm2, train"}
    assert kl["llm1, eval"] == ({0: 5, 11: 2, 12: 10}, "-", to_hex("C0"))
    assert kl["base, eval"] == ({0: 0, 11: 0, 12: 0}, "-", GREY)
    training = kl["llm2, train"]
    assert training.points.keys() == {*range(1, 13)}
    for i in range(2, 12):
        assert training.points[i] == pytest.approx(i / 3 + 1)
    assert training.style == ":"
    assert training.color == kl["llm2, eval"].color
    assert training.color == to_hex("C1")
    spread = lines_of(figure, "spread")
    assert spread["base_team, eval"] == ({0: 0.1, 11: 0.1, 12: 0.1}, "--", GREY)
    observer_reward = lines_of(figure, "observer_task_reward")
    assert observer_reward["team, eval"].points == {0: 20, 11: 31, 12: 32}
    against_kl = [line.get_xydata().tolist() for line in figure.axes[-1].lines]
    assert [[0.1, 0.01], [2, 0.2], [11, 1.1]] in against_kl


def test_training_curves_are_running_means_over_a_twentieth():
    """Of 100 points: over 5."""
    values = pd.Series({i: i % 5 for i in range(1, 101)}, dtype=float)
    assert report.running_mean(values).tolist()[:4] == pytest.approx([2, 2.5, 2, 2])
    assert report.running_mean(pd.Series({5: 6.0, 9: 8.0})).to_dict() == {5: 7, 9: 7}


def test_a_table_has_means_and_sample_std():
    """Of 1 and 2: 1.5 and 1 / sqrt(2). Teams have a table of their own; a mean of one agent is left out."""
    rows = [
        {"task_reward": 1.0, "kl": 0.5, "gap": 1e-6},
        {"task_reward": 0.126, "kl": 15.0},
        {"task_reward": 2.0, "kl": 0.5, "big": 1234.5},
        {"score": -0.5, "kl": 0.25},
        {"task_reward": 0.126, "kl": 15.0}]
    frame = pd.DataFrame(rows, index=["C", "B", "C", "team", "mean"])
    assert report.tables(frame, ["C", "B", "C", "C", "mean"]) == (
        "held-out                 C       B\n"
        "runs                     2       1\n"
        "task_reward  1.500 ± 0.707   0.126\n"
        "kl           0.500 ± 0.000  15.000\n"
        "big                      –       –\n"
        "\n"
        "held-out       C\n"
        "kl         0.250\n"
        "score     -0.500")


def test_a_table_of_zeros_has_its_rows():
    frame = pd.DataFrame([{"copies": 0.0, "pioneer_reward": 0.0}], index=["team"])
    assert report.tables(frame) == (
        "held-out         team\n"
        "copies          0.000\n"
        "pioneer_reward  0.000")


def compare(runs: list[Path], out: Path, monkeypatch, capsys, *flags: str) -> tuple:
    """The figure, and the lines that `report` prints, each as its cells."""
    figures = []
    draw = report.draw_comparison
    monkeypatch.setattr(report, "draw_comparison", lambda *given: figures.append(draw(*given)))
    main(["report", *map(str, runs), "--out", str(out), *flags])
    printed = capsys.readouterr().out.splitlines()
    return figures[0], [re.split(" {2,}", line) for line in printed]


@pytest.mark.parametrize("base_of_cory", [0.0, 0.2])
def test_runs_that_differ_in_more_than_the_seed_are_groups(base_of_cory, tmp_path, capsys, monkeypatch):
    """CORY's means end at 3.05 and 4.05, the second run's at iteration 20: 3.55 is the mean of the ends. At
    iteration 0, which alone all its runs have, the reward is 0.255.

    PPO's end at 1.05 and 2.05, both at iteration 12: the band is t(0.975) for two runs, 12.706, times
    0.71 / sqrt(2).
    """
    runs = []
    for seed in (0, 1):
        ppo = write_run(tmp_path / f"ppo{seed}", 1 + seed, 0.0, method="ppo", seed=seed)
        cory = write_run(
            tmp_path / f"cory{seed}", 3 + seed, base_of_cory, 12 + 8 * seed,
            seed=seed, kl_target=6.0, device="cuda")
        runs += [ppo, cory]
    out = tmp_path / "new/c.pdf"
    figure, (labels, seeds, iteration, reward, *_) = compare(runs, out, monkeypatch, capsys)
    bases = ["cory base", "ppo base"] if base_of_cory else ["base"]
    assert {*labels[1:]} == {"ppo", "cory", *bases}
    assert len(labels) == len(seeds)
    by_label = dict(zip(labels, reward, strict=True))
    assert by_label["cory"] == "3.550 ± 0.707"
    assert by_label["ppo"] == "1.550 ± 0.707"
    assert {"12.000 ± 0.000", "16.000 ± 5.657"} < {*iteration}
    assert {*legend_of(figure)} == {"ppo", "cory", *bases}
    lines = lines_of(figure, "task_reward")
    ppo_points = {0: 0.255, 11: 0.2, 12: pytest.approx(1.55)}
    assert lines["ppo"] == (ppo_points, "--", to_hex("C1"))
    assert lines["cory"] == ({0: 0.255}, "-", to_hex("C0"))
    assert lines[bases[0]].color == GREY
    combined = lines_of(figure, "combined_reward")
    assert combined["ppo"].points == {0: 0.255 - 1, 11: -0.8, 12: pytest.approx(0.55)}
    against_kl = lines_of(figure, "reward against KL")
    joined = [[*line.points.items()] for line in against_kl.values()]
    end = (pytest.approx(15.5), pytest.approx(1.55))
    assert [(2.55, 0.255), (2, 0.2), end] in joined
    bands = [band.get_paths()[0] for band in figure.axes[1].collections]
    tops = [band.get_extents().y1 for band in bands]
    assert pytest.approx(1.55 + 12.706 / 2, abs=1e-3) in tops              # 0.71 / sqrt(2) = 1 / 2
    assert out.read_bytes()[:4] == b"%PDF"


def test_a_comparison_can_be_drawn_over_sampled_tokens(tmp_path, capsys, monkeypatch):
    """Each iteration has 100 tokens of llm1, and each odd one 50 of llm2. Tables have no tokens."""
    runs = [write_run(tmp_path / method, method=method) for method in ("ppo", "cory")]
    figure, printed = compare(runs, tmp_path / "c.png", monkeypatch, capsys, "--over", "tokens")
    lines = lines_of(figure, "task_reward")
    assert lines["cory"].points == {0: 0.255, 1400: 0.2, 1500: pytest.approx(1.05)}
    assert lines["base"].points.keys() == {0, 1400, 1500}
    assert figure.axes[0].get_xlabel() == "tokens"
    assert "tokens" not in [row[0] for row in printed]


def test_teams_of_bases_with_other_roles_are_no_group(tmp_path, capsys):
    cory = write_run(tmp_path / "cory")
    custom = write_run(tmp_path / "custom", method="my:Method")
    log = custom / "metrics.jsonl"
    log.write_text(log.read_text().replace("eval/spread", "eval/other"))
    main(["report", str(cory), str(custom), "--out", str(tmp_path / "c.png")])
    printed = capsys.readouterr().out
    assert "cory base_team" in printed
    assert "my:Method base_team" in printed


def test_groups_are_named_by_the_settings_in_which_runs_differ(tmp_path):
    custom = write_run(tmp_path / "custom", method="my:Method", learning_rate=1.0)
    faster = write_run(tmp_path / "faster", learning_rate=2)
    slower = write_run(tmp_path / "slower", learning_rate=1)
    groups = report.groups_of([custom, faster, slower])
    assert groups.group.tolist() == [
        "cory, learning_rate 1.0",
        "cory, learning_rate 2.0",
        "my:Method, learning_rate 1.0"]
    longer = write_run(tmp_path / "longer", learning_rate=1, iterations=200)
    groups = report.groups_of([slower, longer])
    assert groups.settings.tolist() == [", iterations 100", ", iterations 200"]


def test_runs_that_differ_in_their_code_alone_are_named_by_their_folders(tmp_path):
    runs = [write_run(tmp_path / name, run_dir="") for name in ("a", "b")]
    assert report.groups_of(runs).settings.tolist() == [f", run_dir {run}" for run in runs]


def test_groups_have_a_colour_each_a_line_for_each_method_and_a_marker_for_each_setting():
    groups = pd.DataFrame({
        "method": ["cory"] * 7 + ["my:Method"] * 7,
        "settings": [f", rate {i}" for i in range(7)] * 2})
    groups["group"] = groups.method + groups.settings
    styles = report.styles_of_groups(groups)
    colors = [style["color"] for style in styles.values()]
    assert len({to_hex(color) for color in colors[:10]}) == 10
    for i in range(7):
        cory = styles[f"cory, rate {i}"]
        other = styles[f"my:Method, rate {i}"]
        assert (cory["linestyle"], other["linestyle"]) == ("-", "--")
        assert cory["marker"] == other["marker"] == report.MARKERS[i]


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for command in ("report", "evaluate"):
        for folder in ("TYPO", str(tmp_path)):
            assert f"'{folder}': contains no run" in error_line(main, [command, folder], capsys)


def test_a_run_without_metrics_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    assert f"'{run}': has no metrics yet" in error_line(main, ["report", str(run)], capsys)


def test_a_plot_without_a_suffix_is_a_png(tmp_path, capsys):
    main(["report", str(write_run(tmp_path / "run")), "--out", str(tmp_path / "plot")])
    assert capsys.readouterr().out.endswith(f"written: {tmp_path / 'plot.png'}\n")
    assert (tmp_path / "plot.png").exists()
