"""All settings: the dataclass is the configuration and the command line.

Nothing here imports PyTorch, so that `--help` and a mistyped flag are answered at once.
"""
import importlib
import json
import os
import re
import sys
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal, get_args

from cory.errors import UserError

ASSETS = Path(__file__).parent / "assets"
BUNDLED = "bundled:"            # prefix of models and data in ASSETS: a run does not depend on where that is

# Settings that name code: their short names, and where these are. Custom code is named as `module:Name`.
NAMED = {
    "task": {"imdb": "cory.tasks.imdb:Imdb", "gsm8k": "cory.tasks.gsm8k:Gsm8k"},
    "method": {"ppo": "cory.train:Ppo", "cory": "cory.train:Cory"},
    "advantage": {name: f"cory.ppo.advantages:{name}"
                  for name in ("gae", "rloo", "grpo", "reinforce")},
    "checker": {name: f"cory.tasks.gsm8k:{name}" for name in ("last_number", "final_answer")},
    "sampler": {"cory": "cory.ppo.sampling:sample_tokens"},
    "loss": {"ppo": "cory.ppo.update:losses"},
    "critic": {"linear": "cory.ppo.model:Critic"},
    "lr_schedule": {name: f"cory.ppo.agent:{name}" for name in ("constant", "linear")},
    "kl_controller": {"adaptive": "cory.ppo.agent:adaptive"},
}


def script_name() -> str:
    """The module that runs, by which others may import it."""
    spec = sys.modules["__main__"].__spec__             # of `python -m NAME`
    return spec.name if spec else Path(sys.argv[0]).stem


def import_name(name: str):
    """The object `module:Name`; the module may be in the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    sys.modules.setdefault(script_name(), sys.modules["__main__"])      # found there, not run a second time
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:                # any other error of the module keeps its traceback
        raise UserError(f"{name}: {error}; code is named as module:Name, without .py") from error


def expand_bundled(name: str) -> str:
    """The folder, file or Hub name that a setting names: `bundled:imdb/lm` is the folder ASSETS/imdb/lm."""
    if not name.startswith(BUNDLED):
        return name
    return str(ASSETS / name.removeprefix(BUNDLED))


def setting(default, help: str, min=-inf, max=inf, per_agent=False, above=None):
    """A field of the settings: its help, a number's range, and whether agents may differ in it."""
    rules = dict(help=help, min=min, above=above, max=max, per_agent=per_agent)
    return field(default=default, metadata=rules)


# A setting in which agents may differ, by a method's `agent_config`.
agent_setting = partial(setting, per_agent=True)


@dataclass(frozen=True)
class Config:
    """The shared settings; defaults are the paper's for IMDB, and presets change some. Frozen: agents
    share it, and a resumed run must find it unchanged. What changes in training belongs in a `memory`.
    """
    # what to run
    task: str = setting("imdb", "imdb, or your own class, given as module:Class")
    method: str = setting(
        "cory", "ppo (one agent), cory (two agents), or your own class, given as module:Class")
    preset: str = setting("custom", "a named set of settings, which other flags override")
    model: str = agent_setting(
        "gpt2-large", "pretrained language model: folder or Hub name, with @REVISION if needed (paper: "
        "gpt2-large, Llama-2-7b-chat)")
    dataset: str = setting("stanfordnlp/imdb", "data to make queries from: folder, .jsonl or .csv file, or "
                           "Hub name (paper: IMDB, GSM8K)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a CUDA GPU if there is one, else the CPU")
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = setting(
        "auto", "precision of matrix products; auto: bfloat16 on a GPU that supports it, else float32")
    seed: int = setting(0, "random seed, for queries, length limits, sampling, mini-batches and adapters",
                        min=0)
    iterations: int = setting(100, "number of iterations, each a rollout and an update (paper: 100)", min=1)
    # memory
    lora_rank: int = agent_setting(
        0, "rank of LoRA adapters on a frozen base; 0: train all weights (paper: not stated)", min=0)
    load_in_4bit: bool = setting(
        False, "load the frozen base in 4 bits, with bitsandbytes (paper: for Llama-2)")
    shard: bool = setting(False, "divide layers and Adam's moments among the processes of torchrun, by FSDP2")
    # the two agents
    role_exchange_every: int = setting(
        5, "T_REx: iterations between exchanges of roles; 0: never (paper: 5)", min=0)
    knowledge_transfer: bool = setting(True, "the observer sees the pioneer's response (paper: yes)")
    partner_reward: float = setting(
        1.0, "weight of the partner's task reward in what an agent is trained on; may be negative (paper: 1)")
    share_weights: bool = setting(
        False, "one model plays all roles, and is trained in each (paper: an option, to save memory)")
    # rollout
    batch_size: int = setting(256, "responses per iteration and role (paper: IMDB 256, GSM8K 32)", min=1)
    responses_per_query: int = setting(
        1, "k, the number of responses to each query; a batch has batch_size / k queries (paper: 1)", min=1)
    min_response_length: int = setting(
        4, "each iteration draws a limit on the length of its responses, in tokens, between this and the "
        "maximum; 0: always the maximum (released code for IMDB: 4)", min=0)
    max_response_length: int = setting(
        15, "maximum length of responses, in tokens (paper: not stated; released code for IMDB: 15)", min=1)
    temperature: float = agent_setting(
        1.0, "divides the logits, in sampling and in all log-probabilities alike (paper: 1)", above=0)
    sampler: str = agent_setting(
        "cory", "what samples responses in training: cory (this code), or your own, given as "
        "module:function")
    chat_template: bool = setting(
        False, "put each prompt into the model's chat template, as a user's message")
    chat_template_kwargs: str = setting(
        "{}", 'arguments of the chat template, as JSON: {"enable_thinking": false} for Qwen3 and SmolLM3')
    system_prompt: str = setting("", "system message of each prompt that has none, in the chat template")
    # the update
    advantage: str = agent_setting(
        "gae", "advantage estimator: gae (paper), reinforce, rloo or grpo (both without gamma and lam), or "
        "your own, given as module:function")
    critic: str = agent_setting(
        "linear", "critic: linear (a value head on the policy's last hidden state; paper), or your own, "
        "given as module:Class")
    loss: str = agent_setting("ppo", "loss of each token: ppo (paper), or your own, given as module:function")
    loss_mean: Literal["tokens", "responses", "constant"] = agent_setting(
        "tokens", "average the loss over tokens (TRL), over each response's tokens and then over responses "
        "(GRPO), or with a constant as each response's length (Dr. GRPO)")
    learning_rate: float = agent_setting(
        1.41e-5, "learning rate of the policy (paper: IMDB 1.41e-5; GSM8K 1e-5 for PPO, 1e-4 for "
        "CORY)", above=0)
    critic_learning_rate: float = agent_setting(
        0.0, "learning rate of the critic; 0: the same as the policy's (paper)", min=0)
    lr_schedule: str = agent_setting(
        "constant", "learning-rate schedule: constant (paper), linear, or your own, given as module:function")
    mini_batch_size: int = agent_setting(
        256, "maximum number of responses in a backward pass; PPO's mini-batch is this times "
        "gradient_accumulation_steps (paper: IMDB 256, GSM8K 2)", min=1)
    gradient_accumulation_steps: int = agent_setting(
        1, "backward passes per Adam step; PPO's mini-batch is this times mini_batch_size (paper: IMDB 1, "
        "GSM8K 16)", min=1)
    num_ppo_epochs: int = agent_setting(4, "passes over a rollout in its update (paper: 4)", min=1)
    init_kl_coef: float = agent_setting(
        0.3, "initial value of eta, the weight of the KL penalty, in reward per nat (paper: IMDB 0.3, GSM8K "
        "0.01)", min=0)
    kl_penalty: Literal["full", "k1"] = agent_setting(
        "full", "estimate of the KL: exact (full; paper, eq. 2) or the log-ratio of the sampled token (k1)")
    kl_in: Literal["reward", "loss"] = agent_setting(
        "reward", "where the KL penalty enters: subtracted from token rewards (paper), or added to the loss, "
        "as k3 (GRPO)")
    kl_controller: str = agent_setting(
        "adaptive", "how eta changes: adaptive (TRL), or your own, given as module:function")
    kl_target: float = agent_setting(
        6.0, "the KL that eta is adapted to reach, in nats per response; 0: constant eta (TRL: 6)", min=0)
    kl_horizon: float = agent_setting(
        10_000.0, "number of responses over which eta adapts (TRL: 10000)", above=0)
    gamma: float = agent_setting(1.0, "discount factor per token (paper: 1)", min=0, max=1)
    lam: float = agent_setting(0.95, "lambda of GAE (paper: 0.95)", min=0, max=1)
    cliprange: float = agent_setting(0.2, "clip range of the policy ratio (paper: 0.2)", above=0)
    cliprange_value: float = agent_setting(
        0.2, "clip range of values, in units of reward (paper: 0.2)", above=0)
    vf_coef: float = agent_setting(0.1, "beta, the weight of the value loss (paper: 0.1)", min=0)
    max_grad_norm: float = agent_setting(
        0.0, "norm to which the gradient is clipped; 0: no clipping (paper)", min=0)
    # evaluation, saving, logging
    eval_split: Literal["test", "validation"] = setting(
        "test", "held-out split to evaluate on; choose settings on validation")
    eval_queries: int = setting(256, "held-out queries per evaluation", min=1)
    eval_samples: int = setting(1, "responses to each held-out query per evaluation", min=1)
    eval_every: int = setting(
        20, "iterations between evaluations; 0: evaluate only before and after training", min=0)
    save_every: int = setting(
        10, "save a checkpoint after the first iteration and then every N; 0: no checkpoints", min=0)
    run_dir: str = setting("", "folder of this run; if empty, a new one under runs/")
    resume: bool = setting(False, "continue the run in run_dir from its last checkpoint")
    wandb: Literal["auto", "online", "offline", "disabled"] = setting(
        "auto", "logging to Weights & Biases (W&B); auto: online if an API key is found, else offline")
    wandb_project: str = setting(os.environ.get("WANDB_PROJECT", "cory"), "W&B project")

    @property
    def rows_per_optimizer_step(self) -> int:
        return self.mini_batch_size * self.gradient_accumulation_steps

    def resolve(self, setting: str):
        """The code that a setting names."""
        known = NAMED[setting]
        name = getattr(self, setting)
        self.require(setting, name in known or ":" in name,
                     f"choose from {', '.join(known)}, or name your own as module:Name")
        return import_name(known.get(name, name))

    def require(self, name: str, holds: bool, hint: str) -> None:
        if not holds:
            raise UserError(name, getattr(self, name), hint)

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            words = get_args(f.type)
            rules = f.metadata
            self.require(f.name, not words or value in words, f"choose from {', '.join(words)}")
            types = (int, float) if f.type is float else (f.type,)
            self.require(f.name, words or type(value) in types, f"must be of type {types[-1].__name__}")
            if f.type in (int, float) and rules:
                holds = rules["min"] <= value <= rules["max"]
                low = f"at least {rules['min']}"
                if rules["above"] is not None:
                    holds = rules["above"] < value <= rules["max"]
                    low = f"above {rules['above']}"
                self.require(f.name, holds, f"must be {low} and at most {rules['max']}")
        self.require("min_response_length", self.min_response_length <= self.max_response_length,
                     f"must be at most max_response_length = {self.max_response_length}")
        rows = self.rows_per_optimizer_step
        self.require("batch_size", self.batch_size % rows == 0,
                     f"must be a multiple of mini_batch_size x gradient_accumulation_steps = {rows}")
        self.require("responses_per_query", self.batch_size % self.responses_per_query == 0,
                     f"must divide batch_size = {self.batch_size}")
        needs_template = self.system_prompt or self.chat_template_kwargs != "{}"
        self.require("chat_template", self.chat_template or not needs_template,
                     "must be true with --system_prompt or --chat_template_kwargs")
        self.require("advantage", self.advantage != "grpo" or self.kl_in == "loss" or self.init_kl_coef == 0,
                     "would also divide the KL penalty by its group's standard deviation; add --kl_in loss")


@dataclass(frozen=True)
class ImdbConfig(Config):
    reward_model: str = setting("lvwerra/distilbert-imdb", "sentiment classifier: folder or Hub name (paper: "
                                "lvwerra/distilbert-imdb)")
    min_query_length: int = setting(
        2, "minimum number of a review's first tokens that form a query (paper: 2)", min=1)
    max_query_length: int = setting(
        8, "maximum number of a review's first tokens that form a query (paper: 8)", min=1)


@dataclass(frozen=True)
class Gsm8kConfig(Config):
    task: str = setting("gsm8k", "gsm8k, or your own class, given as module:Class")
    checker: str = setting("last_number", "how an answer is read: last_number (paper), final_answer (in "
                           "\\boxed{} or after ####), or your own, given as module:function")
    one_shot: bool = setting(True, "put the paper's worked example before the question (paper: yes)")


# What the presets of small models share.
TINY = dict(batch_size=64, mini_batch_size=16, num_ppo_epochs=1, min_response_length=0, lora_rank=16,
            lr_schedule="linear", kl_penalty="k1", kl_target=0.0, eval_queries=128)


# --- the command line ---
# What may differ in a resumed run, since none of it changes what an iteration computes.
FREE_ON_RESUME = {"resume", "run_dir", "save_every", "shard", "wandb", "wandb_project"}

ABOUT = "Parentheses name a setting's source, and its value there. Defaults are those of --preset NAME."


def true_or_false(word: str) -> bool:
    return bool(["false", "true"].index(word.lower()))          # a ValueError for any other word


# By the type of a setting; any other has a choice of words.
ARGUMENTS = {
    bool: dict(type=true_or_false, metavar="true|false", nargs="?", const=True),
    int: dict(type=int, metavar="N"),
    float: dict(type=float, metavar="X"),
    str: dict(type=os.path.expanduser, metavar="NAME"),
}


def parse(config_class: type[Config], presets: dict, argv: list | None = None) -> Config:
    """The command line over a preset, or with --resume over the run's own settings. Each setting is a flag
    `--name VALUE`; for a bool, `--name` alone means true.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = ArgumentParser(usage="%(prog)s --method cory [--preset NAME] [--SETTING VALUE ...]",
                            description=ABOUT, allow_abbrev=False)
    for f in fields(config_class):
        options = ARGUMENTS.get(f.type, {"choices": get_args(f.type)})
        if f.name == "preset":
            options = {"choices": [*presets]}
        about = f.metadata.get("help", "") + " (default: %(default)s)"
        parser.add_argument(f"--{f.name}", default=f.default, help=about, **options)
    parser.set_defaults(preset=next(iter(presets)))
    parser._negative_number_matcher = re.compile(r"-\.?\d")       # also -1e-1
    # parsed twice: --preset and --resume choose the defaults of all other flags, also in --help
    given = parser.parse_args([word for word in argv if word not in ("-h", "--help")])
    chosen = presets[given.preset]
    if given.resume:
        run = load_config(Path(given.run_dir))
        run.require("run_dir", type(run) is config_class, "was started by another script")
        chosen = asdict(run)
    parser.set_defaults(**chosen)
    cfg = config_class(**vars(parser.parse_args(argv)))
    if cfg.preset == "tiny" and cfg.model != chosen["model"]:
        print(f"preset tiny has the settings of its own model, not of {cfg.model}; see --preset")
    return cfg


# --- config.json ---
def base_names(configs: dict[str, Config]) -> dict[str, str]:
    """By agent, the name of its base. Agents whose model and temperature are the same share a base."""
    names = {}
    for agent, cfg in configs.items():
        names.setdefault((cfg.model, cfg.temperature), f"base_{agent}" if names else "base")
    return {agent: names[cfg.model, cfg.temperature] for agent, cfg in configs.items()}


def to_save(cfg: Config, configs: dict[str, Config]) -> dict:
    """The settings, their class, each agent's base, and as `AGENT/SETTING` what an agent has of its own."""
    module = type(cfg).__module__.replace("__main__", script_name())
    saved = {"config_class": f"{module}:{type(cfg).__name__}", "agents": base_names(configs)} | asdict(cfg)
    saved["resume"] = False
    for agent, agent_cfg in configs.items():
        for name, value in asdict(agent_cfg).items():
            if value != getattr(cfg, name):
                saved[f"{agent}/{name}"] = value
    return saved


def read_config(run_dir: Path) -> dict:
    """config.json of a run. Settings added to the code since then have their defaults."""
    path = run_dir / "config.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    if "config_class" not in saved:
        raise UserError("run_dir", str(run_dir), "contains no run; pass the folder of one")
    return asdict(import_name(saved["config_class"])()) | saved


def load_config(run_dir: Path) -> Config:
    """The settings of a run."""
    saved = read_config(run_dir)
    config_class = import_name(saved["config_class"])
    return config_class(**{f.name: saved[f.name] for f in fields(config_class)})


def require_settings_of(run_dir: Path, cfg: Config, configs: dict, free: set) -> None:
    """Raises `UserError` where settings, apart from those in `free`, are not those of the run."""
    old = read_config(run_dir)
    new = to_save(cfg, configs)
    for name in sorted({*old, *new} - free):
        if old.get(name) != new.get(name):
            raise UserError(name, new.get(name), f"the run has {old.get(name)!r}; keep it, or start afresh")
