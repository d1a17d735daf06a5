"""The jobs of the README with what the package ships; and what it ships."""
import importlib
import operator
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import SHARED
from toys import read

from cory.assets.word_problems import NAMES, THINGS, problem, wrong_answer
from cory.config import ASSETS
from cory.system.files import read_jsonl
from cory.tasks.answers import gold_answer, last_number, strict
from cory.tasks.imdb import SentimentReward

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.mark.parametrize("task, method, iterations, learning_rate, gain", [
    ("imdb", "cory", 4, "4e-3", 0.05), ("gsm8k", "ppo", 3, "3e-4", 0.03)])
def test_both_tasks_learn(task, method, iterations, learning_rate, gain, tmp_path):
    """A short version of each job, with larger steps: all agents' held-out rewards rise above the base's. At this
    seed they do so by three times `gain` and more.
    """
    flags = (f"--seed 1 --method {method} --iterations {iterations} --learning_rate {learning_rate} "
             "--eval_every 0 --eval_queries 64 --batch_size 64 --wandb disabled --run_dir").split()
    importlib.import_module(f"train_{task}").main([*flags, str(tmp_path / "run")])
    held_out = read(tmp_path / "run" / "eval.json")
    for agent in ("llm1", "llm2")[:1 if method == "ppo" else 2]:
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + gain, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_shipped_problems_do_not_overlap_in_numbers_templates_or_questions():
    blank = re.compile(rf"\b({'|'.join(map(re.escape, [*NAMES, *THINGS]))}|\d+)\b")
    seen = {}
    for split, least in (("train", 4000), ("test", 1000)):
        problems = read_jsonl(ASSETS / f"gsm8k/problems/{split}.jsonl")
        for answer in (row["answer"] for row in problems):
            assert gold_answer(answer) == last_number(answer) == strict(answer) is not None
        questions = {row["question"] for row in problems}
        assert len(questions) == len(problems) >= least
        numbers = {tuple(re.findall(r"\d+", question)) for question in questions}
        seen[split] = questions, numbers, {blank.sub("_", question) for question in questions}
    assert not any(train & test for train, test in zip(seen["train"], seen["test"]))


def test_worked_answers_are_right_and_wrong_ones_are_wrong():
    """Each sum of a worked answer holds and feeds the next; a wrong one has at most one that does not (it may be
    misread instead), and another end.
    """
    rng = random.Random(0)
    for _ in range(300):
        made = problem(rng, held_out=rng.random() < 0.5)
        for answer, mistakes in ((made.answer, {0}), (wrong_answer(rng, made), {0, 1})):
            sums = re.findall(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)", answer)
            wrong = [result for a, sign, b, result in sums if OPERATIONS[sign](int(a), int(b)) != int(result)]
            assert len(wrong) in mistakes and answer.endswith(f"#### {sums[-1][3]}")
            assert all(left[3] == right[0] for left, right in zip(sums, sums[1:]))
        assert gold_answer(made.answer) != last_number(wrong_answer(rng, made))


def test_shipped_openings_do_not_overlap_and_are_no_rows_of_the_data_set():
    train, test = ([row["text"] for row in read_jsonl(ASSETS / f"imdb/openings/{split}.jsonl")]
                   for split in ("train", "test"))
    assert len(train) >= 5000 and len(test) >= 1000
    assert not {text[:40].lower() for text in train} & {text[:40].lower() for text in test}
    if not SHARED.exists():
        pytest.skip("real IMDB is not at ../shared/data: that no opening is a row of it was not checked")
    from datasets import load_dataset

    reviews = [text for rows in load_dataset(str(SHARED / "imdb")).values() for text in rows["text"]]
    real = {" ".join(text.replace("<br />", " ").split())[:60] for text in reviews}
    assert sum(text[:60] in real for text in train + test) <= 5         # stock phrases


def test_the_shipped_classifier_tells_praise_from_blame():
    reward = SentimentReward(str(ASSETS / "imdb" / "classifier"), torch.device("cpu"))
    good = reward(["This is a wonderful film, one of the best I have seen.",
                   "A great story, superb acting and a moving end."])
    bad = reward(["This is an awful film, one of the worst I have seen.",
                  "A boring story, terrible acting and a stupid end."])
    assert min(good) > 1 and max(bad) < -1


def test_every_module_of_the_package_can_be_imported():
    """The scripts that make the assets too, which nothing else imports."""
    root = Path(__file__).parents[1]
    for path in sorted((root / "cory").rglob("*.py")):
        importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
