"""What the settings of a run name: the task with its data, the bases, the method, and its agents."""
from dataclasses import fields
from pathlib import Path

from transformers import set_seed

from cory.config import FREE_ON_RESUME, NAMED, Config, require_settings_of, to_save
from cory.loading import load_language_model
from cory.machine import device
from cory.machine.distributed import processes
from cory.machine.sharding import shard
from cory.ppo.agent import Agent
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel, Policy


class Experiment:
    """configs: each agent's settings. bases: frozen models by their names in logs, which `base_of` gives for
    each agent. They have the temperature of their agents, and share their weights if the model is the same.
    Of a run that is resumed or evaluated, only settings in `free` may be changed.
    """

    def __init__(self, cfg: Config, run_dir: Path, free: set | dict = FREE_ON_RESUME):
        cfg, self.device = device.resolve_auto(cfg)
        device.prepare_device(cfg, self.device)
        set_seed(cfg.seed)                              # for tasks and methods that draw as they are made
        self.cfg, self.run_dir = cfg, run_dir
        for name in NAMED.keys() & vars(cfg).keys():    # misspelled ones fail before a model is loaded
            cfg.find(name)
        method_class, task_class = cfg.find("method"), cfg.find("task")
        names = method_class.agent_names[:1] if cfg.share_weights else method_class.agent_names
        self.configs = {name: method_class.agent_config(cfg, name) for name in names}
        for name, own in self.configs.items():
            require_agent(name, own, cfg)
        if (run_dir / "config.json").exists():
            require_settings_of(run_dir, cfg, self.configs, {*free})
        print(f"{cfg.method} on {cfg.task}: preset {cfg.preset}, {cfg.dtype} on {self.device}, in {run_dir}\n"
              f"model {cfg.model}, data {cfg.dataset}", flush=True)
        data = task_class.load_data(cfg)
        self.base_of, self.bases, loaded = to_save(cfg, self.configs)["agents"], {}, {}
        for name, own in self.configs.items():
            if own.model not in loaded:
                loaded[own.model] = load_language_model(own.model, own, self.device)
            model = loaded[own.model]
            self.bases[self.base_of[name]] = LanguageModel(
                model.lm, model.tokenizer, cfg.dtype, cfg.chat_template, own.temperature)
        self.task = task_class(cfg, data, self.bases["base"])
        self.method = method = method_class(cfg, self.task)
        in_tables = [*method.agent_names, "base", "base_team", "mean", "team"]
        once = all(len({*words}) == len(words) for words in (in_tables, method.roles))
        cfg.require("method", once and {*method.frozen} <= {*names},
                    f"agents {names}, frozen {method.frozen}, roles {method.roles}: give each agent and role "
                    "a name of its own, and no agent base, base_team, mean or team")

    def new_agents(self) -> list[Agent]:
        """The agents, each with its own policy. Then shrinks the frozen bases: to bfloat16, to shards."""
        cfg = self.cfg
        agents = [Agent(name, self.bases[self.base_of[name]], agent_cfg, i)
                  for i, (name, agent_cfg) in enumerate(self.configs.items())]
        trained = {p for agent in agents for p in agent.trainable_parameters().values()}
        count = sum(p.numel() for agent in agents if agent.name not in self.method.frozen
                    for p in agent.trainable_parameters().values())
        print(f"{count:,} trainable parameters", flush=True)
        for base in {base.lm: base for base in self.bases.values()}.values():
            if not cfg.lora_rank and cfg.dtype == "bfloat16":
                base.store_in_bfloat16()            # after agents have had their copies
            if cfg.shard:
                shard(base, cfg, whole=trained)
        return agents

    def final_model(self, name: str) -> Policy:
        """The final policy of an agent, of a finished run."""
        folder, own = self.run_dir / "final" / name, self.configs[name]
        policy = self.bases[self.base_of[name]].new_policy(name, own)
        if own.lora_rank:
            load_adapter(policy.lm, name, folder)
        else:
            policy.lm = load_language_model(str(folder), own, self.device).lm
        return policy


def require_agent(name: str, own: Config, cfg: Config) -> None:
    """Raises `UserError` where an agent's settings differ from the run's in what agents share."""
    may_differ = [f.name for f in fields(cfg) if f.metadata.get("per_agent")]
    for setting, value in vars(cfg).items():
        own.require(setting, setting in may_differ or getattr(own, setting) == value,
                    f"agents share it, but {name}'s differs; they may differ in {', '.join(may_differ)}")
    own.require("lora_rank", bool(own.lora_rank) == bool(cfg.lora_rank), "must be 0 for all agents or none")
    rows, size = own.rows_per_optimizer_step, processes().size
    own.require("mini_batch_size", rows >= size, f"{rows} rows of an optimizer step are too few for {size} "
                "processes")
