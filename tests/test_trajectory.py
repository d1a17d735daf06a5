"""Pinned runs of the bundled models, compared with stored metrics, so that no change stays unseen.

They are computed in float64. In float32 processors differ by 1e-6, which moves a draw in some thousands to
another token, and Adam makes whole steps out of the rounding of a gradient that is 0. The three take 12 s,
since they are of the models that are shipped, and float64 is put into each call of PyTorch's.

After a change that is meant to move them `PYTHONPATH=. python tests/test_trajectory.py` writes
trajectory.json anew; say in the commit message what moved it. Where only keys were renamed, its diff shows
keys alone: values are rounded to digits that processors share.
"""
import json
import tempfile
from pathlib import Path

import pytest
from toys import float64, read, rows

import train_gsm8k
import train_imdb

STORED = Path(__file__).with_name("trajectory.json")
QUICK = ("--iterations 2 --batch_size 8 --mini_batch_size 8 --eval_queries 2 --eval_samples 1 --eval_every 0 "
         "--save_every 0 --wandb disabled --device cpu")
RUNS = {
    "imdb-cory": "--max_response_length 10 --mini_batch_size 4 --gradient_accumulation_steps 2 "
    "--num_ppo_epochs 2 --role_exchange_every 1 --learning_rate 2.2e-3",
    "imdb-ppo-full": "--max_response_length 10 --mini_batch_size 4 --method ppo --kl_penalty full "
    "--kl_target 0.5 --kl_horizon 20 --max_grad_norm 1 --lora_rank 0 --learning_rate 1e-5 "
    "--num_ppo_epochs 4 --critic_learning_rate 0 --lr_schedule constant",
    "gsm8k-cory-rloo": "--max_response_length 24 --advantage rloo --responses_per_query 4 --kl_in loss "
    "--share_weights true --lr_schedule linear --lora_rank 0 --learning_rate 1e-4 --seed 3"}


def metrics_of(name: str, folder: Path) -> dict[str, list[float]]:
    """By key, its values in the rows that have it, rounded."""
    task = name.partition("-")[0]
    script = {"imdb": train_imdb, "gsm8k": train_gsm8k}[task]
    flags = f"{QUICK} {RUNS[name]}"
    with float64():
        script.main([*flags.split(), "--run_dir", str(folder)])
    metrics = {}
    for row in rows(folder):
        for key, value in row.items():
            values = metrics.setdefault(key, [])
            values.append(round(value, 10) + 0.0)                       # + 0.0 makes 0.0 of -0.0
    return metrics


@pytest.mark.parametrize("name", RUNS)
def test_metrics_are_those_stored(name, tmp_path):
    metrics = metrics_of(name, tmp_path / "r")
    stored = read(STORED)[name]
    assert metrics.keys() == stored.keys()
    for key, values in stored.items():
        assert metrics[key] == pytest.approx(values, rel=1e-6, abs=1e-9), key


def to_text(runs: dict) -> str:
    """JSON with a line for each metric."""
    blocks = []
    for name, metrics in runs.items():
        lines = [f'  "{key}": {json.dumps(values)}' for key, values in metrics.items()]
        blocks.append(f' "{name}": {{\n' + ",\n".join(lines))
    return "{\n" + "\n },\n".join(blocks) + "\n }\n}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: metrics_of(name, Path(folder) / name) for name in RUNS}
    STORED.write_text(to_text(runs))
