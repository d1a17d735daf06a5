"""README's job, with what the package ships."""
import importlib
from pathlib import Path

from toys import read

import train_imdb
from cory.run import record, report


def test_both_agents_learn(tmp_path, monkeypatch):
    """A short version of README's job, with larger steps: held-out rewards rise above the base's. At this
    seed they do so by more than twice 0.08, though processors draw differently. It takes 18 s: with fewer
    responses to learn from or to measure, or with a smaller model, chance would hide the gain.
    """
    flags = ("--seed 1 --method cory --iterations 3 --learning_rate 5e-3 --eval_every 0 --eval_queries 64 "
             "--wandb disabled --run_dir")
    monkeypatch.setattr(record, "draw_run", report.draw_run)
    train_imdb.main([*flags.split(), str(tmp_path / "run")])
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    held_out = read(tmp_path / "run" / "eval.json")
    for agent in ("llm1", "llm2"):
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + 0.08, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_every_module_of_the_package_can_be_imported():
    """The scripts that make the assets too, which nothing else imports."""
    root = Path(__file__).parents[1]
    for path in sorted((root / "cory").rglob("*.py")):
        importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
