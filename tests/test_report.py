"""Tables and plots of one run, and of several over seeds and settings."""
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from toys import error_line, read

from cory.config import ASSETS
from cory.run import plots, report
from cory.run.tables import grouped, results_table


def held_out(reward: float) -> dict:
    return {"task_reward": reward, "kl": 10 * reward, "accuracy": 0.5, "greedy_accuracy": 0.75}


def write_run(folder: Path, reward=1.0, **changes) -> Path:
    """A finished run of 12 iterations; agent j ends at held-out reward `reward` + j / 10. Roles are exchanged
    after iteration 6: the pioneer's KL is 1 throughout, the observer's 2.
    """
    config = {"agents": {"llm1": "base", "llm2": "base"}, "task": "imdb", "method": "cory", "preset": "tiny",
              "seed": 0, "learning_rate": 1e-4, "gamma": 1.0, "agent_settings": {}, "device": "cpu"} | changes
    rows = [{"iteration": 0, "eval/team/copies": 0.1} | {f"eval/base/{k}": x for k, x in held_out(0).items()}]
    for i in range(1, 13):
        first, second = ("llm1", "llm2") if i <= 6 else ("llm2", "llm1")
        kl = {"pioneer": 1, first: 1, "observer": 2, second: 2}
        rows.append({"iteration": i, "roles": {"pioneer": first, "observer": second}, "spread": 0.1 * i,
                     "seconds": 1.0} | {f"{name}/kl": x for name, x in kl.items()})
    final = {"llm1": held_out(reward), "llm2": held_out(reward + 0.1), "team": {"copies": 0.3}}
    rows[-1] |= {f"eval/{who}/{key}": x for who, part in final.items() for key, x in part.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.json").write_text(json.dumps({"iteration": 12, "base": held_out(0), **final}))
    return folder


def columns_of(table: str) -> dict[str, list[str]]:
    """{first cell of a row: its other cells}"""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def points_of(figure, title: str, group: str) -> list[list]:
    """The dots of a group in a panel."""
    (ax,) = [ax for ax in figure.axes if ax.get_title() == title]
    return [xy for line in ax.lines if line.get_label() == group for xy in line.get_xydata().tolist()]


def labels(figure) -> set[str]:
    return {text.get_text() for text in figure.legends[0].get_texts()}


def test_a_run_has_a_panel_for_each_metric_and_a_line_for_each_agent_and_the_team(tmp_path):
    figure = plots.draw_runs([write_run(tmp_path / "run")], tmp_path / "curves.png")
    assert [ax.get_title() for ax in figure.axes] == [
        "task reward", "KL per response (nats)", "accuracy", "copies", "spread", "held-out reward against KL"]
    assert labels(figure) == {"base", "CORY LLM1", "CORY LLM2", "CORY TEAM", "hollow: greedy responses"}
    assert points_of(figure, "task reward", "CORY LLM2") == [[0, 0], [12, 1.1]]         # it starts as the base
    assert points_of(figure, "held-out reward against KL", "CORY LLM2") == [[0, 0], [11, 1.1]]
    # what the method measures is the team's, and not the first agent's
    assert points_of(figure, "copies", "CORY TEAM") == [[0, 0.1], [12, 0.3]]
    assert points_of(figure, "copies", "CORY LLM1") == []


def test_a_line_for_each_role_where_asked(tmp_path):
    run = write_run(tmp_path / "run")
    agents, roles = plots.read_curves(run), plots.read_curves(run, roles=True)
    assert agents["llm1"]["kl"] == dict.fromkeys(range(1, 7), 1) | dict.fromkeys(range(7, 13), 2)
    assert agents["team"]["spread"].keys() == {*range(1, 13)} and "spread" not in agents["llm1"]
    assert {*roles["pioneer"]["kl"].values()} == {1} and {*roles["observer"]["kl"].values()} == {2}
    figure = plots.draw_runs([run], tmp_path / "roles.png", roles=True)
    assert labels(figure) == {"base", "CORY PIONEER", "CORY OBSERVER", "CORY TEAM"}


def test_curves_begin_at_an_agents_own_base_and_hold_finite_numbers(tmp_path):
    run = write_run(tmp_path / "run", agents={"llm1": "base", "llm2": "base_llm2", "llm3": "base"})
    rows = [{"iteration": 0, "eval/base/kl": 1.0, "eval/base_llm2/kl": 5.0}, {"iteration": 1, "llm3/x": 2},
            {"iteration": 2, "llm3/x": float("nan")}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = plots.read_curves(run)
    assert [curves[name]["eval/kl"][0] for name in ("llm1", "llm2", "llm3")] == [1.0, 5.0, 1.0]
    assert curves["llm3"]["x"] == {1: 2}


def test_a_band_is_the_mean_and_one_sample_std_by_hand():
    """Seeds 1 and 3 at iteration 5: mean 2, std sqrt(2). Iteration 6, which one of them lacks, is left out."""
    ax = Figure().subplots()
    plots.band(ax, [{5: 1.0, 6: 9.0}, {5: 3.0}], color="red")
    assert ax.lines[0].get_xydata().tolist() == [[5.0, 2.0]]
    extent = ax.collections[0].get_paths()[0].get_extents()
    assert extent.intervaly.tolist() == pytest.approx([2 - 2**0.5, 2 + 2**0.5])
    assert plots.smooth({1: 0.0, 2: 3.0, 3: 6.0, 5: 0.0}) == {1: 1.5, 2: 3.0, 3: 3.0, 5: 3.0}


@pytest.mark.parametrize("task", ["imdb", "gsm8k"])
def test_an_embedded_bases_best_of_n_belongs_to_what_it_was_measured_for(task):
    known = read(ASSETS / task / "best_of_n.json")
    config = {name: x.replace(task, f"{ASSETS}/{task}") for name, x in known["settings"].items()} | {"task": task}
    assert plots.embedded_best_of_n(config).keys() == {"4", "16", "32"}
    for change in ({"eval_split": "validation"}, {"model": "gpt2"}, {"task": "my:Task"}):
        assert not plots.embedded_best_of_n(config | change)


# --- tables and python -m cory report ---
def test_the_held_out_table_has_every_agent_and_metric_and_the_team_below():
    parts = {"iteration": 3, "base": {"task_reward": 0.126, "kl": 0.0}, "llm1": {"task_reward": 1.0, "kl": 2.3},
             "judge": {"kl": 1.0, "greedy_accuracy": 0.5}, "team": {"copies": 0.25}}
    first, team = map(columns_of, results_table(parts).split("\n\n"))
    assert first == {"held-out": ["base", "llm1", "judge"], "task reward": ["0.13", "1.00", "–"],
                     "kl": ["0.0", "2.3", "1.0"], "greedy accuracy": ["–", "–", "0.500"]}
    assert team == {"held-out": ["team"], "copies": ["0.250"]}


def test_groups_are_of_a_method_and_of_each_value_of_a_setting():
    def run(method, base, llm1, **own):
        return {"method": method, "lr": 0.1, "agent_settings": own}, {"base": base, "llm1": llm1}

    runs = [run("ppo", {"kl": 5}, 1), run("my:Chain", {"kl": 5}, 2), run("ppo", {"kl": 5}, 4)]
    assert grouped(runs) == {"base": [{"kl": 5}], "PPO LLM1": [1, 4], "CHAIN LLM1": [2]}
    assert grouped([run("ppo", {"kl": 5}, 1), run("ppo", {"kl": 7}, 3, llm1={"lr": 0.3})], ["lr"]) == {
        "base, lr 0.1": [{"kl": 5}], "base, lr 0.1/0.3": [{"kl": 7}], "PPO LLM1, lr 0.1": [1],
        "PPO LLM1, lr 0.1/0.3": [3]}


@pytest.mark.plots
def test_values_of_a_setting_are_grouped_and_never_averaged(tmp_path, capsys):
    """Two rates, two seeds each: llm1's held-out reward ends at 1 and 2, 3 and 4, the std is 1 / sqrt(2)."""
    runs = [write_run(tmp_path / str(end), learning_rate=rate, seed=seed, reward=end)
            for rate, seed, end in ((1e-5, 0, 1.0), (1e-5, 1, 2.0), (1e-4, 0, 3.0), (1e-4, 1, 4.0))]
    assert "in learning_rate; make a group" in error_line(report.main, runs, capsys)
    report.main([*map(str, runs), "--out", str(tmp_path / "c.pdf"), "--by", "learning_rate"])
    rewards = {name: cells[0] for name, cells in columns_of(capsys.readouterr().out).items()}
    assert rewards["CORY LLM1, learning_rate 1e-05"] == "1.50 ± 0.71" and rewards["base"] == "0.00"
    assert rewards["CORY LLM1, learning_rate 0.0001"] == "3.50 ± 0.71" and len(rewards) == 8
    assert (tmp_path / "c.pdf").read_bytes()[:4] == b"%PDF"


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    first, again = write_run(tmp_path / "a"), write_run(tmp_path / "b", device="cuda", wandb="offline")
    other = write_run(tmp_path / "c", gamma=0.9)
    for words, says in (([first, again], "has the seed of"), ([first, first], "has the seed of"),
                        ([first, other], "in gamma;"), ([first, "--by", "gama"], "did you mean gamma?"),
                        ([tmp_path], "holds no run"), ([first, "--out", "p"], "must end in .png"),
                        ([first, "--out", "no/a.png"], "its folder")):
        assert says in error_line(report.main, words, capsys)
    report.main([str(first), str(write_run(tmp_path / "p", method="ppo"))])         # another method is a group
    (again / "eval.json").unlink()
    assert "is no finished run" in error_line(report.main, [again], capsys)
