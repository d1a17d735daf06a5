"""Seconds per phase and peak memory of an iteration, beside the least that its arithmetic can take here.

    python -m cory benchmark --model DIR --iterations 5 --batch_size 64 --mini_batch_size 64 --device cpu

The flags are those of train_imdb.py. The loop of `cory.train` runs as it is, on IMDB's prompts with a
trivial reward. Seconds are medians without the first iteration. `floor` divides the operations of the same
work by the rate of a large matrix product, measured in the same process. The first line names the processor
and the library that multiplies, the last is JSON.
"""
import json
import statistics
import time

import torch

from cory.config import ASSETS, METHODS, ImdbConfig
from cory.errors import exit_on_user_error
from cory.experiment.flags import parse
from cory.names import find
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.lora import linear_layers
from cory.ppo.sampling import Prompts, sample
from cory.system.machine import described, peak_memory, prepare_device, settled
from cory.tasks.imdb import Imdb

PRESETS = {"benchmark": dict(
    dataset=str(ASSETS / "imdb/openings"), max_query_length=7, min_response_length=0, max_response_length=16,
    iterations=4, batch_size=64, mini_batch_size=64, kl_penalty="k1")}


class Bench:
    """Stands in for `Run`: the loop runs, nothing is logged or saved; seconds per phase are kept.

    Calls of the reward divide an iteration: rollouts come before the first, updates after the last. Sampling
    is timed by itself, on the last iteration's prompts; the rest of the rollouts is scoring.
    """

    def __init__(self, cfg: ImdbConfig):
        self.cfg = cfg = settled(cfg)
        self.device = prepare_device(cfg)
        self.loop = find("method", cfg.method, METHODS)
        self.reference = load_language_model(cfg.model, cfg.temperature, cfg.precision, self.device,
                                             cfg.storage)
        self.task = Imdb(cfg, Imdb.load_data(cfg), self.reference, reward_model=self.reward)
        self.roles = [Agent(name, self.reference, cfg, i) for i, name in enumerate(self.loop.agents)]
        self.seconds, self.rewarded, self.turns = [], [], []

    def reward(self, texts: list[str]) -> list[float]:
        self.rewarded.append(self.now())
        return [len(set(text)) / 50 for text in texts]

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def iterations(self):
        for iteration in range(1, self.cfg.iterations + 1):
            self.rewarded, self.start = [], self.now()
            yield iteration

    def finish_iteration(self, iteration, queries, max_new_tokens, turns, roles, metrics=None):
        end, self.turns = self.now(), turns
        self.seconds.append({"rollout": self.rewarded[0] - self.start, "update": end - self.rewarded[-1],
                             "total": end - self.start})

    def run(self) -> dict[str, float]:
        """Median seconds of each phase."""
        self.loop(self)
        seconds = {key: statistics.median(row[key] for row in self.seconds[1:]) for key in self.seconds[0]}
        sampling = statistics.median(self.timed(self.sample, 3))
        scoring = seconds.pop("rollout") - sampling
        return {"sample": sampling, "score": scoring, **seconds}

    def sample(self) -> None:
        for turn in self.turns:
            prompts = Prompts(turn.rollout.prompt_BP, turn.rollout.prompt_mask_BP)
            cfg = turn.agent.cfg
            sample(turn.agent.policy, prompts, cfg.max_response_length, turn.agent.generator, cfg=cfg)

    def timed(self, work, times: int) -> list[float]:
        """Seconds of each call of `work()`."""
        seconds = []
        for _ in range(times):
            start = self.now()
            work()
            seconds.append(self.now() - start)
        return seconds

    def rate(self) -> float:
        """Operations per second, at best, of a 2048^3 product in the run's dtype; on a GPU 8192^3."""
        n = 8192 if self.device.type == "cuda" else 2048
        dtype = torch.bfloat16 if self.cfg.dtype == "bfloat16" else torch.float32
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * n**3 / min(self.timed(lambda: torch.mm(a, b), 4))

    def floor(self, rate: float) -> dict[str, float]:
        """Seconds that the last iteration's operations take at `rate`.

        Operations: 2 per weight and token forward, 4 backward (2 where weights are frozen), 4 x layers x
        width for each pair of a token and one that it sees. Of each row the body has P + T - 1 real tokens,
        the head T. Sampling runs forward once, scoring twice (policy and reference), the update
        `num_ppo_epochs` times both ways.
        """
        cfg, lm = self.cfg, self.reference.lm
        head = lm.get_output_embeddings()
        body_weights = sum(layer.weight.numel() for layer in linear_layers(lm).values())
        pair = 4 * lm.config.num_hidden_layers * lm.config.hidden_size
        forward = 0.0
        for turn in self.turns:
            P, T = turn.rollout.prompt_mask_BP.sum(1).double(), turn.rollout.mask_BT.sum(1).double()
            seen = P + T - 1
            products = 2 * body_weights * seen + 2 * head.weight.numel() * T
            forward += float((products + pair * seen * (seen + 1) / 2).sum())
        passes = {"sample": 1, "score": 2, "update": cfg.num_ppo_epochs * (2 if cfg.lora else 3)}
        seconds = {phase: n * forward / rate for phase, n in passes.items()}
        return seconds | {"total": sum(seconds.values())}


@exit_on_user_error
def main(argv: list[str]) -> None:
    cfg = parse(ImdbConfig, PRESETS, argv, prog="python -m cory benchmark")
    cfg.require("iterations", cfg.iterations >= 2, "must be 2 or more: the first is left out")
    bench = Bench(cfg)
    print(described(bench.cfg, bench.device), flush=True)
    seconds, peak = bench.run(), peak_memory(bench.device)
    rate = bench.rate()                                             # takes memory of its own
    floor = bench.floor(rate)
    print(json.dumps({"seconds": seconds, "peak_gib": peak, "floor": floor, "matrix_gflops": rate / 1e9,
                      "share_of_floor": {phase: floor[phase] / seconds[phase] for phase in floor}}))
