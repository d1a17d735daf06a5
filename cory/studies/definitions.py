"""The studies: which claim each holds against measurement, by which variants, over how many seeds.

A variant is a line of flags of the ordinary scripts. To add one, add a line; to add a study, add a `Study`.
A value like `init_kl_coef*3` is three times what the run would have otherwise. A flag that says what a run
would have anyway is left out, so that such a variant shares its runs with others.
"""
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Study:
    claim: str                              # what the paper says, or what is asked
    variants: dict[str, str]                # name: flags
    baseline: str                           # the variant that the others are compared with
    seeds: int = 5
    tasks: tuple[str, ...] = ("imdb", "gsm8k")
    quick: tuple[str, ...] = ()             # variants of the quick run, with 2 seeds; () = all
    pairs: dict[str, str] = field(default_factory=dict)         # variant: a baseline of its own
    sweeps: dict[str, tuple[str, ...]] = field(default_factory=dict)    # ppo, cory: `METHOD, ...` along eta
    only: dict[str, str] = field(default_factory=dict)          # variant: the one preset that it is for
    measure: dict[str, str] = field(default_factory=dict)       # task: what is measured of finished runs

    def baseline_of(self, variant: str) -> str:
        return self.pairs.get(variant, self.baseline)

    def variants_of(self, preset: str, quick: bool) -> list[str]:
        """Those that a run of the whole study makes under a preset."""
        return [name for name in (self.quick if quick and self.quick else self.variants)
                if self.only.get(name, preset) == preset]


PPO, CORY, OURS = "--method ppo", "--method cory", "--method cory.studies.loops:"
RLOO, GRPO = (f"--advantage {name} --responses_per_query 4" for name in ("rloo", "grpo"))
ETAS, RATES = ("0.1", "0.3", "1", "3"), ("1", "4", "10")


def multiples(**factors: str) -> str:
    """Flags that multiply settings: multiples(init_kl_coef="3")."""
    return " ".join(f"--{name} {name}*{factor}" for name, factor in factors.items())


def of_both(variants: dict[str, str]) -> dict[str, str]:
    """Each line of flags for PPO and for CORY: `ppo, NAME` and `cory, NAME`."""
    return {f"{method}, {name}": f"--method {method} {flags}"
            for name, flags in variants.items() for method in ("ppo", "cory")}


def cory_against_ppo(names) -> dict[str, str]:
    return {f"cory, {name}": f"ppo, {name}" for name in names}


ALONG_ETA = {f"eta x {eta}": multiples(init_kl_coef=eta) for eta in ETAS}
RATE_AND_ETA = {f"rate x {rate}, eta x {eta}": multiples(learning_rate=rate, init_kl_coef=eta)
                for rate in RATES for eta in ("0.1", "1")}

# PPO with as many responses as a run of CORY has: over twice the iterations, or in batches of twice the size.
OF_TWICE = {"ppo, twice the iterations": f"{PPO} {multiples(iterations='2')}",
            "ppo, twice the batch": f"{PPO} {multiples(batch_size='2', mini_batch_size='2')}"}

STUDIES = {
    "curves": Study(
        "Figures 3 to 5: on IMDB CORY's task reward equals PPO's, at less than half of its KL, and its "
        "combined reward rises where PPO's falls; on GSM8K its pass@k lies above PPO's for every k.",
        {"ppo": PPO, "cory": CORY}, "ppo", seeds=10, quick=("ppo", "cory"), measure={"gsm8k": "pass@k"}),
    "team": Study(
        "Do two answer better as a team: pioneer and observer, against two answers of PPO's agent?",
        {"ppo": PPO, "cory": CORY}, "ppo", seeds=10, quick=("ppo", "cory"),
        measure={"imdb": "team", "gsm8k": "team"}),
    "variance": Study(
        "Is it the noise of the partner's sampled reward that costs CORY its reward?",
        {"cory": CORY, "ppo": PPO, "observer on its own reward": f"{CORY} --partner_term sampled_to_pioneer",
         "partner by the critic": f"{CORY} --partner_term critic",
         "no value clip": f"{CORY} --cliprange_value 1000",
         "value coefficient 1": f"{CORY} --vf_coef 1",
         "value head's rate x 10": f"{OURS}train_fast_critic_cory",
         "16 more critic epochs": f"{OURS}train_long_critic_cory",
         "ppo, value head's rate x 10": f"{OURS}train_fast_critic_ppo",
         "ppo, 16 more critic epochs": f"{OURS}train_long_critic_ppo",
         "rloo, 4 responses": f"{CORY} {RLOO}",
         "ppo, rloo, 4 responses": f"{PPO} {RLOO}"},
        "cory", seeds=10, quick=("cory", "ppo", "partner by the critic"),
        pairs={f"ppo, {name}": name                     # what the same does for PPO, less CORY with it
               for name in ("value head's rate x 10", "16 more critic epochs", "rloo, 4 responses")}),
    "groups": Study(
        "A group of four responses to a query in the place of the critic: does it matter which baseline it "
        "gives, RLOO's or GRPO's?",
        {"cory": CORY, "ppo": PPO, "rloo": f"{CORY} {RLOO}", "grpo": f"{CORY} {GRPO}",
         "ppo, rloo": f"{PPO} {RLOO}", "ppo, grpo": f"{PPO} {GRPO}"},
        "cory", quick=("cory", "rloo", "grpo"),
        pairs={"grpo": "rloo", "ppo, rloo": "rloo", "ppo, grpo": "grpo"}),
    "critic": Study(
        "Does CORY do better than PPO of the same compute, if the pioneer's partner term is by the critic? "
        "Is that better than no partner's term?",
        {"partner by the critic": f"{CORY} --partner_term critic", "cory": CORY,
         "cory, twice eta": f"{CORY} {multiples(init_kl_coef='2')}",
         "no partner's reward": f"{CORY} --partner_reward 0", "ppo": PPO, **OF_TWICE},
        "partner by the critic", quick=("partner by the critic", "ppo, twice the iterations")),
    "compute": Study(
        "Which variant of CORY does better than PPO that samples and trains on as many responses?",
        {**OF_TWICE, "cory": CORY,
         "observer on its own reward": f"{CORY} --partner_term sampled_to_pioneer",
         "partner by the critic": f"{CORY} --partner_term critic",
         "no partner's reward": f"{CORY} --partner_reward 0", "weight -0.5": f"{CORY} --partner_reward -0.5",
         "value head's rate x 10": f"{OURS}train_fast_critic_cory",
         "16 more critic epochs": f"{OURS}train_long_critic_cory",
         "no transfer": f"{CORY} --knowledge_transfer false",
         "one model in both roles": f"{CORY} --share_weights true",
         "rloo, 4 responses": f"{CORY} {RLOO}",
         "ppo, rloo, twice the batch": f"{PPO} {RLOO} {multiples(batch_size='2', mini_batch_size='2')}"},
        "ppo, twice the batch", quick=("ppo, twice the batch", "cory", "partner by the critic"),
        pairs={"rloo, 4 responses": "ppo, rloo, twice the batch"}),
    "reward": Study(
        "Camera-ready figure: cooperating agents (partner weight 1) do better than competing ones (below 0).",
        {"weight 1": CORY, "weight 0.5": f"{CORY} --partner_reward 0.5",
         "weight 0": f"{CORY} --partner_reward 0", "weight -0.5": f"{CORY} --partner_reward -0.5",
         "ppo": PPO},
        "weight 1", quick=("weight 1", "weight 0"), pairs={"ppo": "weight 0"}),
    "ablations": Study(
        "Figure 6: without knowledge transfer reward is unstable and KL higher; without role exchange KL is "
        "much higher and the observer clearly below the pioneer; a PPO of twice the parameters collapses.",
        {"cory": CORY, "no transfer": f"{CORY} --knowledge_transfer false",
         "no exchange": f"{CORY} --role_exchange_every 0",
         **{f"T_REx {n}": f"{CORY} --role_exchange_every {n}" for n in (1, 2, 10)},
         "exact KL": f"{CORY} --kl_penalty full", "sampled KL": f"{CORY} --kl_penalty k1",
         "reset at exchange": f"{CORY} --reset_on_exchange true",
         "one model in both roles": f"{CORY} --share_weights true",
         "ppo, gpt2-xl": f"{PPO} --model gpt2-xl",
         "ppo, llama2-13b": f"{PPO} --model meta-llama/Llama-2-13b-chat-hf"},
        "cory", quick=("cory", "no transfer", "no exchange"),
        only={"ppo, gpt2-xl": "gpt2-large", "ppo, llama2-13b": "llama2-7b"}),
    "controls": Study(
        "What the paper lacks: is CORY's effect that of its compute, of its doubled reward, or of noise?",
        {"cory": CORY, "ppo": PPO, **OF_TWICE,
         "cory, twice eta": f"{CORY} {multiples(init_kl_coef='2')}",
         "ppo, a partner's noise": f"{OURS}train_noisy_ppo"},
        "cory", quick=("cory", "ppo", "cory, twice eta"),
        pairs={"ppo, a partner's noise": "ppo"}),
    "frontier": Study(
        "Figure 2c: CORY's frontier of reward against KL, over eta, lies above PPO's.",
        of_both(ALONG_ETA), "ppo, eta x 1",
        quick=("ppo, eta x 0.3", "cory, eta x 0.3", "ppo, eta x 1", "cory, eta x 1"),
        pairs=cory_against_ppo(ALONG_ETA),
        sweeps={method: tuple(f"{method}, {name}" for name in ALONG_ETA) for method in ("ppo", "cory")}),
    "stability": Study(
        "Appendix E: at large learning rates and small eta PPO collapses and CORY does not.",
        of_both(RATE_AND_ETA), "ppo, rate x 1, eta x 1",
        quick=("ppo, rate x 10, eta x 0.1", "cory, rate x 10, eta x 0.1",
               "ppo, rate x 1, eta x 1", "cory, rate x 1, eta x 1"),
        pairs=cory_against_ppo(RATE_AND_ETA)),
    "released": Study(
        "Which habits of the released code move CORY's result: normalised scores, dropout, resets, a "
        "repetition penalty while sampling, another eta than PPO's; one by one, and all of them.",
        {"cory": CORY, "ppo": PPO, "resets": f"{CORY} --reset_on_exchange true",
         "scores normalised": f"{OURS}train_normalised_cory",
         "ppo, scores normalised": f"{OURS}train_normalised_ppo",
         "dropout": f"{OURS}train_dropout_cory",
         "repetition penalty 1.1": f"{OURS}train_penalised_cory",
         "eta of 0.4 to PPO's 0.3": f"{CORY} {multiples(init_kl_coef='1.333')}",
         "ppo as released": f"{OURS}train_released_ppo",
         "cory as released": f"{OURS}train_released_cory --reset_on_exchange true "
                             f"{multiples(init_kl_coef='1.333')}"},
        "cory", tasks=("imdb",), quick=("cory", "scores normalised"),
        pairs={"cory as released": "ppo as released", "ppo as released": "ppo",
               "ppo, scores normalised": "ppo"}),
}
