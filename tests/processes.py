"""What torchrun starts in test_distributed.py: commands one after another, in the same processes.

    torchrun --nproc_per_node 2 tests/processes.py commands.json

A command is [module:function, flag, ...]; {rank} in a flag becomes the process's number.
"""
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch.distributed as dist  # noqa: E402

import train_imdb  # noqa: E402
from cory.config import IMDB_PRESETS, ImdbConfig  # noqa: E402
from cory.experiment import run  # noqa: E402
from cory.experiment.flags import parse  # noqa: E402
from cory.system.distributed import launched, rank  # noqa: E402
from cory.tasks.imdb import Imdb  # noqa: E402


class Faulty(Imdb):
    """The seventh call of its reward kills process 1."""
    calls = 0

    def reward_of(self, queries, responses):
        type(self).calls += 1
        if self.calls == 7 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward_of(queries, responses)


def weigh(flags: list[str]) -> None:
    """Trains, leaves the run as one that was stopped, and writes the bytes that this process holds into the
    run's folder, to weighed_{rank}.json.
    """
    def held(tensors) -> int:
        return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors if x.dim())

    cfg = parse(ImdbConfig, IMDB_PRESETS, flags)
    with launched(asdict(cfg)), run.Run(cfg) as started:
        started.loop(started)
        policies = [(agent, p) for agent in started.agents for p in agent.policy.lm.parameters()]
        weighed = {"reference": held(started.bases["base"].lm.parameters()),
                   "policies": held(p for _, p in policies),
                   "moments": held(x for agent, p in policies for x in agent.optimizer.state[p].values())}
        Path(cfg.run_dir, f"weighed_{rank()}.json").write_text(json.dumps(weighed))


def refused(flags: list[str]) -> None:
    """Trains with flags that are refused, and goes on."""
    with suppress(SystemExit):
        train_imdb.main(flags)
    dist.destroy_process_group()


def main() -> None:
    run.draw_curves = lambda run_dir: None          # a picture takes as long as three iterations
    for name, *flags in json.loads(Path(sys.argv[1]).read_text()):
        module, _, function = name.partition(":")
        command = getattr(importlib.import_module(module), function)
        command([flag.replace("{rank}", os.environ["RANK"]) for flag in flags])


if __name__ == "__main__":
    main()
