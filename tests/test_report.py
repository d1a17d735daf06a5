"""Tables and plots of one run, and of several over seeds and settings."""
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from toys import error_line

import train_imdb
from cory import report
from cory.log import read_jsonl


def held_out(reward: float) -> dict:
    return {"task_reward": reward, "kl": 10 * reward, "accuracy": 0.5, "greedy_accuracy": 0.75}


def write_run(folder: Path, reward=1.0, base=0.0, starts=None, **changes) -> Path:
    """A run of 12 iterations. LLM1 ends at held-out reward `reward`, and its base has `base`; LLM2 ends 0.1
    higher, and its base has 0.01. starts: LLM1's reward at iteration 0, if it does not start as its base.
    """
    config = {"config_class": "cory.config:ImdbConfig",
              "agents": {"llm1": "base", "llm2": "base_llm2"}, "task": "imdb", "method": "cory", "seed": 0,
              "preset": "tiny", "gamma": 1.0, "learning_rate": 0.1} | changes
    first = {"base": held_out(base), "base_llm2": held_out(0.01), "team": {"copies": 0.1}}
    first |= {"llm1": held_out(starts)} if starts else {}
    last = {"llm1": held_out(reward), "llm2": held_out(reward + 0.1), "team": {"copies": 0.3}}
    rows = [{"iteration": i, "role/llm1": 0, "kl_full/llm1": 1.0, "kl_full/llm2": 2.0, "spread": 0.1 * i,
             "seconds": 1.0, "broken": float("nan")} for i in range(1, 13)]
    for at, parts, iteration in ((0, first, 0), (len(rows) + 1, last, 12)):
        values = {f"eval_{key}/{who}": x for who, part in parts.items() for key, x in part.items()}
        rows.insert(at, {"iteration": iteration} | values)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = report.held_out_parts(rows)
    (folder / "eval.json").write_text(json.dumps({"iteration": 12} | parts))
    return folder


def cells_of(table: str) -> dict[str, list[str]]:
    """{first cell of a row: its other cells}; two spaces or more lie between the columns of the tests."""
    lines = [re.split(" {2,}", line.strip()) for line in table.splitlines()]
    return {name: cells for name, *cells in lines}


def lines_of(figure, title: str, label: str) -> list[list]:
    """The points of each line of that label in a panel."""
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    return [line.get_xydata().tolist() for line in ax.lines if line.get_label() == label]


def test_a_run_has_a_panel_for_each_metric_and_a_line_for_each_agent_and_the_team(tmp_path):
    figure = report.draw_runs([write_run(tmp_path / "run")], tmp_path / "p.png")
    assert [ax.get_title() for ax in figure.axes] == [
        "task reward", "KL per response (nats)", "accuracy", "copies", "spread", "held-out reward against KL"]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        "base", "CORY LLM1", "CORY LLM2", "CORY TEAM", "hollow: greedy responses"}
    assert lines_of(figure, "task reward", "CORY LLM2") == [[[0, 0.01], [12, 1.1]]]
    assert [base[0][1] for base in lines_of(figure, "task reward", "base")] == [0, 0.01]
    assert lines_of(figure, "accuracy", "hollow: greedy responses") == [[[0, 0.75], [12, 0.75]]] * 2
    assert lines_of(figure, "held-out reward against KL", "CORY LLM2") == [[[0.1, 0.01], [11, 1.1]]]
    _, mean_of_batches = lines_of(figure, "KL per response (nats)", "CORY LLM2")
    assert mean_of_batches == [[i, 2] for i in range(1, 13)]
    # what the method measures is the team's, and not the first agent's
    assert lines_of(figure, "copies", "CORY TEAM") == [[[0, 0.1], [12, 0.3]]]
    assert lines_of(figure, "copies", "CORY LLM1") == []
    assert lines_of(figure, "copies", "base") == []


def test_an_agent_that_does_not_start_as_its_base_has_a_curve_from_where_it_starts(tmp_path):
    curves = report.read_curves(write_run(tmp_path / "run", starts=0.5))
    for name, points in (("llm1", [[0, 0.5], [12, 1.0]]), ("llm2", [[0, 0.01], [12, 1.1]])):
        rewards = curves[name].query("metric == 'task_reward' and kind == 'eval'")
        assert rewards[["iteration", "value"]].to_numpy().tolist() == points


@pytest.mark.parametrize("eta", [0.1, 0.2])
def test_what_is_trained_on_has_a_panel_and_an_eta_that_moves(eta, tmp_path):
    path = write_run(tmp_path / "run") / "metrics.jsonl"
    with path.open("a") as file:
        for i, value in ((1, 0.1), (2, eta)):
            file.write(json.dumps({"iteration": i, "score/llm1": 1.0, "kl_coef/llm1": value}) + "\n")
    titles = [ax.get_title() for ax in report.draw_runs([tmp_path / "run"], tmp_path / "p.png").axes]
    assert "score: what is trained on" in titles and ("KL coefficient eta" in titles) == (eta != 0.1)


def test_each_metric_of_an_update_and_of_an_evaluation_has_a_title_or_no_panel(small_flags, tmp_path):
    """And all that are named there are logged."""
    flags = f"--iterations 1 --num_ppo_epochs 1 --kl_in loss --method ppo --run_dir {tmp_path}"
    train_imdb.main([*small_flags, *flags.split()])
    names = {key for row in read_jsonl(tmp_path / "metrics.jsonl") for key in row} - {"iteration"}
    metrics = {re.fullmatch(report.KEY, name)["metric"].replace("kl_k1", "kl") for name in names}
    assert metrics == {*report.TITLES} | report.WITHOUT_PANEL


def test_bands_and_running_means_by_hand():
    """Seeds 1 and 3 at iteration 5: mean 2, std sqrt(2). Iteration 6, which one lacks, is left out."""
    ax = Figure().subplots()
    report.band(ax, pd.DataFrame({"iteration": [5, 6, 5], "value": [1.0, 9.0, 3.0]}), 2, color="red")
    assert ax.lines[0].get_xydata().tolist() == [[5.0, 2.0]]
    extent = ax.collections[0].get_paths()[0].get_extents()
    assert extent.intervaly.tolist() == pytest.approx([2 - 2**0.5, 2 + 2**0.5])
    assert report.smooth(pd.Series([0.0, 3.0, 6.0, 0.0])).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert report.smooth(pd.Series(range(40)))[[0, 20]].tolist() == [1.0, 20.0]


def test_the_held_out_table_has_every_agent_and_metric_and_the_team_below():
    parts = {"base": {"task_reward": 0.126, "kl": 0.0}, "llm1": {"task_reward": 1.0, "kl": 2.3},
             "judge": {"kl": 1.0, "greedy_accuracy": 0.5}, "iteration": 3, "team": {"copies": 0.25}}
    first, team = map(columns_of, report.results_table(parts).split("\n\n"))
    assert first == {"held-out": ["base", "llm1", "judge"], "task reward": ["0.13", "1.00", "–"],
                     "kl": ["0.0", "2.3", "1.0"], "greedy accuracy": ["–", "–", "0.500"]}
    assert team == {"held-out": ["team"], "copies": ["0.250"]}


def test_values_of_a_setting_are_grouped_and_never_averaged(tmp_path, capsys, monkeypatch):
    """Two rates, two seeds each: llm1's held-out reward ends at 1 and 2, 3 and 4; the std is 1 / sqrt(2). One
    base has another reward with each rate; the other stands once.
    """
    runs = [write_run(tmp_path / str(end), learning_rate=rate, seed=seed, reward=end, base=1e4 * rate)
            for rate, seed, end in ((1e-5, 0, 1.0), (1e-5, 1, 2.0), (1e-4, 0, 3.0), (1e-4, 1, 4.0))]
    assert "in learning_rate; make a group" in error_line(report.main, runs, capsys)
    figures, draw = [], report.draw_runs
    monkeypatch.setattr(report, "draw_runs", lambda *args: figures.append(draw(*args)))
    out = tmp_path / "new" / "c.pdf"
    report.main([*map(str, runs), "--out", str(out), "--by", "learning_rate"])
    cells = columns_of(capsys.readouterr().out)
    runs_of, rewards = ({name: values[i] for name, values in cells.items()} for i in (0, 1))
    assert runs_of["held-out"] == "runs" and runs_of["CORY LLM1, learning_rate 1e-05"] == "2"
    assert rewards["CORY LLM1, learning_rate 1e-05"] == "1.50 ± 0.71" and rewards["base_llm2"] == "0.01"
    assert rewards["CORY LLM1, learning_rate 0.0001"] == "3.50 ± 0.71" and len(rewards) == 12
    assert rewards["base, learning_rate 1e-05"] == "0.10" and rewards["base, learning_rate 0.0001"] == "1.00"
    assert out.read_bytes()[:4] == b"%PDF"
    (mean,) = lines_of(figures[0], "task reward", "CORY LLM1, learning_rate 0.0001 (n = 2)")
    assert mean == [[0, 1], [12, 3.5]]


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys, monkeypatch):
    """A setting that a run is older than has its default."""
    monkeypatch.setattr(report, "draw_runs", lambda *_: None)
    first, again = write_run(tmp_path / "a"), write_run(tmp_path / "b", device="cuda", wandb="offline")
    other = write_run(tmp_path / "c", gamma=0.9, kl_target=0.0)
    for words, says in (([first, again], "has the seed of"), ([first, first], "has the seed of"),
                        ([first, other], "in gamma, kl_target;"), ([tmp_path], "holds no run"),
                        ([first, "--by", "gama"], "did you mean gamma?"),
                        ([first, "--out", "x.xyz"], "out is 'x.xyz': must end in .png")):
        assert says in error_line(report.main, words, capsys)
    chain = write_run(tmp_path / "p", method="my:Chain", base=0.3, kl_target=6.0)
    report.main([str(first), str(chain), "--out", str(tmp_path / "c.png")])
    shown = columns_of(capsys.readouterr().out)
    assert {"CORY LLM1", "CHAIN LLM1"} < {*shown} and shown["base"][:2] == ["2", "0.15 ± 0.21"]  # 0, 0.3
    (again / "eval.json").unlink()
    assert "is no finished run" in error_line(report.main, [again], capsys)
