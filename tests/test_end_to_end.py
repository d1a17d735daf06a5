"""Each method with what the package ships, by the command of the README; and what it ships."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARED

from cory.config import ASSETS
from cory.ppo.loading import load_language_model
from cory.tasks.imdb import SentimentReward

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "task, method, iterations, learning_rate, eval_queries, gain",
    [("imdb", "cory", 5, "5e-4", 64, 0.2), ("gsm8k", "ppo", 3, "1e-4", 128, 0.05)],
)
def test_the_commands_of_the_readme_learn(
    task, method, iterations, learning_rate, eval_queries, gain, tmp_path
):
    """A short version of each, with larger steps: the held-out reward of every agent rises above the
    base's.
    """
    paper_preset = {"imdb": "gpt2-large", "gsm8k": "llama2-7b"}[task]
    done = subprocess.run(
        [
            sys.executable,
            f"train_{task}.py",
            "--method",
            method,
            "--iterations",
            str(iterations),
            "--learning_rate",
            learning_rate,
            "--eval_queries",
            str(eval_queries),
            "--eval_every",
            "0",
            "--wandb",
            "disabled",
            "--run_dir",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert (
        first.startswith(f"{method.upper()} on {task}: preset tiny, model embedded")
        and f"--method {method} --preset {paper_preset}" in first
    )
    held_out = json.loads((tmp_path / "run" / "eval.json").read_text())
    for agent in ("llm1", "llm2")[: 1 if method == "ppo" else 2]:
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + gain, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_shipped_problems_do_not_overlap_in_numbers_templates_or_questions():
    from cory.assets.word_problems import NAMES, THINGS
    from cory.tasks.answers import gold_answer, last_number, strict

    words, numbers, questions = {}, {}, {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (ASSETS / "gsm8k" / "problems" / f"{split}.jsonl").open()]
        assert all(
            gold_answer(r["answer"]) == last_number(r["answer"]) == strict(r["answer"]) is not None
            for r in rows
        )
        assert all(2 <= r["answer"].count("=") <= 4 for r in rows)
        questions[split] = {r["question"] for r in rows}
        numbers[split] = {tuple(re.findall(r"\d+", q)) for q in questions[split]}
        blank = re.compile(rf"\b({'|'.join(map(re.escape, [*NAMES, *THINGS]))}|\d+)\b")
        words[split] = {blank.sub("_", q) for q in questions[split]}
        assert len(questions[split]) == len(rows)
    assert len(questions["train"]) >= 4000 and len(questions["test"]) >= 1000
    for found in (words, numbers, questions):
        assert not found["train"] & found["test"]


def test_worked_answers_are_right_and_wrong_ones_are_wrong():
    """Each sum of a worked answer holds and feeds the next; a wrong one has at most one that does not (it
    may be misread instead), and another end.
    """
    from cory.assets.word_problems import problem, wrong_answer
    from cory.tasks.answers import gold_answer, last_number

    rng = random.Random(0)
    for _ in range(300):
        made = problem(rng, held_out=rng.random() < 0.5)
        for answer, mistakes in ((made.answer, {0}), (wrong_answer(rng, made), {0, 1})):
            sums = re.findall(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)", answer)
            wrong = sum(
                (
                    {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[
                        o
                    ]
                    != int(c)
                )
                for a, o, b, c in sums
            )
            assert wrong in mistakes and all(left[3] == right[0] for left, right in zip(sums, sums[1:]))
            assert answer.endswith(f"#### {sums[-1][3]}")
        assert gold_answer(made.answer) != last_number(wrong_answer(rng, made))


def test_shipped_assets_are_small_and_in_the_hubs_formats():
    for task, limit in (("imdb", 30e6), ("gsm8k", 20e6)):
        assert sum(p.stat().st_size for p in (ASSETS / task).rglob("*") if p.is_file()) <= limit
    for part in ("imdb/lm", "imdb/classifier", "gsm8k/lm"):
        assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {
            p.name for p in (ASSETS / part).iterdir()
        }


def test_shipped_openings_do_not_overlap_and_are_no_rows_of_the_data_set():
    split = {
        s: [json.loads(line)["text"] for line in (ASSETS / "imdb" / "openings" / f"{s}.jsonl").open()]
        for s in ("train", "test")
    }
    assert len(split["train"]) >= 5000 and len(split["test"]) >= 1000
    tokenizer = load_language_model(str(ASSETS / "imdb" / "lm")).tokenizer
    first8 = {s: {tuple(ids[:8]) for ids in tokenizer(texts)["input_ids"]} for s, texts in split.items()}
    assert not first8["train"] & first8["test"]
    if not SHARED.exists():
        pytest.skip("real IMDB is not at ../shared/data: that no opening is a row of it was not checked")
    from datasets import load_dataset

    real = {
        " ".join(t.replace("<br />", " ").split())[:60]
        for rows in load_dataset(str(SHARED / "imdb")).values()
        for t in rows["text"]
    }
    assert sum(text[:60] in real for s in split.values() for text in s) <= 5  # stock phrases aside


def test_shipped_classifier_tells_praise_from_blame():
    reward = SentimentReward(str(ASSETS / "imdb" / "classifier"), torch.device("cpu"))
    good = reward(
        [
            "This is a wonderful film, one of the best I have seen.",
            "A great story, superb acting and a moving end.",
        ]
    )
    bad = reward(
        [
            "This is an awful film, one of the worst I have seen.",
            "A boring story, terrible acting and a stupid end.",
        ]
    )
    assert min(good) > 1 and max(bad) < -1


def test_every_module_of_the_package_can_be_imported():
    """The scripts that make the assets too, which nothing else imports."""
    import importlib

    for path in sorted((ROOT / "cory").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(name)
