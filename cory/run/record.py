"""The record of a run: what is logged, evaluated and saved, and what a resumed run goes on from."""
import fcntl
import json
import os
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from cory.config import Config, to_save
from cory.errors import UserError
from cory.machine.device import peak_memory
from cory.machine.distributed import processes
from cory.machine.sharding import is_sharded, whole_on_cpu
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, real_ids
from cory.run.checkpoint import checkpoints_of, load_checkpoint, save_checkpoint
from cory.run.evaluate import held_out_metrics, response_metrics
from cory.run.experiment import Experiment
from cory.run.log import Logger, read_jsonl, write_text
from cory.run.report import draw_run, last_held_out, tables
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
        of_responses = response_metrics(self.rollout, self.reward_B, self.parts, task, self.agent.cfg)
        return dict(**of_responses, **self.update, task_reward_std=self.reward_B.std(correction=0).item())


class Record:
    """done: iterations completed by the checkpoint that the run resumes from, or 0."""

    def __init__(self, run: Experiment, agents: list[Agent]):
        self.cfg, self.method, self.task, self.bases = run.cfg, run.method, run.task, run.bases
        self.run_dir, self.device, self.agents, self.done, wandb_id = run.run_dir, run.device, agents, 0, ""
        if run.cfg.resume and (state := load_checkpoint(run.run_dir, agents)):
            self.done, wandb_id = state["iteration"], state["wandb_id"]
            self.method.memory, self.task.memory = state["memory"]["method"], state["memory"]["task"]
        if processes().is_main:
            write_text(self.run_dir / "config.json", json.dumps(to_save(run.cfg, run.configs), indent=1))
            (self.run_dir / "eval.json").unlink(missing_ok=True)        # only finished runs have one
        self.logger = Logger(run.cfg, [*run.configs], self.run_dir, self.done, wandb_id)

    def begin(self, iteration: int) -> None:
        """Starts the iteration's clock, and seeds the global generators, for tasks and methods that draw from
        them; agents have their own.
        """
        for hooked in (self.method, self.task):
            hooked.iteration, hooked.training = iteration, True
        # a spawn key, so that no adapter of an agent starts from this seed
        seed = np.random.SeedSequence(self.cfg.seed, spawn_key=(iteration,)).generate_state(1)[0]
        set_seed(int(seed))
        self.clock = time.perf_counter()

    def log(self, iteration: int, turns: list[Turn], metrics: dict) -> None:
        """Logs an iteration: each metric as NAME/AGENT, the mean over the roles that the agent played, and
        `role/AGENT`, its first role by number; `metrics` are whatever else the method measured.
        """
        of_agents, roles = defaultdict(list), {}
        for role, turn in enumerate(turns):
            roles.setdefault(f"role/{turn.agent.name}", role)
            for name, x in turn.metrics(self.task).items():
                of_agents[f"{name}/{turn.agent.name}"].append(x)
        means = {name: statistics.fmean(xs) for name, xs in of_agents.items()}
        of_team = {name: float(x) for name, x in metrics.items()}
        row = dict(**roles, **means, **of_team, seconds=time.perf_counter() - self.clock)
        self.logger.iteration(iteration, row, self.samples(iteration, turns))

    def samples(self, iteration: int, turns: list[Turn]) -> list[dict]:
        """A few queries, with each role's prompt, response, agent and reward."""
        rows, queries = [], turns[0].rollout.query
        for i in range(0, len(queries), self.cfg.responses_per_query)[:SAMPLES]:
            row = {"iteration": iteration, "query": queries[i]}
            for role, agent, rollout, reward_B, *_ in turns:
                (prompt,) = real_ids(rollout.prompt_BP[i:i + 1], rollout.prompt_mask_BP[i:i + 1])
                row |= {role: rollout.text[i], f"{role}_agent": agent.name,
                        f"{role}_reward": reward_B[i].item(),
                        f"{role}_prompt": agent.policy.tokenizer.decode(prompt)}
            rows.append(row)
        return rows

    def evaluate(self, iteration: int) -> None:
        """Logs held-out metrics as eval_NAME/WHO; of the bases, too, since a reward may have been learned."""
        metrics = held_out_metrics(self.method, self.agents, self.bases, iteration)
        row = {f"eval_{name}/{who}": x for who in metrics for name, x in metrics[who].items()}
        self.logger.evaluation(iteration, row)

    def save_if_due(self, iteration: int) -> None:
        """Saves after iteration 1, every `save_every` iterations and at the end."""
        every = self.cfg.save_every
        if every and (iteration in (1, self.cfg.iterations) or iteration % every == 0):
            about = {"memory": self.memory(), "wandb_id": self.logger.wandb_id}
            save_checkpoint(self.run_dir, iteration, self.agents, about)

    def memory(self) -> dict[str, dict]:
        """Of the method and the task; a checkpoint has each agent's with the agent."""
        return {"method": self.method.memory, "task": self.task.memory}

    def finish(self) -> None:
        """Writes the final models, eval.json and curves.png; prints held-out tables and a few responses."""
        cfg = self.cfg
        self.logger.bar.close()
        save_models(self.run_dir / "final", self.agents)
        if not processes().is_main:
            return
        torch.save(self.memory(), self.run_dir / "final/state.pt")
        rows, samples = read_jsonl(self.logger.metrics), read_jsonl(self.logger.samples)
        done, held_out = rows[-1]["iteration"], last_held_out(rows)
        about = {"iteration": done, "split": cfg.eval_split, "queries": cfg.eval_queries,
                 "samples": cfg.eval_samples}
        write_text(self.run_dir / "eval.json", json.dumps(about | held_out, indent=1) + "\n")
        draw_run(self.run_dir, self.run_dir / "curves.png")
        self.logger.send(done, lambda wandb: {"curves": wandb.Image(str(self.run_dir / "curves.png"))})
        for row in samples[-2:]:
            print(f"\n{row['query'][:80]!r}")
            for role in self.method.roles:
                print(f"    {role} ({row[f'{role}_agent']}): {row[role][:55]!r}")
        seconds = statistics.median(row["seconds"] for row in rows if "seconds" in row)
        print(f"\n{tables('held-out', pd.DataFrame(held_out).T)}\n\n"
              f"{seconds:.2f} s per iteration (median of {done}), "
              f"peak memory {peak_memory(self.device):.2f} GiB\n{self.run_dir} holds "
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
            policy.lm.generation_config.temperature = policy.temperature
            policy.lm.save_pretrained(folder / agent.name, state_dict=whole)
            policy.tokenizer.save_pretrained(folder / agent.name)


def run_folder(cfg: Config) -> Path:
    """The folder of a run that is resumed, or one without a run: `cfg.run_dir`, or a new one under runs/."""
    what = f"{cfg.task}-{cfg.method}-{cfg.preset}-seed{cfg.seed}".replace(":", "-").lower()
    new = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(processes().gather([cfg.run_dir or new])[0])
    cfg.require("run_dir", not folder.is_file(), "is a file; name a folder")
    if cfg.resume:
        goes_on = checkpoints_of(folder) or not (folder / "eval.json").exists()
        cfg.require("run_dir", goes_on, "holds a run that is finished and has no checkpoint")
    elif (folder / "config.json").exists():
        raise UserError("run_dir", str(folder), "holds a run; go on with --resume, or name another folder")
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A block in which no other run may use the folder. The lock is on the folder itself: it leaves no file,
    and ends with this process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError("run_dir", str(folder), "is in use by another run") from None
    except OSError:
        pass                                        # a file system that locks no folders, as NFS
    try:
        yield
    finally:
        os.close(descriptor)
