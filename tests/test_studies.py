"""The scripts of docs/studies: the grid, statistics by hand, and the methods that only studies use."""
import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from toys import close, settings

import train_imdb
from cory.config import EXPERIMENTS
from cory.flags import parse
from docs.studies import grid, methods, table

# Stands in for train_imdb.py: ends as --method says, and finishes where it is resumed.
TRAIN = """import json, pathlib, sys
folder, method = pathlib.Path(sys.argv[-1]), sys.argv[2]
if method != "wrong":
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(open("metrics.jsonl").read())
    (folder / "config.json").write_text(json.dumps({"agents": ["llm1"], "agent_settings": {}, "m": method, "n": 1}))
if method not in ("done", "--run_dir"):
    sys.exit("error: " + method)
(folder / "eval.json").write_text("{}")
"""


def test_a_grid_skips_resumes_and_reports(tmp_path, monkeypatch, capsys):
    variants = {name: f"--method {name}" for name in ("done", "diverged", "stopped", "wrong")}
    study = {"seeds": [3], "flags": "", "tasks": {"imdb": {"variants": variants}}}
    (tmp_path / "studies.json").write_text(json.dumps({"few": study}))
    (tmp_path / "metrics.jsonl").write_text('''{"iteration": 0, "eval/base/task_reward": 1}
        {"iteration": 5, "seconds": 2, "eval/llm1/task_reward": 3}\n''')
    (tmp_path / "train_imdb.py").write_text(TRAIN)
    for name in ("HERE", "ROOT"):
        monkeypatch.setattr(grid, name, tmp_path)
    monkeypatch.chdir(tmp_path)
    runs = grid.plan(study, Path("studies/few").resolve())
    assert grid.main(["few", "--jobs", "2"]) == 1 and "error: wrong" in capsys.readouterr().out
    assert [run.state for run in runs] == ["finished", "diverged", "interrupted", "not started"]
    rows = pd.read_csv("studies/few/rows.csv")
    assert list(rows.variant[rows.diverged]) == ["diverged"] * 2 and list(rows.reward) == [1, 3, 1, 3]
    assert set(rows.core_seconds) == {2} and "m" in rows and "n" not in rows         # n is alike in all
    assert grid.main(["few"]) == 1 and "1 of 2: finished" in capsys.readouterr().out
    assert [run.state for run in runs] == ["finished", "diverged", "finished", "not started"]


def test_rows_of_a_run_of_the_frontier(small_flags, tmp_path):
    folder, method = tmp_path / "run", "docs.studies.methods:FrontierCory"
    train_imdb.main([*small_flags, "--method", method, "--run_dir", str(folder)])
    rows = pd.DataFrame(grid.rows_of(grid.GridRun("imdb", "cory", 0, [], folder)))
    end = json.loads((folder / "eval.json").read_text())
    assert list(rows.iteration) == [0, 0, 2, 2, 4, 4, 5, 5] and set(rows.kl[:2]) == {0}
    assert list(rows.kl[-2:]) == [end["llm1"]["kl"], end["llm2"]["kl"]]
    assert set(rows.observer_copies[-2:]) == {end["team"]["observer_copies"]}


def test_studies_are_made_of_flags_that_there_are():
    for study in json.loads((grid.HERE / "studies.json").read_text()).values():
        runs = grid.plan(study, Path("out")) if "flags" in study else []
        assert len({run.folder for run in runs}) == len(runs)
        for run in {(run.task, run.variant): run for run in runs}.values():
            parse(*EXPERIMENTS[run.task], run.flags)


def test_statistics_by_hand():
    """x = 0 .. 4: mean 2, s / sqrt(5) = sqrt(0.5), t of 4 degrees 2.776; t = 2.828, p = 0.0474 (tables).

    At a KL of 2, where CORY's second agent ends, PPO has 1 and CORY (0.6 + 1) / 2. The frontiers, rewards of 3 KL
    for KL 1 and 3 and of 2 KL for 0.5 and 2, differ by 1.5 in the mean over KL from 1 to 2.
    """
    a, b = (pd.Series({i: slope * i for i in range(n)}) for slope, n in ((11.0, 6), (10.0, 5)))
    assert table.difference(a, b) == pytest.approx((2, 2 - 1.963, 2 + 1.963, 0.0474, 5), abs=1e-3)
    assert list(table.holm([0.04, 0.01, 0.03])) == pytest.approx([0.06, 0.03, 0.06])    # 1, 3 and 2 times
    rows = [(variant, 0, False, agent, *point) for variant, agent, *points in (
        ("ppo", 1, (1.5, 3), (2, 4)), ("cory", 1, (3, 10)), ("cory", 2, (1, 2)), ("a, x 1", 1, (9, 3)),
        ("a, x 2", 1, (3, 1)), ("b, x 1", 1, (1, 0.5)), ("b, x 2", 1, (4, 2))) for point in ((0, 0), *points)]
    rows = pd.DataFrame(rows, columns=["variant", "seed", "diverged", "agent", "reward", "kl"])
    assert table.at_equal(rows, "cory", "ppo", "reward", "kl", False).mean == pytest.approx(-0.2)
    assert table.at_equal(rows, "a", "b", "reward", "kl", True).mean == pytest.approx(1.5)
    base = {"reward": 0.2, "distinct_2": 1.0, "repeated_tokens": 0.1, "diverged": 0}
    for name, sound, gone in (("reward", 0.16, 0.14), ("distinct_2", 0.34, 0.33), ("repeated_tokens", 0.29, 0.31),
                              ("diverged", 0, 1)):
        ends = [table.collapsed(pd.DataFrame([base, base | {name: end}])) for end in (sound, gone)]
        assert ends == [False, True], name


def test_methods_of_studies_change_the_score_alone():
    own, partner, cfg = torch.tensor([1.0, 2, 6]), torch.tensor([0.0, 10, 20]), settings()
    close(methods.ZeroPpo().score(SimpleNamespace(cfg=cfg), None, own, None), [0, 0, 0])
    close(methods.ShuffledCory().score(SimpleNamespace(cfg=cfg), None, own, partner), [12, 26, 1])
    for method, expected in ((methods.StrangersCory(), [[10, 20, 0], [2, 6, 1]]),
                             (methods.CentredCory(), [[-10, 0, 10], [-2, -1, 3]])):
        close(torch.stack(method.partner_rewards(own, partner, None, cfg)), expected)
