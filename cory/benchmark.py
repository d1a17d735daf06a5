"""Seconds per phase and peak memory of an iteration, beside the least that its arithmetic can take on this machine.

    python -m cory.benchmark MODEL --batch 64 --minibatch 64 --response 16 --iterations 4 --kl kl --device cpu

The loop of `cory.train` runs as it is, on IMDB's prompts with a trivial reward; its phases are timed from outside, the first iteration
left out, medians of the others. `floor` counts operations and bytes of the same work and divides them by the rates of a large matrix
product and of a large copy, measured in the same process. The last line is JSON. Several values of --batch or --response are a sweep:
each in a process of its own, then a picture.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import cory.ppo.rollout
import cory.train
from cory.ppo.agent import Agent
from cory.config import ASSETS, ImdbConfig, OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.tasks.imdb import Imdb
from cory.experiment.machine import choose_device, peak_memory, tune_cpu
from cory.ppo.model import LanguageModel, load_language_model
from cory.report import draw_sweep, require_picture
from cory.ppo.sampling import encode_prompts, sample

PHASES = ("sample", "score", "reward", "update")


class Bench:
    """Stands in for `cory.run.Run`: the loop runs, nothing is logged or saved; each iteration's seconds per phase are kept."""

    def __init__(self, cfg: ImdbConfig):
        self.cfg, self.device = cfg, choose_device(cfg)
        if self.device.type == "cpu":
            tune_cpu()
        self.reference = load_language_model(cfg.model, cfg.temperature, cfg.dtype, self.device, cfg.storage)
        self.task = Imdb(cfg, Imdb.load_data(cfg), self.reference, reward_model=lambda texts: [len(set(text)) / 50 for text in texts])
        self.roles = [Agent(name, self.reference, cfg, i) for i, name in enumerate(["llm1"] if cfg.method == "ppo" else ["llm1", "llm2"])]
        self.seconds, self.turns, self.phases = [], [], dict.fromkeys(PHASES, 0.0)

    def iterations(self):
        for step in range(1, self.cfg.iterations + 1):
            self.phases, self.start = dict.fromkeys(PHASES, 0.0), self.clock()
            yield step

    def finish_iteration(self, step, queries, length, turns, roles):
        self.seconds.append({**self.phases, "total": self.clock() - self.start})
        self.turns = turns
        print({k: round(v, 2) for k, v in self.seconds[-1].items()}, flush=True)

    def run(self) -> dict[str, float]:
        """Median seconds of each phase, without the first iteration."""
        with (self.timed(cory.ppo.rollout, "sample", "sample"), self.timed(cory.train, "rollout", "score", inner="sample"),
              self.timed(self.task, "reward", "reward"), self.timed(cory.train, "ppo_update", "update")):
            {"ppo": cory.train.train_ppo, "cory": cory.train.train_cory}[self.cfg.method](self)
        return {key: statistics.median(row[key] for row in self.seconds[1:]) for key in self.seconds[0]}

    def clock(self) -> float:
        return now(self.device)

    @contextmanager
    def timed(self, owner, name: str, phase: str, inner: str | None = None):
        """While it lasts, calls of `owner.name` add their seconds to `phase`, less those that the phase `inner` took in them."""
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            start, before = self.clock(), self.phases[inner] if inner else 0.0
            result = original(*args, **kwargs)
            self.phases[phase] += self.clock() - start - (self.phases[inner] - before if inner else 0.0)
            return result

        setattr(owner, name, wrapper)
        try:
            yield
        finally:
            setattr(owner, name, original)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# --- the floor --------------------------------------------------------------------------------------------------------
def measured_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(operations per second of a 2048^3 matrix product in `dtype`, bytes per second read and written by a copy of 256 MiB)."""
    a, b = (torch.randn(2048, 2048, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)

    def best(work) -> float:
        times = []
        for _ in range(12):
            start = now(device)
            work()
            times.append(now(device) - start)
        return min(times[2:])

    return 2 * 2048**3 / best(lambda: torch.mm(a, b)), 2 * source.numel() * 4 / best(lambda: target.copy_(source))


def floor(bench: Bench, rate: float, copy: float) -> dict[str, float]:
    """Seconds that the last iteration's work must take: in each phase the larger of operations / rate and bytes / copy.

    Operations: 2 per weight and token forward, 4 backward (2 where weights are frozen), and 4 x layers x width for each pair of a token and
    one that it sees. The body has P + T - 1 tokens for each row, real ones only, the head T. Sampling runs forward once, scoring twice
    (policy and reference), the update `num_ppo_epochs` times forward and backward. Bytes: the weights once for each sampled token of
    the longest row, twice for scoring; in the update for each optimizer step three times, and seven numbers per trained weight in Adam.
    """
    cfg, lm = bench.cfg, bench.reference.lm
    head = lm.get_output_embeddings()
    body_weights = sum(m.weight.numel() for path, m in lm.named_modules()
                       if isinstance(m, (nn.Linear, Conv1D)) and m is not head and ".lora_" not in path)
    pair = 4 * lm.config.num_hidden_layers * lm.config.hidden_size
    weights = 4 * (body_weights + head.weight.numel()) if cfg.dtype == "float32" else 2 * body_weights + 4 * head.weight.numel()
    seconds = dict.fromkeys(("sample", "score", "update"), 0.0)
    for turn in bench.turns:
        P, T = turn.rollout.prompt_mask_BP.sum(1).double(), turn.rollout.mask_BT.sum(1).double()
        seen = P + T - 1
        forward = float((2 * body_weights * seen + 2 * head.weight.numel() * T + pair * seen * (seen + 1) / 2).sum())
        passes, steps = cfg.num_ppo_epochs * (2 if cfg.lora else 3), cfg.num_ppo_epochs * cfg.batch_size / cfg.rows_per_optimizer_step
        trained = sum(p.numel() for p in turn.agent.policy.trained().values())
        seconds["sample"] += max(forward / rate, float(T.max()) * weights / copy)
        seconds["score"] += max(2 * forward / rate, 2 * weights / copy)
        seconds["update"] += max(passes * forward / rate, steps * (3 * weights + 7 * 4 * trained) / copy)
    return seconds | {"total": sum(seconds.values())}


def state_gib(bench: Bench) -> dict[str, float]:
    """GiB of what lives from one iteration to the next, counted: all weights and Adam's moments; and of the base and the moments alone."""
    size = lambda tensors: sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values()) / 2**30
    moments = [t for agent in bench.roles for state in agent.optimizer.state.values() for t in state.values() if t.dim()]
    own = [p for agent in bench.roles for p in agent.policy.parameters()]
    base = [p for name, p in bench.reference.lm.named_parameters() if ".lora_" not in name]
    return {"state_gib": size([*base, *own, *moments]), "base_and_moments_gib": size([*base, *moments])}


def generate_seconds(model: LanguageModel, prompts: list[str], length: int) -> dict[str, float]:
    """Median seconds of our sampling loop and of transformers' `generate` on the same prompts, three times each, in turn."""
    encoded = encode_prompts(model, prompts, length)
    settings = dict(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=length, pad_token_id=model.tokenizer.eos_token_id)
    seconds = {"sample": [], "generate": []}
    for _ in range(4):
        start = now(model.device)
        sample(model, encoded, length, torch.Generator().manual_seed(0))
        seconds["sample"].append(now(model.device) - start)
        start = now(model.device)
        with torch.no_grad(), model.autocast():
            model.lm.generate(encoded.ids_BP, attention_mask=encoded.mask_BP, **settings)
        seconds["generate"].append(now(model.device) - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


# --- the command ------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace, batch: int, response: int) -> dict:
    cfg = ImdbConfig(model=args.model, dataset=args.dataset, method=args.method, batch_size=batch, mini_batch_size=min(batch, args.minibatch),
                     min_response_length=response, max_response_length=response, max_query_length=7, iterations=args.iterations,
                     dtype=args.dtype, kl_penalty={"kl": "k1", "full": "full"}[args.kl], lora=args.lora, device=args.device, eval_queries=1)
    bench = Bench(cfg)
    seconds = bench.run()
    peaks = {"peak_rss_gib": peak_memory(torch.device("cpu"))}      # before the rates are measured, which takes memory of its own
    if bench.device.type == "cuda":
        peaks["peak_cuda_gib"] = peak_memory(bench.device)
    rate, copy = measured_rates(bench.device, getattr(torch, args.dtype))
    least = floor(bench, rate, copy)
    tokens = sum(int(turn.rollout.length_B.sum()) for turn in bench.turns)
    result = {"batch": batch, "response": response, "seconds": seconds, **peaks,
              "floor": least, "share_of_floor": {key: least[key] / seconds[key] for key in least}, "matrix_gflops": rate / 1e9,
              "copy_gib_per_s": copy / 2**30, "response_tokens": tokens, **state_gib(bench)}
    if args.generate:
        queries, _ = bench.task.batch(1)
        result["sampling"] = generate_seconds(bench.reference, bench.task.pioneer_prompts(queries), response)
    return result


def measure_sizes(args: argparse.Namespace, argv: list[str]) -> dict:
    """Each size in a process of its own, so that peaks of memory do not mix, and a picture."""
    require_picture(Path(args.plot), "plot")
    rows = []
    for batch in args.batch:
        for response in args.response:
            command = [sys.executable, "-m", "cory.benchmark", *argv, "--batch", str(batch), "--response", str(response)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(done.returncode)                   # it has said why
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"batch {batch}, response {response}: {rows[-1]['seconds']['total']:.2f} s", flush=True)
    draw_sweep(rows, Path(args.plot))
    return {"sweep": rows, "plot": args.plot}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="python -m cory.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="causal LM: local folder or Hub name")
    parser.add_argument("--method", choices=["ppo", "cory"], default="cory")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="queries per iteration; several for a sweep")
    parser.add_argument("--minibatch", type=int, default=64, help="rows per optimizer step")
    parser.add_argument("--response", type=int, nargs="+", default=[16], help="tokens per response, or fewer where EOS is drawn; several for a sweep")
    parser.add_argument("--iterations", type=int, default=4, help="the first is a warm-up and is left out")
    parser.add_argument("--kl", choices=["kl", "full"], default="kl", help="KL of the sampled token, or of the whole distribution")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora", action="store_true", help="two adapters on one frozen base instead of three full copies")
    parser.add_argument("--generate", action="store_true", help="also time the sampling loop against transformers' generate")
    parser.add_argument("--dataset", default=str(ASSETS / "imdb/openings"), help="reviews whose first tokens are the queries")
    parser.add_argument("--plot", default="cost.png", help="picture of a sweep")
    args = parser.parse_args(argv)
    if args.iterations < 2:
        raise UserError("iterations", args.iterations, "must be 2 or more: the first is left out")
    if len(args.batch) * len(args.response) > 1:
        result = measure_sizes(args, argv)
    else:
        result = measure(args, args.batch[0], args.response[0])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
