"""PPO and CORY on IMDB sentiment: `python train_imdb.py --method cory`; `--help` lists every setting."""
from cory.config import IMDB_PRESETS, ImdbConfig, parse
from cory.errors import exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    cfg = parse(ImdbConfig, IMDB_PRESETS, argv)
    # imported only now, so that a mistyped flag is answered before PyTorch is loaded
    from cory.train import train

    train(cfg)


if __name__ == "__main__":
    main()
