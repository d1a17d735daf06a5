"""The record of a run: what is logged, evaluated and saved, and what a resumed run goes on from."""
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from cory.config import config_json
from cory.machine.device import peak_memory
from cory.machine.distributed import processes
from cory.machine.sharding import is_sharded, whole_on_cpu
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, real_ids
from cory.run.checkpoint import load_checkpoint, save_checkpoint
from cory.run.evaluate import held_out_metrics
from cory.run.log import Logger, read_jsonl, write_text
from cory.run.report import draw_run, last_held_out, tables
from cory.run.setup import Setup
from cory.tasks.task import Task

SAMPLES = 4                         # queries per iteration whose texts samples.jsonl keeps


class Turn(NamedTuple):
    """What one agent did in one role in one iteration."""
    role: str                       # pioneer, observer, ...
    agent: Agent
    rollout: Rollout
    reward_B: Tensor                # the task reward of its own responses, whatever it was trained on
    parts: dict[str, float]         # of which this reward consists, if the task says so
    update: dict[str, float]        # metrics of its update

    def metrics(self, task: Task) -> dict[str, float]:
        """Metrics of the rollout, the update and the task; a name in two of these raises."""
        rollout, reward, cfg = self.rollout, self.reward_B.mean().item(), self.agent.cfg
        kl = rollout.kl_B.mean().item()
        metrics = {"task_reward": reward, "task_reward_std": self.reward_B.std(correction=0).item(),
                   "kl": kl, "combined_reward": reward - cfg.init_kl_coef * kl,
                   "length": rollout.mask_BT.sum(1).mean().item(),
                   "truncated": rollout.truncated_B.double().mean().item(),
                   "sampling_gap": rollout.sampling_gap, "trained": float(bool(self.update))}
        return dict(**metrics, **self.update, **self.parts, **task.metrics(rollout.query, rollout.text))


class Record:
    """done: iterations completed by the checkpoint that the run resumes from, or 0."""

    def __init__(self, setup: Setup, agents: list[Agent]):
        self.setup, self.agents, self.run_dir, cfg = setup, agents, setup.run_dir, setup.cfg
        self.method, self.task, self.done, wandb_id = setup.method, setup.task, 0, ""
        if cfg.resume and (state := load_checkpoint(self.run_dir, agents)):
            self.done, wandb_id = state["iteration"], state["wandb_id"]
            self.method.memory, self.task.memory = state["memory"]["method"], state["memory"]["task"]
        if processes().is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_text(self.run_dir / "config.json", config_json(replace(cfg, resume=False), setup.base_of))
            (self.run_dir / "eval.json").unlink(missing_ok=True)        # of a run that has ended alone
        self.logger = Logger(cfg, [*setup.configs], self.run_dir, self.done, wandb_id)

    def begin(self, iteration: int) -> None:
        """Starts the iteration's clock, and seeds the global generators, for tasks and methods that draw from
        them; agents have their own.
        """
        for hooked in (self.method, self.task):
            hooked.iteration, hooked.training = iteration, True
        # a spawn key, so that no adapter of an agent starts from this seed
        seed = np.random.SeedSequence(self.setup.cfg.seed, spawn_key=(iteration,)).generate_state(1)[0]
        set_seed(int(seed))
        self.clock = time.perf_counter()

    def log(self, iteration: int, turns: list[Turn], metrics: dict) -> None:
        """Logs an iteration: each metric as NAME/AGENT, the mean over the roles that the agent played, and
        `role/AGENT`, its first role by number; `metrics` are whatever else the method measured.
        """
        of_agents = defaultdict(list)
        for role, turn in enumerate(turns):
            of_agents.setdefault(f"role/{turn.agent.name}", [role])
            for name, x in turn.metrics(self.task).items():
                of_agents[f"{name}/{turn.agent.name}"].append(x)
        means = {name: statistics.fmean(xs) for name, xs in of_agents.items()}
        seconds = time.perf_counter() - self.clock
        tokens = sum(turn.rollout.mask_BT.sum().item() for turn in turns)
        row = dict(**means, **{name: float(x) for name, x in metrics.items()},
                   seconds=seconds, tokens_per_second=tokens / seconds)
        self.logger.iteration(iteration, row, self.samples(iteration, turns))

    def samples(self, iteration: int, turns: list[Turn]) -> list[dict]:
        """A few queries, with each role's prompt, response, agent and reward."""
        rows, count = [], min(len(turn.rollout.query) for turn in turns)
        for i in range(0, count, self.setup.cfg.responses_per_query)[:SAMPLES]:
            row = {"iteration": iteration, "query": turns[0].rollout.query[i]}
            for role, agent, rollout, reward_B, *_ in turns:
                (prompt,) = real_ids(rollout.prompt_BP[i:i + 1], rollout.prompt_mask_BP[i:i + 1])
                row |= {role: rollout.text[i], f"{role}_agent": agent.name,
                        f"{role}_reward": reward_B[i].item(),
                        f"{role}_prompt": agent.policy.tokenizer.decode(prompt)}
            rows.append(row)
        return rows

    def evaluate(self, iteration: int) -> None:
        """Logs held-out metrics as eval_NAME/AGENT; at first and at last of the bases, too, so that all are
        compared under one reward, which a task may have learned meanwhile.
        """
        bases = self.setup.bases if iteration in (0, self.setup.cfg.iterations) else {}
        metrics = held_out_metrics(self.setup, bases | {a.name: a.policy for a in self.agents}, iteration)
        row = {f"eval_{name}/{who}": float(x) for who in metrics for name, x in metrics[who].items()}
        self.logger.evaluation(iteration, row)

    def save_if_due(self, iteration: int) -> None:
        """Saves after iteration 1, every `save_every` iterations and at the end."""
        every = self.setup.cfg.save_every
        if every and (iteration in (1, self.setup.cfg.iterations) or iteration % every == 0):
            about = {"memory": self.memory(), "wandb_id": self.logger.wandb_id}
            save_checkpoint(self.run_dir, iteration, self.agents, about)

    def memory(self) -> dict[str, dict]:
        """Of the method and the task; a checkpoint has each agent's with the agent."""
        return {"method": self.method.memory, "task": self.task.memory}

    def finish(self) -> None:
        """Writes the final models, eval.json and curves.png; prints held-out tables and a few responses."""
        cfg = self.setup.cfg
        self.logger.bar.close()
        save_models(self.run_dir / "final", self.agents)
        if not processes().is_main:
            return
        torch.save(self.memory(), self.run_dir / "final/state.pt")
        rows, samples = read_jsonl(self.logger.metrics), read_jsonl(self.logger.samples)
        done, held_out = rows[-1]["iteration"], last_held_out(rows, [*self.setup.configs])
        about = {"iteration": done, "split": cfg.eval_split, "queries": cfg.eval_queries,
                 "samples": cfg.eval_samples}
        write_text(self.run_dir / "eval.json", json.dumps(about | held_out, indent=1) + "\n")
        draw_run(self.run_dir, self.run_dir / "curves.png")
        self.logger.send(done, lambda wandb: {"curves": wandb.Image(str(self.run_dir / "curves.png"))})
        for row in samples[-2:]:
            said = [f"    {row[f'{role}_agent']}: {row[role]}" for role in self.method.roles if role in row]
            print(f"\n{row['query']}", *said, sep="\n")
        seconds = statistics.median(row["seconds"] for row in rows if "seconds" in row)
        print(f"\n{tables('held-out', pd.DataFrame(held_out).T)}\n\n"
              f"{seconds:.2f} s per iteration (median of {done}), "
              f"peak memory {peak_memory(self.setup.device):.2f} GiB\nwritten to {self.run_dir}: "
              "metrics.jsonl, samples.jsonl, eval.json, curves.png, final/", flush=True)


def save_models(folder: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(folder/llm1)` loads the policy. With LoRA the folder holds only
    the adapter, and names its base; one of another kind than LoRA is for peft's `AutoPeftModelForCausalLM`.
    """
    for agent in agents:
        policy, whole = agent.policy, None
        if is_sharded(policy.lm) and not policy.adapter:
            once = {**dict(policy.lm.named_parameters()), **dict(policy.lm.named_buffers())}    # if tied
            whole = whole_on_cpu({name: x for name, x in policy.lm.state_dict().items() if name in once})
        if processes().is_main:
            policy.activate()
            policy.lm.generation_config = policy.generation_config
            policy.lm.save_pretrained(folder / agent.name, state_dict=whole)
            policy.tokenizer.save_pretrained(folder / agent.name)
