"""Evaluation of finished runs: pass@k, several runs in one picture, what is refused."""
import itertools
import shutil

import pytest
from safetensors.torch import load_file, save_file
from toys import error_line, read, rows

import train_gsm8k
import train_imdb
from cory.commands import evaluate
from cory.commands.evaluate import solved_metrics
from cory.ppo.formulas import pass_at_k

FLAGS = ["--k", "1", "2", "4", "--samples", "4", "--queries", "5", "--device", "cpu"]


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_response():
    for n in range(1, 8):
        for c in range(n + 1):
            right = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(right, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert pass_at_k(1000, 1, 32) == pytest.approx(0.032)       # 32 of 1000 draws hit the one; exact


class TwoQueries:
    held_out_queries = ["a", "b"]
    metrics = staticmethod(lambda queries, responses: {"unparsed": responses.count("") / len(responses)})


def test_figures_of_greedy_and_drawn_answers_by_hand():
    """Greedy answers score 1 and 0. Of three drawn answers a has two right, b none: pass@1 = (2/3 + 0) /
    2, pass@2 = (1 + 0) / 2.
    """
    rounds = [{"responses": ["x", ""], "rewards": [1.0, 0.0]}]
    rounds += [{"responses": ["", ""], "rewards": [a, -1.0]} for a in (0.5, 0.0, 2.0)]
    expected = {"greedy_task_reward": 0.5, "greedy_solved": 0.5, "greedy_unparsed": 0.5, "pass@1": 1 / 3,
                "pass@2": 0.5}
    assert solved_metrics(TwoQueries, rounds, [1, 2]) == pytest.approx(expected)


@pytest.fixture(autouse=True)
def three_at_once(monkeypatch):
    monkeypatch.setattr(evaluate, "ROWS", 3)


@pytest.fixture(scope="module")
def finished(problem_flags, tmp_path_factory):
    """Two seeds of a LoRA run, untouched by any evaluation."""
    folder = tmp_path_factory.mktemp("finished")
    for seed in ("0", "1"):
        flags = ["--lora", "true", "--seed", seed, "--iterations", "1", "--save_every", "0"]
        train_gsm8k.main([*problem_flags, *flags, "--run_dir", str(folder / f"cory-{seed}")])
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    return lambda *names: [str(shutil.copytree(finished / name, tmp_path / name)) for name in names]


def rounds_of(folder, run: str, name: str) -> list[dict]:
    return rows(folder / run / "evaluation", f"{name}.jsonl")


@pytest.mark.pictures
def test_finished_runs_are_evaluated_by_agent_and_for_the_base(copied, tmp_path, capsys):
    evaluate.main([*copied("cory-0", "cory-1"), *FLAGS, "--out", str(tmp_path / "both.png")])
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if line.startswith("| held-out"))
    cells = [cell.strip() for cell in head.strip("|").split("|")]
    assert cells == ["held-out, 5 queries", "base", "CORY LLM1", "CORY LLM2"]
    assert "pass@4" in out and "greedy strict accuracy" in out
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    names = ["greedy_accuracy", "greedy_solved", "greedy_strict_accuracy", "greedy_unparsed", "pass@1",
             "pass@2", "pass@4"]
    for run in ("cory-0", "cory-1"):
        results = read(tmp_path / run / "evaluation" / "results.json")
        assert results["samples"] == 4 and results["queries"] == 5
        for agent in ("base", "llm1", "llm2"):
            rounds = rounds_of(tmp_path, run, agent)
            assert [(len(x["responses"]), len(x["rewards"])) for x in rounds] == [(5, 5)] * 5
            assert {*names} <= results[agent].keys()
    base = rounds_of(tmp_path, "cory-0", "base")
    assert base == rounds_of(tmp_path, "cory-1", "base")
    assert len({tuple(one["responses"]) for one in base}) == 5          # every round draws anew


def test_runs_of_imdb_are_evaluated_too(small_flags, tmp_path):
    flags = ["--iterations", "1", "--learning_rate", "0.1", "--run_dir", str(tmp_path / "r")]
    train_imdb.main([*small_flags, *flags])
    evaluate.main([str(tmp_path / "r"), "--k", "1", "2", "--samples", "2", "--queries", "6"])
    assert rounds_of(tmp_path, "r", "base") != rounds_of(tmp_path, "r", "llm1")   # the trained model answers
    results = read(tmp_path / "r" / "evaluation" / "results.json")
    assert results["llm2"].keys() == {"greedy_task_reward", "greedy_solved", "pass@1", "pass@2"}


@pytest.mark.parametrize("runs, flags, says", [
    (["cory-0"], ["--k", "0"], "k is 0: must be 1 or more"),
    (["cory-0"], ["--samples", "3"], "samples is 3: must be 32 or more"),
    (["cory-0"], ["--queries", "500"], "has 10 test queries that training never asks"),
    (["cory-0"], ["--device", "cuda"], "device is 'cuda': PyTorch sees no CUDA GPU here"),
    (["cory-0"], ["--out", "/nowhere/p.png"], "out is '/nowhere/p.png'"),
    (["cory-0"], ["--out", "p.txt"], "must end in .png"),
    ([""], [], "holds no run (no config.json)")])
def test_bad_requests_exit_2_with_one_line(runs, flags, says, finished, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert says in error_line(evaluate.main, [*(finished / run for run in runs), *flags], capsys)


def test_a_run_that_is_not_what_it_was_and_rows_it_trained_on_are_refused(
        problems, problem_flags, tmp_path, capsys):
    """One file without a test split: the run held its last rows out, and more are not to be had."""
    own, data = shutil.copytree(problems, tmp_path / "problems"), tmp_path / "problems" / "train.jsonl"
    flags = ["--model", str(own / "lm"), "--dataset", str(data), "--lora", "true", "--iterations", "1"]
    train_gsm8k.main([*problem_flags, *flags, "--run_dir", str(tmp_path / "r")])

    def refusal(*more: str) -> str:
        return error_line(evaluate.main, [tmp_path / "r", *FLAGS, *more], capsys)

    assert "has 16 test queries that training never asks" in refusal("--queries", "20")
    text = data.read_text()
    data.write_text(text.replace("eggs", "hens", 1))
    assert "the data of this run was another" in refusal()
    data.write_text(text)
    path = own / "lm" / "model.safetensors"
    kept, weights = path.read_bytes(), load_file(path)
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, path, {"format": "pt"})
    assert "the model of this run was another" in refusal()
    path.write_bytes(kept)
    (tmp_path / "r" / "final" / "llm1").rename(tmp_path / "llm1")
    assert "has no final/llm1" in refusal()
    assert not (tmp_path / "r" / "evaluation").exists()
    (tmp_path / "llm1").rename(tmp_path / "r" / "final" / "llm1")
    evaluate.main([str(tmp_path / "r"), *FLAGS])
    (tmp_path / "r" / "eval.json").unlink()
    assert "is no finished run (no eval.json)" in refusal()
