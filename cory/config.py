"""All settings: the dataclass is the configuration and the command line.

Nothing here imports PyTorch, so that `--help` and a mistyped flag are answered at once.
"""
import importlib
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, HelpFormatter
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

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
    "critic": {"linear": "cory.ppo.model:Critic"},
    "lr_schedule": {name: f"cory.ppo.agent:{name}" for name in ("constant", "linear", "cosine")},
    "kl_controller": {"adaptive": "cory.ppo.agent:adaptive"},
}


def find(setting: str, name: str):
    """The object `module:Name`; the module may be in the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code = importlib.import_module(module)
    except ModuleNotFoundError as error:                # any other error of the module keeps its traceback
        raise UserError(setting, name, f"{error}; name code as module:Name, without .py") from error
    if not hasattr(code, attribute):
        raise UserError(setting, name, f"{module} has no {attribute}; name code as module:Name, without .py")
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
    accepted = (int, float) if kind is float else kind
    return isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)


def words_of(kind: type) -> tuple[str, ...]:
    """The values of a setting that has one of several."""
    return get_args(kind) if get_origin(kind) is Literal else ()


# A setting that each agent has, and in which agents may differ, by a method's `agent_config`.
each = partial(setting, per_agent=True)


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
    model: str = each("gpt2-large", "pretrained language model: folder or Hub name, with @REVISION if needed "
                      "(paper: gpt2-large, Llama-2-7b-chat)")
    dataset: str = setting("stanfordnlp/imdb", "data to make queries from: folder, .jsonl file or Hub name "
                           "(paper: IMDB, GSM8K)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a CUDA GPU if there is one, else the CPU")
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = setting(
        "auto", "precision of matrix products; auto: bfloat16 on a GPU that supports it, else float32")
    seed: int = setting(0, "random seed, for queries, length limits, sampling, mini-batches and adapters",
                        min=0)
    iterations: int = setting(100, "number of iterations, each a rollout and an update (paper: 100)", min=1)
    # memory
    lora_rank: int = each(
        0, "rank of LoRA adapters on a frozen base; 0: train all weights (paper: not stated)", min=0)
    load_in_4bit: bool = setting(
        False, "load the frozen base in 4 bits, with bitsandbytes (paper: for Llama-2)")
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass instead of storing them")
    shard: bool = setting(False, "divide layers and Adam's moments among the processes of torchrun, by FSDP2")
    # the two agents
    role_exchange_every: int = setting(
        5, "T_REx: iterations between exchanges of roles; 0: never (paper: 5)", min=0)
    knowledge_transfer: bool = setting(True, "the observer sees the pioneer's response (paper: yes)")
    partner_reward: float = setting(
        1.0, "weight of the partner's task reward in what an agent is trained on; may be negative (paper: 1)")
    share_weights: bool = setting(False, "one model plays both roles (paper: an option, to save memory)")
    reset_on_exchange: bool = setting(
        False, "reset Adam's moments and eta at each exchange of roles (paper: no; released code: yes)")
    # rollout
    batch_size: int = setting(256, "responses per iteration and role (paper: IMDB 256, GSM8K 32)", min=1)
    responses_per_query: int = setting(
        1, "k, the number of responses to each query; a batch has batch_size / k queries (paper: 1)", min=1)
    min_response_length: int = setting(
        4, "each iteration draws a limit on the length of its responses, in tokens, between this and the "
        "maximum; 0: always the maximum (released code for IMDB: 4)", min=0)
    max_response_length: int = setting(
        15, "maximum length of responses, in tokens (paper: not stated; released code for IMDB: 15)", min=1)
    temperature: float = setting(
        1.0, "divides the logits, in sampling and in all log-probabilities alike (paper: 1)", min=ABOVE_0)
    chat_template: bool = setting(
        False, "put each prompt into the model's chat template, as a user's message")
    # the update
    advantage: str = each("gae", "advantage estimator: gae (paper), rloo, grpo, dr_grpo, reinforce, or your "
                          "own, given as module:function")
    critic: str = each("linear", "critic: linear (a value head on the policy's last hidden state; paper), or "
                       "your own, given as module:Class")
    loss: str = each("ppo", "policy loss: ppo (paper), or your own, given as module:function")
    loss_mean: Literal["tokens", "responses", "constant"] = each(
        "tokens", "average the loss over tokens (TRL), over each response's tokens and then over responses "
        "(GRPO), or with a constant as each response's length (Dr. GRPO)")
    max_approx_kl: float = each(
        0.0, "end an update once the policy has moved this far, in nats per token; 0: never (paper)", min=0)
    learning_rate: float = each(1.41e-5, "learning rate of the policy (paper: IMDB 1.41e-5; GSM8K 1e-5 for "
                                "PPO, 1e-4 for CORY)", min=ABOVE_0)
    critic_learning_rate: float = each(
        0.0, "learning rate of the critic; 0: the same as the policy's (paper)", min=0)
    lr_schedule: str = each("constant", "learning-rate schedule: constant (paper), linear, cosine, or your "
                            "own, given as module:function")
    mini_batch_size: int = each(
        256, "maximum number of responses in a backward pass (paper: IMDB 256, GSM8K 2)", min=1)
    gradient_accumulation_steps: int = each(
        1, "backward passes per Adam step (paper: IMDB 1, GSM8K 16)", min=1)
    num_ppo_epochs: int = each(4, "passes over a rollout in its update (paper: 4)", min=1)
    init_kl_coef: float = each(0.3, "initial value of eta, the weight of the KL penalty, in reward per nat "
                               "(paper: IMDB 0.3, GSM8K 0.01)", min=0)
    kl_penalty: Literal["full", "k1"] = each(
        "full", "estimate of the KL: exact (full; paper, eq. 2) or the log-ratio of the sampled token (k1)")
    kl_in: Literal["reward", "loss"] = each("reward", "where the KL penalty enters: subtracted from token "
                                            "rewards (paper), or added to the loss, as k3 (GRPO)")
    kl_controller: str = each(
        "adaptive", "how eta changes: adaptive (TRL), or your own, given as module:function")
    kl_target: float = each(
        6.0, "the KL that eta is adapted to reach, in nats per response; 0: constant eta (TRL: 6)", min=0)
    kl_horizon: float = each(
        10_000.0, "number of responses over which eta adapts (TRL: 10000)", min=ABOVE_0)
    gamma: float = each(1.0, "discount factor per token (paper: 1)", min=0, max=1)
    lam: float = each(0.95, "lambda of GAE (paper: 0.95)", min=0, max=1)
    cliprange: float = each(0.2, "clip range of the policy ratio (paper: 0.2)", min=ABOVE_0)
    cliprange_high: float = each(
        0.0, "upper clip range of the policy ratio, as in DAPO; 0: the same as cliprange (paper)", min=0)
    cliprange_value: float = each(0.2, "clip range of values, in units of reward (paper: 0.2)", min=ABOVE_0)
    vf_coef: float = each(0.1, "beta, the weight of the value loss (paper: 0.1)", min=0)
    max_grad_norm: float = each(0.0, "norm to which the gradient is clipped; 0: no clipping (paper)", min=0)
    # evaluation, saving, logging
    eval_split: Literal["test", "validation"] = setting(
        "test", "held-out split to evaluate on; choose settings on validation")
    eval_queries: int = setting(256, "held-out queries per evaluation", min=1)
    eval_samples: int = setting(1, "responses to each held-out query per evaluation", min=1)
    eval_every: int = setting(
        20, "iterations between evaluations; 0: evaluate only before and after training", min=0)
    save_every: int = setting(
        50, "save a checkpoint after the first iteration and then every N; 0: no checkpoints", min=0)
    save_best: bool = setting(False, "also write best/: the models whose held-out combined reward, which is "
                              "reward minus init_kl_coef times KL, was the highest")
    run_dir: str = setting("", "folder of this run; if empty, a new one under runs/")
    resume: bool = setting(False, "continue the run in run_dir from its last checkpoint")
    wandb: Literal["auto", "online", "offline", "disabled"] = setting(
        "auto", "logging to Weights & Biases (W&B); auto: online if an API key is found, else offline")
    wandb_project: str = setting(os.environ.get("WANDB_PROJECT", "cory"), "W&B project")
    wandb_group: str = setting(os.environ.get("WANDB_RUN_GROUP", ""), "W&B group; if empty, it is made of "
                               "task, method, preset and the settings that differ from the preset")

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

    def require_valid(self, name: str, kind: type, low: float, high: float) -> None:
        """Raises `UserError` unless a setting has its declared type and one of its words, or is in range."""
        value, require = getattr(self, name), self.require
        if words := words_of(kind):
            require(name, value in words, f"choose from {', '.join(words)}")
            return
        require(name, kind in (bool, int, float, str),
                f"is declared as {kind}; a setting is bool, int, float, str or a Literal of words")
        require(name, has_type(value, kind), f"must be of type {kind.__name__}")
        if known := NAMED.get(name):
            require(name, value in known or ":" in value,
                    f"choose from {', '.join(known)}, or name your own as module:Name")
        if kind in (int, float):
            require(name, value >= low, "must be above 0" if low == ABOVE_0 else f"must be {low} or more")
            require(name, value <= high, f"must be {high} or less")

    def __post_init__(self):
        kinds, require = get_type_hints(type(self)), self.require
        for f in fields(self):
            if isinstance(getattr(self, f.name), Path):
                object.__setattr__(self, f.name, str(getattr(self, f.name)))
            low, high = f.metadata.get("min", -LARGEST), f.metadata.get("max", LARGEST)
            self.require_valid(f.name, kinds[f.name], low, high)
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
            ("a critic, as with --advantage gae", critic,
             "critic lam vf_coef cliprange_value critic_learning_rate"),
            ("--advantage gae or reinforce", critic or self.advantage == "reinforce", "gamma"),
            ("--vf_coef above 0", self.vf_coef, "cliprange_value critic_learning_rate")]
        return {name: what for what, holds, names in needs if not holds for name in names.split()}


@dataclass(frozen=True)
class ImdbConfig(Config):
    reward_model: str = setting("lvwerra/distilbert-imdb", "sentiment classifier: folder or Hub name (paper: "
                                "lvwerra/distilbert-imdb)")
    min_query_length: int = setting(
        2, "minimum number of a review's first tokens that form a query (paper: 2)", min=1)
    max_query_length: int = setting(
        8, "maximum number of a review's first tokens that form a query (paper: 8)", min=1)

    def __post_init__(self):
        super().__post_init__()
        self.require("min_query_length", self.min_query_length <= self.max_query_length,
                     f"must not exceed max_query_length = {self.max_query_length}")


@dataclass(frozen=True)
class Gsm8kConfig(Config):
    task: str = setting("gsm8k", "gsm8k, or your own class, given as module:Class")
    checker: str = setting("last_number", "how an answer is read: last_number (paper), strict (the number "
                           "after ####), or your own, given as module:function")
    one_shot: bool = setting(True, "put the paper's worked example before the question (paper: yes)")


# Shared by the `tiny` presets of both tasks; tuned for PPO on validation queries.
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

# The groups of --help, by their first setting. Settings of your own come after a task's.
SECTIONS = {"task": "what to run", "lora_rank": "memory", "role_exchange_every": "the two agents",
            "batch_size": "rollout", "advantage": "the update",
            "eval_split": "evaluation, saving, logging", "reward_model": "the task", "checker": "the task"}
ABOUT = """Parentheses name the source of a setting, and its value there: the paper on CORY, the code that its
authors released, or TRL, the library that their code uses. Defaults are those of the preset: add --preset
NAME to see another one's."""


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
                           formatter_class=partial(HelpFormatter, max_help_position=32))
    types, hints = {bool: true_or_false, int: int, float: float}, get_type_hints(config_class)
    metavars, section = {bool: "true|false", int: "N", float: "X", str: "NAME"}, parser
    for f in fields(config_class):
        if f.name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[f.name])
        kind = hints[f.name]
        words = presets if f.name == "preset" else words_of(kind) or None
        alone = {"nargs": "?", "const": True} if kind is bool else {}
        section.add_argument(f"--{f.name}", type=types.get(kind, os.path.expanduser), choices=words,
                             metavar=None if words else metavars.get(kind),
                             default=f.default, **alone,
                             help=f.metadata.get("help", "") + " (default: %(default)s)" * (f.default != ""))
    parser.set_defaults(preset=next(iter(presets)))
    # a first time for --preset and --resume, whose settings are what --help shows and other flags change
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
def config_json(cfg: Config, bases: dict[str, str], configs: dict[str, Config], earlier: str = "") -> str:
    """The settings, their class, and by agent, in order, the name in logs of its base; the settings that only
    this agent has; and the commit of this code, after those of the run before it was resumed.
    """
    module = type(cfg).__module__.replace("__main__", Path(sys.argv[0]).stem)       # of a script, its name
    commits = dict.fromkeys(filter(None, [*earlier.split(", "), commit()]))
    about = {"config_class": f"{module}:{type(cfg).__name__}", "agents": bases,
             "agent_settings": own_settings(cfg, configs), "commit": ", ".join(commits)}
    return json.dumps(about | asdict(cfg), indent=1) + "\n"


def own_settings(cfg: Config, configs: dict[str, Config]) -> dict[str, dict]:
    """{agent: {setting: value}} of the values that are not those of `cfg`."""
    return {name: {setting: x for setting, x in asdict(own).items() if x != getattr(cfg, setting)}
            for name, own in configs.items() if own != cfg}


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
    return asdict(find("config_class", config_class)()) | {"agent_settings": {}, "commit": ""} | saved


def load_config(run_dir: Path, config_class: type[Config] | None = None) -> Config:
    """The settings of a run. Raises `UserError` if they are not of this class."""
    saved = read_config(run_dir)
    own_class = find("config_class", saved["config_class"])
    # by name: a class in a script that runs is another than in its module
    if config_class and config_class.__name__ != own_class.__name__:
        raise UserError("run_dir", str(run_dir), f"holds a run of {saved['task']}; use its own script")
    names = [f.name for f in fields(own_class)]
    for name in saved.keys() - {*names, "config_class", "agents", "agent_settings", "commit"}:
        raise UserError(name, saved[name], f"is no setting; edit {run_dir}/config.json")
    return own_class(**{name: saved[name] for name in names})


def require_settings_of(run_dir: Path, cfg: Config, configs: dict[str, Config]) -> None:
    """Raises `UserError` where a run that is resumed would go on with other settings."""
    for name, old in asdict(load_config(run_dir, type(cfg))).items():
        cfg.require(name, name in FREE_ON_RESUME or getattr(cfg, name) == old,
                    f"the run has {old!r}; leave this setting out, or start afresh")
    before = read_config(run_dir)["agent_settings"]
    for agent, own in configs.items():
        for name, old in (asdict(cfg) | before.get(agent, {})).items():
            own.require(name, name in FREE_ON_RESUME or getattr(own, name) == old,
                        f"the {agent} of the run has {old!r}; undo that edit, or start afresh")
