"""Seconds per phase and peak memory of an iteration, beside the least that its arithmetic can take here.

    python -m cory benchmark MODEL --batch 64 --minibatch 64 --response 16 --iterations 4 --kl kl --device cpu

The loop of `cory.train` runs as it is, on IMDB's prompts with a trivial reward; its phases are timed from
outside, the first iteration left out, medians of the others. `floor` divides operations and bytes of the same
work by the rates of a large matrix product and a large copy, measured in the same process. The first line
names the processor and the library that multiplies, the last is JSON. Several values of --batch or --response
are a sweep: each in a process of its own.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import product
from typing import get_args, get_type_hints
from unittest.mock import patch

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import cory.ppo.rollout
import cory.train
from cory.commands.flags import OneLineParser
from cory.config import ASSETS, METHODS, Config, ImdbConfig
from cory.errors import UserError, exit_on_user_error
from cory.names import find
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import encode_prompts, sample
from cory.system.machine import described, peak_memory, prepare_device, settled
from cory.tasks.imdb import Imdb


class Bench:
    """Stands in for `Run`: the loop runs, nothing is logged or saved; seconds per phase are kept."""

    def __init__(self, cfg: ImdbConfig):
        self.cfg = cfg = settled(cfg)
        self.device = prepare_device(cfg)
        self.loop = find("method", cfg.method, METHODS)
        self.reference = load_language_model(cfg.model, cfg.temperature, cfg.precision, self.device,
                                             cfg.storage)
        self.task = Imdb(cfg, Imdb.load_data(cfg), self.reference,
                         reward_model=lambda texts: [len(set(text)) / 50 for text in texts])
        self.roles = [Agent(name, self.reference, cfg, i) for i, name in enumerate(self.loop.agents)]
        self.seconds, self.turns = [], []           # of each iteration; of the last one

    def iterations(self):
        for iteration in range(1, self.cfg.iterations + 1):
            self.phases = dict.fromkeys(("sample", "score", "reward", "update"), 0.0)
            self.start = now(self.device)
            yield iteration

    def finish_iteration(self, iteration, queries, max_new_tokens, turns, roles, metrics=None):
        self.seconds.append({**self.phases, "total": now(self.device) - self.start})
        self.turns = turns
        print({k: round(v, 2) for k, v in self.seconds[-1].items()}, flush=True)

    def run(self) -> dict[str, float]:
        """Median seconds of each phase, without the first iteration."""
        with (self.timed(cory.ppo.rollout, "sample", "sample"),
              self.timed(cory.train, "collect_rollout", "score"),
              self.timed(self.task, "reward", "reward"), self.timed(cory.train, "ppo_update", "update")):
            self.loop(self)
        return {key: statistics.median(row[key] for row in self.seconds[1:]) for key in self.seconds[0]}

    def timed(self, owner, name: str, phase: str):
        """While it lasts, calls of `owner.name` add their seconds to `phase`, less those of phases within."""
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            start, before = now(self.device), sum(self.phases.values())
            result = original(*args, **kwargs)
            within = sum(self.phases.values()) - before
            self.phases[phase] += now(self.device) - start - within
            return result

        return patch.object(owner, name, wrapper)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work, device: torch.device) -> float:
    start = now(device)
    work()
    return now(device) - start


# --- the floor ---
def measured_rates(device: torch.device) -> tuple[dict[str, float], float]:
    """({dtype: operations/s of a matrix product}, bytes/s read and written by a copy of 256 MiB), at best.

    The product is 2048^3, on a GPU 8192^3; float32 is by the library and at the precision of the run.
    """
    n = 8192 if device.type == "cuda" else 2048

    def best(work) -> float:
        return min([seconds_of(work, device) for _ in range(8)][2:])

    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = 2 * n**3 / best(lambda a=a, b=b: torch.mm(a, b))
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)
    return rates, 2 * source.numel() * 4 / best(lambda: target.copy_(source))


def floor(bench: Bench, rate: float, copy: float) -> dict[str, float]:
    """Seconds that the last iteration must take: of each phase the larger of operations / rate, bytes / copy.

    Operations: 2 per weight and token forward, 4 backward (2 where weights are frozen), 4 x layers x width
    for each pair of a token and one that it sees. Of each row the body has P + T - 1 real tokens, the head T.
    Sampling runs forward once, scoring twice (policy and reference), the update `num_ppo_epochs` times both
    ways. Bytes: the weights once for each sampled token of the longest row, twice for scoring; in the update
    for each optimizer step three times, and seven numbers per trained weight in Adam.
    """
    cfg, lm = bench.cfg, bench.reference.lm
    head = lm.get_output_embeddings()
    body_weights = sum(m.weight.numel() for path, m in lm.named_modules()
                       if isinstance(m, (nn.Linear, Conv1D)) and m is not head and ".lora_" not in path)
    pair = 4 * lm.config.num_hidden_layers * lm.config.hidden_size
    weights = (2 if cfg.dtype == "bfloat16" else 4) * body_weights + 4 * head.weight.numel()
    passes = cfg.num_ppo_epochs * (2 if cfg.lora else 3)
    steps = cfg.num_ppo_epochs * cfg.batch_size / cfg.rows_per_optimizer_step
    seconds = dict.fromkeys(("sample", "score", "update"), 0.0)
    for turn in bench.turns:
        P, T = turn.rollout.prompt_mask_BP.sum(1).double(), turn.rollout.mask_BT.sum(1).double()
        seen = P + T - 1
        of_weights = 2 * body_weights * seen + 2 * head.weight.numel() * T
        forward = float((of_weights + pair * seen * (seen + 1) / 2).sum())
        trained = sum(p.numel() for p in turn.agent.policy.trained().values())
        seconds["sample"] += max(forward / rate, float(T.max()) * weights / copy)
        seconds["score"] += max(2 * forward / rate, 2 * weights / copy)
        seconds["update"] += max(passes * forward / rate, steps * (3 * weights + 7 * 4 * trained) / copy)
    return seconds | {"total": sum(seconds.values())}


def state_gib(bench: Bench) -> dict[str, float]:
    """GiB of what lives from one iteration to the next: all weights and moments; base and moments alone."""
    def size(tensors) -> float:
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values()) / 2**30

    moments = [t for agent in bench.roles for state in agent.optimizer.state.values()
               for t in state.values() if t.dim()]
    own = [p for agent in bench.roles for p in agent.policy.parameters()]
    base = [p for name, p in bench.reference.lm.named_parameters() if ".lora_" not in name]
    return {"state_gib": size([*base, *own, *moments]), "base_and_moments_gib": size([*base, *moments])}


def generate_seconds(model: LanguageModel, prompts: list[str], length: int) -> dict[str, float]:
    """Median seconds of our sampling loop and of transformers' `generate`: three times each, in turn."""
    encoded = encode_prompts(model, prompts, length)

    def generate():
        with model.autocast():
            model.lm.generate(encoded.ids_BP, attention_mask=encoded.mask_BP, do_sample=True, top_k=0,
                              top_p=1.0, max_new_tokens=length, pad_token_id=model.tokenizer.eos_token_id)

    works = {"sample": lambda: sample(model, encoded, length, torch.Generator().manual_seed(0)),
             "generate": generate}
    rounds = [{name: seconds_of(work, model.device) for name, work in works.items()} for _ in range(4)]
    return {name: statistics.median(seconds[name] for seconds in rounds[1:]) for name in works}


# --- the command ---
def measure(args: argparse.Namespace, batch: int, response: int) -> dict:
    kl_penalty = "full" if args.kl == "full" else "k1"
    cfg = ImdbConfig(model=args.model, dataset=args.dataset, method=args.method, lora=args.lora,
                     batch_size=batch, mini_batch_size=min(batch, args.minibatch), iterations=args.iterations,
                     min_response_length=response, max_response_length=response, max_query_length=7,
                     dtype=args.dtype, head_precision=args.head_precision, cpu_matmul=args.cpu_matmul,
                     device=args.device, kl_penalty=kl_penalty, eval_queries=1)
    bench = Bench(cfg)
    machine = described(bench.cfg, bench.device)
    print(machine, flush=True)
    seconds = bench.run()
    result = {"machine": machine, "batch": batch, "response": response, "seconds": seconds,
              "peak_rss_gib": peak_memory(torch.device("cpu"))}
    if bench.device.type == "cuda":
        result["peak_cuda_gib"] = peak_memory(bench.device)
    rates, copy = measured_rates(bench.device)                      # takes memory of its own
    least = floor(bench, rates["bfloat16" if bench.cfg.dtype == "bfloat16" else "float32"], copy)
    result |= {"floor": least, "share_of_floor": {key: least[key] / seconds[key] for key in least},
               "matrix_gflops": {name: rate / 1e9 for name, rate in rates.items()},
               "copy_gib_per_s": copy / 2**30,
               "response_tokens": sum(int(turn.rollout.length_B.sum()) for turn in bench.turns)}
    result |= state_gib(bench)
    if args.generate:
        queries, _ = bench.task.batch(1)
        result["sampling"] = generate_seconds(bench.reference, bench.task.pioneer_prompts(queries), response)
    return result


def measure_sizes(args: argparse.Namespace, argv: list[str]) -> dict:
    """Each size in a process of its own, so that peaks of memory do not mix."""
    rows = []
    for batch, response in product(args.batch, args.response):
        size = ["--batch", str(batch), "--response", str(response)]
        command = [sys.executable, "-m", "cory", "benchmark", *argv, *size]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)                   # it has said why
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"batch {batch}, response {response}: {rows[-1]['seconds']['total']:.2f} s", flush=True)
    return {"sweep": rows}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="python -m cory benchmark", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="causal LM: local folder or Hub name")
    add("--method", choices=["ppo", "cory"], default="cory")
    add("--batch", type=int, nargs="+", default=[64], help="queries per iteration; several for a series")
    add("--minibatch", type=int, default=64, help="rows per optimizer step")
    add("--response", type=int, nargs="+", default=[16],
        help="tokens per response, or fewer where EOS is drawn; several for a series")
    add("--iterations", type=int, default=4, help="the first is a warm-up and is left out")
    add("--kl", choices=["kl", "full"], default="kl", help="KL of the sampled token, or the exact one")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    for setting in ("dtype", "head_precision", "cpu_matmul"):
        choices = get_args(get_type_hints(Config)[setting])
        add(f"--{setting}", default="auto", help="as in training", choices=choices)
    add("--lora", action="store_true", help="two adapters on one frozen base instead of three full copies")
    add("--generate", action="store_true", help="also time the sampling loop against transformers' generate")
    add("--dataset", default=str(ASSETS / "imdb/openings"), help="reviews whose first tokens are the queries")
    args = parser.parse_args(argv)
    if args.iterations < 2:
        raise UserError("iterations", args.iterations, "must be 2 or more: the first is left out")
    for name in ("batch", "response"):
        values = getattr(args, name)
        if len(set(values)) < len(values) or min(values) < 1:
            raise UserError(name, values, "must be different numbers of 1 or more")
    single = len(args.batch) == len(args.response) == 1
    result = measure(args, *args.batch, *args.response) if single else measure_sizes(args, argv)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
