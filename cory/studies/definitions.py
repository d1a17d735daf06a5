"""The studies: which claim each holds against measurement, by which variants, over how many seeds.

A variant is a line of flags of the ordinary scripts. To add one, add a line; to add a study, add a `Study`. A
value like `init_kl_coef*3` is three times what the run would have otherwise.
"""
from dataclasses import dataclass, field

from cory.config import METHODS
from cory.names import find


@dataclass(frozen=True)
class Study:
    claim: str                              # what the paper says, or what is asked
    variants: dict[str, str]                # name: flags
    baseline: str                           # the variant that the others are compared with
    seeds: int = 5
    tasks: tuple[str, ...] = ("imdb", "gsm8k")
    quick: tuple[str, ...] = ()             # variants of the quick run, with 2 seeds
    compute: dict[str, float] = field(default_factory=dict)     # variant: its batches, where not one per role

    def responses(self, variant: str) -> float:
        """Batches of responses sampled and trained on per iteration: one for each role of the loop."""
        words = self.variants[variant].split()
        loop = find("method", words[words.index("--method") + 1], METHODS)
        return self.compute.get(variant, float(len(loop.agents)))


PPO, CORY = "--method ppo", "--method cory"

STUDIES = {
    "curves": Study(
        "Figures 3 and 4: CORY's task reward equals PPO's or is higher, at less than half of its KL; its "
        "combined reward rises where PPO's falls.",
        {"ppo": PPO, "cory": CORY}, "ppo", seeds=10, quick=("ppo", "cory")),
    "frontier": Study(
        "Figure 2c: CORY's frontier of reward against KL, over eta, lies above PPO's.",
        {f"{method}, eta x {eta}": f"--method {method} --init_kl_coef init_kl_coef*{eta}"
         for eta in ("0", "0.3", "1", "3") for method in ("ppo", "cory")},
        "ppo, eta x 1", quick=("ppo, eta x 0", "cory, eta x 0", "ppo, eta x 1", "cory, eta x 1")),
    "ablations": Study(
        "Figure 6: without knowledge transfer reward is unstable and KL higher; without role exchange KL is "
        "much higher and the observer clearly below the pioneer.",
        {"cory": CORY, "no transfer": f"{CORY} --knowledge_transfer false",
         "no exchange": f"{CORY} --role_exchange_every 0",
         **{f"T_REx {n}": f"{CORY} --role_exchange_every {n}" for n in (1, 2, 10)},
         "exact KL": f"{CORY} --kl_penalty full", "sampled KL": f"{CORY} --kl_penalty k1",
         "reset at exchange": f"{CORY} --reset_on_exchange true",
         "one model in both roles": f"{CORY} --share_weights true"},
        "cory", quick=("cory", "no transfer", "no exchange")),
    "reward": Study(
        "Camera-ready figure: cooperating agents (partner weight 1) do better than competing ones (below 0).",
        {"weight 1": CORY, "weight 0.5": f"{CORY} --partner_reward 0.5",
         "weight 0": f"{CORY} --partner_reward 0", "weight -0.5": f"{CORY} --partner_reward -0.5"},
        "weight 1", quick=("weight 1", "weight 0")),
    "stability": Study(
        "Appendix E: at large learning rates and small eta PPO collapses and CORY does not.",
        {f"{method}, rate x {rate}, eta x {eta}": f"--method {method} --learning_rate learning_rate*{rate} "
         f"--init_kl_coef init_kl_coef*{eta}"
         for rate in ("1", "4", "10") for eta in ("0.1", "1") for method in ("ppo", "cory")},
        "ppo, rate x 1, eta x 1", quick=("ppo, rate x 10, eta x 0.1", "cory, rate x 10, eta x 0.1",
                                         "ppo, rate x 1, eta x 1", "cory, rate x 1, eta x 1")),
    "controls": Study(
        "What the paper lacks: is CORY's effect that of its compute, of its doubled reward, or of noise?",
        {"cory": CORY, "ppo": PPO, "ppo, twice the iterations": f"{PPO} --iterations iterations*2",
         "ppo, twice the batch":
             f"{PPO} --batch_size batch_size*2 --mini_batch_size mini_batch_size*2",
         "cory, twice eta": f"{CORY} --init_kl_coef init_kl_coef*2",
         "ppo, a partner's noise": "--method cory.studies.loops:train_noisy_ppo"},
        "cory", quick=("cory", "ppo", "cory, twice eta"), compute={"ppo, twice the batch": 2.0}),
    "released": Study(
        "Which habits of the released code move CORY's result: normalised scores, dropout, resets, a "
        "repetition penalty while sampling; one by one.",
        {"cory": CORY, "resets": f"{CORY} --reset_on_exchange true",
         "scores normalised": "--method cory.studies.loops:train_normalised_cory",
         "dropout": "--method cory.studies.loops:train_dropout_cory",
         "repetition penalty 1.1": "--method cory.studies.loops:train_penalised_cory"},
        "cory", tasks=("imdb",), quick=("cory", "scores normalised")),
    "variance": Study(
        "Is it the noise of the partner's sampled reward that costs CORY its reward?",
        {"cory": CORY, "ppo": PPO, "observer on its own reward": f"{CORY} --partner_term sampled_to_pioneer",
         "partner by the critic": f"{CORY} --partner_term critic",
         "no value clip": f"{CORY} --cliprange_value 1000",
         "value coefficient 1": f"{CORY} --vf_coef 1",
         "rloo, 4 responses": f"{CORY} --advantage rloo --responses_per_query 4"},
        "cory", seeds=10, quick=("cory", "ppo", "partner by the critic")),
}
