"""The jobs of the README, with what the package ships."""
import importlib
from pathlib import Path

import pytest
from toys import read

from cory.run import record, report


@pytest.mark.parametrize("task, method, iterations, batch, learning_rate, gain", [
    ("imdb", "cory", 3, 64, "5e-3", 0.08), ("gsm8k", "ppo", 2, 32, "2e-3", 0.06)])
def test_both_tasks_learn(task, method, iterations, batch, learning_rate, gain, tmp_path, monkeypatch):
    """A short version of each job, with larger steps: all agents' held-out rewards rise above the base's. At
    this seed they do so by more than twice `gain`, though processors draw differently. It takes 20 and 9 s:
    with fewer responses to learn from or to measure, or with smaller models, chance would hide the gain.
    """
    flags = (f"--seed 1 --method {method} --iterations {iterations} --learning_rate {learning_rate} "
             f"--batch_size {batch} --eval_every 0 --eval_queries 64 --eval_samples 1 --wandb disabled "
             "--run_dir")
    if method == "cory":                                    # a picture takes seconds
        monkeypatch.setattr(record, "draw_run", report.draw_run)
    importlib.import_module(f"train_{task}").main([*flags.split(), str(tmp_path / "run")])
    if method == "cory":
        assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    held_out = read(tmp_path / "run" / "eval.json")
    for agent in ("llm1", "llm2")[:1 if method == "ppo" else 2]:
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + gain, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_every_module_of_the_package_can_be_imported():
    """The scripts that make the assets too, which nothing else imports."""
    root = Path(__file__).parents[1]
    for path in sorted((root / "cory").rglob("*.py")):
        importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
