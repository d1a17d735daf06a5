"""What torchrun starts in test_distributed.py: commands one after another, in the same processes.

    torchrun --nproc_per_node 2 tests/processes.py commands.json

A command is [module:function, flag, ...]; {rank} in a flag becomes the process's number.
"""
import importlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from cory.commands.flags import parse  # noqa: E402
from cory.config import IMDB_PRESETS, ImdbConfig  # noqa: E402
from cory.experiment.run import Run  # noqa: E402
from cory.system.distributed import launched, rank  # noqa: E402
from cory.tasks.imdb import Imdb  # noqa: E402


class Faulty(Imdb):
    """The sixth call of its reward kills process 1."""
    calls = 0

    def reward_of(self, queries, responses):
        type(self).calls += 1
        if self.calls == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward_of(queries, responses)


def weigh(flags: list[str]) -> None:
    """Trains a little, and writes the bytes that this process holds to weighed.json in the run's folder."""
    def own(tensors) -> int:
        return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors if x.dim())

    cfg = parse(ImdbConfig, IMDB_PRESETS, flags)
    with launched(asdict(cfg)), Run(cfg) as run:
        run.loop(run)
        held = {"reference": own(run.reference.lm.parameters()),
                "policies": own(p for agent in run.agents for p in agent.policy.lm.parameters()),
                "moments": own(x for agent in run.agents for p in agent.policy.lm.parameters()
                               for x in agent.optimizer.state[p].values())}
        Path(cfg.run_dir, f"weighed_{rank()}.json").write_text(json.dumps(held))


def main() -> None:
    for name, *flags in json.loads(Path(sys.argv[1]).read_text()):
        module, _, function = name.partition(":")
        command = getattr(importlib.import_module(module), function)
        command([flag.replace("{rank}", os.environ["RANK"]) for flag in flags])


if __name__ == "__main__":
    main()
