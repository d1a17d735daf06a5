"""The scripts of docs/studies: the grid, statistics by hand, and the methods that only studies use."""
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from toys import EXPERIMENTS, close, finished, read, settings

from cory.config import parse
from docs.studies import collapse, figures, grid, methods, table


def test_a_grid_skips_resumes_and_reports(tmp_path, monkeypatch, capsys):
    study = {"seeds": [3], "flags": "", "tasks": {"imdb": {"variants": dict.fromkeys("abcd", "")}}}
    script = 'import sys\n"--resume" in sys.argv or wrong\nopen(sys.argv[-1] + "/eval.json", "w")'
    (tmp_path / "studies.json").write_text(json.dumps({"few": study}))
    (tmp_path / "train_imdb.py").write_text(script)
    monkeypatch.setattr(grid, "HERE", tmp_path)
    monkeypatch.setattr(grid, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    done, far, cut, new = grid.plan(study, Path("studies/few").resolve())
    for run in (done, far, cut):
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text('{"agents": {"llm1": "base"}, "alike": 1}')
        (run.folder / "metrics.jsonl").write_text('{"iteration": 0, "eval/task_reward/llm1": 1}\n{"cut off')
    (done.folder / "eval.json").touch()
    Path(f"{far.folder}.log").write_text("c0ffee\nerror: grad_norm is nan: llm1 has diverged\n")
    assert grid.main(["few", "--jobs", "1"]) == 1
    out, rows = capsys.readouterr().out, pd.read_csv("studies/few/rows.csv.gz")
    assert "1 of 2: finished\n2 of 2: failed" in out and "name 'wrong' is not defined" in out
    assert [run.state for run in (done, far, cut, new)] == ["finished", "diverged", "finished", "not started"]
    assert list(rows.diverged) == [False, True, False] and set(rows.reward) == {1} and "alike" not in rows


def test_rows_of_a_run_of_the_frontier(small_flags, tmp_path):
    folder = finished(small_flags, tmp_path / "run", "--method", "docs.studies.methods:FrontierCory")
    rows = pd.DataFrame(grid.rows_of(grid.GridRun("imdb", "cory", 0, [], folder)))
    end = read(folder / "eval.json")
    assert list(rows.iteration) == [0, 0, 2, 2, 4, 4, 5, 5] and set(rows.kl[:2]) == {0}
    assert list(rows.kl[-2:]) == [end["llm1"]["kl"], end["llm2"]["kl"]]
    assert set(rows.observer_copies[-2:]) == {end["team"]["observer_copies"]}


def test_studies_are_made_of_flags_that_there_are():
    for study in read(grid.HERE / "studies.json").values():
        for run in grid.plan(study | {"seeds": [0]}, Path("out")) if "flags" in study else []:
            parse(*EXPERIMENTS[run.task], run.flags)


def test_pictures_are_drawn(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.update({path.name: figure}))
    figures.main(tmp_path / "studies")
    assert {*drawn} == {"hero.png", "drift.png", "collapse.png"}
    (base, *_), *_ = (line.get_xydata() for line in drawn["hero.png"].axes[1].lines)
    assert base[0] == 0                                     # the line of a method starts at the base


def test_a_difference_on_a_page_is_made_of_the_rows(capsys):
    """Takes 6 s, for all tables of all studies."""
    table.main()
    collapse.main()
    number = r"[+-]\d+\.\d\d"

    def differences(text):
        found = re.findall(rf"({number}) \[({number}), ({number})\]\\?([*†]?)", " ".join(text.split()))
        return [(np.array(values, dtype=float), mark) for *values, mark in found]
    made = differences(capsys.readouterr().out)
    for page in ("../results.md", "details.md"):
        on_page = differences((table.HERE / page).read_text())
        assert len(on_page) > 20
        for values, mark in on_page:                        # processors round the second digit differently
            assert mark in {known for x, known in made if np.abs(x - values).max() < 0.011}, (page, values)


def test_rewards_of_strangers_change_the_scores_alone():
    rewards = [torch.tensor([1.0, 2, 6]), torch.tensor([0.0, 10, 20])]
    scores = methods.StrangersCory(settings(), None).scores([], rewards)
    close(torch.stack(scores), [[11, 22, 6], [2, 16, 21]])


def test_an_agent_collapses_at_the_first_limit_that_it_passes():
    """By hand: distinct_2 passes 0.5 halfway between its third and fourth evaluation, where reward is 2.5;
    perplexity 3 at log 3 / log 9 = half of the way; the length 3 at a quarter.
    """
    sound = {"iteration": [0, 2, 4, 6], "reward": [0.0, 1, 2, 3], "length": [9.0] * 4}
    sound |= {"distinct_2": [1.0] * 4, "base_perplexity": [1.0] * 4}
    for found, changed in {
            ("", 6, 3): {},
            ("repetition", 5, 2.5): {"distinct_2": [1, 1, 0.75, 0.25]},
            ("perplexity", 3, 1.5): {"base_perplexity": [1, 1, 9, 9]},
            ("length", 2.5, 1.25): {"length": [9, 4, 0, 0], "base_perplexity": [1, 1, 1, 99]},
            ("reward", 2, 5): {"reward": [0, 5, 2, 3.9]}, ("", 6, 5): {"reward": [0, 5, 2, 4.1]}}.items():
        assert collapse.collapse(pd.DataFrame(sound | changed), collapse.Limits()) == pytest.approx(found)
