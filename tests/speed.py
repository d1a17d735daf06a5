"""Seconds of an iteration, and peak memory.

    python tests/speed.py --model DIR --method cory --iterations 5 --batch_size 64 --device cpu

The flags are those of train_imdb.py. The method runs as it is, on IMDB's prompts with a trivial reward,
without evaluation, checkpoints or plots. Seconds are the median without the first iteration. The last line
is JSON. Started in the folder of another checkout, it times that one.
"""
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.getcwd())

from cory import config, device, errors, log, run, train  # noqa: E402
from cory.tasks import imdb  # noqa: E402

PRESET = dict(dataset=str(config.ASSETS / "imdb/openings"), max_query_length=7, min_response_length=0,
              max_response_length=16, iterations=5, batch_size=64, mini_batch_size=64, kl_penalty="k1",
              eval_queries=1, save_every=0, wandb="disabled")


@errors.exit_on_user_error
def main() -> None:
    imdb.SentimentReward = lambda *_: lambda texts: [len(set(text)) / 50 for text in texts]
    run.Run.evaluate, run.Run.finish = lambda *_: None, lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        cfg = config.parse(config.ImdbConfig, {"speed": PRESET}, [*sys.argv[1:], "--run_dir", folder])
        cfg.require("iterations", cfg.iterations >= 2, "must be 2 or more: the first is left out")
        ended = train.train(cfg)
        rows = log.read_jsonl(Path(folder) / "metrics.jsonl")[1:]
    seconds = statistics.median(row["seconds"] for row in rows)
    print(json.dumps({"seconds": seconds, "peak_gib": device.peak_memory(ended.device)}))


if __name__ == "__main__":
    main()
