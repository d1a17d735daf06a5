"""All settings. The dataclass is the configuration and the command line; presets hold the paper's tables.

Nothing here imports PyTorch, so that `--help` and a bad flag are answered at once.
"""
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from cory.errors import UserError
from cory.names import unknown

ASSETS, EMBEDDED = Path(__file__).parent / "assets", "embedded:"      # embedded:imdb/lm is ASSETS/imdb/lm

# Short names of what a setting may name; a user's own goes by `module:Name` (see cory/names.py).
TASKS = {"imdb": "cory.tasks.imdb:Imdb", "gsm8k": "cory.tasks.gsm8k:Gsm8k"}
METHODS = {"ppo": "cory.train:train_ppo", "cory": "cory.train:train_cory"}
ADVANTAGES = {name: f"cory.ppo.advantages:{name}" for name in ("gae", "rloo", "grpo", "reinforce")}
CHECKERS = {name: f"cory.tasks.answers:{name}" for name in ("last_number", "strict")}
LR_SCHEDULES = {name: f"cory.ppo.formulas:{name}" for name in ("constant", "linear", "cosine")}
NAMED = {"task": TASKS, "method": METHODS, "advantage": ADVANTAGES, "checker": CHECKERS,
         "lr_schedule": LR_SCHEDULES}


# What an agent may have for itself; all else is the same for the whole run.
PER_AGENT = {"model", "lora_rank", "lora_alpha", "lora_targets", "advantage", "whiten_advantages",
             "learning_rate", "critic_learning_rate", "lr_schedule", "warmup_iterations", "mini_batch_size",
             "gradient_accumulation_steps", "num_ppo_epochs", "init_kl_coef", "kl_penalty", "kl_in",
             "adap_kl_ctrl", "kl_target", "kl_horizon", "gamma", "lam", "cliprange", "cliprange_value",
             "vf_coef", "ent_coef", "max_grad_norm", "sampling_temperature", "top_p", "importance_cap"}


class Precision(NamedTuple):
    """What matrix products are computed in: those of the transformer's body, and those of its head."""
    body: str = "float32"
    head: str = "float32"


FLOAT32 = Precision()
ABOVE_0 = 1e-30         # the least of what must be above 0


def setting(default, help: str, least: float = -inf, most: float = inf):
    """A field of settings: what `--help` says of it, and the least and the most that a number may be."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass
class Config:
    """Settings shared by the experiments: a class's defaults are the paper's, a preset changes some."""
    # what runs
    task: str = setting("imdb", "imdb, gsm8k, or a class of yours as module:Class (ours)")
    method: str = setting("cory", "ppo (one agent), cory (two), or a loop of yours as module:function (ours)")
    preset: str = setting("tiny", "named settings; every other flag given overrides them (ours)")
    model: str = setting("gpt2-large", "causal LM of agents and reference: folder or Hub name (paper)")
    dataset: str = setting("stanfordnlp/imdb", "queries: folder, .jsonl file or Hub name (paper)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA when there is one (ours)")
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = setting("auto", "products of the transformer's "
        "body, and what a frozen base is kept in. auto: bfloat16 on a GPU that has it, else float32 (ours)")
    head_precision: Literal["auto", "float32", "tf32", "bfloat16"] = setting("auto", "inputs of the head's "
        "products. auto: float32; under bfloat16 tf32 on a GPU, bfloat16 on a CPU that has it (ours)")
    cpu_matmul: Literal["auto", "pytorch", "onednn"] = setting("auto",
        "library of a CPU's products. auto: onednn on AMD processors with AVX-512, else PyTorch's (ours)")
    seed: int = setting(0, "seeds queries, lengths, sampling and mini-batches; below 2^31 (ours)", least=0)
    iterations: int = setting(100, "rollout and update rounds (paper: 100)", least=1)
    # LoRA: two agents, one base
    lora: bool = setting(False, "adapters and a value head per agent on one frozen base (paper: not stated)")
    lora_rank: int = setting(16, "rank r of each adapter's matrices (ours)", least=1)
    lora_alpha: float = setting(32.0, "adapters are scaled by lora_alpha / lora_rank (ours)", least=ABOVE_0)
    lora_targets: str = setting("all-linear", "modules with an adapter, separated by commas (ours)")
    load_in_4bit: bool = setting(False, "a frozen base in 4 bits, by bitsandbytes (paper: Llama-2)")
    shard: bool = setting(False, "divide layers and Adam's moments among torchrun's processes (ours)")
    # the agents
    role_exchange_every: int = setting(5, "T_REx, iterations between exchanges; 0: never (paper: 5)", least=0)
    knowledge_transfer: bool = setting(True, "the observer sees the pioneer's response (paper: yes)")
    partner_reward: float = setting(1.0, "weight on the partner's task reward (paper: 1); may be negative")
    partner_term: Literal["sampled", "sampled_to_pioneer", "critic"] = setting("sampled",
        "what an agent adds for its partner: the reward of its response (paper); that, the pioneer alone; or "
        "the pioneer alone the observer's value of its prompt (ours)")
    share_weights: bool = setting(False, "one model plays both roles (paper: named as a way to save memory)")
    reset_on_exchange: bool = setting(False, "forget Adam's moments, KL coefficients and random streams at "
        "each exchange, as the released code does (paper: no)")
    agent_settings: dict = field(default_factory=dict, metadata={"help": "{agent: {setting: value}} of what "
        "is an agent's own: --llm2 model=DIR learning_rate=3e-5 (ours)"})
    # rollout
    batch_size: int = setting(256, "responses per iteration and role (paper: 256, GSM8K 32)", least=1)
    responses_per_query: int = setting(1, "k; batch_size / k queries are answered (paper: 1)", least=1)
    temperature: float = setting(1.0, "of the policy, sampled or trained (paper: 1)", least=0.01, most=100)
    sampling_temperature: float = setting(1.0, "responses are drawn from the policy to the power of one over "
        "this, the policy stays as it is (paper: 1)", least=0.01, most=100)
    top_p: float = setting(1.0, "responses are drawn from the likeliest tokens that hold this much of the "
        "probability (paper: 1)", least=ABOVE_0, most=1)
    min_response_length: int = setting(4, "tokens; each iteration draws one limit from here to the largest; "
        "0: always the largest (released code: 4)", least=0)
    max_response_length: int = setting(15, "tokens; largest limit of a response (released code: 15)", least=1)
    # the update
    advantage: str = setting("gae", "gae (paper), rloo, grpo, reinforce, or yours as module:function")
    importance_cap: float = setting(0.0, "weigh tokens by policy / sampling probability, up to this; 0: off "
        "(truncated importance sampling, Ionides 2008; ours)", least=0)
    whiten_advantages: Literal["auto", "true", "false"] = setting(
        "auto", "mean 0 and variance 1 over the batch; auto: yes, but for rloo and grpo (TRL: yes)")
    learning_rate: float = setting(1.41e-5, "Adam step size (paper: 1.41e-5, GSM8K 1e-5)", least=ABOVE_0)
    critic_learning_rate: float = setting(0.0, "of the value head; 0: learning_rate (paper)", least=0)
    lr_schedule: str = setting("constant", "constant (paper), linear, cosine, or yours as module:function")
    warmup_iterations: int = setting(0, "iterations in which the rate rises (paper: 0)", least=0)
    mini_batch_size: int = setting(256, "most rows per backward pass (paper: 256, GSM8K 2)", least=1)
    gradient_accumulation_steps: int = setting(1, "passes per optimizer step (paper: 1, GSM8K 16)", least=1)
    num_ppo_epochs: int = setting(4, "passes over each rollout (paper: 4)", least=1)
    init_kl_coef: float = setting(0.3, "eta, first KL coefficient, per nat (paper: 0.3, GSM8K 0.01)", least=0)
    kl_penalty: Literal["full", "k1"] = setting("full", "the KL that is measured and steered by. full: exact "
        "at each state (paper, eq. 2); k1: the sampled token's log-ratio")
    kl_in: Literal["reward", "loss"] = setting(
        "reward", "reward: kl_penalty is charged on tokens (paper, eq. 2); loss: k3 with its gradient (GRPO)")
    adap_kl_ctrl: bool = setting(True, "let eta follow kl_target (TRL; the paper's eta is 'initial')")
    kl_target: float = setting(6.0, "nats per response that this controller steers to (TRL)", least=ABOVE_0)
    kl_horizon: float = setting(10_000.0, "responses over which the controller acts (TRL: 10000)")
    gamma: float = setting(1.0, "discount per token (paper: 1)", least=0, most=1)
    lam: float = setting(0.95, "GAE lambda (paper: 0.95)", least=0, most=1)
    cliprange: float = setting(0.2, "policy ratio clip (paper: 0.2)", least=ABOVE_0)
    cliprange_value: float = setting(0.2, "value clip, in units of reward (paper: 0.2)", least=ABOVE_0)
    vf_coef: float = setting(0.1, "beta, weight of the value loss (paper: 0.1)", least=0)
    ent_coef: float = setting(0.0, "weight of the loss's entropy bonus, per nat (paper: none)", least=0)
    max_grad_norm: float = setting(0.0, "clip the gradient's norm to this; 0: off (paper: off)", least=0)
    # evaluation, saving, logging
    eval_split: Literal["test", "validation"] = setting(
        "test", "held-out queries that are measured: validation to choose settings by, test to report (ours)")
    eval_queries: int = setting(256, "held-out queries per evaluation (ours)", least=1)
    eval_samples: int = setting(1, "answers to each held-out query per evaluation (ours)", least=1)
    eval_every: int = setting(20, "iterations between evaluations; 0: at start and end (ours)", least=0)
    save_every: int = setting(20, "iterations between checkpoints; 0: only the final models (ours)", least=0)
    sample_rows: int = setting(4, "queries per iteration whose texts samples.jsonl keeps (ours)", least=0)
    run_dir: str = setting("", "folder of this run; a new one under runs/ if empty (ours)")
    resume: bool = setting(False, "continue the run in run_dir from its last checkpoint (ours)")
    wandb: Literal["auto", "online", "offline", "disabled"] = setting(
        "auto", "auto: online if a W&B key is found, else offline (ours)")
    wandb_project: str = setting("cory", "W&B project (ours)")
    wandb_group: str = setting("", "W&B group of this run; empty: none (ours)")
    wandb_tags: str = setting("", "W&B tags, separated by commas (ours)")
    wandb_name: str = setting("", "W&B name; empty: the run folder's (ours)")

    paper_preset: ClassVar[str] = ""            # the preset that holds the paper's setting, if there is one

    @property
    def rows_per_optimizer_step(self) -> int:
        return self.mini_batch_size * self.gradient_accumulation_steps

    @property
    def storage(self) -> str:
        """What the base is kept in: 4bit, or bfloat16 where LoRA freezes it, or float32."""
        in_bfloat16 = self.not_auto("dtype") == "bfloat16" and self.lora
        return "4bit" if self.load_in_4bit else "bfloat16" if in_bfloat16 else "float32"

    @property
    def precision(self) -> Precision:
        return Precision(self.not_auto("dtype"), self.not_auto("head_precision"))

    def not_auto(self, name: str) -> str:
        self.require(name, getattr(self, name) != "auto", "let the machine choose: machine.settled(cfg)")
        return getattr(self, name)

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened, `auto` resolved."""
        if self.whiten_advantages == "auto":
            return self.advantage not in ("rloo", "grpo")
        return self.whiten_advantages == "true"

    @property
    def has_critic(self) -> bool:
        """Whether the advantage has a critic; one of the user's own may have."""
        return self.advantage == "gae" or self.advantage not in ADVANTAGES

    def __post_init__(self):
        hints = get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            self.require_type(f.name, value, hints[f.name])
            if isinstance(value, str) and value.startswith(EMBEDDED):
                setattr(self, f.name, str(ASSETS / value.removeprefix(EMBEDDED)))
            elif isinstance(value, (int, float)):
                self.require_bounds(f.name, value, f.metadata.get("least", -inf), f.metadata.get("most", inf))
        for name, known in NAMED.items():
            value = getattr(self, name, "another:Task's")
            self.require(name, value in known or ":" in value, unknown(value, known))
        experiment, _ = EXPERIMENTS.get(self.task, (Config, {}))
        self.require("task", isinstance(self, experiment), f"has its own script, train_{self.task}.py")
        for tag in self.wandb_tags.split(","):
            self.require("wandb_tags", len(tag.strip()) <= 64, "a tag has at most 64 characters")
        project = self.wandb_project
        self.require("wandb_project", 0 < len(project) <= 128 and not {*"/\\#?%:"} & {*project},
                     "must have 1 to 128 characters, none of them / \\ # ? % or :")
        self.require_sizes()
        self.require_combinations()
        for name in self.agent_settings:
            self.of_agent(name)

    def of_agent(self, name: str) -> "Config":
        """The settings of one agent: the run's, with its own in their place. Raises `UserError`."""
        own = self.agent_settings.get(name, {})
        if not {*own} <= PER_AGENT:
            raise UserError("agent_settings", name, f"may have for itself what PER_AGENT in config.py lists: "
                            f"{', '.join(sorted(PER_AGENT))}")
        try:
            return replace(self, agent_settings={}, **own) if own else self
        except UserError as error:
            raise UserError.of(f"{name}: {error}") from error

    def base_columns(self, agents: list[str]) -> dict[str, str]:
        """{agent: what its base is called in logs}: `base` is the first agent's, `base_llm2` another one that
        llm2 is the first to have.
        """
        columns = {}
        for name in agents:
            columns.setdefault(self.of_agent(name).model, f"base_{name}" if columns else "base")
        return {name: columns[self.of_agent(name).model] for name in agents}

    def require_type(self, name: str, value, hint) -> None:
        """bool, int, float, str or one of a Literal's words; an int may stand for a float."""
        if get_origin(hint) is Literal:
            words = get_args(hint)
            self.require(name, value in words, f"choose from {', '.join(map(str, words))}")
        else:
            is_number = hint is float and type(value) is int
            self.require(name, type(value) is hint or is_number, f"must be of type {hint.__name__}")

    def require_bounds(self, name: str, value: float, least: float, most: float) -> None:
        self.require(name, abs(value) < 2**31, "must be a finite number, below 2^31 in size")
        self.require(name, value >= least, f"must be {'above 0' if least == ABOVE_0 else f'{least} or more'}")
        self.require(name, value <= most, f"must be {most} or less")

    def require_sizes(self) -> None:
        """Refuses numbers that exceed one another, or do not divide."""
        rows, k = self.rows_per_optimizer_step, self.responses_per_query
        self.require("batch_size", self.batch_size % rows == 0,
                     "must be a multiple of mini_batch_size x gradient_accumulation_steps = "
                     f"{self.mini_batch_size} x {self.gradient_accumulation_steps} = {rows}")
        self.require("responses_per_query", self.batch_size % k == 0,
                     f"must divide batch_size = {self.batch_size}")
        self.require("kl_horizon", not self.adap_kl_ctrl or self.kl_horizon > 0.2 * self.batch_size,
                     f"must exceed 0.2 x batch_size = {0.2 * self.batch_size:g}, or eta could fall below 0")
        self.require("min_response_length", self.min_response_length <= self.max_response_length,
                     f"must not exceed max_response_length = {self.max_response_length}")
        self.require("warmup_iterations", self.warmup_iterations < self.iterations,
                     f"must be below iterations = {self.iterations}, or the rate never gets there")

    def require_combinations(self) -> None:
        """Refuses settings that mean nothing together."""
        if self.advantage in ("rloo", "grpo"):
            self.require("advantage", self.responses_per_query >= 2,
                         "compares the responses to a query; add --responses_per_query 4, say")
            self.require("gamma", self.gamma == 1, f"is not used by {self.advantage}; leave it at 1")
        self.require("whiten_advantages", self.advantage != "grpo" or self.whiten_advantages != "true",
                     "and grpo already divides by its group's standard deviation; use one of both")
        self.require("partner_term", self.partner_term != "critic" or self.has_critic,
                     f"needs a critic, which {self.advantage} has not; use --advantage gae")
        self.require("shard", not (self.shard and self.load_in_4bit),
                     "4 bits cannot be divided among processes; add --load_in_4bit false")
        self.require("load_in_4bit", self.lora or not self.load_in_4bit,
                     "trains nothing by itself: 4-bit weights are frozen; add --lora true")

    def unread(self) -> dict[str, str]:
        """{setting: the condition under which it is read} of those that nothing reads as the others are; such
        flags are refused.

        A loop or an advantage of the user's own may read them all. A new setting that some methods ignore has
        its line here.
        """
        team = ["role_exchange_every", "knowledge_transfer", "partner_reward", "partner_term",
                "share_weights", "reset_on_exchange"]
        own_loop, exchanges = self.method not in METHODS, self.role_exchange_every > 0
        waiting = [
            (self.method != "ppo", "a method of two agents", team),
            (own_loop or exchanges, "--role_exchange_every above 0", ["reset_on_exchange"]),
            (own_loop or not self.share_weights or self.reset_on_exchange, "--share_weights false",
             ["role_exchange_every"]),
            (own_loop or self.partner_reward != 0, "a --partner_reward that is not 0", ["partner_term"]),
            (self.lora, "--lora true", ["lora_rank", "lora_alpha", "lora_targets"]),
            (self.adap_kl_ctrl, "--adap_kl_ctrl true", ["kl_target", "kl_horizon"]),
            (self.has_critic, "a critic, as of --advantage gae",
             ["lam", "vf_coef", "cliprange_value", "critic_learning_rate"]),
            (self.vf_coef > 0, "--vf_coef above 0", ["cliprange_value", "critic_learning_rate"])]
        return {name: what for holds, what, names in waiting if not holds for name in names}

    def require(self, name: str, holds: bool, way_out: str) -> None:
        if not holds:
            raise UserError(name, getattr(self, name), way_out)


@dataclass
class ImdbConfig(Config):
    paper_preset: ClassVar[str] = "gpt2-large"

    reward_model: str = setting("lvwerra/distilbert-imdb", "sentiment classifier: folder or Hub name (paper)")
    min_query_length: int = setting(2, "tokens; fewest of a review kept as query (paper: 2)", least=1)
    max_query_length: int = setting(8, "tokens; most of a review kept as query (paper: 8)", least=1)

    def __post_init__(self):
        super().__post_init__()
        self.require("min_query_length", self.min_query_length <= self.max_query_length,
                     f"must not exceed max_query_length = {self.max_query_length}")


IMDB_PRESETS = {
    # Chosen on validation queries (docs/learning.md): PPO and CORY.
    "tiny": dict(model=str(ASSETS / "imdb/lm"), dataset=str(ASSETS / "imdb/openings"),
                 reward_model=str(ASSETS / "imdb/classifier"), iterations=44, batch_size=128,
                 mini_batch_size=32, num_ppo_epochs=1, min_response_length=0, lora=True, learning_rate=2e-3,
                 critic_learning_rate=5e-3, lr_schedule="linear", init_kl_coef=0.15, kl_penalty="k1",
                 adap_kl_ctrl=False, eval_queries=128, eval_samples=2, eval_every=11, save_every=11),
    "gpt2": dict(model="gpt2"),
    "gpt2-large": dict(),                       # the paper's setting: the class's own defaults
    "gpt2-xl": dict(model="gpt2-xl"),           # the paper's PPO with twice the parameters
}


def with_default(name: str, default):
    """The same setting with another default."""
    return field(default=default, metadata=Config.__dataclass_fields__[name].metadata)


@dataclass
class Gsm8kConfig(Config):
    paper_preset: ClassVar[str] = "llama2-7b"

    task: str = with_default("task", "gsm8k")
    model: str = with_default("model", "meta-llama/Llama-2-7b-chat-hf")
    dataset: str = with_default("dataset", "openai/gsm8k")
    batch_size: int = with_default("batch_size", 32)
    min_response_length: int = with_default("min_response_length", 0)           # ours
    max_response_length: int = with_default("max_response_length", 256)         # paper: not stated
    learning_rate: float = with_default("learning_rate", 1e-5)
    mini_batch_size: int = with_default("mini_batch_size", 2)
    gradient_accumulation_steps: int = with_default("gradient_accumulation_steps", 16)
    init_kl_coef: float = with_default("init_kl_coef", 0.01)
    checker: str = setting("last_number", "last_number (paper), strict, or yours as module:function")
    one_shot: bool = setting(True, "put the paper's worked example before the question (paper: yes)")
    chat_template: bool = setting(False, "wrap prompts by the tokenizer's chat template (paper: not stated)")


# The paper's base is in 4 bits; that it used LoRA is our reading.
LLAMA2 = dict(lora=True, load_in_4bit=True, dtype="bfloat16")

GSM8K_PRESETS = {
    # Chosen on validation queries (docs/learning.md): PPO and CORY.
    "tiny": dict(model=str(ASSETS / "gsm8k/lm"), dataset=str(ASSETS / "gsm8k/problems"), one_shot=False,
                 max_response_length=48, iterations=60, batch_size=128, mini_batch_size=32,
                 gradient_accumulation_steps=1, num_ppo_epochs=1, lora=True, learning_rate=1e-3,
                 critic_learning_rate=1e-3, lr_schedule="linear", init_kl_coef=0.02, kl_penalty="k1",
                 adap_kl_ctrl=False, lam=1.0, eval_queries=128, eval_samples=2, eval_every=15),
    "llama2-7b": LLAMA2,                        # the paper's table 2, PPO's learning rate
    "llama2-7b-lr1e-4": dict(learning_rate=1e-4, **LLAMA2),         # the paper's learning rate for CORY
}

EXPERIMENTS = {"imdb": (ImdbConfig, IMDB_PRESETS), "gsm8k": (Gsm8kConfig, GSM8K_PRESETS)}
