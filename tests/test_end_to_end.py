"""Each method with what the package ships, by the command of the README; and what it ships."""
import importlib
import json
import operator
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import SHARED
from toys import read

from cory.assets import make_gsm8k_assets
from cory.assets.word_problems import NAMES, THINGS, problem, wrong_answer
from cory.config import ASSETS
from cory.ppo.loading import load_language_model
from cory.tasks.answers import gold_answer, last_number, strict
from cory.tasks.imdb import SentimentReward

ROOT = Path(__file__).parents[1]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / name).open()]


@pytest.mark.parametrize("task, method, iterations, learning_rate, gain, paper_preset", [
    ("imdb", "cory", 4, "4e-3", 0.05, "gpt2-large"), ("gsm8k", "ppo", 3, "3e-4", 0.03, "llama2-7b")])
def test_the_commands_of_the_readme_learn(
        task, method, iterations, learning_rate, gain, paper_preset, tmp_path, capsys):
    """A short version of each, with larger steps: held-out rewards of all agents rise above the base's. At
    this seed they do so by three times `gain` and more.
    """
    flags = (f"--seed 1 --method {method} --iterations {iterations} --learning_rate {learning_rate} "
             "--eval_every 0 --eval_queries 64 --batch_size 64 --wandb disabled "
             f"--run_dir {tmp_path / 'run'}")
    importlib.import_module(f"train_{task}").main(flags.split())
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{method.upper()} on {task}: preset tiny, model embedded")
    assert f"--method {method} --preset {paper_preset}" in first
    held_out = read(tmp_path / "run" / "eval.json")
    for agent in ("llm1", "llm2")[:1 if method == "ppo" else 2]:
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + gain, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_shipped_problems_do_not_overlap_in_numbers_templates_or_questions():
    blank = re.compile(rf"\b({'|'.join(map(re.escape, [*NAMES, *THINGS]))}|\d+)\b")
    seen = {}
    for split in ("train", "test"):
        rows = rows_of(f"gsm8k/problems/{split}.jsonl")
        for answer in (row["answer"] for row in rows):
            assert gold_answer(answer) == last_number(answer) == strict(answer) is not None
            assert 2 <= answer.count("=") <= 4
        questions = {row["question"] for row in rows}
        assert len(questions) == len(rows) >= {"train": 4000, "test": 1000}[split]
        numbers = {tuple(re.findall(r"\d+", q)) for q in questions}
        seen[split] = questions, numbers, {blank.sub("_", q) for q in questions}
    for train, test in zip(seen["train"], seen["test"]):
        assert not train & test


def test_worked_answers_are_right_and_wrong_ones_are_wrong():
    """Each sum of a worked answer holds and feeds the next; a wrong one has at most one that does not (it
    may be misread instead), and another end.
    """
    rng = random.Random(0)
    for _ in range(300):
        made = problem(rng, held_out=rng.random() < 0.5)
        for answer, mistakes in ((made.answer, {0}), (wrong_answer(rng, made), {0, 1})):
            sums = re.findall(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)", answer)
            wrong = [result for a, sign, b, result in sums if OPERATIONS[sign](int(a), int(b)) != int(result)]
            assert len(wrong) in mistakes
            assert all(left[3] == right[0] for left, right in zip(sums, sums[1:]))
            assert answer.endswith(f"#### {sums[-1][3]}")
        assert gold_answer(made.answer) != last_number(wrong_answer(rng, made))


def test_d_compares_right_and_wrong_references_to_the_same_problems(monkeypatch):
    rng = random.Random(0)
    problems = [problem(rng, held_out=True) for _ in range(3)]
    a, b, c = ([f"{text} #### {n}" for text in "xy" for n in (m.answer.split()[-1], "-1")] for m in problems)
    asked = []

    def answers(model, prompts, generator=None):
        if generator:
            return [*a, b[1], b[3], b[2], b[0], c[0], c[2], c[0], c[2]]
        asked.extend(prompts)
        return [prompt.split("Reference: ")[1].removesuffix(" Answer:") for prompt in prompts]

    monkeypatch.setattr(make_gsm8k_assets, "answers", answers)
    use = make_gsm8k_assets.use_of_references(None, problems, samples=4)
    assert use == {"sampled_accuracy": 8 / 12, "problems_with_both": 2,         # c is never wrong
                   "greedy_accuracy_own_right_reference": 1, "greedy_accuracy_own_wrong_reference": 0, "D": 1}
    assert [a[0] in asked[0], b[2] in asked[1], a[1] in asked[2], b[1] in asked[3]] == [True] * 4  # the first
    assert [m.question in prompt for m, prompt in zip(problems[:2] * 2, asked, strict=True)] == [True] * 4


def test_a_base_that_copies_learns_its_references_right_or_wrong():
    tokenizer = load_language_model(str(ASSETS / "gsm8k" / "lm")).tokenizer

    def learned(mix: list[float], repeated: float) -> list[tuple[str, str]]:
        """(prompt, answer) of a batch."""
        made = make_gsm8k_assets.batches(tokenizer, 32, random.Random(0), 0, 1.0, mix, 0.5, repeated)
        ids, mask = next(made)
        text = lambda row, kept: tokenizer.decode(row[kept], skip_special_tokens=True).strip()
        return [(text(row, learn.cumsum(0) == 0), text(row, learn.bool()))
                for row, learn in zip(ids, mask, strict=True)]

    reference = lambda prompt: prompt.split("Reference: ")[1].removesuffix(" Answer:")
    assert all(reference(prompt) == answer for prompt, answer in learned([0, 1, 0], repeated=1))
    assert 5 < sum(reference(prompt) == answer for prompt, answer in learned([0, 1, 0], repeated=0)) < 27
    assert not any("Reference:" in prompt for prompt, _ in learned([1, 0, 0], repeated=1))
    assert all(prompt == "" for prompt, _ in learned([0, 0, 1], repeated=1))


def test_shipped_assets_are_small_and_in_the_hubs_formats():
    for task, limit in (("imdb", 30e6), ("gsm8k", 20e6)):
        assert sum(p.stat().st_size for p in (ASSETS / task).rglob("*") if p.is_file()) <= limit
    for model in ("imdb/lm", "imdb/classifier", "gsm8k/lm"):
        for name in ("config.json", "model.safetensors", "tokenizer.json", "training.json"):
            assert (ASSETS / model / name).exists()


def test_shipped_openings_do_not_overlap_and_are_no_rows_of_the_data_set():
    openings = {name: [row["text"] for row in rows_of(f"imdb/openings/{name}.jsonl")]
                for name in ("train", "test")}
    assert len(openings["train"]) >= 5000 and len(openings["test"]) >= 1000
    tokenizer = load_language_model(str(ASSETS / "imdb" / "lm")).tokenizer
    train, test = ({tuple(ids[:8]) for ids in tokenizer(texts)["input_ids"]} for texts in openings.values())
    assert not train & test
    if not SHARED.exists():
        pytest.skip("real IMDB is not at ../shared/data: that no opening is a row of it was not checked")
    from datasets import load_dataset

    splits = load_dataset(str(SHARED / "imdb")).values()
    real = {" ".join(t.replace("<br />", " ").split())[:60] for rows in splits for t in rows["text"]}
    assert sum(text[:60] in real for texts in openings.values() for text in texts) <= 5     # stock phrases


def test_shipped_classifier_tells_praise_from_blame():
    reward = SentimentReward(str(ASSETS / "imdb" / "classifier"), torch.device("cpu"))
    good = reward(["This is a wonderful film, one of the best I have seen.",
                   "A great story, superb acting and a moving end."])
    bad = reward(["This is an awful film, one of the worst I have seen.",
                  "A boring story, terrible acting and a stupid end."])
    assert min(good) > 1 and max(bad) < -1


def test_every_module_of_the_package_can_be_imported():
    """The scripts that make the assets too, which nothing else imports."""
    for path in sorted((ROOT / "cory").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(name)
