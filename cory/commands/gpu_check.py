"""What to run first on a machine with a GPU: one table, to paste into docs/hardware.md.

    python -m cory gpu_check

The test suite, both presets `tiny`, and the benchmark of a random GPT-2 Large at the paper's sizes: some ten
minutes. A part that fails is named, and the others go on.
"""
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from cory.commands.plan import SHAPES
from cory.config import ASSETS, ImdbConfig
from cory.errors import exit_on_user_error
from cory.experiment.flags import OneLineParser
from cory.system.machine import choose_device

ROOT = Path(__file__).parents[2]
SHORT = ("--device cuda --iterations 3 --eval_every 0 --save_every 0 --eval_queries 16 "
         "--wandb disabled").split()
PAPER = ("--device cuda --batch_size 256 --mini_batch_size 256 --max_response_length 15 "
         "--kl_penalty full").split()
COLUMNS = ["method, dtype", "s per iteration", "sample", "score", "update", "peak GiB", "share of the floor"]


def last_line(*command: str) -> str:
    """Runs `python COMMAND` in the repository. Returns its last line that is a result, or how it failed."""
    print("$ python", *command, flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("written to")] or [""]
    return lines[-1] if done.returncode == 0 else f"FAILED with status {done.returncode}: {lines[-1]}"


def write_gpt2_large(folder: str) -> None:
    """With random weights, and the embedded tokenizer."""
    GPT2LMHeadModel(SHAPES["gpt2-large"]).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "imdb/lm").save_pretrained(folder)


def measured(model: str, method: str, dtype: str) -> str:
    """A row of the table: seconds in all and by phase, peak memory, share of the floor."""
    flags = ["--model", model, "--method", method, "--dtype", dtype, *PAPER]
    last = last_line("-m", "cory", "benchmark", *flags)
    if last.startswith("FAILED"):
        return f"| {method}, {dtype} | {last} |"
    result = json.loads(last)
    cells = [f"{result['seconds'][key]:.2f}" for key in ("total", "sample", "score", "update")]
    cells += [f"{result['peak_gib']:.1f}", f"{result['share_of_floor']['total']:.0%}"]
    return f"| {method}, {dtype} | {' | '.join(cells)} |"


@exit_on_user_error
def main(argv: list[str]) -> None:
    OneLineParser(prog="python -m cory gpu_check", description=__doc__).parse_args(argv)
    choose_device(ImdbConfig(device="cuda"))                    # said before anything is made
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}"]
    with tempfile.TemporaryDirectory() as folder:
        write_gpt2_large(folder)
        lines.append(f"tests: {last_line('-m', 'pytest', '-q')}")
        for script in ("train_imdb.py", "train_gsm8k.py"):
            lines.append(f"{script}: {last_line(script, *SHORT, '--run_dir', f'{folder}/{script}')}")
        lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * 6 + "|"]
        for method, dtype in product(("ppo", "cory"), ("float32", "tf32", "bfloat16")):
            lines.append(measured(folder, method, dtype))
    print("\n".join(["", *lines]))
