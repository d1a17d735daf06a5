"""The end of a run: its final models, eval.json, curves.png, and what it prints."""
import json
from pathlib import Path

import torch

from cory.machine.distributed import processes
from cory.machine.sharding import is_sharded, whole_on_cpu
from cory.ppo.agent import Agent
from cory.run.experiment import Experiment
from cory.run.log import Logger, read_jsonl, write_text
from cory.run.report import draw_run, last_held_out, read_metrics, tables


def finish(run: Experiment, agents: list[Agent], logger: Logger) -> None:
    """Writes the final models, eval.json and curves.png; prints held-out tables and a few responses."""
    cfg = run.cfg
    run_dir = run.run_dir
    logger.bar.close()
    save_models(run_dir / "final", agents)
    if not processes().is_main:
        return
    trained = [agent.name for agent in agents if agent.is_trained]
    state = {"method": run.method.memory, "task": run.task.memory, "trained": trained}
    torch.save(state, run_dir / "final/state.pt")
    held_out = last_held_out(read_metrics(run_dir))
    results = {"iteration": logger.done, "split": cfg.eval_split, "queries": cfg.eval_queries,
               "samples": cfg.eval_samples}
    for who, metrics in held_out.iterrows():
        results[who] = metrics.dropna().to_dict()
    write_text(run_dir / "eval.json", json.dumps(results, indent=1) + "\n")
    draw_run(run_dir, run_dir / "curves.png")
    for row in read_jsonl(logger.samples_path)[-2:]:
        print(f"\n{row['query'][:80]!r}")
        for role in run.method.roles:
            print(f"    {role} ({row[f'{role}_agent']}): {row[role][:55]!r}")
    print("\n" + tables(held_out))
    print(f"\n{run_dir} holds metrics.jsonl, samples.jsonl, eval.json, curves.png, final/", flush=True)


def save_models(folder: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(folder/llm1)` loads the policy. With LoRA the folder holds only
    the adapter, and names its base; one of another kind than LoRA is for peft's `AutoPeftModelForCausalLM`.
    """
    for agent in agents:
        policy = agent.policy
        whole = None
        if is_sharded(policy.lm) and not policy.adapter:
            # the state has a tied tensor under each of its names: one of them is saved
            names = {name for name, _ in policy.lm.named_parameters()}
            names |= {name for name, _ in policy.lm.named_buffers()}
            state = policy.lm.state_dict()
            whole = whole_on_cpu({name: x for name, x in state.items() if name in names})
        if processes().is_main:
            policy.activate()
            policy.lm.generation_config.temperature = policy.temperature
            policy.lm.save_pretrained(folder / agent.name, state_dict=whole)
            policy.tokenizer.save_pretrained(folder / agent.name)
