"""All settings: the dataclass is the configuration and the command line.

Nothing here imports PyTorch, so that `--help` and a mistyped flag are answered at once.
"""
import importlib
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from cory.errors import UserError, reading

ASSETS = Path(__file__).parent / "assets"
BUNDLED = "bundled:"            # prefix of models and data in ASSETS: a run does not depend on where that is

# Settings that name code: their short names, and where these are. Your own is named as `module:Name`.
NAMED = {
    "task": {"imdb": "cory.tasks.imdb:Imdb", "gsm8k": "cory.tasks.gsm8k:Gsm8k"},
    "method": {"ppo": "cory.train:Ppo", "cory": "cory.train:Cory"},
    "advantage": {name: f"cory.ppo.advantages:{name}"
                  for name in ("gae", "rloo", "grpo", "dr_grpo", "reinforce")},
    "checker": {name: f"cory.tasks.gsm8k:{name}" for name in ("last_number", "strict")},
    "loss": {"ppo": "cory.ppo.formulas:policy_loss"},
    "lr_schedule": {name: f"cory.ppo.agent:{name}" for name in ("constant", "linear", "cosine")},
    "kl_controller": {"adaptive": "cory.ppo.agent:adaptive"},
}

def find(field: str, name: str):
    """The object `module:Name`; the module may be in the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code = importlib.import_module(module)
    except ModuleNotFoundError as error:                # any other error of the module keeps its traceback
        raise UserError(field, name, f"{error}; name code as module:Name, without .py") from error
    if not hasattr(code, attribute):
        raise UserError(field, name, f"{module} has no {attribute}; name code as module:Name, without .py")
    return getattr(code, attribute)


def short_name(name: str) -> str:
    """What logs and legends show of `module:Name`: its last part."""
    return name.rpartition(":")[2]


LARGEST = 2**31 - 1     # value that a numeric setting accepts
ABOVE_0 = 1e-30         # the minimum of settings that must be above 0


def located(name: str) -> str:
    """The folder, file or Hub name that a setting names: `bundled:imdb/lm` is the folder ASSETS/imdb/lm."""
    return str(ASSETS / name.removeprefix(BUNDLED)) if name.startswith(BUNDLED) else name


def setting(default, help: str, min: float = -LARGEST, max: float = LARGEST, per_agent: bool = False):
    """A field of the settings: its help, a number's range, and whether agents may differ in it."""
    return field(default=default, metadata={"help": help, "min": min, "max": max, "per_agent": per_agent})


def has_type(value, kind: type) -> bool:
    """Whether a setting of this type may have this value: a float may be 1, an int neither 1.0 nor True."""
    if kind not in (bool, int, float, str):                 # one of several words, or a type of your own
        return True
    accepted = (int, float) if kind is float else kind
    return isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)


# A setting that each agent has, and in which agents may differ, by a method's `agent_config`.
each = partial(setting, per_agent=True)


@dataclass(frozen=True)
class Config:
    """The shared settings; defaults are the paper's for IMDB, and presets change some. Frozen: agents
    share it, and a resumed run must find it unchanged. What changes in training belongs in a `memory`.
    """
    # what runs
    task: str = setting("imdb", "imdb, or a class of yours as module:Class")
    method: str = setting("cory", "ppo (one agent), cory (two), or a class of yours as module:Class")
    preset: str = setting("custom", "named settings; other flags override them")
    model: str = each("gpt2-large", "causal LM: folder or Hub name, optionally @REVISION (paper)")
    dataset: str = setting("stanfordnlp/imdb", "queries: folder, .jsonl file or Hub name (paper)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: CUDA if there is one")
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = setting(
        "auto", "precision of matrix products; auto: bfloat16 on a GPU that supports it, else float32")
    seed: int = setting(0, "seeds queries, lengths, sampling, mini-batches and adapters", min=0)
    iterations: int = setting(100, "rollouts, each followed by an update (paper: 100)", min=1)
    # memory
    lora_rank: int = each(0, "LoRA rank, on a frozen base; 0: full fine-tuning (paper: unstated)", min=0)
    load_in_4bit: bool = setting(False, "load the frozen base in 4 bits, with bitsandbytes (paper: Llama-2)")
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass")
    shard: bool = setting(False, "shard layers and Adam's moments across torchrun's processes: FSDP2")
    # the agents
    role_exchange_every: int = setting(5, "T_REx, iterations between exchanges; 0: never (paper: 5)", min=0)
    knowledge_transfer: bool = setting(True, "the observer sees the pioneer's response (paper: yes)")
    partner_reward: float = setting(1.0, "weight on the partner's task reward (paper: 1); may be negative")
    share_weights: bool = setting(False, "one model plays both roles (paper: mentioned, to save memory)")
    reset_on_exchange: bool = setting(False, "exchanges reset Adam and eta (paper: no; released code: yes)")
    # rollout
    batch_size: int = setting(256, "responses per iteration and role (paper: IMDB 256, GSM8K 32)", min=1)
    responses_per_query: int = setting(1, "k; a batch has batch_size / k queries (paper: 1)", min=1)
    min_response_length: int = setting(
        4, "tokens; least value of an iteration's random limit; 0: the maximum (released code, IMDB: 4)",
        min=0)
    max_response_length: int = setting(15, "tokens (released code, IMDB: 15)", min=1)
    temperature: float = setting(1.0, "divides all logits, not only in sampling (paper: 1)", min=ABOVE_0)
    chat_template: bool = setting(False, "prompts are user messages in the model's chat template")
    # the update
    advantage: str = each("gae", "gae (paper), rloo, grpo, dr_grpo, reinforce, or yours as module:function")
    loss: str = each("ppo", "policy loss: ppo (paper), or yours as module:function")
    loss_mean: Literal["tokens", "responses", "constant"] = each(
        "tokens", "mean over tokens (TRL), responses (GRPO), or constant lengths (Dr. GRPO)")
    max_approx_kl: float = each(
        0.0, "an update ends where the policy has moved so far, nats per token; 0: never (paper)", min=0)
    learning_rate: float = each(1.41e-5, "Adam's step size (paper: IMDB 1.41e-5, GSM8K 1e-5)", min=ABOVE_0)
    critic_learning_rate: float = each(0.0, "for the value head; 0: same as learning_rate (paper)", min=0)
    lr_schedule: str = each("constant", "constant (paper), linear, cosine, or yours as module:function")
    mini_batch_size: int = each(256, "maximum rows per backward pass (paper: IMDB 256, GSM8K 2)", min=1)
    gradient_accumulation_steps: int = each(
        1, "backward passes per Adam step (paper: IMDB 1, GSM8K 16)", min=1)
    num_ppo_epochs: int = each(4, "passes over each rollout (paper: 4)", min=1)
    init_kl_coef: float = each(
        0.3, "eta, initial KL coefficient, per nat (paper: IMDB 0.3, GSM8K 0.01)", min=0)
    kl_penalty: Literal["full", "k1"] = each("full", "full: exact KL (paper, eq. 2); k1: sampled log-ratio")
    kl_in: Literal["reward", "loss"] = each("reward", "rewards minus KL (paper), or loss plus k3 (GRPO)")
    kl_controller: str = each("adaptive", "how eta moves: adaptive (TRL), or yours as module:function")
    kl_target: float = each(6.0, "target KL, nats per response; 0: constant eta (TRL: 6)", min=0)
    kl_horizon: float = each(10_000.0, "responses over which eta adapts (TRL: 10000)", min=ABOVE_0)
    gamma: float = each(1.0, "discount per token (paper: 1)", min=0, max=1)
    lam: float = each(0.95, "GAE lambda (paper: 0.95)", min=0, max=1)
    cliprange: float = each(0.2, "policy ratio clip (paper: 0.2)", min=ABOVE_0)
    cliprange_high: float = each(0.0, "the ratio's upper clip; 0: cliprange (paper), above it: DAPO", min=0)
    cliprange_value: float = each(0.2, "value clip, in units of reward (paper: 0.2)", min=ABOVE_0)
    vf_coef: float = each(0.1, "beta, weight of the value loss (paper: 0.1)", min=0)
    max_grad_norm: float = each(0.0, "clip the gradient's norm to this; 0: off (paper: off)", min=0)
    # evaluation, saving, logging
    eval_split: Literal["test", "validation"] = setting("test", "validation: to choose settings by")
    eval_queries: int = setting(256, "held-out queries per evaluation", min=1)
    eval_samples: int = setting(1, "responses to each held-out query per evaluation", min=1)
    eval_every: int = setting(20, "iterations between evaluations; 0: at start and end", min=0)
    save_every: int = setting(50, "iterations between checkpoints, after the first; 0: none", min=0)
    save_best: bool = setting(False, "write best/, the models of the highest held-out combined reward")
    run_dir: str = setting("", "folder of this run; a new one under runs/ if empty")
    resume: bool = setting(False, "continue the run in run_dir from its last checkpoint")
    wandb: Literal["auto", "online", "offline", "disabled"] = setting(
        "auto", "auto: online if a W&B key is found, else offline")
    wandb_project: str = setting(os.environ.get("WANDB_PROJECT", "cory"), "W&B project")
    wandb_group: str = setting(os.environ.get("WANDB_RUN_GROUP", ""), "W&B group; if empty: task, method, "
                               "preset and the settings that differ from the preset")

    @property
    def rows_per_optimizer_step(self) -> int:
        return self.mini_batch_size * self.gradient_accumulation_steps

    def find(self, setting: str):
        """The code that a setting names. Raises `UserError`."""
        name = getattr(self, setting)
        return find(setting, NAMED[setting].get(name, name))

    def require(self, name: str, holds: bool, hint: str) -> None:
        if not holds:
            raise UserError(name, getattr(self, name), hint)

    def __post_init__(self):
        hints, require = get_type_hints(type(self)), self.require
        for f in fields(self):
            value, kind = getattr(self, f.name), hints[f.name]
            if isinstance(value, Path):
                object.__setattr__(self, f.name, value := str(value))
            require(f.name, has_type(value, kind), f"must be of type {getattr(kind, '__name__', kind)}")
            own = f.name in NAMED and ":" in value
            words = () if own else NAMED.get(f.name) or get_args(kind)
            code = ", or name your own as module:Name" if f.name in NAMED else ""
            require(f.name, not words or value in words, f"choose from {', '.join(words)}{code}")
            if kind in (int, float):
                low, high = f.metadata.get("min", value), f.metadata.get("max", value)
                least = "above 0" if low == ABOVE_0 else f"{low} or more"
                require(f.name, value >= low, f"must be {least}")
                require(f.name, value <= high, f"must be {high} or less")
        experiment = {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}.get(self.task, Config)
        require("task", isinstance(self, experiment), f"has its own script, train_{self.task}.py")
        rows = self.rows_per_optimizer_step
        require("batch_size", self.batch_size % rows == 0,
                f"must be a multiple of mini_batch_size x gradient_accumulation_steps = {rows}")
        require("responses_per_query", self.batch_size % self.responses_per_query == 0,
                f"must divide batch_size = {self.batch_size}")
        require("min_response_length", self.min_response_length <= self.max_response_length,
                f"must not exceed max_response_length = {self.max_response_length}")
        require("advantage", self.advantage != "grpo" or self.kl_in == "loss" or self.init_kl_coef == 0,
                "would also divide the KL penalty by its group's standard deviation; add --kl_in loss")
        require("save_best", not self.save_best or self.eval_split == "validation",
                "would choose models by the queries that they are reported on; add --eval_split validation")
        require("shard", not (self.shard and self.load_in_4bit),
                "4 bits cannot be divided among processes; add --load_in_4bit false")
        require("load_in_4bit", self.lora_rank > 0 or not self.load_in_4bit,
                "trains nothing by itself: 4-bit weights are frozen; add --lora_rank 16")

    def without_effect(self) -> dict[str, str]:
        """{setting: what it needs}, for those without effect. Code of your own may read all of them."""
        own_method, own_controller = ":" in self.method, ":" in self.kl_controller
        critic = ":" in self.advantage or self.advantage == "gae"
        needs = [
            ("a method of two agents", self.method != "ppo",
             "role_exchange_every knowledge_transfer partner_reward share_weights reset_on_exchange"),
            ("--role_exchange_every above 0", own_method or self.role_exchange_every, "reset_on_exchange"),
            ("--share_weights false", own_method or self.reset_on_exchange or not self.share_weights,
             "role_exchange_every"),
            ("--kl_target above 0", own_controller or self.kl_target, "kl_horizon"),
            ("--init_kl_coef above 0", own_controller or self.init_kl_coef or not self.kl_target,
             "kl_target"),
            ("a critic, as with --advantage gae", critic, "lam vf_coef cliprange_value critic_learning_rate"),
            ("--advantage gae or reinforce", critic or self.advantage == "reinforce", "gamma"),
            ("--vf_coef above 0", self.vf_coef, "cliprange_value critic_learning_rate")]
        return {name: what for what, holds, names in needs if not holds for name in names.split()}


@dataclass(frozen=True)
class ImdbConfig(Config):
    reward_model: str = setting("lvwerra/distilbert-imdb", "sentiment classifier: folder or Hub name (paper)")
    min_query_length: int = setting(2, "fewest tokens of a review used as a query (paper: 2)", min=1)
    max_query_length: int = setting(8, "most tokens of a review used as a query (paper: 8)", min=1)

    def __post_init__(self):
        super().__post_init__()
        self.require("min_query_length", self.min_query_length <= self.max_query_length,
                     f"must not exceed max_query_length = {self.max_query_length}")


@dataclass(frozen=True)
class Gsm8kConfig(Config):
    task: str = setting("gsm8k", "gsm8k, or a class of yours as module:Class")
    checker: str = setting("last_number", "last_number (paper), strict, or yours as module:function")
    one_shot: bool = setting(True, "put the paper's worked example before the question (paper: yes)")


# Shared by both tasks' `tiny` presets; tuned for PPO on validation queries.
TINY = dict(batch_size=128, mini_batch_size=32, num_ppo_epochs=1, min_response_length=0, lora_rank=16,
            lr_schedule="linear", kl_penalty="k1", kl_target=0.0, eval_queries=128, eval_samples=2)


# What may differ between runs that are compared: it changes random numbers at most.
FREE = {"seed", "device", "resume", "run_dir", "save_every", "shard", "wandb", "wandb_project", "wandb_group"}


def default_group(cfg: Config, preset: dict) -> str:
    """W&B's group: task, method, preset, and each setting that differs from the preset, but for `FREE` ones.
    W&B allows 128 characters; the end of a longer name is replaced by a hash.
    """
    usual = asdict(type(cfg)()) | preset
    differ = {name: value for name, value in asdict(cfg).items() if value != usual[name]}
    what = [short_name(cfg.task), short_name(cfg.method), cfg.preset]
    what += [f"{name}_{json.dumps(value)}".replace('"', "") for name, value in differ.items()
             if name not in FREE | {"task", "method", "preset"}]
    group = "-".join(what)
    return group if len(group) <= 128 else f"{group[:119]}-{sha256(group.encode()).hexdigest()[:8]}"


# --- the command line ---
# What may differ in a resumed run, since none of it changes what an iteration computes. Models and data may
# have moved: their content is compared.
FREE_ON_RESUME = {"resume", "run_dir", "iterations", "save_every", "shard", "wandb", "wandb_project",
                  "wandb_group", "model", "dataset", "reward_model"}

# The groups of --help, by their first setting. One's own settings come after a task's.
SECTIONS = {"task": "what runs", "lora_rank": "memory", "role_exchange_every": "the agents",
            "batch_size": "rollout", "advantage": "the update",
            "eval_split": "evaluation, saving, logging", "reward_model": "the task", "checker": "the task"}
ABOUT = """Parentheses say where a setting is from, and its value there: the paper, the code that its authors
released, or TRL, the library which that code uses. Settings without them are ours."""


class OneLineParser(ArgumentParser):
    def __init__(self, **named):
        super().__init__(**named)
        self._negative_number_matcher = re.compile(r"-\.?\d")       # as in Python 3.14: -1e-1 is no flag

    def error(self, message):
        raise UserError(f"{message} (--help lists every flag)")


def true_or_false(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        hint = "; a run's folder goes after --run_dir" if "/" in word else ""
        raise ArgumentTypeError(f"{word!r} is neither true nor false{hint}")
    return word.lower() == "true"


def parse(config_class: type[Config], presets: dict[str, dict], argv: list[str] | None = None) -> Config:
    """The command line over a preset, or with --resume over the run's own settings; says which flags have no
    effect. Each setting is a flag `--name VALUE`; for a bool, `--name` alone means true.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(usage="%(prog)s --method cory [--preset NAME] [--SETTING VALUE ...]",
                           description=ABOUT, allow_abbrev=False,
                           formatter_class=partial(ArgumentDefaultsHelpFormatter, max_help_position=32))
    types, hints = {bool: true_or_false, int: int, float: float}, get_type_hints(config_class)
    metavars, section = {bool: "true|false", int: "N", float: "X", str: "NAME"}, parser
    for f in fields(config_class):
        if f.name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[f.name])
        kind = hints[f.name]
        words = presets if f.name == "preset" else get_args(kind) or None
        alone = {"nargs": "?", "const": True} if kind is bool else {}
        section.add_argument(f"--{f.name}", type=types.get(kind, os.path.expanduser), choices=words,
                             metavar=None if words else metavars.get(kind),
                             default=f.default, help=f.metadata.get("help"), **alone)
    parser.set_defaults(preset=next(iter(presets)))
    given = parser.parse_args([word for word in argv if word not in ("-h", "--help")])
    if given.resume:
        if not given.run_dir:
            parser.error("--resume needs --run_dir")
        saved = load_config(Path(given.run_dir), config_class)
    parser.set_defaults(**asdict(saved) if given.resume else presets[given.preset])
    config = config_class(**vars(parser.parse_args(argv)))
    for name, needs in config.without_effect().items():
        changed = getattr(config, name) != parser.get_default(name)
        if changed and os.environ.get("RANK", "0") == "0":
            print(f"--{name} has no effect here: it needs {needs}", file=sys.stderr)
    group = config.wandb_group or default_group(config, presets.get(config.preset, {}))
    return replace(config, wandb_group=group)


# --- config.json ---
def config_json(cfg: Config, bases: dict[str, str]) -> str:
    """The settings, their class, and the name in logs of each agent's base, by agent, in order."""
    module = type(cfg).__module__.replace("__main__", Path(sys.argv[0]).stem)       # of a script, its name
    about = {"config_class": f"{module}:{type(cfg).__name__}", "agents": bases, "commit": commit()}
    return json.dumps(about | asdict(cfg), indent=1) + "\n"


def commit() -> str:
    """The commit of this code, with `-dirty` where files have been changed since; "" outside of a clone."""
    ask = ["git", "-C", str(ASSETS), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    with suppress(OSError):                                 # no git
        return subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    return ""


def read_config(run_dir: Path) -> dict:
    """config.json of a run. Settings added to the code since then have their defaults."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "contains no run (no config.json); pass the folder of one")
    with reading(path):
        saved = json.loads(path.read_text(encoding="utf-8-sig"))
        config_class = saved["config_class"]
    return asdict(find("config_class", config_class)()) | saved


def load_config(run_dir: Path, config_class: type[Config] | None = None) -> Config:
    """The settings of a run. Raises `UserError` if they are not of this class."""
    saved = read_config(run_dir)
    own_class = find("config_class", saved["config_class"])
    # by name: a class in a script that runs is another than in its module
    if config_class and config_class.__name__ != own_class.__name__:
        raise UserError("run_dir", str(run_dir), f"holds a run of {saved['task']}; use its own script")
    names = [f.name for f in fields(own_class)]
    for name in saved.keys() - {*names, "config_class", "agents", "commit"}:
        raise UserError(name, saved[name], f"is no setting; edit {run_dir}/config.json")
    return own_class(**{name: saved[name] for name in names})


def require_settings_of(run_dir: Path, cfg: Config) -> None:
    """Raises `UserError` where a run that is resumed would go on with other settings."""
    for name, old in asdict(load_config(run_dir, type(cfg))).items():
        cfg.require(name, name in FREE_ON_RESUME or getattr(cfg, name) == old,
                    f"the run has {old!r}; leave this setting out, or start afresh")
