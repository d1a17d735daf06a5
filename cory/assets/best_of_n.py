"""Store the best of n of a bundled base, as measured by `python -m cory evaluate`, next to the base:

    python train_imdb.py --method ppo --iterations 1 --wandb disabled --run_dir build/base
    python -m cory evaluate build/base --samples 64
    python -m cory.assets.best_of_n build/base
"""
import json
import sys
from pathlib import Path

import numpy as np

from cory.config import ASSETS
from cory.flags import read_config
from cory.run.held_out import best_of_n
from cory.system.files import read_jsonl

# What the reward of the base's responses to held-out queries depends on.
SETTINGS = ("model", "dataset", "eval_split", "eval_queries", "max_response_length", "chat_template",
            "reward_model", "min_query_length", "max_query_length", "checker", "one_shot")


def settings_of(config: dict) -> dict[str, str]:
    return {name: str(config[name]).removeprefix(f"{ASSETS}/") for name in SETTINGS if name in config}


def bundled_best_of_n(config: dict) -> dict[str, list[float]]:
    """{n: (KL, reward)} if base, held-out queries and reward of a run are those it was measured for."""
    path = ASSETS / config["task"] / "best_of_n.json"
    stored = json.loads(path.read_text()) if path.exists() else {"settings": None}
    return stored["best_of_n"] if stored["settings"] == settings_of(config) else {}


def main(run_dir: Path) -> None:
    config = read_config(run_dir)
    reward_Qm = np.array([row["rewards"] for row in read_jsonl(run_dir / "evaluation" / "base.jsonl")])
    queries, samples = reward_Qm.shape
    best = {n: [round(x, 4) for x in best_of_n(reward_Qm, n)] for n in (4, 16, 32)}
    stored = {"settings": settings_of(config | {"eval_queries": queries}), "samples": samples,
              "best_of_n": best}
    (ASSETS / config["task"] / "best_of_n.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
