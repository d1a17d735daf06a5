"""PPO and CORY on GSM8K: `python train_gsm8k.py --method cory`; `--help` lists every setting."""
from cory.config import GSM8K_PRESETS, Gsm8kConfig, parse
from cory.errors import exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    cfg = parse(Gsm8kConfig, GSM8K_PRESETS, argv)
    # imported only now, so that a mistyped flag is answered before PyTorch is loaded
    from cory.train import train

    train(cfg)


if __name__ == "__main__":
    main()
