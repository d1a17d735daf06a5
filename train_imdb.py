"""PPO and CORY on IMDB sentiment: `python train_imdb.py --method cory`; `--help` lists every setting."""
from cory.config import BUNDLED, TINY, ImdbConfig, parse
from cory.errors import exit_on_user_error

IMDB_TINY = TINY | dict(model=f"{BUNDLED}imdb/lm", dataset=f"{BUNDLED}imdb/openings",
                        reward_model=f"{BUNDLED}imdb/classifier", learning_rate=1.6e-3, init_kl_coef=0.15,
                        critic_learning_rate=5e-3, iterations=30, eval_every=10)

# `--preset NAME` changes these settings of ImdbConfig; the first is the default.
PRESETS = {
    "tiny": IMDB_TINY,
    # A pretrained model of GPT-2's size.
    "smollm2": IMDB_TINY | dict(model="HuggingFaceTB/SmolLM2-135M-Instruct", learning_rate=1e-3,
                                iterations=40),
    "gpt2": dict(model="gpt2"),
    "gpt2-large": dict(),                       # the paper's settings, which are ImdbConfig's defaults
    "gpt2-xl": dict(model="gpt2-xl"),           # the paper's PPO of twice the size
}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    cfg = parse(ImdbConfig, PRESETS, argv)
    # imported only now, so that a mistyped flag is answered before PyTorch is loaded
    from cory.train import train

    train(cfg)


if __name__ == "__main__":
    main()
