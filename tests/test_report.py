"""Tables and plots of one run, and of several over seeds and settings."""
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from toys import error_line, read

from cory.config import ASSETS
from cory.run import plots, report
from cory.run.tables import results_table


def held_out(reward: float) -> dict:
    return {"task_reward": reward, "kl": 10 * reward, "accuracy": 0.5, "greedy_accuracy": 0.75}


def write_run(folder: Path, reward=1.0, **changes) -> Path:
    """A run of 12 iterations: agent j ends at held-out reward `reward` + j / 10, its base has j / 100; roles
    are exchanged after iteration 6, the pioneer's KL is 1 throughout, the observer's 2.
    """
    config = {"agents": {"llm1": "base", "llm2": "base_llm2"}, "task": "imdb", "method": "cory", "seed": 0,
              "preset": "tiny", "gamma": 1.0, "learning_rate": 0.1, "agent_settings": {}} | changes
    bases = {"base": held_out(0), "base_llm2": held_out(0.01)}
    final = {"llm1": held_out(reward), "llm2": held_out(reward + 0.1), "team": {"copies": 0.3}}
    rows = [{"iteration": 0, "eval/team/copies": 0.1}]
    for i in range(1, 13):
        first, second = ("llm1", "llm2") if i <= 6 else ("llm2", "llm1")
        kl = {"pioneer": 1, first: 1, "observer": 2, second: 2}
        rows.append({"iteration": i, "roles": {"pioneer": first, "observer": second}, "spread": 0.1 * i,
                     "seconds": 1.0} | {f"{name}/kl": x for name, x in kl.items()})
    for row, parts in ((rows[0], bases), (rows[-1], final)):
        row |= {f"eval/{who}/{key}": x for who, part in parts.items() for key, x in part.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.json").write_text(json.dumps({"iteration": 12, **bases, **final}))
    return folder


def columns_of(table: str) -> dict[str, list[str]]:
    """{first cell of a row: its other cells}"""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def points_of(figure, title: str, group: str) -> list[list]:
    """The dots of a group in a panel."""
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    return [xy for line in ax.lines if line.get_label() == group for xy in line.get_xydata().tolist()]


def test_a_run_has_a_panel_for_each_metric_and_a_line_for_each_agent_or_role_and_the_team(tmp_path):
    run = write_run(tmp_path / "run")
    figure, of_roles = (plots.draw_runs([run], tmp_path / "p.png", roles=roles) for roles in (False, True))
    assert [ax.get_title() for ax in figure.axes] == [
        "task reward", "KL per response (nats)", "accuracy", "copies", "spread", "held-out reward against KL"]
    labels, role_labels = ({text.get_text() for text in f.legends[0].get_texts()} for f in (figure, of_roles))
    assert labels == {"base", "base_llm2", "CORY LLM1", "CORY LLM2", "CORY TEAM", "hollow: greedy responses"}
    assert role_labels == {"base", "base_llm2", "CORY PIONEER", "CORY OBSERVER", "CORY TEAM"}
    assert points_of(figure, "task reward", "CORY LLM2") == [[0, 0.01], [12, 1.1]]
    assert points_of(figure, "held-out reward against KL", "CORY LLM2") == [[0.1, 0.01], [11, 1.1]]
    # what the method measures is the team's, and not the first agent's
    assert points_of(figure, "copies", "CORY TEAM") == [[0, 0.1], [12, 0.3]]
    assert points_of(figure, "copies", "CORY LLM1") == []


def test_curves_of_agents_and_of_roles(tmp_path):
    run = write_run(tmp_path / "run")
    agents, roles = plots.read_curves(run), plots.read_curves(run, roles=True)
    assert agents["llm1"]["kl"] == dict.fromkeys(range(1, 7), 1) | dict.fromkeys(range(7, 13), 2)
    assert agents["team"]["spread"].keys() == {*range(1, 13)} and "spread" not in agents["llm1"]
    assert {*roles["pioneer"]["kl"].values()} == {1} and {*roles["observer"]["kl"].values()} == {2}
    rows = [{"iteration": i, "x": x} for i, x in enumerate([float("nan"), 2, "a"])]
    assert plots.curves_of(rows, "")["x"] == {1: 2}


def test_a_band_is_the_mean_and_one_sample_std_by_hand():
    """Seeds 1 and 3 at iteration 5: mean 2, std sqrt(2). Iteration 6, which one lacks, is left out."""
    ax = Figure().subplots()
    plots.band(ax, [{5: 1.0, 6: 9.0}, {5: 3.0}], color="red")
    assert ax.lines[0].get_xydata().tolist() == [[5.0, 2.0]]
    extent = ax.collections[0].get_paths()[0].get_extents()
    assert extent.intervaly.tolist() == pytest.approx([2 - 2**0.5, 2 + 2**0.5])
    assert plots.smooth({1: 0.0, 2: 3.0, 3: 6.0, 5: 0.0}) == {1: 1.5, 2: 3.0, 3: 3.0, 5: 3.0}


@pytest.mark.parametrize("task", ["imdb", "gsm8k"])
def test_an_embedded_bases_best_of_n_belongs_to_what_it_was_measured_for(task):
    known = read(ASSETS / task / "best_of_n.json")
    config = {name: x.replace(task, f"{ASSETS}/{task}") for name, x in known["settings"].items()}
    config["task"] = task
    assert plots.embedded_best_of_n(config).keys() == {"4", "16", "32"}
    for change in ({"eval_split": "validation"}, {"model": "gpt2"}, {"task": "my:Task"}):
        assert not plots.embedded_best_of_n(config | change)


def test_the_held_out_table_has_every_agent_and_metric_and_the_team_below():
    parts = {"base": {"task_reward": 0.126, "kl": 0.0}, "llm1": {"task_reward": 1.0, "kl": 2.3},
             "judge": {"kl": 1.0, "greedy_accuracy": 0.5}, "iteration": 3, "team": {"copies": 0.25}}
    first, team = map(columns_of, results_table(parts).split("\n\n"))
    assert first == {"held-out": ["base", "llm1", "judge"], "task reward": ["0.13", "1.00", "–"],
                     "kl": ["0.0", "2.3", "1.0"], "greedy accuracy": ["–", "–", "0.500"]}
    assert team == {"held-out": ["team"], "copies": ["0.250"]}


@pytest.mark.plots
def test_values_of_a_setting_are_grouped_and_never_averaged(tmp_path, capsys):
    """Two rates, two seeds each: llm1's held-out reward ends at 1 and 2, 3 and 4; the std is 1 / sqrt(2)."""
    runs = [write_run(tmp_path / str(end), learning_rate=rate, seed=seed, reward=end)
            for rate, seed, end in ((1e-5, 0, 1.0), (1e-5, 1, 2.0), (1e-4, 0, 3.0), (1e-4, 1, 4.0))]
    assert "in learning_rate; make a group" in error_line(report.main, runs, capsys)
    report.main([*map(str, runs), "--out", str(tmp_path / "c.pdf"), "--by", "learning_rate"])
    rewards = {name: cells[0] for name, cells in columns_of(capsys.readouterr().out).items()}
    assert rewards["CORY LLM1, learning_rate 1e-05"] == "1.50 ± 0.71" and rewards["base"] == "0.00"
    assert rewards["CORY LLM1, learning_rate 0.0001"] == "3.50 ± 0.71" and len(rewards) == 9
    assert (tmp_path / "c.pdf").read_bytes()[:4] == b"%PDF"


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    first, again = write_run(tmp_path / "a"), write_run(tmp_path / "b", device="cuda", wandb="offline")
    other = write_run(tmp_path / "c", gamma=0.9)
    for words, says in (([first, again], "has the seed of"), ([first, first], "has the seed of"),
                        ([first, other], "in gamma;"), ([first, "--by", "gama"], "did you mean gamma?"),
                        ([tmp_path], "holds no run"), ([first, "--out", "p"], "must end in .png"),
                        ([first, "--out", "no/a.png"], "its folder")):
        assert says in error_line(report.main, words, capsys)
    report.main([str(first), str(write_run(tmp_path / "p", method="my:Chain"))])       # a group of its own
    assert "CORY LLM1" in (shown := capsys.readouterr().out) and "CHAIN LLM1" in shown
    (again / "eval.json").unlink()
    assert "is no finished run" in error_line(report.main, [again], capsys)
