"""Seconds of each phase of an iteration, and peak memory, by wrapping functions of the package from outside.

    python tests/speed.py --model DIR --method cory --iterations 5 --batch_size 64 --device cpu

The flags are those of train_imdb.py. The method runs as it is, on IMDB's prompts with a trivial reward,
without evaluation, checkpoints or plots. Seconds are medians without the first iteration. The last line is
JSON. Started in the folder of another checkout, it times that one.
"""
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec

sys.path.insert(0, os.getcwd())

import torch  # noqa: E402

from cory import config, errors, train  # noqa: E402
from cory.ppo import rollout  # noqa: E402
from cory.tasks import imdb, task  # noqa: E402

IS_NEW = find_spec("cory.run") is not None              # commits before f7aa8aa have other names
flags, run = map(import_module, ("cory.flags", "cory.run.run") if IS_NEW else
                 ("cory.experiment.flags", "cory.experiment.run"))
PRESET = dict(dataset=str(config.ASSETS / "imdb/openings"), max_query_length=7, min_response_length=0,
              max_response_length=16, iterations=5, batch_size=64, mini_batch_size=64, kl_penalty="k1",
              eval_queries=1)
present: dict[str, float] = defaultdict(float)          # seconds of the present iteration
seconds: list[dict[str, float]] = []                    # of those that have ended


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(place, name: str, phase: str) -> None:
    """Replaces a function of a module by one that adds its seconds to a phase."""
    function = getattr(place, name)

    def timed_function(*args, **kwargs):
        start = now()
        result = function(*args, **kwargs)
        present[phase] += now() - start
        return result

    setattr(place, name, timed_function)


def start_iteration(self, iteration: int, batch=task.Task.batch):
    queries = batch(self, iteration)
    present.clear()
    present["total"] = -now()
    return queries


def finish_iteration(self, iteration: int, *args, **kwargs) -> None:
    present["total"] += now()
    sampling, collecting = present["sampling"], present.pop("collecting")
    seconds.append({**present, "sampling": sampling, "logprob": collecting - sampling})
    print(f"iteration {iteration}: {present['total']:.3f} s", flush=True)


def peak_gib() -> float:
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


@errors.exit_on_user_error
def main() -> None:
    timed(rollout, "sample", "sampling")
    timed(train, "collect_rollout", "collecting")
    timed(train, "ppo_update", "update")
    task.Task.batch, run.Run.finish_iteration = start_iteration, finish_iteration
    imdb.SentimentReward = lambda *_: lambda texts: [len(set(text)) / 50 for text in texts]
    run.evaluate, run.Run.evaluate_team = lambda *_: {}, lambda *_: {}
    run.Run.finish = lambda self: None
    with tempfile.TemporaryDirectory() as folder:
        given = [*sys.argv[1:], "--wandb", "disabled", "--run_dir", folder]
        cfg = flags.parse(config.ImdbConfig, {"speed": PRESET}, given)
        cfg.require("iterations", cfg.iterations >= 2, "must be 2 or more: the first is left out")
        train.train(cfg)
    medians = {phase: statistics.median(row[phase] for row in seconds[1:])
               for phase in ("sampling", "logprob", "update", "total")}
    print(json.dumps({"seconds": medians, "peak_gib": peak_gib()}))


if __name__ == "__main__":
    main()
