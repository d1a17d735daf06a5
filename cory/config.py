"""All settings: the dataclass is the configuration and the command line; the presets can be held against the paper's tables."""
import difflib
import json
import math
import sys
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from transformers import HfArgumentParser

from cory.tasks.answers import CHECKERS
from cory.errors import UserError

ASSETS = Path(__file__).parent / "assets"


def setting(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    """Settings shared by the experiments. A class's own defaults are the paper's; a preset changes some of them."""
    # what runs
    method: Literal["ppo", "cory"] = setting("cory", "ppo: one agent; cory: pioneer and observer, exchanging roles (ours: cory)")
    preset: str = setting("tiny", "named settings; every other flag given overrides them (ours: tiny)")
    model: str = setting("gpt2-large", "causal LM of both agents and of the reference: local folder or Hub name (paper: "
                         "GPT2-Large)")
    dataset: str = setting("stanfordnlp/imdb", "queries: local folder, .jsonl file or Hub name (paper: IMDB)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA when there is one (ours)")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "arithmetic of the transformer's body and of the head's backward pass; weights, "
                                                    "logits and losses stay float32; a frozen base is kept in it (ours)")
    seed: int = setting(0, "seeds queries, lengths, sampling and mini-batches; 0 to 2^31 - 1 (ours)")
    iterations: int = setting(100, "rollout and update rounds (paper: 100)")
    # LoRA: two agents, one base
    lora: bool = setting(False, "one frozen base for all: an adapter and a value head per agent, adapters off is the reference (paper: "
                         "not stated)")
    lora_rank: int = setting(16, "rank r of each adapter's matrices (ours)")
    lora_alpha: float = setting(32.0, "adapters are scaled by lora_alpha / lora_rank (ours)")
    lora_targets: str = setting("all-linear", "modules that get an adapter, separated by commas, or all-linear: every linear layer but the "
                                "head (ours)")
    load_in_4bit: bool = setting(False, "keep the frozen base in 4 bits by bitsandbytes, on CUDA (paper: yes for Llama-2)")
    # the two agents
    role_exchange_every: int = setting(5, "T_REx: iterations between role exchanges (paper: 5); 0 = never")
    knowledge_transfer: bool = setting(True, "the observer sees the pioneer's response (paper: yes)")
    partner_reward: float = setting(1.0, "weight on the partner's task reward: 1 cooperative (paper), 0 independent, "
                                    "negative competitive")
    reset_on_exchange: bool = setting(False, "forget Adam's moments, the KL coefficient and the agents' random streams at "
                                      "each exchange, as the released code does, but for its repeating lengths (paper: no)")
    # rollout
    batch_size: int = setting(256, "queries per iteration (paper: 256)")
    temperature: float = setting(1.0, "softmax temperature, in sampling and in scoring alike (paper: 1)")
    min_response_length: int = setting(4, "tokens; each iteration draws one length limit from here to the largest (released code: "
                                        "4); 0 = always the largest")
    max_response_length: int = setting(15, "tokens; largest length limit (released code: 15)")
    # PPO
    learning_rate: float = setting(1.41e-5, "Adam step size (paper: 1.41e-5)")
    mini_batch_size: int = setting(256, "most rows per forward and backward pass (paper: 256)")
    gradient_accumulation_steps: int = setting(1, "an optimizer step takes this many times mini_batch_size rows (paper: 1)")
    num_ppo_epochs: int = setting(4, "passes over each rollout (paper: 4)")
    init_kl_coef: float = setting(0.3, "eta, weight of the KL penalty at the start, per nat (paper: 0.3)")
    kl_penalty: Literal["full", "k1"] = setting("full", "full: exact KL at each state (paper, eq. 2); k1: log-ratio of the "
                                                "sampled token")
    adap_kl_ctrl: bool = setting(True, "let the KL coefficient follow kl_target (TRL's default; the paper calls its eta initial)")
    kl_target: float = setting(6.0, "nats per response that the adaptive controller steers to (TRL: 6)")
    kl_horizon: float = setting(10_000.0, "responses over which the controller acts (TRL: 10000)")
    gamma: float = setting(1.0, "discount per token (paper: 1)")
    lam: float = setting(0.95, "GAE lambda (paper: 0.95)")
    cliprange: float = setting(0.2, "policy ratio clip (paper: 0.2)")
    cliprange_value: float = setting(0.2, "value clip, in units of reward (paper: 0.2)")
    vf_coef: float = setting(0.1, "beta, weight of the value loss (paper: 0.1)")
    max_grad_norm: float = setting(0.0, "clip the gradient's norm to this; 0 = off (paper: off)")
    # evaluation, saving, logging
    eval_queries: int = setting(256, "held-out queries per evaluation (ours)")
    eval_every: int = setting(20, "iterations between held-out evaluations; 0 = only before and after training (ours)")
    save_every: int = setting(20, "iterations between checkpoints; 0 = only the final models (ours)")
    sample_rows: int = setting(4, "queries per iteration whose texts are kept in samples.jsonl (ours)")
    run_dir: str = setting("", "folder of this run; a new one under runs/ if empty (ours)")
    resume: bool = setting(False, "continue the run in run_dir from its last checkpoint, with its settings (ours)")
    wandb: Literal["auto", "online", "offline", "disabled"] = setting("auto", "auto: online if a W&B key is found, else offline "
                                                                      "(ours)")
    wandb_project: str = setting("cory", "W&B project name (ours)")

    @property
    def rows_per_optimizer_step(self) -> int:
        return self.mini_batch_size * self.gradient_accumulation_steps

    @property
    def storage(self) -> str:
        """What the base's weights are kept in: 4bit, or under LoRA, where they are frozen, `dtype`; else float32."""
        return "4bit" if self.load_in_4bit else self.dtype if self.lora else "float32"

    def __post_init__(self):
        for f in fields(self):
            if isinstance(getattr(self, f.name), float) and not math.isfinite(getattr(self, f.name)):
                raise UserError(f.name, getattr(self, f.name), "must be a finite number")
        for name in ("iterations", "batch_size", "mini_batch_size", "gradient_accumulation_steps", "num_ppo_epochs",
                     "max_response_length", "eval_queries", "lora_rank"):
            self.require(name, getattr(self, name) >= 1, "must be 1 or more")
        for name in ("role_exchange_every", "eval_every", "save_every", "sample_rows", "init_kl_coef", "vf_coef", "max_grad_norm",
                     "min_response_length"):
            self.require(name, getattr(self, name) >= 0, "must be 0 or more")
        for name in ("learning_rate", "temperature", "cliprange", "cliprange_value", "kl_target", "lora_alpha"):
            self.require(name, getattr(self, name) > 0, "must be above 0")
        for name in ("gamma", "lam"):
            self.require(name, 0 <= getattr(self, name) <= 1, "must lie between 0 and 1")
        self.require("seed", 0 <= self.seed < 2**31, "must lie between 0 and 2147483647")
        self.require("batch_size", self.batch_size % self.rows_per_optimizer_step == 0,
                     "must be a multiple of mini_batch_size x gradient_accumulation_steps = "
                     f"{self.mini_batch_size} x {self.gradient_accumulation_steps} = {self.rows_per_optimizer_step}")
        self.require("kl_horizon", not self.adap_kl_ctrl or self.kl_horizon > 0.2 * self.batch_size,
                     f"must exceed 0.2 x batch_size = {0.2 * self.batch_size:g}, or the KL coefficient could turn negative")
        self.require("min_response_length", self.min_response_length <= self.max_response_length,
                     f"must not exceed max_response_length = {self.max_response_length}")
        self.require("load_in_4bit", self.lora or not self.load_in_4bit, "trains nothing by itself: 4-bit weights are frozen; add --lora true")

    def require(self, name: str, holds: bool, way_out: str) -> None:
        if not holds:
            raise UserError(name, getattr(self, name), way_out)


@dataclass
class ImdbConfig(Config):
    task: ClassVar[str] = "imdb"
    paper_preset: ClassVar[str] = "gpt2-large"

    reward_model: str = setting("lvwerra/distilbert-imdb", "sentiment classifier whose positive logit is the reward: local "
                                "folder or Hub name (paper)")
    min_query_length: int = setting(2, "tokens; fewest of a review kept as query (paper: 2)")
    max_query_length: int = setting(8, "tokens; most of a review kept as query (paper: 8)")

    def __post_init__(self):
        super().__post_init__()
        self.require("min_query_length", 1 <= self.min_query_length <= self.max_query_length,
                     f"must lie between 1 and max_query_length = {self.max_query_length}")


IMDB_PRESETS = {
    # Chosen by measurement (README, "Which KL penalty"): small and fast enough for 3 minutes on 2 cores, and readable at the end.
    "tiny": dict(model=str(ASSETS / "imdb/lm"), dataset=str(ASSETS / "imdb/openings"), reward_model=str(ASSETS / "imdb/classifier"),
                 iterations=60, batch_size=32, mini_batch_size=32, learning_rate=1e-4, init_kl_coef=0.15, kl_penalty="k1",
                 adap_kl_ctrl=False),
    "gpt2": dict(model="gpt2"),
    "gpt2-large": dict(),                       # the paper's setting: the class's own defaults
    "gpt2-xl": dict(model="gpt2-xl"),           # the paper's PPO with twice the parameters
}


@dataclass
class Gsm8kConfig(Config):
    task: ClassVar[str] = "gsm8k"
    paper_preset: ClassVar[str] = "llama2-7b"

    model: str = setting("meta-llama/Llama-2-7b-chat-hf", "causal LM of both agents and of the reference: local folder or Hub name (paper: "
                         "4-bit Llama-2-7b-chat)")
    dataset: str = setting("openai/gsm8k", "questions and worked answers: local folder, .jsonl file or Hub name (paper: GSM8K)")
    checker: str = setting("last_number", f"how an answer is read from a response: {', '.join(CHECKERS)} (paper: the last number)")
    one_shot: bool = setting(True, "put the paper's worked example before the question (paper: yes)")
    chat_template: bool = setting(False, "wrap each prompt as a user's message by the tokenizer's chat template (paper: not stated)")
    batch_size: int = setting(32, "queries per iteration (paper: 32)")
    min_response_length: int = setting(0, "tokens; each iteration draws one length limit from here to the largest; 0 = always the largest (ours)")
    max_response_length: int = setting(256, "tokens; largest length limit (paper: not stated)")
    learning_rate: float = setting(1e-5, "Adam step size (paper: 1e-5 for PPO, 1e-4 for CORY: preset llama2-7b-lr1e-4)")
    mini_batch_size: int = setting(2, "most rows per forward and backward pass (paper: 2)")
    gradient_accumulation_steps: int = setting(16, "an optimizer step takes this many times mini_batch_size rows (paper: 16)")
    init_kl_coef: float = setting(0.01, "eta, weight of the KL penalty at the start, per nat (paper: 0.01)")

    def __post_init__(self):
        super().__post_init__()
        self.require("checker", self.checker in CHECKERS, f"unknown; choose from {', '.join(CHECKERS)}")


LLAMA2 = dict(lora=True, load_in_4bit=True, dtype="bfloat16")       # the paper's 4-bit base; that it used LoRA is our reading
GSM8K_PRESETS = {
    # Chosen by measurement: under 5 minutes on 2 cores, and every agent learns (README, "Length and lambda").
    "tiny": dict(model=str(ASSETS / "gsm8k/lm"), dataset=str(ASSETS / "gsm8k/problems"), one_shot=False, max_response_length=48, iterations=40,
                 batch_size=64, mini_batch_size=64, gradient_accumulation_steps=1, learning_rate=5e-5, init_kl_coef=0.02, kl_penalty="k1",
                 adap_kl_ctrl=False, lam=1.0, eval_every=10),
    "llama2-7b": LLAMA2,                        # the paper's table 2, PPO's learning rate
    "llama2-7b-lr1e-4": dict(learning_rate=1e-4, **LLAMA2),         # the paper's learning rate for CORY
}

CONFIGS = {config.task: config for config in (ImdbConfig, Gsm8kConfig)}

# What may differ between a run and its continuation: none of these changes what an iteration computes.
FREE_ON_RESUME = {"resume", "run_dir", "iterations", "save_every", "wandb", "wandb_project"}


class OneLineParser(ArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message):
        raise UserError("command line", " ".join(sys.argv[1:]), message + " (--help lists every flag)")


class Parser(HfArgumentParser, OneLineParser):
    """HfArgumentParser that names the nearest flag for an unknown one."""

    def parse(self, argv: list[str]):
        config, unknown = self.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        for word in unknown:
            known = [a for action in self._actions for a in action.option_strings]
            near = difflib.get_close_matches(word.split("=")[0], known, n=1)
            raise UserError("flag", word, f"unknown; did you mean {near[0]}?" if near else "unknown; --help lists every flag")
        return config


def parse(config_class: type, presets: dict[str, dict], argv: list[str]) -> Config:
    """The command line over the preset it names over the class's defaults; with --resume, over the run's own settings.

    Raises `UserError`.
    """
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?", default="tiny")
    first.add_argument("--run_dir", nargs="?", default="")
    first.add_argument("--resume", nargs="?", const="true", default="false")
    known = first.parse_known_args(argv)[0]
    if known.resume.lower() in ("true", "1", "yes", "y", "t"):
        return continued(config_class, known.run_dir or "", argv)
    preset = known.preset
    if preset not in presets:
        raise UserError("preset", preset, f"choose from {', '.join(presets)}")
    return parse_over(config_class, {"preset": preset, **presets[preset]}, argv)


def parse_over(config_class: type, defaults: dict, argv: list[str]) -> Config:
    parser = Parser(config_class, allow_abbrev=False)
    parser.set_defaults(**defaults)
    return parser.parse(argv)


def continued(config_class: type, run_dir: str, argv: list[str]) -> Config:
    """The settings of the run in run_dir, with what the command line may change of them."""
    if not run_dir:
        raise UserError("run_dir", run_dir, "names no run to resume; give the folder of one")
    saved = load_config(Path(run_dir))
    if saved.task != config_class.task:
        raise UserError("run_dir", run_dir, f"holds a run of {saved.task}; continue it with train_{saved.task}.py")
    config = parse_over(config_class, asdict(saved), argv)
    changed = [f"{k} was {getattr(saved, k)!r}, now {v!r}" for k, v in asdict(config).items() if k not in FREE_ON_RESUME and getattr(saved, k) != v]
    if changed:
        raise UserError("resume", run_dir, f"the run has other settings ({'; '.join(changed)}); leave these flags out, or start a new "
                        "run")
    return config


def load_config(run_dir: Path) -> Config:
    """The settings a run was started with. Raises `UserError`."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "holds no run (no config.json); name the folder of one")
    try:
        saved = json.loads(path.read_text())
        return CONFIGS[saved.pop("task")](**saved)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError("run_dir", str(run_dir), f"its config.json is not this version's ({error}); start a new run") from error
