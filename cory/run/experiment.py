"""What the settings of a run name: the task with its data, the bases, the method, and its agents."""
from dataclasses import fields, replace
from pathlib import Path

from transformers import set_seed

from cory.config import FREE_ON_RESUME, NAMED, Config, base_names, require_settings_of
from cory.loading import load_language_model
from cory.machine import device
from cory.machine.sharding import shard
from cory.ppo.agent import Agent
from cory.ppo.lora import load_adapter
from cory.ppo.model import Policy


class Experiment:
    """configs: each agent's settings. bases: each agent's frozen base, which is its model at its temperature;
    agents with the same model and temperature share one.

    free: the settings that may be changed when a run is resumed or evaluated.
    """

    def __init__(self, cfg: Config, run_dir: Path, free: set[str] = FREE_ON_RESUME):
        cfg, self.device = device.choose_device(cfg)
        self.cfg = cfg
        self.run_dir = run_dir
        device.prepare_device(cfg, self.device)
        set_seed(cfg.seed)                              # for tasks and methods that draw as they are made
        for name in NAMED.keys() & vars(cfg).keys():    # misspelled ones fail before a model is loaded
            cfg.resolve(name)
        method_class = cfg.resolve("method")
        taken = [*method_class.agent_names, *method_class.roles, "base", "mean", "team"]
        cfg.require("method", len({*taken}) == len(taken),
                    f"give each agent and each role another name: two of {taken} are the same")
        names = method_class.agent_names
        if cfg.share_weights:
            names = names[:1]
        self.configs = {name: method_class.agent_config(cfg, name) for name in names}
        for name, agent_cfg in self.configs.items():
            require_agent(name, agent_cfg, cfg)
            for setting, value in method_class.needs.items():
                agent_cfg.require(setting, getattr(agent_cfg, setting) == value,
                                  f"{cfg.method} needs {value}")
        if (run_dir / "config.json").exists():
            require_settings_of(run_dir, cfg, self.configs, free)
        print(f"{cfg.method} on {cfg.task}: preset {cfg.preset}, {cfg.dtype} on {self.device}, in {run_dir}\n"
              f"model {cfg.model}, data {cfg.dataset}", flush=True)
        task_class = cfg.resolve("task")
        data = task_class.load_data(cfg)
        self.load_bases()
        self.task = task_class(cfg, data, self.bases[names[0]])
        self.method = method_class(cfg, self.task)

    def load_bases(self) -> None:
        self.bases = {}
        loaded = {}
        for agent, name in base_names(self.configs).items():
            agent_cfg = self.configs[agent]
            if name not in loaded:
                model = load_language_model(agent_cfg.model, agent_cfg, self.device)
                loaded[name] = replace(model, name=name)
            self.bases[agent] = loaded[name]

    def new_agents(self) -> list[Agent]:
        """The agents, each with its own policy. Then shards the frozen bases."""
        agents = []
        weights = set()
        for i, (name, agent_cfg) in enumerate(self.configs.items()):
            agent = Agent(name, self.bases[name], agent_cfg, i)
            agents.append(agent)
            weights.update(agent.trainable_parameters().values())
        if self.cfg.shard:
            for base in dict.fromkeys(self.bases.values()):
                shard(base, self.cfg, whole=weights)
        return agents

    def final_model(self, name: str) -> Policy:
        """An agent's policy at the end of a finished run."""
        folder = self.run_dir / "final" / name
        agent_cfg = self.configs[name]
        policy = self.bases[name].new_policy(name, agent_cfg)
        if agent_cfg.lora_rank:
            load_adapter(policy.lm, name, folder)
        else:
            policy.lm = load_language_model(str(folder), agent_cfg, self.device).lm
        return policy


def require_agent(name: str, agent_cfg: Config, cfg: Config) -> None:
    """Raises `UserError` where an agent's settings differ from the run's in what agents share."""
    may_differ = [f.name for f in fields(cfg) if f.metadata.get("per_agent")]
    for setting, value in vars(cfg).items():
        agent_cfg.require(setting, setting in may_differ or getattr(agent_cfg, setting) == value,
                    f"agents share it, but {name}'s differs; they may differ in {', '.join(may_differ)}")
    agent_cfg.require("lora_rank", bool(agent_cfg.lora_rank) == bool(cfg.lora_rank),
                      "must be 0 for all agents or none")
