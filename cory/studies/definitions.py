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

# Half of a preset's responses.
HALF = "--iterations iterations*0.5"

DRAWS = 16

# Where CORY's best draw had the highest critic's rate of all, or the lowest rate: powers of 10 near it.
EDGES = {"imdb": {"critic": (-2.0, -1.5)}, "gsm8k": {"policy": (-4.0, -3.3)}}


def rates(rng: random.Random, share: float = 1.0, policy: tuple[float, float] = (-3.5, -2.3),
          critic: tuple[float, float] = (-3.3, -1.7)) -> str:
    """Two rates drawn at random, each between two powers of 10; a share of each."""
    rate, critic = share * 10 ** rng.uniform(*policy), share * 10 ** rng.uniform(*critic)
    return f"--learning_rate {rate:.1e} --critic_learning_rate {critic:.1e}"


def drawn(number: int, method: str, rows: int = 1, length: float = 0.5, **ranges) -> str:
    """A method's flags, with settings drawn at random. The same number draws the same for every method.

    `length` of a preset's iterations, with batches of `rows` times as many responses.
    """
    rng = random.Random(number)
    flags = f"{method} {rates(rng, **ranges)}"
    epochs, batch, exchange = rng.choice([1, 2]), rng.choice([0.5, 1, 2]), rng.choice([1, 5, 20])
    flags += (f" --num_ppo_epochs {epochs} --iterations iterations*{length / batch:g}"
              f" --batch_size batch_size*{batch * rows:g} --mini_batch_size mini_batch_size*{batch * rows:g}")
    return flags if method in (PPO, NO_EXCHANGE) else f"{flags} --role_exchange_every {exchange}"


# The draw that the study `search` chose for each method.
CHOSEN = {"imdb": {"ppo": 9, "cory": 8, "no partner's reward": 12, "partner by the critic": 5},
          "gsm8k": {"ppo": 7, "cory": 1, "no partner's reward": 4, "partner by the critic": 4}}

# The draw near an edge that is better than CORY's best there, by the mean of three seeds.
BETTER = {"imdb": {}, "gsm8k": {"cory, lower rate": drawn(16, CORY, **EDGES["gsm8k"])}}


def paper(method: str, number: int, share: float = 1.0) -> str:
    """The paper's algorithm with a share of a draw's rates, beside a preset's model and sizes."""
    return (f"{method} {rates(random.Random(number), share)} --kl_penalty full --adap_kl_ctrl true "
            "--kl_target 6 --init_kl_coef 0.3 --lam 0.95 --iterations 120 --lr_schedule constant")


def tuned(task: str) -> Study:
    chosen = CHOSEN[task]
    return Study(
        "Which method is best with settings of its own, on seeds and queries that chose none of them?",
        {"ppo, twice the batch": drawn(chosen["ppo"], PPO, rows=2),
         "ppo": drawn(chosen["ppo"], PPO),
         **{name: drawn(chosen[name], flags) for name, flags in TUNED.items()},
         **BETTER[task],
         # as many bare queries as an agent of CORY has
         "ppo, half the iterations": drawn(chosen["ppo"], PPO, length=0.25)},
        baseline="ppo, twice the batch", baselines={"ppo, half the iterations": "cory"},
        seeds=range(200, 210), tasks=(task,))


def parts(task: str) -> Study:
    number = CHOSEN[task]["cory"]
    return Study(
        "Which part of CORY helps: transfer, exchange, or the shared reward?",
        {**{name: drawn(number, flags) for name, flags in
            {"cory": CORY,
             "no transfer": NO_TRANSFER,
             "no exchange": NO_EXCHANGE,
             "no partner's reward": NO_PARTNER,
             "another query's reward": f"{LOOPS}train_strangers_cory",
             "partner's reward, centred": f"{LOOPS}train_centred_cory",
             "ppo": PPO}.items()},
         # as many bare queries as an agent of CORY has
         "no transfer, half the iterations": drawn(number, NO_TRANSFER, length=0.25)},
        baseline="cory", seeds=range(200, 205), tasks=(task,))


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
        {f"{name} {i}": flags for i in range(DRAWS) for name, flags in
         {"ppo": drawn(i, PPO, rows=2), **{name: drawn(i, flags) for name, flags in TUNED.items()}}.items()},
        baseline="ppo 0", seeds=range(50, 51)),
    # Likewise: more draws for CORY alone.
    **{f"search_cory_{task}": Study(
        "Do settings near the rate of CORY's best draw, at the edge of `search`, suit it better?",
        {f"cory {i}": drawn(i, CORY, **near) for i in range(DRAWS, DRAWS + 8)},
        baseline=f"cory {DRAWS}", seeds=range(50, 51), tasks=(task,)) for task, near in EDGES.items()},
    # Those seeds are for reporting alone.
    **{f"tuned_{task}": tuned(task) for task in CHOSEN},
    "paper": Study(
        "What does the paper's algorithm as it stands do: exact KL, steered to 6 nats?",
        {"ppo": paper(PPO, CHOSEN["imdb"]["ppo"]),
         "cory": paper(CORY, CHOSEN["imdb"]["cory"]),
         "ppo, a tenth of the rates": paper(PPO, CHOSEN["imdb"]["ppo"], share=0.1),
         "cory, a tenth of the rates": paper(CORY, CHOSEN["imdb"]["cory"], share=0.1)},
        baseline="ppo", baselines={"cory, a tenth of the rates": "ppo, a tenth of the rates"},
        tasks=("imdb",)),
    # One base after the other: `-- --model DIR`.
    "transfer": Study(
        "Does CORY gain where the base can use a reference?",
        {"ppo, twice the batch": f"{TWICE_THE_BATCH} {HALF}",
         "cory": f"{CORY} {HALF}",
         "no transfer": f"{NO_TRANSFER} {HALF}",
         "no partner's reward": f"{NO_PARTNER} {HALF}",
         "observer on its own reward": f"{CORY} --partner_term sampled_to_pioneer {HALF}"},
        baseline="ppo, twice the batch", tasks=("gsm8k",)),
    **{f"parts_{task}": parts(task) for task in CHOSEN},
}
