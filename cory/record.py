"""The record of a run: what is logged, evaluated and saved, and what a resumed run goes on from."""
import json
import shlex
import shutil
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from cory.checkpoint import load_checkpoint, save_checkpoint
from cory.config import config_json, read_config
from cory.device import peak_memory
from cory.distributed import processes
from cory.errors import UserError
from cory.evaluate import examples, for_evaluation, held_out_metrics
from cory.final import require_faithful, save_models
from cory.log import Logger, read_jsonl, write_text
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, real_ids
from cory.report import draw_run, last_held_out, tables
from cory.setup import Setup
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
                   "sampling_gap": rollout.sampling_gap}
        return dict(**metrics, **self.update, **self.parts, **task.metrics(rollout.query, rollout.text))


class Record:
    """done: iterations completed by the checkpoint that the run resumes from, or 0. signals: received so far.
    """

    def __init__(self, setup: Setup, agents: list[Agent]):
        self.setup, self.agents, cfg = setup, agents, setup.cfg
        self.run_dir, self.method, self.task = setup.run_dir, setup.method, setup.task
        self.digests_at_start = setup.digests(agents)
        self.signals: list[int] = []
        self.best = float("-inf")
        self.done, wandb_id = self.resume() if cfg.resume else (0, "")
        if processes().is_main:
            self.begin_folder()
        self.logger = Logger(cfg, [*setup.configs], self.run_dir, self.done, wandb_id)

    def begin_folder(self) -> None:
        """Writes config.json, and removes what is only true of a run that has ended."""
        setup, path = self.setup, self.run_dir / "config.json"
        earlier = read_config(self.run_dir)["commit"] if setup.cfg.resume else ""
        write_text(path, config_json(replace(setup.cfg, resume=False), setup.base_of, setup.configs, earlier))
        (self.run_dir / "eval.json").unlink(missing_ok=True)
        if self.done < setup.cfg.iterations:
            shutil.rmtree(self.run_dir / "evaluation", ignore_errors=True)

    def resume(self) -> tuple[int, str]:
        """Restores the last checkpoint's state. Returns (iterations done, W&B id), or (0, "")."""
        cfg, state = self.setup.cfg, load_checkpoint(self.run_dir, self.agents)
        if state is None:
            cfg.require("resume", not (self.run_dir / "eval.json").exists(),
                        "the run is finished, and has no checkpoint to continue from")
            print("no checkpoint yet: the run starts from the beginning", flush=True)
            return 0, ""
        done, before = state["iteration"], state["iterations"]
        schedules = {f"--lr_schedule {agent.cfg.lr_schedule}" for agent in self.agents}
        schedules |= {f"--kl_controller {agent.cfg.kl_controller}" for agent in self.agents}
        schedules -= {"--lr_schedule constant", "--kl_controller adaptive"}
        cfg.require("iterations", not schedules or cfg.iterations == before,
                    f"the run has {before}, and {', '.join(sorted(schedules))} may depend on it")
        cfg.require("iterations", cfg.iterations > done or cfg.iterations == done == before,
                    f"the run has done {done}; ask for more")
        self.setup.require_digests(self.digests_at_start, state["digests"], "is not what the run began with "
                                   "(weights, tokens or rows differ); name that one, wherever it is")
        self.method.memory, self.task.memory = state["memory"]["method"], state["memory"]["task"]
        self.best = state["best"]
        return done, state["wandb_id"]

    def require_unchanged(self) -> None:
        found = self.setup.digests(self.agents)
        self.setup.require_digests(
            found, self.digests_at_start, "is not what the run began with; frozen weights have changed: KL "
            "has another reference, which no checkpoint keeps")

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
        for agent in self.agents:
            agent.seconds.clear()

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
        metrics = {name: float(x) for name, x in metrics.items()}
        row = dict(**means, **metrics, **self.timings(turns))
        self.logger.iteration(iteration, row, self.samples(iteration, turns))

    def timings(self, turns: list[Turn]) -> dict[str, float]:
        """Seconds of the iteration and of its phases, of all agents, and response tokens per second."""
        seconds = time.perf_counter() - self.clock
        of_phases = defaultdict(float)
        for agent in self.agents:
            for phase, x in agent.seconds.items():
                of_phases[f"seconds_{phase}"] += x
        tokens = sum(turn.rollout.mask_BT.sum().item() for turn in turns)
        return {"seconds": seconds, **of_phases, "tokens_per_second": tokens / seconds}

    def samples(self, iteration: int, turns: list[Turn]) -> list[dict]:
        """A few queries, with each role's prompt, response, agent and reward."""
        rows, queries, group_B = [], turns[0].rollout.query, turns[0].rollout.group_B
        groups = [*range(len(queries))] if group_B is None else group_B.tolist()
        firsts = [i for i, group in enumerate(groups) if group not in groups[:i]]
        for i in firsts[:SAMPLES]:
            row = {"iteration": iteration, "query": queries[i]}
            for turn in turns:
                role, rollout, tokenizer = turn.role, turn.rollout, turn.agent.policy.tokenizer
                if i >= len(rollout.query):
                    continue
                (prompt,) = real_ids(rollout.prompt_BP[i:i + 1], rollout.prompt_mask_BP[i:i + 1])
                row |= {role: rollout.text[i], f"{role}_agent": turn.agent.name,
                        f"{role}_reward": turn.reward_B[i].item(), f"{role}_prompt": tokenizer.decode(prompt)}
                if rollout.query[i] != queries[i]:
                    row[f"{role}_query"] = rollout.query[i]
            rows.append(row)
        return rows

    def evaluate(self, iteration: int) -> None:
        """Logs held-out metrics as eval_NAME/AGENT; at iteration 0 of the bases, too. With `--save_best true`
        writes the models to best/ whenever the agents' mean combined reward is the highest so far.
        """
        self.require_unchanged()
        bases = self.setup.bases if iteration == 0 else {}
        metrics = held_out_metrics(self.setup, bases | {a.name: a.policy for a in self.agents}, iteration)
        row = {f"eval_{name}/{who}": float(x) for who in metrics for name, x in metrics[who].items()}
        self.logger.evaluation(iteration, row)
        combined = statistics.fmean(metrics[agent.name]["combined_reward"] for agent in self.agents)
        if self.setup.cfg.save_best and iteration > 0 and combined > self.best:
            self.best, folder = combined, self.run_dir / "best"
            (folder / "eval.json").unlink(missing_ok=True)      # absent while the models are being written
            save_models(folder, self.agents)
            if processes().is_main:
                about = {"iteration": iteration, "combined_reward": combined, **metrics}
                write_text(folder / "eval.json", json.dumps(about, indent=1, default=float) + "\n")

    def save_if_due(self, iteration: int) -> None:
        """Saves after iteration 1, every `save_every` iterations and at the end; after a signal to a process,
        too, which then ends the run.
        """
        every, signals = self.setup.cfg.save_every, processes().gather(self.signals)
        is_due = every and (iteration in (1, self.setup.cfg.iterations) or iteration % every == 0)
        if iteration == 1:
            self.require_unchanged()
        if is_due or every and signals:
            self.save(iteration)
        if signals:
            self.stop(iteration, signals[0])

    def save(self, iteration: int) -> None:
        """Writes a checkpoint; after iteration 1 also the final models, which it reads again, so that what
        cannot be saved is found at once.
        """
        for agent in self.agents:
            given = self.setup.configs[agent.name], self.setup.bases[self.setup.base_of[agent.name]]
            if (agent.cfg, agent.base) != given:
                raise UserError("agent", agent.name, "has another cfg or base than at the start, which "
                                "no checkpoint keeps; use --save_every 0")
        self.require_unchanged()
        about = {"iterations": self.setup.cfg.iterations, "digests": self.digests_at_start,
                 "memory": self.memory(), "best": self.best, "wandb_id": self.logger.wandb.id}
        save_checkpoint(self.run_dir, iteration, self.agents, about)
        if iteration == 1:
            require_faithful(self.setup, self.agents)

    def stop(self, iteration: int, number: int) -> None:
        """Ends the run after a signal, and says how to go on."""
        processes().gather([])              # the first process to end ends all: main has saved by now
        hint = f"go on with: python {sys.argv[0]} --resume --run_dir {shlex.quote(str(self.run_dir))}"
        hint = hint if self.setup.cfg.save_every else "nothing is saved, as --save_every 0 asks"
        self.logger.bar.close()
        print(f"stopped after iteration {iteration}; {hint}", flush=True)
        raise SystemExit(128 + number)

    def memory(self) -> dict[str, dict]:
        """Of the method and the task; a checkpoint has each agent's with the agent."""
        return {"method": self.method.memory, "task": self.task.memory}

    def finish(self) -> None:
        """Writes the final models, eval.json and curves.png; prints a few responses and held-out tables."""
        cfg = self.setup.cfg
        self.logger.bar.close()
        save_models(self.run_dir / "final", self.agents)
        models = self.setup.bases | {agent.name: agent.policy for agent in self.agents}
        responses = examples(models, cfg, for_evaluation(self.method, cfg.iterations).task)
        print(f"\nheld-out queries, and each model's response:\n{responses}\n")
        for_evaluate = {"memory": self.memory(), "digests": self.setup.digests(self.agents, rounded=True)}
        if not processes().is_main:
            return
        torch.save(for_evaluate, self.run_dir / "final/state.pt")
        rows = read_jsonl(self.run_dir / "metrics.jsonl")
        done = rows[-1]["iteration"]
        about = {"iteration": done, "split": cfg.eval_split, "queries": cfg.eval_queries,
                 "samples": cfg.eval_samples}
        held_out = last_held_out(rows)
        write_text(self.run_dir / "eval.json", json.dumps(about | held_out, indent=1) + "\n")
        draw_run(self.run_dir, self.run_dir / "curves.png")
        self.logger.wandb.send(done, lambda wandb: {"curves": wandb.Image(str(self.run_dir / "curves.png"))})
        seconds = statistics.median(row["seconds"] for row in rows if "seconds" in row)
        print(f"{tables('held-out', pd.DataFrame(held_out).T)}\n\n"
              f"{seconds:.2f} s per iteration (median of {done}), "
              f"peak memory {peak_memory(self.setup.device):.2f} GiB\nwritten to {self.run_dir}: "
              "metrics.jsonl, samples.jsonl, eval.json, curves.png, final/", flush=True)
