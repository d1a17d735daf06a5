"""Everything around the loops: from a configuration to a finished run folder."""
import json
import os
import random
import secrets
import shlex
import signal
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from typing import Iterable, Iterator, NamedTuple

import numpy as np
import torch

from cory import names
from cory.config import ASSETS, LR_SCHEDULES, METHODS, TASKS, Config
from cory.errors import UserError
from cory.experiment.checkpoint import (
    load_checkpoint,
    packed,
    require_disk,
    save_checkpoint,
    save_final,
    sources,
    versions,
)
from cory.experiment.evaluation import EVALUATION_SEED, answer, checked, evaluate, require_same_reward
from cory.experiment.fingerprints import of_run, require_same
from cory.experiment.limit import embedded_rewards, limit_of, on_limit
from cory.experiment.log import RunLog, log_digest
from cory.experiment.plots import draw_curves
from cory.experiment.saved_config import read_config, saved_config
from cory.experiment.tables import results_table
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model, storage_options
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import Rollout
from cory.system.distributed import all_reduce_max, broadcast, held_by_main, is_main, started_as, world_size
from cory.system.files import read_log, replace_text
from cory.system.folder import claimed
from cory.system.machine import described, peak_memory, prepare_device, settled
from cory.system.sharding import shard, unsharded
from cory.system.signals import Signals
from cory.tasks.task import Task

# Columns of what a run writes: no agent, role or metric of a loop may have such a name.
RESERVED = ["base", "team", "eval", "iteration", "query", "queries", "samples", "roles", "seconds", "metric"]
# Nats per token of `sampling_gap` that rounding does not make, in float32 and in less: bfloat16 makes some
# 0.02. A repetition penalty of 1.1 makes 0.03 to 0.2, dropout of 0.1 makes 1.8.
OFF_POLICY, OFF_POLICY_ROUNDED = 0.01, 0.1


class Turn(NamedTuple):
    """What one agent did in one role in one iteration."""
    role: str                       # pioneer, observer, ...; the agent's own name is its identity
    agent: Agent
    rollout: Rollout
    reward_B: torch.Tensor          # the task reward of its own responses, whatever it was trained on
    update: dict[str, float]        # metrics of its update

    def metrics(self, task: Task, queries: list[str]) -> dict[str, float]:
        """Of the rollout, the update and the task. Raises `UserError` where one would hide another."""
        rollout, reward = self.rollout, self.reward_B.mean().item()
        kl, eta = rollout.kl_B.mean().item(), self.agent.cfg.init_kl_coef
        metrics = {"task_reward": reward, "task_reward_std": self.reward_B.std(correction=0).item(),
                   "kl": kl, "combined_reward": reward - eta * kl,
                   "length": rollout.length_B.mean().item(), "sampling_gap": rollout.sampling_gap}
        metrics |= checked(self.update, taken=metrics)
        return metrics | checked(task.metrics(queries, rollout.text), taken=metrics)


class Run(ExitStack):
    """What a loop works with: it reads `cfg`, `task` and `roles` (the agents by first role).

    It goes through `iterations()`, each ended by `finish_iteration(...)`, which logs, evaluates and saves.
    What it must remember from one iteration to the next it keeps in `state`, a dictionary of JSON values and
    tensors that are the same in all processes: a resumed run finds it as it was.
    `with Run(cfg) as run:` holds the run's folder, its log and its answer to signals until the block ends, or
    until `close()`.
    """

    def __init__(self, cfg: Config):
        super().__init__()
        if names.being_imported:                        # the importing `find` says the way out
            raise UserError("module", names.being_imported[-1], "starts a run while it is imported")
        processes = os.environ["WORLD_SIZE"] if "TORCHELASTIC_RUN_ID" in os.environ else "1"
        if processes != str(world_size()):
            raise UserError("processes", processes, "have not been joined; start the run by cory.train.train")
        self.cfg = cfg = settled(cfg)
        versions()                          # asked now and kept: the clone may be at another commit later
        self.signals = Signals().install()
        self.callback(self.signals.remove)
        try:
            self.run_dir = self.enter_context(held_by_main(claimed, cfg))
            self.prepare(cfg)
        except BaseException:
            self.close()
            raise

    def prepare(self, cfg: Config) -> None:
        """Device, task, models, agents; the state of a resumed run; the log. What is refused comes first."""
        self.device = prepare_device(cfg)
        random.seed(cfg.seed)               # for loops and tasks that draw from these; agents have their own
        np.random.seed(cfg.seed)
        torch.manual_seed(cfg.seed)
        self.loop = names.find("method", cfg.method, METHODS)
        task_class = find_task(cfg)
        self.agent_names = agents_of(cfg, self.loop)
        self.columns = cfg.base_columns(self.agent_names)
        for name in {*self.agent_names, *cfg.agent_settings}:
            require_agent(cfg, name, self.agent_names)
        print(first_lines(cfg, self.agent_names, self.device), flush=True)
        storage_options(cfg.storage, self.device)
        data = task_class.load_data(cfg)
        self.bases = load_bases(cfg, self.columns, self.device)
        self.task = task_class(cfg, data, self.bases["base"])
        contexts = [base.context_length for base in self.bases.values()]
        self.task.room = max(cfg.max_response_length, self.task.room - contexts[0] + min(contexts))
        # of the bases as they were loaded: LoRA's agents put their adapters into them
        self.fingerprints = of_run(data, self.bases, self.task)
        self.agents = [Agent(name, self.bases[self.columns[name]], cfg.of_agent(name), i)
                       for i, name in enumerate(self.agent_names)]
        self.roles = self.agents * len(self.loop.agents) if cfg.share_weights else self.agents
        broadcast(lambda: require_disk(cfg, self.run_dir, self.agents))
        trained = {p for agent in self.agents for p in agent.policy.trained().values()}
        for base in self.bases.values() if cfg.shard else ():
            shard(base.lm, cfg, whole=trained)      # after agents have had their copies, or their adapters
        self.state, self.code, self.mark = {}, sources(), secrets.token_hex(8)
        self.start, self.wandb_id = self.resume() if cfg.resume else (0, "")
        self.warned_off_policy = False
        if is_main():
            saved = saved_config(cfg, self.agent_names, self.fingerprints, self.mark)
            replace_text(self.run_dir / "config.json", json.dumps(saved, indent=1) + "\n")
            self.log = RunLog(cfg, self.agent_names, self.run_dir, self.start, self.wandb_id)
            self.wandb_id = self.log.wandb.id
            self.callback(self.log.close)

    def resume(self) -> tuple[int, str]:
        """Puts the last checkpoint's state back. Returns (iterations done, W&B id), or (0, "").

        Model, data and reward must be what they were. Other versions of packages are printed.
        """
        cfg, before = self.cfg, read_config(self.run_dir)
        self.mark = before["run"]
        for name, fingerprint in self.fingerprints.items():
            require_same(cfg, before, name, fingerprint)
        logged = {row["iteration"] for row in read_log(self.run_dir / "metrics.jsonl")}
        state = load_checkpoint(self.run_dir, self.agents)
        if not state:
            done = max(logged, default=0)
            way_out = f"has done {done} iterations and has no checkpoint to go on from; start another run"
            cfg.require("run_dir", done <= before["save_every"], way_out)
            print("no checkpoint has been made yet: the run starts from its beginning", flush=True)
            return 0, ""
        done, then = state["iteration"], state["versions"]
        cfg.require("iterations", cfg.iterations >= done, f"the run has done {done}; ask for more")
        way_out = "its config.json and its checkpoint are of two runs; put back its own"
        cfg.require("run_dir", self.mark == state["run"], way_out)
        way_out = f"its metrics.jsonl or samples.jsonl is not as iteration {done} left it; put back a copy"
        as_left = logged >= {*range(done + 1)} and state["log"] == log_digest(self.run_dir, done)
        cfg.require("run_dir", as_left, way_out)
        require_same_reward(self.task, self.run_dir)
        changed = [f"{name} {then.get(name)} then, {now} now" for name, now in versions().items()
                   if then.get(name) != now]
        if changed:
            print(f"other versions than at the checkpoint, so that results may differ: {'; '.join(changed)}")
        added = [f"--{name}: {value}" for name, value in asdict(cfg).items() if name not in before]
        if added:
            print(f"settings that the run is older than, from here on: {', '.join(added)}")
        edited = [file for file, now in self.code.items() if state["code"].get(file, now) != now]
        if edited:
            print(f"other code than at the checkpoint, by which the run goes on: {', '.join(edited)}")
        if done == cfg.iterations:
            print(f"its {done} iterations are done: results are written again; ask for more by --iterations")
        agents = dict(zip(self.agent_names, self.agents, strict=True))
        self.roles = [agents[name] for name in state["roles"]]
        self.played = [agents[name] for name in state["played"]]
        self.state = state["memory"]
        return done, state["wandb_id"]

    def iterations(self) -> Iterator[int]:
        """Yields start + 1 .. iterations. A new run first evaluates the base, which all agents equal."""
        if self.start == 0:
            metrics = {f"eval/{column}/{name}": value for column, base in self.bases.items()
                       for name, value in evaluate(base, base, self.task, self.cfg).items()}
            metrics |= self.evaluate_team(self.roles)
            if is_main():
                self.log.iteration(0, metrics, [], {})
        self.clock, self.signals.waiting = time.perf_counter(), True
        yield from range(self.start + 1, self.cfg.iterations + 1)
        self.signals.waiting = False

    def finish_iteration(self, iteration: int, queries: list[str], max_new_tokens: int, turns: list[Turn],
                         roles: list[Agent], metrics: dict[str, float] | None = None) -> None:
        """Logs, evaluates and saves what is due. Raises `UserError` for what would silently be lost.

        `turns` were played on `queries` with responses of at most `max_new_tokens`; `roles` are the agents in
        the order of their roles in the next iteration; `metrics` are what a loop measured beside, by name.
        """
        cfg, last = self.cfg, iteration == self.cfg.iterations
        self.require_known(turns, roles)
        packed("state", self.state, {})
        self.warn_if_off_policy(turns)
        row = self.metrics_of(queries, turns)
        taken = {*RESERVED, *(word for key in row for word in key.split("/"))}
        row |= checked(metrics or {}, taken)
        row["seconds"] = time.perf_counter() - self.clock
        evaluates = last or cfg.eval_every and iteration % cfg.eval_every == 0
        samples = self.samples(iteration, queries, max_new_tokens, turns, self.bases if evaluates else {})
        if evaluates:
            row |= self.evaluate_agents() | self.evaluate_team(self.roles)
        self.played, self.roles = self.roles, roles
        if is_main():
            self.log.iteration(iteration, row, samples, {turn.role: turn.agent.name for turn in turns})
        received = all_reduce_max(self.signals.received or 0)
        if cfg.save_every and (last or received or iteration % cfg.save_every == 0):
            about = {"run": self.mark, "wandb_id": self.wandb_id, "code": self.code,
                     "played": [agent.name for agent in self.played]}
            save_checkpoint(self.run_dir, iteration, self.agents, roles, self.state, about)
        if received:
            self.stop(iteration, signal.Signals(received))
        self.clock = time.perf_counter()

    def stop(self, iteration: int, received: signal.Signals) -> None:
        """Ends a run that a signal has reached, after an iteration that is saved."""
        self.close()
        way_on = f"go on with: {started_as(sys.argv[0])} --resume --run_dir {shlex.quote(str(self.run_dir))}"
        if not self.cfg.save_every:
            way_on = "nothing is saved, as --save_every 0 asks"
        print(f"stopped by {received.name} after iteration {iteration}; {way_on}", flush=True)
        raise SystemExit(128 + received)

    def require_known(self, turns: list[Turn], roles: list[Agent]) -> None:
        """Agents and roles are those that the run evaluates, saves and finds again. Raises `UserError`."""
        known = named(self.roles)
        if not turns or any(turn.agent not in self.agents for turn in turns):
            way_out = "give finish_iteration a Turn of each agent that played; run.roles holds the agents"
            raise UserError("turns", named(turn.agent for turn in turns), way_out)
        if named(roles) != known:
            raise UserError("roles", named(roles), f"must be the run's agents in another order: {known}")
        require_free("role", [turn.role for turn in turns], [*self.agent_names, *RESERVED])

    def warn_if_off_policy(self, turns: list[Turn]) -> None:
        """Once: responses were drawn from another distribution than the update takes them to be from, and
        nothing corrects for it.
        """
        uncorrected = [turn for turn in turns if turn.agent.cfg.importance_cap == 0]
        if not uncorrected:
            return
        cfg, turn = self.cfg, max(uncorrected, key=lambda turn: turn.rollout.sampling_gap)
        gap, exact = turn.rollout.sampling_gap, cfg.dtype == cfg.head_precision == "float32"
        most = OFF_POLICY if exact and not cfg.load_in_4bit else OFF_POLICY_ROUNDED
        if gap > most and is_main() and not self.warned_off_policy:
            self.warned_off_policy = True
            print(f"\nwarning: sampling_gap is {gap:.2f} nats per token: {turn.role}'s responses were not "
                  "sampled from the policy that is trained (a filter, a penalty, dropout?), whose "
                  "log-probabilities PPO's ratio is of; --importance_cap 2 corrects for it", file=sys.stderr,
                  flush=True)

    def metrics_of(self, queries: list[str], turns: list[Turn]) -> dict[str, float]:
        """Each metric under its role, and under its agent the mean over the roles that it played."""
        by_role, by_agent = {}, defaultdict(list)
        for turn in turns:
            for name, value in turn.metrics(self.task, queries).items():
                by_role[f"{turn.role}/{name}"] = value
                by_agent[f"{turn.agent.name}/{name}"].append(value)
        return by_role | {key: statistics.fmean(values) for key, values in by_agent.items()}

    def evaluate_agents(self) -> dict[str, float]:
        return {f"eval/{agent.name}/{name}": value for agent in self.agents
                for name, value in evaluate(agent.policy, agent.reference, self.task, agent.cfg).items()}

    def evaluate_team(self, roles: list[Agent]) -> dict[str, float]:
        """What the loop measures of its agents together, in the roles of the iteration that has ended."""
        measure = getattr(self.loop, "evaluate", None)
        metrics = checked(measure(self, roles)) if measure else {}
        return {f"eval/team/{name}": value for name, value in metrics.items()}

    def samples(self, iteration: int, queries: list[str], limit: int, turns: list[Turn],
                bases: dict[str, LanguageModel]) -> list[dict]:
        """A few different queries with the responses of each role and of these bases, and their rewards."""
        kept = range(0, len(queries), self.cfg.responses_per_query)[:self.cfg.sample_rows]
        asked = [queries[i] for i in kept]
        if not asked:
            return []
        rows = [{"iteration": iteration, "query": query} for query in asked]
        for turn in turns:
            for row, i in zip(rows, kept, strict=True):
                row |= {turn.role: turn.rollout.text[i], f"{turn.role}_agent": turn.agent.name,
                        f"{turn.role}_reward": turn.reward_B[i].item(),
                        f"{turn.role}_prompt": prompt_of(turn, i)}
        for column, base in bases.items():
            with unsharded(base):
                prompts = self.task.pioneer_prompts(asked)
                texts = answer(base, prompts, limit, seed=EVALUATION_SEED + iteration)
            rewards = self.task.reward(asked, texts).tolist()
            for row, text, reward in zip(rows, texts, rewards, strict=True):
                row |= {column: text, f"{column}_reward": reward}
        return rows

    def finish(self) -> None:
        """Writes the final models, eval.json and curves.png, and prints the held-out table."""
        rows = broadcast(lambda: read_log(self.run_dir / "metrics.jsonl"))
        self.cfg.require("run_dir", rows, "its metrics.jsonl is gone; put back a copy, then --resume")
        last, done = rows[-1], rows[-1]["iteration"]
        self.cfg.require("method", done >= self.cfg.iterations,
                         f"stopped after iteration {done}; call run.finish_iteration in each")
        save_final(self.run_dir, self.agents)
        metrics = {key: value for key, value in rows[0].items() if not key.startswith("eval/team/")} | last
        if f"eval/{self.agent_names[0]}/kl" not in last:
            # resumed at its end, which was not an end before
            metrics |= self.evaluate_agents() | self.evaluate_team(self.played)
        if is_main():
            self.log.bar.close()
            self.write_results(done, metrics)
            seconds, memory = statistics.median(row["seconds"] for row in rows[1:]), peak_memory(self.device)
            peak = f", peak memory {memory:.2f} GiB" if memory else ""
            print(f"{seconds:.2f} s per iteration (median of {done}){peak}\nwritten to {self.run_dir}: "
                  "metrics.jsonl, samples.jsonl, eval.json, curves.png, final/", flush=True)
            self.log.wandb.picture(done)                # last: W&B may keep us waiting

    def write_results(self, iteration: int, metrics: dict[str, float]) -> None:
        """eval.json of the held-out `metrics`, the picture, and the table on the terminal."""
        held_out = {"iteration": iteration, "split": self.cfg.eval_split,
                    "queries": self.cfg.eval_queries, "samples": self.cfg.eval_samples}
        for name in [*self.bases, *self.agent_names, "team"]:
            prefix = f"eval/{name}/"
            measured = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
            held_out |= {name: measured} if measured else {}
        if rewards := embedded_rewards(self.cfg, self.task, self.fingerprints["model"]):
            replace_text(self.run_dir / "limit.json", json.dumps(rewards))
        if limit := limit_of(self.run_dir):
            held_out = limit.with_shares(held_out, on_limit(self.cfg, self.agent_names))
        replace_text(self.run_dir / "eval.json", json.dumps(held_out, indent=1) + "\n")
        draw_curves(self.run_dir)
        print(results_table(held_out))


def prompt_of(turn: Turn, row: int) -> str:
    """What the agent has read, as text."""
    real = turn.rollout.prompt_mask_BP[row].bool()
    return turn.agent.policy.tokenizer.decode(turn.rollout.prompt_BP[row][real], skip_special_tokens=True)


def require_agent(cfg: Config, name: str, agents: list[str]) -> None:
    """An agent whose settings can be used. Raises `UserError`."""
    if name not in agents:
        raise UserError("flag", f"--{name}", "names no agent of this run; it has "
                        f"{', '.join(agents)}{' (--share_weights true)' * cfg.share_weights}")
    own = cfg.of_agent(name)
    names.find("lr_schedule", own.lr_schedule, LR_SCHEDULES)
    own.require("mini_batch_size", own.rows_per_optimizer_step % world_size() == 0,
                f"{own.rows_per_optimizer_step} rows of an optimizer step cannot be divided among "
                f"{world_size()} processes; make them a multiple")


def load_bases(cfg: Config, columns: dict[str, str], device: torch.device) -> dict[str, LanguageModel]:
    """The base of each column of `Config.base_columns`; agents of equal bases share one."""
    return {column: load_language_model(cfg.of_agent(name).model, cfg.temperature, cfg.precision, device,
                                        cfg.storage)
            for name, column in columns.items() if column in ("base", f"base_{name}")}


def named(agents: Iterable[Agent]) -> str:
    return ", ".join(sorted(agent.name for agent in agents))


def agents_of(cfg: Config, loop) -> list[str]:
    """Names of the run's agents, in order: those that its loop trains, or the first if they share weights."""
    agents = list(getattr(loop, "agents", ()))
    cfg.require("method", agents, 'does not say which agents it trains; put @trains("llm1", ...) above it')
    require_free("agent", agents, RESERVED)
    return agents[:1] if cfg.share_weights else agents


def require_free(kind: str, given: list[str], taken: list[str]) -> None:
    """Names of roles or agents differ from each other and from `taken`. Raises `UserError`."""
    all_names = [str(name).lower() for name in [*given, *taken]]
    for name in given:
        if not str(name).isidentifier() or all_names.count(name.lower()) > 1:
            way_out = f"is no name, or that of another role, agent or column; give each {kind} one of its own"
            raise UserError(kind, name, way_out)


def find_task(cfg: Config) -> type[Task]:
    task = names.find("task", cfg.task, TASKS)
    is_task = isinstance(task, type) and issubclass(task, Task)
    cfg.require("task", is_task, "is no subclass of cory.tasks.task.Task; make it one")
    return task


def first_lines(cfg: Config, agents: list[str], device: torch.device) -> str:
    models = ", ".join(dict.fromkeys(cfg.of_agent(name).model for name in agents))
    line = (f"{names.short_name(cfg.method).upper()} on {names.short_name(cfg.task)}: preset {cfg.preset}, "
            f"model {models}, data {cfg.dataset}.")
    if cfg.paper_preset and ":" not in cfg.task + cfg.method:
        flags = f"--method {cfg.method} --preset {cfg.paper_preset}"
        line += f" The paper's setting: python train_{cfg.task}.py {flags}"
    return line.replace(f"{ASSETS}/", "embedded ") + f"\n{described(cfg, device)}"
