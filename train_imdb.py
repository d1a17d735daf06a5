"""PPO and CORY on IMDB sentiment: `python train_imdb.py --method cory`; `--help` lists every setting."""
import sys

from cory.config import IMDB_PRESETS, ImdbConfig, parse
from cory.errors import exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    cfg = parse(ImdbConfig, IMDB_PRESETS, sys.argv[1:] if argv is None else argv)
    from cory.tasks.imdb import Imdb          # after the command line has been found sound: these load PyTorch
    from cory.experiment.run import Run
    from cory.train import train
    train(Run(cfg, Imdb))


if __name__ == "__main__":
    main()
