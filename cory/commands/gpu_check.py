"""Everything to run first on a machine with a GPU, and one table of it to paste into docs/hardware.md.

    python -m cory gpu_check

The test suite; both presets `tiny` on the GPU; how often sampling waits for the GPU; and the benchmark of a
random GPT-2 Large at the paper's sizes, PPO and CORY, in float32, TF32 and bfloat16: some ten minutes. A part
that fails is named in the table, and the others go on.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from cory.config import ASSETS, ImdbConfig
from cory.errors import exit_on_user_error
from cory.experiment.flags import OneLineParser
from cory.ppo.loading import load_language_model
from cory.ppo.sampling import encode_prompts, sample
from cory.system.machine import choose_device, settled

ROOT = Path(__file__).parents[2]
LARGE = dict(n_layer=36, n_embd=1280, n_head=20, vocab_size=50257)
SMALL = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=8192)
QUICK = "--iterations 3 --eval_every 0 --save_every 0 --eval_queries 16 --wandb disabled".split()
COLUMNS = ["method, dtype", "s per iteration", "sample", "score", "update", "peak GiB", "share of the floor"]


def passes(*command: str) -> str:
    """Runs `python COMMAND` in the repository. Returns its last result, or how it failed."""
    print("$ python", *command, flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("written to")] or [""]
    return lines[-1] if done.returncode == 0 else f"FAILED with status {done.returncode}: {lines[-1]}"


def write_model(folder: str, **shape: int) -> None:
    """A GPT-2 of that shape with random weights, and the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "imdb/lm")
    end = dict(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape, **end)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def waits(model: str, tokens: int) -> int:
    """How often the host waits for the GPU while it samples so many tokens: PyTorch's own count."""
    cfg = settled(ImdbConfig(device="cuda"))
    lm = load_language_model(model, 1.0, cfg.precision, choose_device(cfg))
    prompts = encode_prompts(lm, ["one", "a film"] * 32, tokens)
    sample(lm, prompts, 2, torch.Generator().manual_seed(0))            # what happens once, before
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True, action="always") as caught:
        sample(lm, prompts, tokens, torch.Generator().manual_seed(0))
    torch.cuda.set_sync_debug_mode("default")
    del lm, prompts
    torch.cuda.empty_cache()                                            # the benchmarks need the room
    return sum("synchroniz" in str(warning.message) for warning in caught)


def measured(method: str, dtype: str, flags: list[str]) -> str:
    """A row of the table: seconds in all and by phase, peak memory, share of the floor."""
    last = passes("-m", "cory", "benchmark", "--method", method, "--dtype", dtype, *flags)
    if last.startswith("FAILED"):
        return f"| {method}, {dtype} | {last} |"
    result = json.loads(last)
    cells = [f"{result['seconds'][key]:.2f}" for key in ("total", "sample", "score", "update")]
    cells += [f"{result['peak_gib']:.1f}", f"{result['share_of_floor']['total']:.0%}"]
    return f"| {method}, {dtype} | {' | '.join(cells)} |"


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory gpu_check", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"],
                        help="cpu tries the script itself: the benchmark of a small model alone")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    choose_device(ImdbConfig(device=args.device))               # said before anything is made
    on_gpu, device = args.device == "cuda", ["--device", args.device]
    lines = [f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}"]
    dtypes, batch = (("float32", "tf32", "bfloat16"), "256") if on_gpu else (("auto",), "8")
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        write_model(model, **(LARGE if on_gpu else SMALL))
        if on_gpu:
            lines.append(f"tests: {passes('-m', 'pytest', '-q')}")
            for script in ("train_imdb.py", "train_gsm8k.py"):
                run = passes(script, *QUICK, *device, "--run_dir", f"{folder}/{script}")
                lines.append(f"{script}: {run}")
            lines.append(f"waits while 32 tokens are sampled: {waits(model, 32)}")
        lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * 6 + "|"]
        flags = ["--preset", "gpt2-large", "--model", model, "--iterations", "4", "--batch_size", batch,
                 "--mini_batch_size", batch, *device]
        for method, dtype in product(("ppo", "cory"), dtypes):
            lines.append(measured(method, dtype, flags))
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
