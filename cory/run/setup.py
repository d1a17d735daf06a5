"""What the settings of a run name: the method, the task with its data, the bases; and its agents."""
import fcntl
import os
import time
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Iterator

from transformers import set_seed

from cory.config import NAMED, Config, require_settings_of, short_name
from cory.errors import UserError
from cory.loading import load_language_model, with_settings
from cory.machine import device
from cory.machine.distributed import processes
from cory.machine.sharding import shard
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel


class Setup:
    """configs: the settings of each agent, by name. bases: frozen models by their names in logs, which
    `base_of` gives for each agent: its model, with its temperature and chat template. Agents whose model is
    the same share the weights of that.
    """

    def __init__(self, cfg: Config, run_dir: Path):
        cfg, self.device = device.resolve_auto(cfg)
        device.prepare_device(cfg, self.device)
        set_seed(cfg.seed)                              # for tasks and methods that draw as they are made
        self.cfg, self.run_dir = cfg, run_dir
        for name in NAMED.keys() & vars(cfg).keys():    # a name of no code is found before a model is loaded
            cfg.find(name)
        method_class, task_class = cfg.find("method"), cfg.find("task")
        names = method_class.agent_names[:1] if cfg.share_weights else method_class.agent_names
        cfg.require("method", len({*names}) == len(names), f"names an agent twice: {', '.join(names)}")
        self.configs = {name: method_class.agent_config(cfg, name) for name in names}
        for name, own in self.configs.items():
            for f in fields(cfg):
                may_differ = f.metadata.get("per_agent") or getattr(own, f.name) == getattr(cfg, f.name)
                own.require(f.name, may_differ, f"agents share it: agent_config may not change it for {name}")
            own.require("lora_rank", bool(own.lora_rank) == bool(cfg.lora_rank), "must be 0 for all or none")
        if cfg.resume:
            require_settings_of(run_dir, cfg)
        print(f"{short_name(cfg.method).upper()} on {short_name(cfg.task)}: preset {cfg.preset}, "
              f"model {cfg.model}, data {cfg.dataset}, {self.device}, {cfg.dtype}; {run_dir}", flush=True)
        data = task_class.load_data(cfg)
        self.base_of, self.bases, named, loaded = {}, {}, {}, {}
        for name, own in self.configs.items():          # `base` is the first agent's; `base_llm2`, llm2's own
            if own.model not in loaded:
                loaded[own.model] = load_language_model(own.model, own, self.device)
            differs = own.model, own.temperature, own.chat_template
            self.base_of[name] = base = named.setdefault(differs, f"base_{name}" if named else "base")
            if base not in self.bases:
                self.bases[base] = with_settings(loaded[own.model], own)
        self.task = task_class(cfg, data, self.bases["base"])
        self.method = method_class(cfg, self.task)

    def new_agents(self) -> list[Agent]:
        """The agents, each with its own policy. Then shrinks the frozen bases: to bfloat16, to shards."""
        cfg = self.cfg
        agents = [Agent(name, self.bases[self.base_of[name]], agent_cfg, i)
                  for i, (name, agent_cfg) in enumerate(self.configs.items())]
        trained = {p for agent in agents for p in agent.trainable_parameters().values()}
        print(f"{sum(p.numel() for p in trained):,} parameters to train", flush=True)
        for base in {base.lm: base for base in self.bases.values()}.values():
            if not cfg.lora_rank and cfg.dtype == "bfloat16":
                base.store_in_bfloat16()            # after agents have had their copies
            if cfg.shard:
                shard(base, cfg, whole=trained)
        return agents

    def final_model(self, name: str) -> LanguageModel:
        """The final policy of an agent, of a finished run; with LoRA a new adapter on its base."""
        folder = self.run_dir / "final" / name
        if not self.cfg.lora_rank:
            return load_language_model(str(folder), self.configs[name], self.device)
        return self.bases[self.base_of[name]].saved_policy(name, folder)


def new_run_dir(cfg: Config) -> Path:
    """`cfg.run_dir`, or a new folder under runs/, named by what runs, when, and the process."""
    what = f"{short_name(cfg.task)}-{short_name(cfg.method)}-{cfg.preset}-seed{cfg.seed}".lower()
    new = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(processes().gather([cfg.run_dir or new])[0])
    if processes().is_main and (folder / "config.json").exists():
        raise UserError("run_dir", str(folder), "holds a run; go on with --resume, or name another folder")
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A block in which no other run may use the folder. The lock is on the folder itself: it leaves no file,
    and ends with this process, however that ends.
    """
    if not processes().is_main:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("run_dir", str(folder), "is in use by another run") from None
        except OSError:                     # a file system, as NFS, that locks no folder
            pass
        yield
    finally:
        os.close(descriptor)
