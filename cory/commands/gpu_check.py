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

from cory.commands.flags import OneLineParser
from cory.config import ASSETS, ImdbConfig
from cory.errors import exit_on_user_error
from cory.ppo.loading import load_language_model
from cory.ppo.sampling import encode_prompts, sample
from cory.system.machine import choose_device, settled

ROOT = Path(__file__).parents[2]
QUICK = "--iterations 3 --eval_every 0 --save_every 0 --eval_queries 16 --wandb disabled"


def passes(*command: str) -> str:
    """Runs `python COMMAND` in the repository. Returns its last result, or how it failed."""
    print("$ python", *command, flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("written to")] or [""]
    return lines[-1] if done.returncode == 0 else f"FAILED with status {done.returncode}: {lines[-1]}"


def write_model(folder: Path, layers: int, width: int, heads: int, vocabulary: int) -> None:
    """A GPT-2 of that shape with random weights, and the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "imdb/lm")
    end = dict(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    config = GPT2Config(vocab_size=max(vocabulary, len(tokenizer)), n_layer=layers, n_embd=width,
                        n_head=heads, **end)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def waits(model: str, device: str, tokens: int) -> int | None:
    """How often the host waits for the GPU while it samples so many tokens: PyTorch's own count."""
    cfg = settled(ImdbConfig(device=device))
    lm = load_language_model(model, 1.0, cfg.precision, choose_device(cfg))
    prompts = encode_prompts(lm, ["one", "a film"] * 32, tokens)
    if lm.device.type != "cuda":
        return None
    sample(lm, prompts, 2, torch.Generator().manual_seed(0))            # what happens once, before
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True, action="always") as caught:
        sample(lm, prompts, tokens, torch.Generator().manual_seed(0))
    torch.cuda.set_sync_debug_mode("default")
    del lm, prompts
    torch.cuda.empty_cache()                                            # the benchmarks need the room
    return sum("synchroniz" in str(warning.message) for warning in caught)


def measured(model: str, method: str, dtype: str, head: str, sizes: list[str]) -> list[str]:
    """Cells of one run of the benchmark: seconds in all and by phase, peak memory, share of the floor."""
    flags = ["--method", method, "--dtype", dtype, "--head_precision", head, "--iterations", "4", *sizes]
    last = passes("-m", "cory", "benchmark", model, *flags)
    if last.startswith("FAILED"):
        return [last]
    result = json.loads(last)
    seconds = [f"{result['seconds'][key]:.2f}" for key in ("total", "sample", "score", "update")]
    peak = result.get("peak_cuda_gib", result["peak_rss_gib"])
    return [*seconds, f"{peak:.1f}", f"{result['share_of_floor']['total']:.0%}"]


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory gpu_check", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the script itself")
    add("--shape", type=int, nargs=4, default=[36, 1280, 20, 50257], metavar="N",
        help="layers, width, heads and vocabulary of the model")
    add("--batch", type=int, default=256)
    add("--dtypes", nargs="+", default=["float32", "tf32", "bfloat16"])
    add("--skip", nargs="+", default=[], choices=["tests", "presets"])
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    choose_device(ImdbConfig(device=args.device))               # said before anything is made
    lines, on = [], ["--device", args.device]
    if "tests" not in args.skip:
        lines.append(f"tests: {passes('-m', 'pytest', '-q')}")
    with tempfile.TemporaryDirectory() as folder:
        if "presets" not in args.skip:
            for task in ("imdb", "gsm8k"):
                run = passes(f"train_{task}.py", *QUICK.split(), *on, "--run_dir", f"{folder}/{task}")
                lines.append(f"train_{task}.py: {run}")
        model = f"{folder}/model"
        write_model(Path(model), *args.shape)
        lines.append(f"waits while 32 tokens are sampled: {waits(model, args.device, 32)}")
        columns = ["method, dtype", "s per iteration", "sample", "score", "update", "peak GiB",
                   "share of the floor"]
        lines += ["", f"| {' | '.join(columns)} |", "|---" + "|--:" * 6 + "|"]
        batch = str(args.batch)
        sizes = ["--batch", batch, "--minibatch", batch, "--response", "15", "--kl", "full", *on]
        for method, dtype in product(("ppo", "cory"), args.dtypes):
            for head in ("auto", "bfloat16") if (dtype, args.device) == ("bfloat16", "cuda") else ("auto",):
                cells = measured(model, method, dtype, head, sizes)
                what = f"{method}, {dtype}" + (f", head in {head}" if head != "auto" else "")
                lines.append(f"| {what} | {' | '.join(cells)} |")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, GPT-2 shape {args.shape}, batch {args.batch}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
