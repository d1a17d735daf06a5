"""The studies. To add a variant, add a line of flags; to add a study, add a `Study`."""
import random
from dataclasses import dataclass, field

from cory.errors import UserError


@dataclass(frozen=True)
class Study:
    """Variants over seeds.

    A variant is a line of flags of `train_imdb.py` and `train_gsm8k.py`. Its value may be a multiple of what
    the run would have otherwise: `--batch_size batch_size*2`. `--quick` makes the first three variants.
    """
    question: str
    variants: dict[str, str]                # name: flags
    baseline: str                           # the variant that the others are compared with
    baselines: dict[str, str] = field(default_factory=dict)     # variant: another baseline, for it alone
    seeds: range = range(5)
    tasks: tuple[str, ...] = ("imdb", "gsm8k")

    def __post_init__(self):
        for name in (self.baseline, *self.baselines, *self.baselines.values()):
            if name not in self.variants:
                raise UserError("baseline", name, f"is no variant; choose from {', '.join(self.variants)}")

    def baseline_of(self, variant: str) -> str:
        return self.baselines.get(variant, self.baseline)


PPO, CORY = "--method ppo", "--method cory"
LOOPS = "--method cory.studies.loops:"
NO_TRANSFER = f"{CORY} --knowledge_transfer false"
NO_EXCHANGE = f"{CORY} --role_exchange_every 0"
NO_PARTNER = f"{CORY} --partner_reward 0"

# Those with settings of their own in the studies `search` and `tuned`.
TUNED = {"cory": CORY, "no partner's reward": NO_PARTNER,
         "partner by the critic": f"{CORY} --partner_term critic"}

# PPO with as many responses as a run of CORY has.
TWICE_THE_BATCH = f"{PPO} --batch_size batch_size*2 --mini_batch_size mini_batch_size*2"
TWICE_THE_ITERATIONS = f"{PPO} --iterations iterations*2"

# Half of a preset's responses, as `search` has them.
HALF = "--iterations iterations*0.5"

# The paper's algorithm on IMDB, beside a preset's model, sizes and learning rate.
PAPER = ("--kl_penalty full --adap_kl_ctrl true --kl_target 6 --init_kl_coef 0.3 --lam 0.95 --iterations 120 "
         "--lr_schedule constant")

DRAWS = 16


def drawn(number: int, roles: int) -> str:
    """Settings drawn at random, the same for every method; as many responses for one role as for two.

    Half of a preset's iterations, with the same number of optimizer steps for each batch.
    """
    rng = random.Random(number)
    rate, critic = 10 ** rng.uniform(-3.5, -2.3), 10 ** rng.uniform(-3.3, -1.7)
    epochs, batch = rng.choice([1, 2]), rng.choice([0.5, 1, 2])
    exchange = rng.choice([1, 5, 20])
    rows = batch * (3 - roles)
    flags = (f"--learning_rate {rate:.1e} --critic_learning_rate {critic:.1e} --num_ppo_epochs {epochs} "
             f"--iterations iterations*{0.5 / batch:g} --batch_size batch_size*{rows:g} "
             f"--mini_batch_size mini_batch_size*{rows:g}")
    return f"{flags} --role_exchange_every {exchange}" if roles == 2 else flags


STUDIES = {
    "curves": Study(
        "Does CORY reach a higher reward than PPO, at a lower KL? (The paper's figures 3 to 5.)",
        {"ppo": PPO, "cory": CORY},
        baseline="ppo", seeds=range(10)),
    "ablations": Study(
        "What do transfer, role exchange and two sets of weights do? (The paper's figure 6.)",
        {"cory": CORY,
         "no transfer": NO_TRANSFER,
         "no exchange": NO_EXCHANGE,
         "T_REx 1": f"{CORY} --role_exchange_every 1",
         "T_REx 2": f"{CORY} --role_exchange_every 2",
         "T_REx 10": f"{CORY} --role_exchange_every 10",
         "exact KL": f"{CORY} --kl_penalty full",
         "reset at exchange": f"{CORY} --reset_on_exchange true",
         "one model in both roles": f"{CORY} --share_weights true"},
        baseline="cory"),
    "reward": Study(
        "Do agents that share their rewards learn more than agents that compete?",
        {"weight 1": CORY,
         "weight 0": NO_PARTNER,
         "weight 0.5": f"{CORY} --partner_reward 0.5",
         "weight -0.5": f"{CORY} --partner_reward -0.5",
         "ppo": PPO},
        baseline="weight 1", baselines={"ppo": "weight 0"}),
    "compute": Study(
        "Which variant of CORY does better than a PPO that samples and trains on as many responses?",
        {"ppo, twice the batch": TWICE_THE_BATCH,
         "cory": CORY,
         "no partner's reward": NO_PARTNER,
         "ppo, twice the iterations": TWICE_THE_ITERATIONS,
         "observer on its own reward": f"{CORY} --partner_term sampled_to_pioneer",
         "partner by the critic": f"{CORY} --partner_term critic",
         "no transfer": NO_TRANSFER,
         "one model in both roles": f"{CORY} --share_weights true"},
        baseline="ppo, twice the batch"),
    "sanity": Study(
        "How much KL does noise alone make, with each method?",
        {"ppo, reward 0": f"{LOOPS}train_zero_ppo {HALF}",
         "cory, reward 0": f"{LOOPS}train_zero_cory {HALF}",
         "ppo, shuffled": f"{LOOPS}train_shuffled_ppo {HALF}",
         "cory, shuffled": f"{LOOPS}train_shuffled_cory {HALF}"},
        baseline="ppo, reward 0", baselines={"cory, shuffled": "ppo, shuffled"}, seeds=range(3)),
    # With `-- --eval_split validation`: draws for the settings of `tuned`, and of its baseline.
    "search": Study(
        "Which settings suit each method best?",
        {f"{name} {i}": f"{flags} {drawn(i, 2 if name in TUNED else 1)}"
         for i in range(DRAWS) for name, flags in {"ppo": PPO, **TUNED}.items()},
        baseline="ppo 0", seeds=range(50, 51)),
    # Put what the search chose into each line, in place of HALF. These seeds are for reporting alone.
    "tuned": Study(
        "Which method is best with settings of its own, on seeds and queries that chose none of them?",
        {"ppo, twice the batch": f"{TWICE_THE_BATCH} {HALF}",
         "ppo": f"{PPO} {HALF}",
         **{name: f"{flags} {HALF}" for name, flags in TUNED.items()}},
        baseline="ppo, twice the batch", seeds=range(200, 210)),
    "paper": Study(
        "What does the paper's algorithm as it stands do: exact KL, steered to 6 nats?",
        {"ppo": f"{PPO} {PAPER}", "cory": f"{CORY} {PAPER}"},
        baseline="ppo", tasks=("imdb",)),
    # One base after the other: `-- --model DIR`.
    "transfer": Study(
        "Does CORY gain where the base can use a reference?",
        {"ppo, twice the batch": f"{TWICE_THE_BATCH} {HALF}",
         "cory": f"{CORY} {HALF}",
         "no transfer": f"{NO_TRANSFER} {HALF}",
         "no partner's reward": f"{NO_PARTNER} {HALF}",
         "observer on its own reward": f"{CORY} --partner_term sampled_to_pioneer {HALF}"},
        baseline="ppo, twice the batch", tasks=("gsm8k",)),
    # With what the search chose for CORY in each line, in place of HALF.
    "parts": Study(
        "Which part of CORY helps: transfer, exchange, or the shared reward?",
        {"cory": f"{CORY} {HALF}",
         "no transfer": f"{NO_TRANSFER} {HALF}",
         "no exchange": f"{NO_EXCHANGE} {HALF}",
         "no partner's reward": f"{NO_PARTNER} {HALF}",
         "another query's reward": f"{LOOPS}train_strangers_cory {HALF}",
         "partner's reward, centred": f"{LOOPS}train_centred_cory {HALF}",
         "ppo": f"{PPO} {HALF}"},
        baseline="cory", seeds=range(200, 205)),
}
