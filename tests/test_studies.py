"""The scripts of docs/studies: the grid, statistics by hand, and the methods that only studies use."""
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from toys import EXPERIMENTS, close, finished, read, settings

from cory.config import parse
from docs.studies import collapse, figures, grid, methods, table, teams

# Ends a run that is resumed, and fails in a new one.
SCRIPT = """
import sys
"--resume" in sys.argv or wrong
open(sys.argv[-1] + "/eval.json", "w")
"""


def test_a_grid_skips_resumes_and_reports(tmp_path, monkeypatch, capsys):
    variants = dict.fromkeys(["done", "diverged", "interrupted", "new"], "")
    tasks = {"imdb": {"variants": variants}}
    study = {"seeds": [3], "flags": "", "tasks": tasks}
    (tmp_path / "studies.json").write_text(json.dumps({"few": study}))
    (tmp_path / "train_imdb.py").write_text(SCRIPT)
    monkeypatch.setattr(grid, "HERE", tmp_path)
    monkeypatch.setattr(grid, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    runs = grid.plan(study, Path("studies/few").resolve())
    for run in runs[:3]:
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text('{"agents": {"llm1": "base"}, "alike": 1}')
        (run.folder / "metrics.jsonl").write_text('{"iteration": 0, "eval/task_reward/llm1": 1}\n{"cut off')
    done, diverged, _, _ = runs
    (done.folder / "eval.json").touch()
    Path(f"{diverged.folder}.log").write_text("c0ffee\nerror: grad_norm is nan: llm1 has diverged\n")
    assert grid.main(["few", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2: finished\n2 of 2: failed" in printed
    assert "name 'wrong' is not defined" in printed
    assert [run.state for run in runs] == ["finished", "diverged", "finished", "not started"]
    rows = pd.read_csv("studies/few/rows.csv.gz")
    assert rows.diverged.tolist() == [False, True, False]
    assert rows.reward.tolist() == [1, 1, 1]
    assert "alike" not in rows


def test_rows_of_a_run_of_the_frontier(small_flags, tmp_path):
    folder = finished(small_flags, tmp_path / "run", "--method", "docs.studies.methods:FrontierCory")
    run = grid.GridRun("imdb", "cory", 0, [], folder)
    rows = pd.DataFrame(grid.rows_of(run))
    end = read(folder / "eval.json")
    for agent in ("llm1", "llm2"):
        points = rows[rows.agent == agent]
        first, *_, last = points.kl
        assert points.iteration.tolist() == [0, 2, 4, 5]
        assert first == pytest.approx(0, abs=1e-6)
        assert last == end[agent]["kl"]
        assert points.observer_kl.iloc[-1] == end["team"]["observer_kl"]


def test_studies_have_flags_that_exist():
    for study in read(grid.HERE / "studies.json").values():
        if "flags" in study:
            for run in grid.plan(study | {"seeds": [0]}, Path("out")):
                parse(*EXPERIMENTS[run.task], run.flags)


def test_figures_are_drawn(tmp_path, monkeypatch):
    drawn = {}

    def save(figure, path):
        drawn[path.name] = figure
    monkeypatch.setattr(figures, "save", save)
    figures.main(tmp_path / "studies")
    assert drawn.keys() == {"hero.png", "drift.png", "collapse.png", "methods.png"}
    line = drawn["hero.png"].axes[1].lines[0]
    assert line.get_xdata()[0] == 0                         # the line of a method starts at the base


def differences(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The three numbers and the mark of each difference in a text, `+0.12 [-0.34, +0.56]*`."""
    number = r"([+-]\d+\.\d\d)"
    pattern = rf"{number} \[{number}, {number}\]\\?([*†]?)"
    found = np.array(re.findall(pattern, " ".join(text.split())))
    return found[:, :3].astype(float), found[:, 3]


def test_the_differences_on_the_pages_are_those_of_the_rows(capsys):
    """Takes 6 s, for all tables of all studies."""
    table.main()
    collapse.main()
    numbers, marks = differences(capsys.readouterr().out)
    for page in ("../results.md", "details.md"):
        on_page = differences((table.HERE / page).read_text())
        assert len(on_page[0]) > 20
        for triple, mark in zip(*on_page):
            distance = np.abs(numbers - triple).max(axis=1)
            same = distance < 0.011                         # processors round the second digit differently
            assert mark in marks[same], (page, triple)


def test_the_table_of_methods_on_the_page_is_that_of_the_rows():
    rows = table.read("methods.teams")
    assert teams.table_of(teams.outcomes(rows)) in (table.HERE / "details.md").read_text()


def test_rewards_of_strangers_change_the_scores_alone():
    rewards = torch.tensor([[1.0, 2, 6], [0, 10, 20]])
    llm1, llm2 = methods.StrangersCory(settings(), None).scores([], rewards)
    close(llm1, [11, 22, 6])                                # 1 + 10, 2 + 20, 6 + 0
    close(llm2, [2, 16, 21])                                # 0 + 2, 10 + 6, 20 + 1


@pytest.mark.parametrize("expected, changes", [
    (("", 6, 9), {}),
    (("repetition", 5, 7.5), {"distinct_2": [1, 1, 0.75, 0.25]}),
    (("perplexity", 3, 4.5), {"base_perplexity": [1, 1, 9, 9]}),
    (("length", 2.5, 3.75),
     {"length": [9, 4, 0, 0],
      "base_perplexity": [1, 1, 1, 99]}),
    (("reward", 2, 5), {"reward": [0, 5, 2, 3.9]}),
    (("", 6, 5), {"reward": [0, 5, 2, 4.1]})])
def test_an_agent_collapses_at_the_first_limit_that_it_passes(expected, changes):
    """By hand: distinct_2 passes 0.5 halfway between its third and fourth evaluation, where reward is 7.5;
    perplexity 3 at log 3 / log 9 = half of the way; the length 3 at a quarter.
    """
    points = pd.DataFrame({
        "iteration": [0, 2, 4, 6],
        "reward": [0, 3, 6, 9]})
    sound = points.assign(length=9, distinct_2=1, base_perplexity=1)
    found = collapse.collapse(sound.assign(**changes), collapse.Limits())
    assert found == pytest.approx(expected)


def test_outcomes_of_teams_by_hand():
    """llm2 is the better agent on validation queries; on test queries it earns 3. CORY minus PPO: 4 and 6. A
    difference that is the same in both seeds is significant.
    """
    rows = []
    for task, variant, seed in product(("imdb", "gsm8k"), ("base", *teams.NAMES), (1, 2)):
        team = {"base": 0, "ppo": 1, "cory": 3 + 2 * seed, "credit": 2 * seed - 1}.get(variant, 9)
        by_split = {"validation": {"llm1": 5, "llm2": 6, "team": 0},
                    "test": {"llm1": 4, "llm2": 3, "team": team + 10 * (task == "gsm8k")}}
        if variant == "base":
            by_split = {split: {"base": 7, "team": 0} for split in by_split}
        for split, values in by_split.items():
            rows += [dict(task=task, variant=variant, seed=seed, split=split, who=who, combined_reward=x)
                     for who, x in values.items()]
    found = teams.outcomes(pd.DataFrame(rows))
    assert (found.agent.drop("base", level="variant") == 3).all()
    assert found.team.xs("cory", level="variant").tolist() == [15, 17, 5, 7]
    tests = teams.differences(found)
    assert len(tests) == 2 * 2 * (10 + 9)
    keys = ["task", "outcome", "baseline", "method"]
    cory = tests.set_index(keys).difference["imdb", "team", "ppo", "cory"]
    assert (cory.mean, cory.seeds) == (5, 2)
    lines = teams.table_of(found)
    assert "\nbase | 0.00 | 7.00" in lines
    assert "\nCORY | 6.00 | 3.00 | 16.00" in lines
    assert "\nMARFT | 9.00 P | 3.00" in lines
    assert "\ncredit | 2.00 C | 3.00" in lines
    rates = pd.DataFrame(rows).assign(variant=lambda rows: rows.variant + ", learning rate 1e-3")
    chosen = teams.chosen_rates(rates.replace("validation", "x").replace("test", "validation"))
    assert chosen.loc[("imdb", "cory"), "1e-3"] == 6
