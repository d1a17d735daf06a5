"""A run: what its settings name; its agents with their roles; log, evaluation and saving."""
import copy
import json
import os
import shlex
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import fields, replace
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed

from cory import device
from cory.checkpoint import load_checkpoint, save_checkpoint, save_final
from cory.config import Config, config_json, load_config
from cory.distributed import processes, shard
from cory.errors import UserError, short_name
from cory.evaluate import evaluate, evaluate_team
from cory.loading import load_language_model, model_errors
from cory.log import Logger, read_jsonl, write_text
from cory.ppo.advantages import find_estimator
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import Rollout, real_ids
from cory.report import draw_runs, held_out_parts, table
from cory.tasks.task import Task

SAMPLES = 4                         # queries per iteration whose texts samples.jsonl keeps


class RoleStep(NamedTuple):
    """What one agent did in one role in one iteration."""
    role: str                       # pioneer, observer, ...
    agent: Agent
    rollout: Rollout
    reward_B: Tensor                # the task reward of its own responses, whatever it was trained on
    update: dict[str, float]        # metrics of its update

    def metrics(self, task: Task, queries: list[str]) -> dict[str, float]:
        """Metrics of the rollout, the update and the task; a name in two of these raises."""
        rollout, reward, cfg = self.rollout, self.reward_B.mean().item(), self.agent.cfg
        kl = rollout.kl_B.mean().item()
        metrics = {"task_reward": reward, "task_reward_std": self.reward_B.std(correction=0).item(),
                   f"kl_{cfg.kl_penalty}": kl, "combined_reward": reward - cfg.init_kl_coef * kl,
                   "length": rollout.mask_BT.sum(1).mean().item(), "sampling_gap": rollout.sampling_gap}
        return dict(**metrics, **self.update, **task.metrics(queries, rollout.text))


class Setup:
    """What the settings refer to: the method, the task with its data, and the bases of the agents."""

    def __init__(self, cfg: Config, run_dir: Path):
        cfg, self.device = device.resolve_auto(cfg)
        device.prepare_device(cfg, self.device)
        set_seed(cfg.seed)                              # for tasks and methods that draw as they are made
        self.cfg, self.run_dir = cfg, run_dir
        method_class, task_class = cfg.find("method"), cfg.find("task")
        names = method_class.agents[:1] if cfg.share_weights else method_class.agents
        self.configs = {name: method_class.agent_config(cfg, name) for name in names}
        require_agents(cfg, self.configs, method_class.roles)
        print(f"{short_name(cfg.method).upper()} on {short_name(cfg.task)}: preset {cfg.preset}, "
              f"model {cfg.model}, data {cfg.dataset}, {self.device}, {cfg.dtype}", flush=True)
        data = task_class.load_data(cfg)
        self.base_of = base_names(self.configs)
        self.bases = {}
        for name, base in self.base_of.items():         # agents with the same base share it
            if base not in self.bases:
                agent_cfg = self.configs[name]
                self.bases[base] = load_language_model(agent_cfg.model, agent_cfg, self.device)
        self.task = task_class(cfg, data, self.bases["base"])
        self.method = method_class(cfg, self.task)

    def held_out_metrics(self, policies: dict[str, LanguageModel], roles: list[str],
                         out: Path | None = None) -> dict[str, dict[str, float]]:
        """Metrics of each policy against its base, and of the team of the agents named in `roles`; if bases
        are among the policies, also of the team of the bases.
        """
        metrics = {}
        for name, policy in policies.items():
            base, cfg = self.bases[self.base_of.get(name, name)], self.configs.get(name, self.cfg)
            metrics[name] = evaluate(policy, base, cfg, self.copied().task, out and out / f"{name}.jsonl")
        teams = {"base_team": [self.base_of[name] for name in roles], "team": roles}
        for team, names in teams.items():
            if len(roles) > 1 and policies.keys() >= {*names}:
                metrics[team] = evaluate_team(self.copied(), [policies[name] for name in names])
        return metrics

    def copied(self):
        """The method and its task with copies of their memory: what evaluation puts there is forgotten."""
        method = copy.copy(self.method)
        method.task = copy.copy(self.task)
        method.memory, method.task.memory = copy.deepcopy((self.method.memory, self.task.memory))
        return method

    def final_model(self, name: str) -> LanguageModel:
        """The final policy of an agent, of a finished run."""
        folder, base = self.run_dir / "final" / name, self.bases[self.base_of[name]]
        if not self.cfg.lora_rank:
            return load_language_model(str(folder), self.configs[name], self.device)
        with model_errors("adapter", str(folder)):
            return base.saved_policy(name, folder)


class Run(Setup):
    """A run as a method's loop sees it: agents with roles; log, evaluation and saving.

    agents: all of them, always in the same order. roles: the agents in the order of the roles they play.
    done: iterations completed by the checkpoint that the run resumes from, or 0. signals: received so far.
    """

    def __init__(self, cfg: Config, run_dir: Path):
        super().__init__(cfg, run_dir)
        cfg, size = self.cfg, processes().size
        for agent_cfg in self.configs.values():
            rows = agent_cfg.rows_per_optimizer_step
            agent_cfg.require("mini_batch_size", rows % size == 0, f"{rows} rows of an optimizer step cannot "
                              f"be divided among {size} processes; make them a multiple")
        self.agents = [Agent(name, self.bases[self.base_of[name]], agent_cfg, i)
                       for i, (name, agent_cfg) in enumerate(self.configs.items())]
        self.roles = [*islice(cycle(self.agents), len(self.method.roles))]
        trained = {p for agent in self.agents for p in agent.trainable_parameters().values()}
        print(f"{sum(p.numel() for p in trained):,} parameters to train", flush=True)
        for base in self.bases.values():
            if not cfg.lora_rank:
                base.cast_once()                    # after agents have had their copies
            if cfg.shard:
                shard(base, cfg, whole=trained)
        self.signals: list[int] = []
        self.done, wandb_id = self.resume() if cfg.resume else (0, "")
        if processes().is_main:
            (self.run_dir / "eval.json").unlink(missing_ok=True)            # until it has finished again
            write_text(self.run_dir / "config.json", config_json(cfg, self.base_of))
        self.logger = Logger(cfg, [*self.configs], self.run_dir, self.done, wandb_id)

    def resume(self) -> tuple[int, str]:
        """Restores the last checkpoint's state. Returns (iterations done, W&B id), or (0, "")."""
        cfg, state = self.cfg, load_checkpoint(self.run_dir, self.agents)
        if state is None:
            cfg.require("resume", not (self.run_dir / "eval.json").exists(),
                        "the run is finished, and has no checkpoint to continue from")
            print("no checkpoint yet: the run starts from the beginning", flush=True)
            return 0, ""
        done, before = state["iteration"], state["iterations"]
        falling = {agent.cfg.lr_schedule for agent in self.agents} - {"constant"}
        cfg.require("iterations", not falling or cfg.iterations == before,
                    f"the run has {before}, and --lr_schedule {', '.join(falling)} falls over them")
        cfg.require("iterations", cfg.iterations > done or cfg.iterations == done == before,
                    f"the run has done {done}; ask for more")
        agents = {agent.name: agent for agent in self.agents}
        self.roles = [agents[name] for name in state["roles"]]
        self.method.memory, self.task.memory = state["method"], state["task"]
        return done, state["wandb_id"]

    def begin(self, iteration: int) -> None:
        """Starts the iteration's clock, and seeds the global generators, for tasks and methods that draw from
        them; agents have their own.
        """
        # a spawn key, so that no adapter of an agent starts from this seed
        seed = np.random.SeedSequence(self.cfg.seed, spawn_key=(iteration,)).generate_state(1)[0]
        set_seed(int(seed))
        self.clock = time.perf_counter()

    def log(self, iteration: int, queries: list[str], steps: list[RoleStep], metrics: dict) -> None:
        """Logs an iteration: each metric as NAME/AGENT, the mean over the roles that the agent played, and
        `role/AGENT`, its first role by number; `metrics` are whatever else the method measured.
        """
        of_agents = defaultdict(list)
        for role, step in enumerate(steps):
            of_agents.setdefault(f"role/{step.agent.name}", [role])
            for name, x in step.metrics(self.task, queries).items():
                of_agents[f"{name}/{step.agent.name}"].append(x)
        means = {name: statistics.fmean(xs) for name, xs in of_agents.items()}
        metrics = {name: float(x) for name, x in metrics.items()}
        row = dict(**means, **metrics, seconds=time.perf_counter() - self.clock)
        self.logger.iteration(iteration, row, self.samples(iteration, queries, steps))

    def samples(self, iteration: int, queries: list[str], steps: list[RoleStep]) -> list[dict]:
        """A few different queries, with each role's prompt, response, agent and reward."""
        rows = []
        for i in range(0, len(queries), self.cfg.responses_per_query)[:SAMPLES]:
            row = {"iteration": iteration, "query": queries[i]}
            for step in steps:
                (prompt,) = real_ids(step.rollout.prompt_BP[i:i + 1], step.rollout.prompt_mask_BP[i:i + 1])
                row |= {step.role: step.rollout.text[i], f"{step.role}_agent": step.agent.name,
                        f"{step.role}_reward": step.reward_B[i].item(),
                        f"{step.role}_prompt": step.agent.policy.tokenizer.decode(prompt)}
            rows.append(row)
        return rows

    def evaluate(self, iteration: int) -> None:
        """Logs held-out metrics as eval_NAME/AGENT; at iteration 0 of the bases, too."""
        bases = self.bases if iteration == 0 else {}
        policies = bases | {agent.name: agent.policy for agent in self.agents}
        metrics = self.held_out_metrics(policies, [agent.name for agent in self.roles])
        row = {f"eval_{name}/{who}": float(x) for who in metrics for name, x in metrics[who].items()}
        self.logger.evaluation(iteration, row)

    def save_if_due(self, iteration: int) -> None:
        """Writes a checkpoint after iteration 1, so that what cannot be saved is found at once, every
        `save_every` iterations, at the end, and after a signal to any process, which then ends the run.
        """
        every, signals = self.cfg.save_every, processes().gather(self.signals)
        if every and (signals or iteration % every == 0 or iteration in (1, self.cfg.iterations)):
            for agent in self.agents:
                given = self.configs[agent.name], self.bases[self.base_of[agent.name]]
                if (agent.cfg, agent.base) != given:
                    raise UserError("agent", agent.name, "has another cfg or base than at the start, which "
                                    "no checkpoint keeps; use --save_every 0")
            about = {"iterations": self.cfg.iterations, "roles": [agent.name for agent in self.roles],
                     "method": self.method.memory, "task": self.task.memory,
                     "wandb_id": self.logger.wandb_id}
            save_checkpoint(self.run_dir, iteration, self.agents, about)
        if signals:
            hint = f"go on with: python {sys.argv[0]} --resume --run_dir {shlex.quote(str(self.run_dir))}"
            hint = hint if every else "nothing is saved, as --save_every 0 asks"
            self.logger.bar.close()
            print(f"stopped after iteration {iteration}; {hint}", flush=True)
            raise SystemExit(128 + signals[0])

    def finish(self) -> None:
        """Writes the final models, eval.json and curves.png, and prints the held-out table."""
        self.logger.bar.close()
        save_final(self.run_dir, self.agents)
        if not processes().is_main:
            return
        memory = {"method": self.method.memory, "task": self.task.memory}       # for `evaluate`
        torch.save(memory, self.run_dir / "final/memory.pt")
        cfg, rows = self.cfg, read_jsonl(self.run_dir / "metrics.jsonl")
        done = rows[-1]["iteration"]
        about = {"iteration": done, "split": cfg.eval_split, "queries": cfg.eval_queries,
                 "samples": cfg.eval_samples}
        held_out = held_out_parts(rows)
        write_text(self.run_dir / "eval.json", json.dumps(about | held_out, indent=1) + "\n")
        draw_runs([self.run_dir], self.run_dir / "curves.png")
        self.logger.send(done, lambda wandb: {"curves": wandb.Image(str(self.run_dir / "curves.png"))})
        seconds = statistics.median(row["seconds"] for row in rows if "seconds" in row)
        print(f"{table('held-out', held_out.items())}\n{seconds:.2f} s per iteration (median of {done}), "
              f"peak memory {device.peak_memory(self.device):.2f} GiB\nwritten to {self.run_dir}: "
              "metrics.jsonl, samples.jsonl, eval.json, curves.png, final/", flush=True)


def evaluate_run(run_dir: Path, samples: int, queries: int, device: str, dtype: str | None) -> None:
    """Evaluates base, agents and team of a finished run into RUN_DIR/evaluation, and prints the tables."""
    saved = load_config(run_dir)
    cfg = replace(saved, device=device, dtype=dtype or saved.dtype, eval_samples=samples,
                  eval_queries=queries or saved.eval_queries)
    run, last = Setup(cfg, run_dir), read_jsonl(run_dir / "samples.jsonl")[-1]
    memory = torch.load(run_dir / "final/memory.pt", weights_only=True,
                        map_location={"cuda:0": str(run.device)})
    run.method.memory, run.task.memory = memory["method"], memory["task"]
    policies = run.bases | {name: run.final_model(name) for name in run.configs}
    folder = run_dir / "evaluation"
    folder.mkdir(exist_ok=True)
    played = [last[f"{role}_agent"] for role in run.method.roles]               # in the last iteration
    metrics = run.held_out_metrics(policies, played, folder)
    if processes().is_main:
        results = {"queries": cfg.eval_queries, "samples": samples, **metrics}
        write_text(folder / "results.json", json.dumps(results, indent=1, default=float) + "\n")
    print(f"{table(run_dir.name, metrics.items())}\nresponses and metrics: {folder}", flush=True)


def run_folder(cfg: Config) -> Path:
    """`cfg.run_dir`, or a new folder under runs/, named by what runs, when, and the process."""
    what = f"{short_name(cfg.task)}-{short_name(cfg.method)}-{cfg.preset}-seed{cfg.seed}".lower()
    new = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path(processes().gather([cfg.run_dir or new])[0])


def require_agents(cfg: Config, configs: dict[str, Config], roles: tuple[str, ...]) -> None:
    """Raises `UserError`, before a model is loaded."""
    cfg.require("method", len(configs) <= len({*roles}) == len(roles), "needs a role for each of its agents, "
                f"and a name for each role; its roles are {', '.join(roles)}")
    shared = [f.name for f in fields(cfg) if not f.metadata.get("per_agent")]
    for name, agent_cfg in configs.items():
        find_estimator(agent_cfg)
        for setting in ("lr_schedule", "kl_controller"):
            agent_cfg.find(setting)
        for setting in shared:
            alike = getattr(agent_cfg, setting) == getattr(cfg, setting)
            agent_cfg.require(setting, alike, f"differs for {name}; agents must share this setting")
        agent_cfg.require("lora_rank", (agent_cfg.lora_rank > 0) == (cfg.lora_rank > 0),
                          "all agents train adapters on frozen bases, or all train full copies")


def base_names(configs: dict[str, Config]) -> dict[str, str]:
    """{agent: its base in logs}: `base` is the first agent's; `base_llm2`, another first used by llm2."""
    columns = {}
    for name, cfg in configs.items():
        columns.setdefault(cfg.model, f"base_{name}" if columns else "base")
    return {name: columns[cfg.model] for name, cfg in configs.items()}
