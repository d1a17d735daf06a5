"""Everything around the loops: from a configuration to a finished run folder."""
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Iterator, NamedTuple

import torch

from cory.ppo.agent import Agent
from cory.experiment.checkpoint import load_checkpoint, require_disk, save_checkpoint, save_final
from cory.config import Config
from cory.errors import UserError
from cory.evaluate import EVALUATION_SEED, evaluate
from cory.experiment.files import read_jsonl, replace_text
from cory.experiment.machine import choose_device, peak_memory, tune_cpu
from cory.ppo.model import load_language_model, storage_options
from cory.report import RunLog, draw_curves, results_table
from cory.ppo.rollout import Rollout
from cory.ppo.sampling import decode, encode_prompts, sample
from cory.tasks.task import Task


class Turn(NamedTuple):
    """What one agent did in one iteration."""
    role: str                       # pioneer or observer; the agent's own name is its identity
    agent: Agent
    rollout: Rollout
    reward_B: torch.Tensor          # the task reward of its own responses, whatever it was trained on
    stats: dict[str, float]         # of its PPO update

    def metrics(self, kl_coef: float) -> dict[str, float]:
        reward, kl = self.reward_B.mean().item(), self.rollout.kl_B.mean().item()
        return {"task_reward": reward, "kl": kl, "combined_reward": reward - kl_coef * kl,
                "task_reward_std": self.reward_B.std(correction=0).item(), "length": self.rollout.length_B.mean().item(),
                "sampling_gap": self.rollout.sampling_gap, **self.stats}


class Run:
    """One run: settings, task, reference, agents and log; after each iteration it evaluates, logs and saves."""

    def __init__(self, cfg: Config, task_class: type[Task]):
        self.cfg, self.device, self.run_dir = cfg, choose_device(cfg), choose_run_dir(cfg)
        if self.device.type == "cpu":
            tune_cpu()
        print(f"{cfg.method.upper()} on {cfg.task}: preset {cfg.preset}, model {shown(cfg.model)}, data {shown(cfg.dataset)}, {self.device} "
              f"{cfg.dtype}. The paper's setting: python train_{cfg.task}.py --method {cfg.method} --preset {cfg.paper_preset}", flush=True)
        storage_options(cfg.storage, self.device)                   # what cannot be is said before anything is loaded
        data = task_class.load_data(cfg)                            # and data before any model: its faults are the cheapest to find
        self.reference = load_language_model(cfg.model, cfg.temperature, cfg.dtype, self.device, cfg.storage)
        self.task = task_class(cfg, data, self.reference)
        names = ["llm1"] if cfg.method == "ppo" else ["llm1", "llm2"]
        self.agents = [Agent(name, self.reference, cfg, index) for index, name in enumerate(names)]
        self.run_dir.mkdir(parents=True, exist_ok=True)
        require_disk(cfg, self.run_dir, self.agents)
        self.start, self.roles, wandb_id = 0, self.agents, ""
        state = load_checkpoint(self.run_dir, self.agents) if cfg.resume else None
        if cfg.resume and not state and (self.run_dir / "eval.json").exists():
            raise UserError("run_dir", str(self.run_dir), "holds a finished run without a checkpoint to go on from; start a new one")
        if state:
            by_name = {agent.name: agent for agent in self.agents}
            self.start, self.roles, wandb_id = state["iteration"], [by_name[name] for name in state["roles"]], state["wandb_id"]
            if cfg.iterations < self.start:
                raise UserError("iterations", cfg.iterations, f"the run in {self.run_dir} has already done {self.start}; ask for more")
        replace_text(self.run_dir / "config.json", json.dumps({"task": cfg.task, **asdict(cfg)}, indent=1) + "\n")
        self.log = RunLog(cfg, self.run_dir, self.start, wandb_id)

    def iterations(self) -> Iterator[int]:
        """Yields start + 1 .. iterations. A new run first evaluates the base, which both agents still equal (iteration 0)."""
        if self.start == 0:
            base = evaluate(self.reference, self.reference, self.task, self.cfg)
            self.log.iteration(0, {f"eval/base/{k}": v for k, v in base.items()}, [])
        self.clock = time.perf_counter()
        yield from range(self.start + 1, self.cfg.iterations + 1)

    def finish_iteration(self, step: int, queries: list[str], length: int, turns: list[Turn], roles: list[Agent]) -> None:
        """`turns` were played on `queries` with at most `length` tokens; `roles` are (pioneer, observer) of the next iteration."""
        cfg, last = self.cfg, step == self.cfg.iterations
        metrics = {}
        for turn in turns:                                          # each figure under its role and under its identity
            figures = turn.metrics(cfg.init_kl_coef) | self.task.figures(queries, turn.rollout.text)
            for k, v in figures.items():
                metrics[f"{turn.role}/{k}"] = metrics[f"{turn.agent.name}/{k}"] = v
        samples = self.samples(step, queries, length, turns)
        metrics["seconds"] = time.perf_counter() - self.clock
        if last or cfg.eval_every and step % cfg.eval_every == 0:
            metrics |= self.evaluate_agents()
        self.log.iteration(step, metrics, samples)
        if cfg.save_every and (last or step % cfg.save_every == 0):
            save_checkpoint(self.run_dir, step, self.agents, roles, self.log.wandb_id)
        self.clock = time.perf_counter()

    def evaluate_agents(self) -> dict[str, float]:
        return {f"eval/{agent.name}/{k}": v for agent in self.agents
                for k, v in evaluate(agent.policy, self.reference, self.task, self.cfg).items()}

    def samples(self, step: int, queries: list[str], length: int, turns: list[Turn]) -> list[dict]:
        """The first few queries with the response of each role, and of the base, and their rewards."""
        rows = min(self.cfg.sample_rows, len(queries))
        if rows == 0:
            return []
        prompts = encode_prompts(self.reference, self.task.pioneer_prompts(queries[:rows]), length)
        drawn = sample(self.reference, prompts, length, torch.Generator().manual_seed(EVALUATION_SEED + step))
        base = decode(self.reference, drawn.response_BT, drawn.mask_BT)
        base_reward = self.task.reward(queries[:rows], base).tolist()
        table = []
        for i in range(rows):
            row = {"iteration": step, "query": queries[i]}
            for turn in turns:
                row |= {turn.role: turn.rollout.text[i], f"{turn.role}_agent": turn.agent.name, f"{turn.role}_reward": turn.reward_B[i].item()}
            table.append(row | {"base": base[i], "base_reward": base_reward[i]})
        return table

    def finish(self) -> None:
        """Final models, eval.json, curves.png, and the held-out table on the terminal."""
        self.log.bar.close()
        save_final(self.run_dir, self.agents)
        rows = read_jsonl(self.run_dir / "metrics.jsonl")
        figures = rows[0] | rows[-1]                                # the base's stand in the first row
        if "eval/llm1/kl" not in rows[-1]:                          # resumed at its end, which was not an end before
            figures |= self.evaluate_agents()
        held_out = {"iteration": rows[-1]["iteration"], "queries": self.cfg.eval_queries}
        for name in ["base", *(agent.name for agent in self.agents)]:
            prefix = f"eval/{name}/"
            held_out[name] = {k.removeprefix(prefix): v for k, v in figures.items() if k.startswith(prefix)}
        replace_text(self.run_dir / "eval.json", json.dumps(held_out, indent=1) + "\n")
        draw_curves(self.run_dir)
        self.log.finish(held_out)
        print(results_table(held_out))
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        print(f"{statistics.median(seconds):.2f} s per iteration (median of {len(seconds)}), peak memory {peak_memory(self.device):.2f} GiB")
        print(f"written to {self.run_dir}: metrics.jsonl, samples.jsonl, eval.json, curves.png, final/")


def shown(path: str) -> str:
    """A name as typed; the embedded assets by their short name."""
    from cory.config import ASSETS
    return f"embedded {Path(path).relative_to(ASSETS)}" if Path(path).is_relative_to(ASSETS) else path


def choose_run_dir(cfg: Config) -> Path:
    """Nothing existing is overwritten: a folder with anything in it is refused, unless it is resumed."""
    name = f"{cfg.task}-{cfg.method}-{cfg.preset}-seed{cfg.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(cfg.run_dir or f"runs/{name}")
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError("run_dir", str(folder), "is a file; name a folder")
        if not cfg.resume and folder.exists() and any(folder.iterdir()):
            what = "holds another run; continue it with --resume" if (folder / "config.json").exists() else "is not empty"
            raise UserError("run_dir", str(folder), f"{what}, or name another --run_dir")
        parent = next(p for p in [folder, *folder.absolute().parents] if p.exists())
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError("run_dir", str(folder), f"is not writable ({error.strerror}); name another --run_dir") from error
    return folder
