"""README's job, with what the package ships."""
import importlib
from pathlib import Path

from toys import float64, read

import train_imdb
from cory.run import finish, report


def test_both_agents_learn(tmp_path, monkeypatch):
    """A short version of README's job: held-out rewards rise above the base's, by 0.71 and 0.27.

    In float64, so that no draw depends on the processor: in float32, over orders of sums, such gains have a
    standard deviation of 0.1. A change of the code that moves draws may need another seed. Short queries and
    responses, and a weak KL penalty, make the gain clear after 3 iterations, in about 25 s.
    """
    flags = ("--seed 1 --method cory --iterations 3 --role_exchange_every 1 --max_query_length 3 "
             "--max_response_length 6 --learning_rate 6e-3 --init_kl_coef 0.05 --eval_every 0 "
             "--eval_queries 48 --wandb disabled --run_dir")
    monkeypatch.setattr(finish, "draw_run", report.draw_run)
    with float64():
        train_imdb.main([*flags.split(), str(tmp_path / "run")])
    plot = tmp_path / "run/curves.png"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    held_out = read(tmp_path / "run/eval.json")
    for agent in ("llm1", "llm2"):
        assert held_out[agent]["task_reward"] > held_out["base"]["task_reward"] + 0.1, held_out
        assert 0 < held_out[agent]["kl"] < 60


def test_every_module_of_the_package_can_be_imported():
    """Also the scripts that make the assets, which nothing else imports."""
    root = Path(__file__).parents[1]
    for path in root.glob("cory/**/*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        importlib.import_module(".".join(parts))
