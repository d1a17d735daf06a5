"""What the settings of a run name: the method, the task with its data, the bases; and its agents."""
import re
from dataclasses import fields
from pathlib import Path

from transformers import set_seed

from cory import device
from cory.config import Config, require_settings_of, short_name
from cory.distributed import processes
from cory.loading import TEXT, digest, load_language_model, model_errors
from cory.ppo.advantages import find_estimator
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel
from cory.sharding import shard

# What logs name otherwise.
LOGGED = ("iteration", "query", "queries", "samples", "split", "combined_reward", "mean", "team")


class Setup:
    """configs: the settings of each agent, by name. bases: frozen models by their names in logs, which
    `base_of` gives for each agent; agents with the same base share it.
    """

    def __init__(self, cfg: Config, run_dir: Path):
        cfg, self.device = device.resolve_auto(cfg)
        device.prepare_device(cfg, self.device)
        set_seed(cfg.seed)                              # for tasks and methods that draw as they are made
        self.cfg, self.run_dir = cfg, run_dir
        method_class, task_class = cfg.find("method"), cfg.find("task")
        names = method_class.agent_names[:1] if cfg.share_weights else method_class.agent_names
        self.configs = {name: method_class.agent_config(cfg, name) for name in names}
        require_agents(cfg, self.configs, method_class.roles)
        if cfg.resume:
            require_settings_of(run_dir, cfg, self.configs)
        print(f"{short_name(cfg.method).upper()} on {short_name(cfg.task)}: preset {cfg.preset}, "
              f"model {cfg.model}, data {cfg.dataset}, {self.device}, {cfg.dtype}", flush=True)
        data = task_class.load_data(cfg)
        self.base_of = base_names(self.configs)
        self.bases = self.load_bases()
        self.task = task_class(cfg, data, self.bases["base"])
        self.method = method_class(cfg, self.task)

    def load_bases(self) -> dict[str, LanguageModel]:
        bases = {}
        for name, base in self.base_of.items():
            if base not in bases:
                cfg = self.configs[name]
                bases[base] = load_language_model(cfg.model, cfg, self.device)
        return bases

    def new_agents(self) -> list[Agent]:
        """The agents, each with its own policy. Then shrinks the frozen bases: to bfloat16, to shards."""
        cfg, size = self.cfg, processes().size
        for agent_cfg in self.configs.values():
            rows = agent_cfg.rows_per_optimizer_step
            agent_cfg.require("mini_batch_size", rows % size == 0, f"{rows} rows of an optimizer step cannot "
                              f"be divided among {size} processes; make them a multiple")
        agents = [Agent(name, self.bases[self.base_of[name]], agent_cfg, i)
                  for i, (name, agent_cfg) in enumerate(self.configs.items())]
        trained = trained_weights(agents)
        print(f"{sum(p.numel() for p in trained):,} parameters to train", flush=True)
        for base in self.bases.values():
            if not cfg.lora_rank and cfg.dtype == "bfloat16":
                base.store_in_bfloat16()            # after agents have had their copies
            if cfg.shard:
                shard(base, cfg, whole=trained)
        return agents

    def saved_model(self, name: str, folder: Path, adapter: str = "") -> LanguageModel:
        """The policy of an agent that lies in a folder; with LoRA a new adapter on its base."""
        base = self.bases[self.base_of[name]]
        if not self.cfg.lora_rank:
            return load_language_model(str(folder), self.configs[name], self.device)
        with model_errors("adapter", str(folder)):
            return base.saved_policy(adapter or name, folder)

    def final_model(self, name: str) -> LanguageModel:
        """The final policy of an agent, of a finished run."""
        return self.saved_model(name, self.run_dir / "final" / name)

    def digests(self, agents: list[Agent], rounded: bool = False) -> dict[str, str]:
        """Of each base, without the weights that agents train, and of what the task reads, by setting.
        rounded: of weights as bfloat16, which are the same in every precision that a base is loaded in.
        """
        trained, of_bases = trained_weights(agents), {}
        for name, base in self.bases.items():
            weights = base.lm.named_parameters(remove_duplicate=False)      # with a head that is tied
            frozen = [p for _, p in weights if p not in trained]
            of_bases[name] = digest(frozen, (base.encode([TEXT]), sorted(base.end_ids)), rounded)
        return of_bases | self.task.digests()

    def require_digests(self, found: dict[str, str], expected: dict[str, str], hint: str) -> None:
        """Raises `UserError` where a model or the data are not those of these digests."""
        for name, value in found.items():
            users = [agent for agent, base in self.base_of.items() if base == name]
            cfg, setting = (self.configs[users[0]], "model") if users else (self.cfg, name)
            cfg.require(setting, value == expected.get(name), hint)


def trained_weights(agents: list[Agent]) -> set:
    return {p for agent in agents for p in agent.trainable_parameters().values()}


def require_agents(cfg: Config, configs: dict[str, Config], roles: tuple[str, ...]) -> None:
    """Raises `UserError`, before a model is loaded."""
    cfg.require("method", len(configs) <= len({*roles}) == len(roles), "needs a role for each of its agents, "
                f"and a name for each role; its roles are {', '.join(roles)}")
    for name in (*configs, *roles):
        of_logs = name in LOGGED or name.startswith("base")
        cfg.require("method", re.fullmatch("[a-z0-9_]+", name) and not of_logs,
                    f"names an agent or a role {name!r}; take a word of small letters, digits and _, but not "
                    f"{', '.join(LOGGED)} or base..., as logs name other things")
    shared = [f.name for f in fields(cfg) if not f.metadata.get("per_agent")]
    for name, agent_cfg in configs.items():
        find_estimator(agent_cfg)
        for setting in ("lr_schedule", "kl_controller", "loss", "critic"):
            agent_cfg.find(setting)
        for setting in shared:
            alike = getattr(agent_cfg, setting) == getattr(cfg, setting)
            agent_cfg.require(setting, alike, f"differs for {name}; agents must share this setting")
        agent_cfg.require("lora_rank", (agent_cfg.lora_rank > 0) == (cfg.lora_rank > 0),
                          "all agents train adapters on frozen bases, or all train full copies")


def base_names(configs: dict[str, Config]) -> dict[str, str]:
    """{agent: its base in logs}: `base` is the first agent's; `base_llm2`, another first used by llm2."""
    base_of_model = {}
    for name, cfg in configs.items():
        base_of_model.setdefault(cfg.model, f"base_{name}" if base_of_model else "base")
    return {name: base_of_model[cfg.model] for name, cfg in configs.items()}
