"""Evaluation of finished runs: pass@k, resuming, several runs in one picture."""

import itertools
import json

import pytest

import train_gsm8k
import train_imdb
from cory.commands import evaluate
from cory.commands.evaluate import solved_metrics
from cory.ppo.formulas import pass_at_k


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_response():
    for n in range(1, 8):
        for c in range(n + 1):
            right = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(right, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert pass_at_k(1000, 1, 32) == pytest.approx(
        0.032
    )  # 32 of 1000 draws hit the one; large numbers stay exact


class TwoQueries:
    held_out_queries = ["a", "b"]
    metrics = staticmethod(
        lambda queries, responses: {"unparsed": sum(r == "" for r in responses) / len(responses)}
    )


def test_figures_of_greedy_and_drawn_answers_by_hand():
    """Greedy answers score 1 and 0. Of three drawn answers a has two right, b none: pass@1 = (2/3 + 0) /
    2, pass@2 = (1 + 0) / 2.
    """
    lines = [{"round": 0, "first": 0, "responses": ["x", ""], "rewards": [1.0, 0.0]}]
    lines += [
        {"round": i + 1, "first": 0, "responses": ["", ""], "rewards": [a, -1.0]}
        for i, a in enumerate((0.5, 0.0, 2.0))
    ]
    assert solved_metrics(TwoQueries, lines, [1, 2]) == pytest.approx(
        {
            "greedy_task_reward": 0.5,
            "greedy_solved": 0.5,
            "greedy_unparsed": 0.5,
            "pass@1": 1 / 3,
            "pass@2": 0.5,
        }
    )


@pytest.fixture(scope="module")
def finished(problem_flags, tmp_path_factory):
    """Two seeds of a LoRA run, one PPO run without LoRA, untouched by any evaluation."""
    folder = tmp_path_factory.mktemp("finished")
    for name, flags in {
        "cory-0": ["--lora", "true"],
        "cory-1": ["--lora", "true", "--seed", "1"],
        "ppo": ["--method", "ppo"],
    }.items():
        train_gsm8k.main(
            [
                *problem_flags,
                "--iterations",
                "2",
                "--save_every",
                "0",
                "--run_dir",
                str(folder / name),
                *flags,
            ]
        )
    return folder


def copied(finished, tmp_path, *names):
    import shutil

    return [str(shutil.copytree(finished / name, tmp_path / name)) for name in names]


FLAGS = ["--k", "1", "2", "4", "--samples", "5", "--rows", "3", "--queries", "7", "--device", "cpu"]


def test_finished_runs_are_evaluated_by_agent_and_for_the_base(finished, tmp_path, capsys):
    runs = copied(finished, tmp_path, "cory-0", "cory-1")
    evaluate.main([*runs, *FLAGS, "--out", str(tmp_path / "both.png")])
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if line.startswith("| held-out"))
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "held-out, 7 queries",
        "base",
        "CORY LLM1",
        "CORY LLM2",
    ]
    assert (
        "pass@4" in out
        and "greedy strict accuracy" in out
        and (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    )
    for run in runs:
        results = json.loads((tmp_path / run / "evaluation" / "results.json").read_text())
        assert results["samples"] == 5 and results["queries"] == 7
        for agent in ("base", "llm1", "llm2"):
            lines = [json.loads(line) for line in (tmp_path / run / "evaluation" / f"{agent}.jsonl").open()]
            assert [(x["round"], x["first"], len(x["responses"])) for x in lines] == [
                (r, f, min(3, 7 - f)) for r in range(6) for f in (0, 3, 6)
            ]
            assert {
                "greedy_accuracy",
                "greedy_solved",
                "greedy_strict_accuracy",
                "greedy_unparsed",
                "pass@1",
                "pass@2",
                "pass@4",
            } <= results[agent].keys()
    texts = {
        agent: (tmp_path / "cory-0" / "evaluation" / f"{agent}.jsonl").read_text()
        for agent in ("base", "llm1", "llm2")
    }
    assert texts["base"] == (tmp_path / "cory-1" / "evaluation" / "base.jsonl").read_text()
    rounds = [x["responses"] for x in map(json.loads, texts["base"].splitlines()) if x["first"] == 0]
    assert len({tuple(r) for r in rounds}) == 6  # every round draws anew


def test_an_evaluation_goes_on_where_it_was_stopped_and_takes_more_samples(finished, tmp_path, monkeypatch):
    whole, parts = copied(finished, tmp_path / "a", "ppo")[0], copied(finished, tmp_path / "b", "ppo")[0]
    evaluate.main([whole, *FLAGS])
    evaluate.main(
        [parts, *FLAGS, "--samples", "4"]
    )  # fewer at first; then the last file loses its end, as by a kill
    path = tmp_path / "b" / "ppo" / "evaluation" / "llm1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]) + '{"round": 2, "first"')
    calls, answer = [], evaluate.answer
    monkeypatch.setattr(evaluate, "answer", lambda *a: calls.append(a) or answer(*a))
    evaluate.main([parts, *FLAGS])
    assert len(calls) == 3 + 12  # base: one round of three batches; llm1: 18 less the 6 kept
    for name in ("base.jsonl", "llm1.jsonl", "results.json"):
        assert (tmp_path / "a" / "ppo" / "evaluation" / name).read_text() == (
            tmp_path / "b" / "ppo" / "evaluation" / name
        ).read_text(), name


def test_runs_of_imdb_are_evaluated_too(small_flags, tmp_path, capsys):
    flags = ["--iterations", "1", "--learning_rate", "0.1", "--run_dir", str(tmp_path / "r")]
    train_imdb.main([*small_flags, *flags])
    evaluate.main([str(tmp_path / "r"), "--k", "1", "2", "--samples", "2", "--queries", "6"])
    base, llm1 = ((tmp_path / "r" / "evaluation" / f"{name}.jsonl").read_text() for name in ("base", "llm1"))
    assert base != llm1                                     # the trained model answers, not its base
    results = json.loads((tmp_path / "r" / "evaluation" / "results.json").read_text())
    assert results["llm2"].keys() == {"greedy_task_reward", "greedy_solved", "pass@1", "pass@2"}
    assert (tmp_path / "r" / "evaluation" / "pass_at_k.png").exists()


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--k", "0"], "k is [0]: must be 1 or more"),
        (["--samples", "3"], "samples is 3: must be at least the largest k = 32"),
        (["--queries", "500"], "queries is 500: the run's test part has 10 rows"),
        (["--rows", "-1"], "rows is -1"),
        (["--out", "/nowhere/p.png"], "out is '/nowhere/p.png'"),
        (["--out", "p.txt"], "must end in .png"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--zzz"], "unrecognized arguments: --zzz"),
    ],
)
def test_bad_requests_exit_2_with_one_line(flags, says, finished, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate.main([str(finished / "ppo"), *flags])
    err = capsys.readouterr().err.split("\r")[-1]
    assert stop.value.code == 2 and says in err and err.count("\n") == 1, err


def test_runs_that_do_not_compare_and_folders_without_a_run_are_refused(finished, tmp_path, capsys):
    for argv, says in (
        ([finished / "cory-0", finished / "ppo"], "differs from"),
        ([tmp_path], "is no finished run (no eval.json)"),
        ([finished / "ppo"] * 2, "has seed 0 as"),
    ):
        with pytest.raises(SystemExit):
            evaluate.main([str(a) for a in argv])
        assert says in capsys.readouterr().err
    (run,) = copied(finished, tmp_path, "ppo")
    evaluate.main([run, *FLAGS])
    with pytest.raises(SystemExit):
        evaluate.main([run, *FLAGS, "--queries", "5"])
    assert "has an evaluation with other settings (queries was 7, now 5)" in capsys.readouterr().err


def test_rows_the_run_trained_on_are_never_evaluated(problem_flags, problems, tmp_path, capsys):
    """One file without a test split: the run held its last 8 rows out, and more are not to be had."""
    train_gsm8k.main(
        [
            *problem_flags,
            "--dataset",
            str(problems / "train.jsonl"),
            "--iterations",
            "1",
            "--run_dir",
            str(tmp_path / "r"),
        ]
    )
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path / "r"), *FLAGS, "--queries", "20"])
    assert "queries is 20: the run's test part has 16 rows" in capsys.readouterr().err
    evaluate.main([str(tmp_path / "r"), *FLAGS])


def test_a_run_without_its_final_models_is_refused(finished, tmp_path, capsys):
    import shutil

    (run,) = copied(finished, tmp_path, "ppo")
    shutil.rmtree(tmp_path / "ppo" / "final" / "llm1")
    with pytest.raises(SystemExit):
        evaluate.main([run, *FLAGS])
    assert "has no final/llm1" in capsys.readouterr().err and not (tmp_path / "ppo" / "evaluation").exists()
