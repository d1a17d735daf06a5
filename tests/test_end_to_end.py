"""Each method with what the package ships, by the command of the README; and what it ships."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARED

from cory.config import ASSETS
from cory.imdb import SentimentReward
from cory.model import load_language_model

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("method", ["ppo", "cory"])
def test_the_command_of_the_readme_learns(method, tmp_path):
    """A short version of it: the held-out reward of every agent rises above the base's."""
    done = subprocess.run([sys.executable, "train_imdb.py", "--method", method, "--iterations", "18", "--eval_queries", "128", "--eval_every", "0",
                           "--wandb", "disabled", "--run_dir", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"{method.upper()} on imdb: preset tiny, model embedded") and f"--method {method} --preset gpt2-large" in first
    held_out = json.loads((tmp_path / "run" / "eval.json").read_text())
    for agent in ("llm1", "llm2")[:1 if method == "ppo" else 2]:
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + 0.2, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_shipped_assets_are_small_and_in_the_hubs_formats():
    files = [p for p in (ASSETS / "imdb").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 30e6
    for part in ("lm", "classifier"):
        assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {p.name for p in (ASSETS / "imdb" / part).iterdir()}


def test_shipped_openings_do_not_overlap_and_are_no_rows_of_the_data_set():
    split = {s: [json.loads(line)["text"] for line in (ASSETS / "imdb" / "openings" / f"{s}.jsonl").open()] for s in ("train", "test")}
    assert len(split["train"]) >= 5000 and len(split["test"]) >= 1000
    tokenizer = load_language_model(str(ASSETS / "imdb" / "lm")).tokenizer
    first8 = {s: {tuple(ids[:8]) for ids in tokenizer(texts)["input_ids"]} for s, texts in split.items()}
    assert not first8["train"] & first8["test"]
    if not SHARED.exists():
        pytest.skip("real IMDB is not at ../shared/data: that no opening is a row of it was not checked")
    from datasets import load_dataset
    real = {" ".join(t.replace("<br />", " ").split())[:60] for rows in load_dataset(str(SHARED / "imdb")).values() for t in rows["text"]}
    assert sum(text[:60] in real for s in split.values() for text in s) <= 5       # stock phrases aside


def test_shipped_classifier_tells_praise_from_blame():
    reward = SentimentReward(str(ASSETS / "imdb" / "classifier"), torch.device("cpu"))
    good = reward(["This is a wonderful film, one of the best I have seen.", "A great story, superb acting and a moving end."])
    bad = reward(["This is an awful film, one of the worst I have seen.", "A boring story, terrible acting and a stupid end."])
    assert min(good) > 1 and max(bad) < -1
