"""PPO and CORY on GSM8K: `python train_gsm8k.py --method cory`; `--help` lists every setting."""
import sys

from cory.config import GSM8K_PRESETS, Gsm8kConfig, parse
from cory.errors import exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    cfg = parse(Gsm8kConfig, GSM8K_PRESETS, sys.argv[1:] if argv is None else argv)
    from cory.tasks.gsm8k import Gsm8k        # after the command line has been found sound: these load PyTorch
    from cory.experiment.run import Run
    from cory.train import train
    train(Run(cfg, Gsm8k))


if __name__ == "__main__":
    main()
