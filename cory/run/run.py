"""Everything around the training loops: from a configuration to a finished run folder."""
import json
import math
import random
import shlex
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch

from cory.config import BUNDLED, METHODS, TASKS, Config
from cory.errors import UserError
from cory.flags import config_json
from cory.loading import load_language_model
from cory.names import find, short_name
from cory.ppo.advantages import estimator
from cory.ppo.agent import Agent
from cory.ppo.lora import adapted_share
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import Rollout
from cory.ppo.sampling import real_ids
from cory.run.checkpoint import load_checkpoint, save_checkpoint, save_final
from cory.run.held_out import evaluate, merged
from cory.run.log import RunLog
from cory.run.plots import draw_runs
from cory.run.tables import results_table
from cory.system import device, signals
from cory.system.distributed import processes
from cory.system.files import claimed, read_jsonl, write_text
from cory.system.sharding import shard
from cory.tasks.task import Task

SAMPLES = 4                         # queries per iteration whose texts samples.jsonl keeps


class Turn(NamedTuple):
    """What one agent did in one role in one iteration."""
    role: str                       # pioneer, observer, ...
    agent: Agent
    rollout: Rollout
    reward_B: torch.Tensor          # the task reward of its own responses, whatever it was trained on
    update: dict[str, float]        # metrics of its update

    def metrics(self, task: Task, queries: list[str]) -> dict[str, float]:
        """Metrics of the rollout, the update and the task."""
        rollout, reward = self.rollout, self.reward_B.mean().item()
        kl, eta = rollout.kl_B.mean().item(), self.agent.cfg.init_kl_coef
        own = {"task_reward": reward, "task_reward_std": self.reward_B.std(correction=0).item(), "kl": kl,
               "combined_reward": reward - eta * kl, "length": rollout.mask_BT.sum(1).mean().item(),
               "sampling_gap": rollout.sampling_gap}
        return merged(own, self.update, task.metrics(queries, rollout.text))


class Run(ExitStack):
    """What a method works with: it reads `cfg`, `task` and `roles` (the agents in order of first role), and
    goes through `iterations()`, each ended by `finish_iteration(...)`, which logs, evaluates and saves.

    State carried between iterations belongs in `state`: a dictionary of numbers, text, tensors and
    collections of these, the same in all processes, restored on resume; it is also the method's `self.state`.
    `with Run(cfg) as run:` holds the run's folder and its log until the block ends.
    """

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg, self.device = device.resolve_auto(cfg)
        self.run_dir = Path(processes().broadcast(lambda: cfg.run_dir or new_folder(cfg)))
        try:
            processes().broadcast(lambda: self.enter_context(claimed(self.run_dir, cfg.resume)))
            self.prepare()
        except BaseException:
            self.close()
            raise

    def prepare(self) -> None:
        """Device, method, task, models, agents; the state of a resumed run; the log."""
        cfg = self.cfg
        device.prepare_device(cfg, self.device)
        self.method = find("method", cfg.method, METHODS)()
        names = list(self.method.agents)[:1] if cfg.share_weights else list(self.method.agents)
        require_agents(cfg, names)
        task_class = find_task(cfg)
        print(first_lines(cfg, names, self.device), flush=True)
        data = task_class.load_data(cfg)
        self.base_names = cfg.base_names(names)
        self.bases = load_bases(cfg, self.base_names, self.device)
        self.task = task_class(cfg, data, self.bases["base"])
        self.state = {}
        self.agents = [Agent(name, self.bases[self.base_names[name]], cfg.of_agent(name), i)
                       for i, name in enumerate(names)]
        for agent in self.agents:
            cfg.require("partner_term", cfg.partner_term != "critic" or agent.policy.value_head is not None,
                        f"needs a critic, which {agent.name}'s advantage {agent.cfg.advantage} lacks")
        for column, base in self.bases.items():
            if cfg.lora_rank and (share := adapted_share(base.layers)) < 1:
                print(f"{column}: {share:.1%} of its layers' weights have an adapter", flush=True)
        self.roles = self.agents * len(self.method.agents) if cfg.share_weights else self.agents
        trained = {p for agent in self.agents for p in agent.policy.trainable_parameters().values()}
        for base in self.bases.values():
            if not cfg.lora_rank:
                base.cast_once()                    # after agents have had their copies
            if cfg.shard:
                shard(base, cfg, whole=trained)
        self.start, wandb_id = self.resume() if cfg.resume else (0, "")
        self.method.state = self.state
        if processes().is_main:
            write_text(self.run_dir / "config.json", config_json(cfg, names))
            self.log = RunLog(cfg, names, self.run_dir, self.start, wandb_id)
            self.callback(self.log.close)
        self.enter_context(signals.noted())

    def resume(self) -> tuple[int, str]:
        """Restores the last checkpoint's state. Returns (iterations done, W&B id), or (0, "")."""
        cfg, state = self.cfg, load_checkpoint(self.run_dir, self.agents)
        if state is None:
            cfg.require("resume", not (self.run_dir / "final").exists(), "the run is finished, and has no "
                        "checkpoint to continue from")
            print("no checkpoint has been made yet: the run starts from the beginning", flush=True)
            return 0, ""
        done = state["iteration"]
        cfg.require("iterations", cfg.iterations > done or state["is_last"] and cfg.iterations == done,
                    f"the run has done {done}; ask for more")
        agents = {agent.name: agent for agent in self.agents}
        self.roles, self.state = [agents[name] for name in state["roles"]], state["memory"]
        return done, state["wandb_id"]

    def iterations(self) -> Iterator[int]:
        """Yields start + 1 .. iterations. A new run first evaluates the base, from which all agents start."""
        if self.start == 0:
            metrics = {f"eval/{column}/{name}": value for column, base in self.bases.items()
                       for name, value in evaluate(base, base, self.task, self.cfg).items()}
            metrics |= self.evaluate_team()
            if processes().is_main:
                self.log.iteration(0, metrics, [], {})
        for iteration in range(self.start + 1, self.cfg.iterations + 1):
            seed_generators(self.cfg.seed, iteration)
            for agent in self.agents:
                agent.set_learning_rate(iteration)
            self.clock = time.perf_counter()
            device.seconds.clear()
            yield iteration

    def finish_iteration(self, iteration: int, queries: list[str], turns: list[Turn], roles: list[Agent],
                         metrics: dict[str, float] | None = None) -> None:
        """Logs, evaluates and saves what is due. Call it last: later changes are neither logged nor saved.

        `turns` were played on `queries`; `roles` are the agents in the order of their roles in the next
        iteration; `metrics` are whatever else the method measured, by name.
        """
        cfg, last = self.cfg, iteration == self.cfg.iterations
        if {agent.name for agent in roles} != {agent.name for agent in self.agents}:
            raise UserError("roles", [agent.name for agent in roles], "must be all agents of the run")
        row = merged(self.metrics_of(queries, turns), metrics or {}, self.times(turns))
        samples = self.samples(iteration, queries, turns)
        if last or cfg.eval_every and iteration % cfg.eval_every == 0:
            row = merged(row, self.evaluate_agents(), self.evaluate_team())
        self.roles = roles
        if processes().is_main:
            self.log.iteration(iteration, row, samples, {turn.role: turn.agent.name for turn in turns})
        received = processes().gather([int(number) for number in signals.received])
        if cfg.save_every and (last or received or iteration % cfg.save_every == 0):
            about = {"wandb_id": self.log.wandb_id if processes().is_main else "", "is_last": last,
                     "roles": [agent.name for agent in roles]}
            save_checkpoint(self.run_dir, iteration, self.agents, self.state, about)
        if received:
            self.stop(iteration, received[0])

    def stop(self, iteration: int, number: int) -> None:
        """Ends a run that has received a signal, after an iteration that is saved."""
        self.close()
        folder = shlex.quote(str(self.run_dir))
        hint = f"go on with: {processes().launcher} {sys.argv[0]} --resume --run_dir {folder}"
        if not self.cfg.save_every:
            hint = "nothing is saved, as --save_every 0 asks"
        print(f"stopped after iteration {iteration}; {hint}", flush=True)
        raise SystemExit(128 + number)

    def metrics_of(self, queries: list[str], turns: list[Turn]) -> dict[str, float]:
        """Each metric under its role, and under its agent the mean over the roles that it played."""
        by_role, by_agent = [], defaultdict(list)
        for turn in turns:
            of_turn = turn.metrics(self.task, queries)
            by_role.append({f"{turn.role}/{name}": value for name, value in of_turn.items()})
            for name, value in of_turn.items():
                by_agent[f"{turn.agent.name}/{name}"].append(value)
        return merged(*by_role, {key: statistics.fmean(values) for key, values in by_agent.items()})

    def times(self, turns: list[Turn]) -> dict[str, float]:
        """Seconds of the iteration and of its phases, and sampled tokens per second, without evaluation."""
        phases = {f"{phase}_seconds": seconds for phase, seconds in device.seconds.items()}
        tokens = sum(turn.rollout.mask_BT.sum().item() for turn in turns)
        return {"seconds": time.perf_counter() - self.clock, **phases,
                "tokens_per_second": tokens / phases.get("sampling_seconds", math.inf)}

    def evaluate_agents(self) -> dict[str, float]:
        """Each agent against its base, whatever its reference has become."""
        return {f"eval/{agent.name}/{name}": value for agent in self.agents for name, value in
                evaluate(agent.policy, self.bases[self.base_names[agent.name]], self.task, agent.cfg).items()}

    def evaluate_team(self) -> dict[str, float]:
        """Team metrics, in the roles of the iteration that has ended."""
        metrics = self.method.team_metrics(self)
        return merged({f"eval/team/{name}": value for name, value in metrics.items()})

    def samples(self, iteration: int, queries: list[str], turns: list[Turn]) -> list[dict]:
        """A few different queries, with each role's prompt, response, agent and reward."""
        rows = []
        for i in range(0, len(queries), self.cfg.responses_per_query)[:SAMPLES]:
            row = {"iteration": iteration, "query": queries[i]}
            for turn in turns:
                (prompt,) = real_ids(turn.rollout.prompt_BP[i:i + 1], turn.rollout.prompt_mask_BP[i:i + 1])
                row |= {turn.role: turn.rollout.text[i], f"{turn.role}_agent": turn.agent.name,
                        f"{turn.role}_reward": turn.reward_B[i].item(),
                        f"{turn.role}_prompt": turn.agent.policy.tokenizer.decode(prompt)}
            rows.append(row)
        return rows

    def finish(self) -> None:
        """Writes the final models, eval.json and curves.png, and prints the held-out table."""
        rows = processes().broadcast(lambda: read_jsonl(self.run_dir / "metrics.jsonl"))
        done = rows[-1]["iteration"]
        self.cfg.require("method", done >= self.cfg.iterations,
                         f"stopped after iteration {done}; call run.finish_iteration in each")
        save_final(self.run_dir, self.agents)
        if not processes().is_main:
            return
        self.log.bar.close()
        held_out = {"iteration": done, "split": self.cfg.eval_split, "queries": self.cfg.eval_queries,
                    "samples": self.cfg.eval_samples}
        columns = [(name, rows[0], name) for name in self.bases]
        columns += [(name, rows[-1], name) for name in self.base_names]
        columns += [("base_team", rows[0], "team"), ("team", rows[-1], "team")]
        for column, row, name in columns:
            prefix = f"eval/{name}/"
            metrics = {key.removeprefix(prefix): x for key, x in row.items() if key.startswith(prefix)}
            held_out |= {column: metrics} if metrics else {}
        write_text(self.run_dir / "eval.json", json.dumps(held_out, indent=1) + "\n")
        draw_runs([self.run_dir], self.run_dir / "curves.png")
        self.log.plot(done, self.run_dir / "curves.png")
        seconds = statistics.median(row["seconds"] for row in rows[1:])
        print(f"{results_table(held_out)}\n{seconds:.2f} s per iteration (median of {done}), peak memory "
              f"{device.peak_memory(self.device):.2f} GiB\nwritten to {self.run_dir}: metrics.jsonl, "
              "samples.jsonl, eval.json, curves.png, final/", flush=True)


def new_folder(cfg: Config) -> str:
    """Makes a new folder under runs/, named by what runs and when, and returns its name."""
    what = f"{short_name(cfg.task)}-{short_name(cfg.method)}-{cfg.preset}-seed{cfg.seed}".lower()
    name = stem = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    for again in count(2):
        try:
            Path(name).mkdir(parents=True)
            return name
        except FileExistsError:                     # of another job that has started in the same second
            name = f"{stem}-{again}"


def require_agents(cfg: Config, names: list[str]) -> None:
    """Raises `UserError` unless the settings of each agent can be used."""
    for name in cfg.agent_settings.keys() - {*names}:
        raise UserError("flag", f"--{name}", f"names no agent of this run; it has {', '.join(names)}"
                        f"{' (--share_weights true)' * cfg.share_weights}")
    for own in map(cfg.of_agent, names):
        estimator(own)
        own.require("mini_batch_size", own.rows_per_optimizer_step % processes().size == 0,
                    f"{own.rows_per_optimizer_step} rows of an optimizer step cannot be divided among "
                    f"{processes().size} processes; make them a multiple")


def load_bases(cfg: Config, columns: dict[str, str], device: torch.device) -> dict[str, LanguageModel]:
    """The base of each column of `Config.base_names`; agents with the same base share it."""
    bases = {}
    for name, column in columns.items():
        if column not in bases:
            bases[column] = load_language_model(cfg.of_agent(name).model, cfg, device)
            if bases[column].context_length is None:
                print(f"{column}: its config.json gives no context length; no prompt is checked against it",
                      flush=True)
    return bases


def find_task(cfg: Config) -> type[Task]:
    task = find("task", cfg.task, TASKS)
    is_task = isinstance(task, type) and issubclass(task, Task)
    cfg.require("task", is_task, "is not a subclass of cory.tasks.task.Task; make it one")
    return task


def seed_generators(seed: int, iteration: int) -> None:
    """Seeds the global generators, for tasks and methods that draw from them; agents have their own."""
    # a spawn key, so that no adapter of an agent starts from this seed
    number = int(np.random.SeedSequence(seed, spawn_key=(iteration,)).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def first_lines(cfg: Config, agents: list[str], device_: torch.device) -> str:
    models = ", ".join(dict.fromkeys(cfg.of_agent(name).model for name in agents))
    line = (f"{short_name(cfg.method).upper()} on {short_name(cfg.task)}: preset {cfg.preset}, "
            f"model {models}, data {cfg.dataset}.")
    cpu = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(device_) if device_.type == "cuda" else cpu
    return line.replace(BUNDLED, "bundled ") + f"\n{where}, {cfg.dtype}"
