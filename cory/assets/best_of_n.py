"""Store what `python -m cory evaluate` has measured of an embedded base, its best of n responses, beside it:

    python train_imdb.py --method ppo --iterations 1 --wandb disabled --run_dir build/base
    python -m cory evaluate build/base --samples 64
    python -m cory.assets.best_of_n build/base

The plots of runs whose held-out queries, base and reward are these show it as crosses.
"""
import json
import sys
from pathlib import Path

from cory.config import ASSETS
from cory.flags import read_config

# What the reward of the base's responses to held-out queries depends on.
SETTINGS = ("model", "dataset", "eval_split", "eval_queries", "max_response_length", "chat_template",
            "reward_model", "min_query_length", "max_query_length", "checker", "one_shot")


def main(run_dir: Path) -> None:
    config = read_config(run_dir)
    results = json.loads((run_dir / "evaluation" / "results.json").read_text())
    settings = {name: str(config[name]).removeprefix(f"{ASSETS}/") for name in SETTINGS if name in config}
    settings["eval_queries"] = str(results["queries"])
    best = {n: [round(x, 4) for x in point] for n, point in results["best_of_n"].items()}
    stored = {"settings": settings, "samples": results["samples"], "best_of_n": best}
    (ASSETS / config["task"] / "best_of_n.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
