"""The seeded-bug score: how many of 100 one-line faults, of kinds that PPO code has had, do the tests see?

    python tests/faults/seeded_bugs.py [--only N ...] [--likely] [--jobs 1] [--limit_s 600]

Each fault goes alone into a copy of the repository, where the suite then runs up to its first failure: first
the files that are most likely to see it (`tests`), then the rest, pinned runs (test_trajectory.py) last. A
fault is `caught` if a test fails, has `survived` if all pass, and is `broken` if anything else comes of it,
such as no end within ten minutes. Exit status 0 if at least 97 of 100 are caught. With --likely the first
files alone are run: minutes instead of hours, to be followed by a run of what passes them (--only).
"""
import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LEAST = 0.97                        # share of faults to be caught
LEFT_OUT = {"test_docs.py"}         # about texts
LAST = ["test_end_to_end.py", "test_trajectory.py"]


class Fault(NamedTuple):
    kind: str
    path: str
    old: str                        # occurs once in the file
    new: str                        # still runs
    tests: str = ""                 # test files that are likely to notice: "loop update"


def of(path: str, *faults: tuple[str, ...]) -> list[Fault]:
    """Faults of one file: (kind, old, new, tests)."""
    return [Fault(kind, path, old, new, *tests) for kind, old, new, *tests in faults]


FAULTS = [
    # --- who plays, and what for ---
    *of("cory/train.py",
        ("reward", "else cfg.partner_reward * partner_reward_B", "else partner_reward_B", "loop"),
        ("wrong agent or role", "return r2, r1\n", "return r1, r2\n", "partner_term loop"),
        ("wrong token or row", "a2.value_BT[:, 0].to(r2)", "a2.value_BT[:, -1].to(r2)", "partner_term"),
        ("reward", "score(a, r, None, agent.cfg)", "score(a, r, r, agent.cfg)", "loop"),
        ("wrong token or row", ", queries, a1.text)", ", queries, a1.text[1:] + a1.text[:1])", "loop"),
        ("wrong agent or role", "collect_rollout(observer,", "collect_rollout(pioneer,", "loop"),
        ("reward", "r2 = task.reward(queries, a2.text)", "r2 = task.reward(prompts, a2.text)", "loop"),
        ("wrong agent or role", "= ppo_update(observer, a2,", "= ppo_update(observer, a1,", "flags"),
        ("off by one", "iteration % cfg.", "(iteration - 1) % cfg.", "loop"),
        ("metric", 'pioneer", pioneer, a1, r1, update1)', 'pioneer", pioneer, a1, score1, update1)', "loop"),
        ("wrong agent or role", "observer.reset()", "pioneer.reset()", "loop"),
        ("wrong agent or role", "roles=[pioneer, observer])", "roles=[observer, pioneer])", "loop"),
    ),

    # --- formulas ---
    *of("cory/ppo/formulas.py",
        ("wrong mean", "x_N = x_N - x_N.mean(", "x_N = x_N - (x_BT - x_BT.max()).double().mean(", "formulas"),
        ("standard deviation", "x_N**2).mean() + eps)", "x_N**2).sum() / (len(x_N) - 1) + eps)", "formulas"),
        ("KL", "p_NV = logp_NV.softmax(-1)", "p_NV = ref_logp_NV.softmax(-1)", "formulas"),
        ("KL", "log_r = ref_logp_N - logp_N", "log_r = logp_N - ref_logp_N", "formulas advantages"),
        ("wrong sign", "reward_BT = -kl_coef * kl_BT *", "reward_BT = kl_coef * kl_BT *", "formulas"),
        ("wrong token or row", "last_B1 = mask_BT.sum(1, keepdim=True).long() - 1",
         "last_B1 = torch.full_like(mask_BT[:, :1], mask_BT.shape[1] - 1).long()", "formulas"),
        ("wrong sign", "ratio_N = (logp_N - old_logp_N).", "ratio_N = (old_logp_N - logp_N).", "formulas"),
        ("clip", "ratio_N.clamp(1 - cliprange, 1 + cliprange", "ratio_N.clamp(max=1 + cliprange", "formulas"),
        ("wrong sign", "return kl_coef * (1 + error * n /", "return kl_coef * (1 - error * n /", "formulas"),
        ("off by one", "schedule((iteration - 1 - warmup) /", "schedule((iteration - warmup) /", "formulas"),
        ("statistics of runs", "- math.comb(n - c, k) / math.comb(n, k)", "- (1 - c / n) ** k", "evaluate"),
    ),

    # --- advantages ---
    *of("cory/ppo/advantages.py",
        ("learning target", "[:, t] + gamma * next_value_B", "[:, t] + lam * next_value_B", "advantages"),
        ("mask or padding", "= value_BT[:, t] * mask_BT[:, t]", "= value_BT[:, t]", "advantages"),
        ("group of a query", "others_Gk = (return_Gk.sum(1, keepdim=True) - return_Gk) / (group_size - 1)",
         "others_Gk = return_Gk.mean(1, keepdim=True)", "advantages"),
        ("group of a query", ".view(-1, group_size)", ".view(group_size, -1).t().contiguous()", "advantages"),
    ),

    # --- the agent, its model and its adapter ---
    *of("cory/ppo/agent.py",
        ("random stream", ".Generator().manual_seed(self.", ".Generator().manual_seed(self.cfg.", "loop"),
        ("random stream", "index // 2 * SEED_STEP", "index // 2 * 2**32", "flags"),
    ),
    *of("cory/ppo/model.py",
        ("off by one", "response_in = response_BT[:, :-1]", "response_in = response_BT[:, 1:]", "model"),
        ("mask or padding", "([prompt_mask_BP, torch.", "([torch.ones_like(prompt_mask_BP), torch.", "model"),
        ("mask or padding", "return (mask.cumsum(1) - 1).clamp(min=0)",
         "return torch.arange(mask.shape[1], device=mask.device).expand_as(mask)", "model"),
        ("temperature, dropout", "head.bias, token_N, self.temperature", "head.bias, token_N, 1.0", "update"),
        ("temperature, dropout", ", self.adapter = lm.eval(),", ", self.adapter = lm.train(),", "model"),
        ("stale or swapped", "lm = base.lm if adapter else copy.deepcopy(base.lm)", "lm = base.lm", "model"),
        ("gradient", "self.value_head(hidden.float())", "self.value_head(hidden.float().detach())", "update"),
    ),
    *of("cory/ppo/lora.py",
        ("LoRA", "        lm.disable_adapters()", "        lm.enable_adapters()", "lora"),
        ("LoRA", '    if getattr(lm, "adapter_in_use", None) == name:\n',
         '    if name and getattr(lm, "adapter_in_use", None) is not None:\n', "lora"),
        ("LoRA", "lora_alpha=cfg.lora_alpha", "lora_alpha=cfg.lora_rank", "lora"),
    ),

    # --- the rollout ---
    *of("cory/ppo/sampling.py",
        ("mask or padding",
         "mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])",
         "mask = (ids != model.tokenizer.eos_token_id).long()", "sampling"),
        ("mask or padding", "t] = running_R.", "t] = (running_R & ~torch.isin(token_R, ends)).", "sampling"),
        ("wrong token or row", "uniform_TB[t, row_R]", "uniform_TB[t, :len(row_R)]", "sampling"),
        ("temperature, dropout", "cumulative_BV = logp_BV.", "cumulative_BV = (logp_BV / 0.7).", "sampling"),
    ),
    *of("cory/ppo/rollout.py",
        ("wrong model", "= reference.response_hidden(", "= policy.response_hidden(", "loop trajectory"),
        ("wrong model", "policy.values(hidden_NH)", "policy.values(ref_hidden_NH)", "update"),
        ("stale or swapped", "sampled.sampling_logp_BT, logp_BT=logp_BT,",
         "sampled.sampling_logp_BT, logp_BT=ref_logp_BT,", "update"),
        ("metric", "(self.sampling_logp_BT - self.logp_BT).abs()",
         "(self.sampling_logp_BT - self.logp_BT)", "sampling"),
    ),
    *of("cory/ppo/minibatches.py",
        ("random stream", "(len(self.mask_BT), generator=generator)", "(len(self.mask_BT))", "loop"),
        ("mask or padding", '{"_BP": (slice(-P, None),),', '{"_BP": (slice(0, P),),', "update"),
        ("wrong token or row", "yield [self.take(rows[group])", "yield [self.take(group)", "update"),
    ),

    # --- the update ---
    *of("cory/ppo/update.py",
        ("stale or swapped", "score_B, agent.kl_coef, cfg", "score_B, cfg.init_kl_coef, cfg", "update loop"),
        ("wrong mean", "distributed.all_reduce(sum(mini_batch.mask_BT.sum() for mini_batch in mini_batches))",
         "mini_batches[0].mask_BT.sum()", "update"),
        ("KL", "len(score_B)\n", "len(score_B) * cfg.num_ppo_epochs\n", "update"),
        ("wrong mean", "kl, n = rollout.kl_B.mean().item()", "kl, n = rollout.kl_BT.mean().item()", "update"),
        ("KL", 'kl_coef if cfg.kl_in == "reward" else 0.0', "kl_coef", "trajectory"),
        ("learning target", "(advantage_BT + value_BT) * mask_BT", "advantage_BT * mask_BT", "update"),
        ("mask or padding", "(advantage_BT, mask_BT)", "(advantage_BT, torch.ones_like(mask_BT))", "update"),
        ("stale or swapped", "(logp_N, old.logp_N,", "(logp_N, logp_N.detach(),", "update"),
        ("clip", ".value_loss(value_N, old.value_N,", ".value_loss(value_N, value_N.detach(),", "update"),
        ("KL", "formulas.kl_k3(logp_N, old.ref_logp_N)", "formulas.kl_k3(logp_N, old.logp_N)", "advantages"),
        ("gradient", "    agent.optimizer.zero_grad(set_to_none=True)\n", "", "update"),
        ("wrong mean", "means[name] = x_N.mean().item()",
         "means[name] = sum(x.double().mean().item() for x in parts) / len(parts)", "update"),
    ),

    # --- tasks ---
    *of("cory/tasks/task.py",
        ("held-out set", '.Random("held-out queries")', '.Random(f"held-out queries {cfg.seed}")', "task"),
        ("held-out set", "rows = getattr(data, cfg.eval_split)\n", "rows = data.train\n", "task"),
        ("held-out set", ", test = held_out[::2], held_out[1::2]", ", test = held_out, held_out", "task"),
        ("random stream", "shuffled(n, cfg.seed, place // n)", "shuffled(n, cfg.seed, 0)", "task"),
        ("group of a query", "[query for query in queries for _ in range(k)]", "queries * k", "task"),
    ),
    *of("cory/tasks/imdb.py",
        ("off by one", "randint(self.cfg.min_query_length,", "randrange(self.cfg.min_query_length,", "task"),
        ("reward", "texts = [query + response for", "texts = [response for", "task"),
        ("reward", "return logits[:, self.positive].tolist()", "return logits[:, 0].tolist()", "task"),
        ("mask or padding", '["input_ids"], attention_mask=batch["attention_mask"]', '["input_ids"]', "task"),
    ),
    *of("cory/tasks/gsm8k.py",
        ("metric", 'accuracy": [last_number(response) =', 'accuracy": [self.answer_in(response) =', "gsm8k"),
        ("reading answers", '": [strict(response) == gold', '": [last_number(response) == gold', "gsm8k"),
    ),
    *of("cory/tasks/answers.py",
        ("reading answers", 'solution.rpartition("####")', 'solution.partition("####")', "answers"),
        ("reading answers", ", digits, exponent = numbers[-1]", ", digits, exponent = numbers[0]", "answers"),
        ("reading answers", "return response if end < 0 else response[:end]", "return response", "answers"),
    ),

    # --- around the loops ---
    *of("cory/experiment/evaluation.py",
        ("random stream", ".manual_seed(EVALUATION_SEED + at)", ".manual_seed(cfg.seed + at)", "trajectory"),
        ("wrong model", "same = model is reference ", "same = model.lm is reference.lm ", "lora"),
        ("wrong mean", '"kl": kl / n, "combined_reward"', '"kl": kl / tokens, "combined_reward"', "report"),
        ("held-out set", "limit, seed=None)", "limit, seed=EVALUATION_SEED)", "gsm8k trajectory"),
    ),
    *of("cory/experiment/run.py",
        ("metric", "self.agent.cfg.init_kl_coef", "self.agent.kl_coef", "loop"),
        ("wrong agent or role", "evaluate(agent.policy,", "evaluate(self.agents[0].policy,", "loop"),
        ("off by one", "yield from range(self.start + 1,", "yield from range(self.start or 1,", "loop"),
        ("wrong agent or role",
         'self.roles = [agents[name] for name in state["roles"]]',
         "self.roles = self.agents", "loop"),
        ("wrong agent or role", 'role}_reward": turn.reward_B[', 'role}_reward": turns[0].reward_B[', "loop"),
    ),
    *of("cory/experiment/checkpoint.py",
        ("checkpoint", "put_back(file, agent)", "put_back(file, agents[0])", "loop"),
        ("checkpoint", 'random"] = agent.generator.get_state()', 'random"] = torch.get_rng_state()', "loop"),
        ("checkpoint", "{agent.name: agent.kl_coef for", "{agent.name: agent.cfg.init_kl_coef for", "loop"),
        ("LoRA", "activate(policy.lm, policy.", "activate(policy.lm, agents[0].policy.", "lora"),
    ),
    *of("cory/experiment/log.py",
        ("off by one", 'row["iteration"] <= start', 'row["iteration"] < start', "report loop"),
    ),

    # --- after training ---
    *of("cory/commands/evaluate.py",
        ("statistics of runs", "greedy, *drawn = rounds", "greedy, drawn = rounds[0], rounds", "evaluate"),
        ("random stream", "+ 1_000_003 * number + first", "+ first", "evaluate"),
        ("wrong model", "load_language_model(str(final),", "load_language_model(cfg.model,", "evaluate"),
    ),
    *of("cory/studies/statistics.py",
        ("statistics of runs", "x = (variant - baseline).dropna()",
         "x = (variant - baseline.mean()).dropna()", "study"),
        ("statistics of runs", "t.ppf(0.975, n - 1)", "t.ppf(0.95, n - 1)", "study"),
        ("statistics of runs", "return self.low > 0 or self.high < 0", "return self.low > 0 or self.mean < 0",
         "study"),
        ("statistics of runs", "return agents.tail(1).groupby", "return agents.head(2).groupby", "study"),
        ("statistics of runs", "agents[along].last().min()", "agents[along].last().max()", "study"),
    ),
    *of("cory/studies/rows.py",
        ("statistics of runs", 'held_out["iteration"], agent))', 'held_out["iteration"], "llm1"))', "study"),
    ),
    *of("cory/studies/loops.py",
        ("wrong token or row", "return x_B.roll(-1)", "return x_B.roll(0)", "study"),
    ),
]


def git_files(root: Path) -> list[str]:
    """Files that git tracks, or would if asked to."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (root / name).is_file())


def copy_to(folder: Path) -> Path:
    """The repository in folder/main, with what the tests find at ../shared."""
    for name in git_files(ROOT):
        (folder / "main" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "main" / name)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (folder / "shared").symlink_to(shared.resolve())
    return folder / "main"


def in_order(copy: Path, names: str) -> list[list[str]]:
    """Test files of one call of pytest after another: those named, most others, slow and pinned runs."""
    there = sorted(path.name for path in copy.glob("tests/test_*.py") if path.name not in LEFT_OUT)
    likely = [f"test_{name}.py" for name in names.split()]
    assert set(likely) <= set(there), likely
    rest = [name for name in there if name not in likely]
    last = [name for name in LAST if name in rest]
    parts = (likely, [name for name in rest if name not in LAST], last)
    return [[f"tests/{name}" for name in part] for part in parts if part]


def pytest(copy: Path, files: list[str], limit_s: float) -> tuple[int, str]:
    """Exit status (124: out of time) and the first line that names a failure or an error."""
    command = ["timeout", "-k", "9", f"{limit_s}", sys.executable, "-m", "pytest", "-q", "-x", "-rfE",
               "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider",
               f"--basetemp={copy.parent / 'pytest'}", *files]
    # a fault and its repair can lie in one second: no compiled file may be taken for either
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), (lines or [""])[-1])
    return done.returncode, first


def tried(fault: Fault, copy: Path, args: argparse.Namespace) -> tuple[str, str]:
    """Puts the fault in, runs the tests, takes it out again. Returns what came of it, and pytest's line."""
    path = copy / fault.path
    text = path.read_text()
    assert text.count(fault.old) == 1, fault
    path.write_text(text.replace(fault.old, fault.new))
    try:
        for files in in_order(copy, fault.tests)[:1 if args.likely else None]:
            status, line = pytest(copy, files, args.limit_s)
            if status:
                break
    finally:
        path.write_text(text)
    return {0: "survived", 1: "caught"}.get(status, "broken"), line if status else ""


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="these faults, counted from 1")
    parser.add_argument("--likely", action="store_true", help="run the most likely test files alone")
    parser.add_argument("--limit_s", type=float, default=600, help="seconds for one call of pytest")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tried at the same time")
    args = parser.parse_args()
    chosen = args.only or range(1, len(FAULTS) + 1)
    with tempfile.TemporaryDirectory(prefix="seeded_bugs_") as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = queue.Queue()
        for job in range(args.jobs):
            copies.put(copy_to(Path(folder) / str(job)))
        for files in in_order(copies.queue[0], "") if not args.likely else []:
            status, line = pytest(copies.queue[0], files, args.limit_s)
            if status:
                sys.exit(f"the suite does not pass as it stands: status {status}, {line}")

        def outcome(number: int) -> str:
            fault, copy, start = FAULTS[number - 1], copies.get(), time.perf_counter()
            result, line = tried(fault, copy, args)
            copies.put(copy)
            old, new = (" ".join(text.split()) for text in (fault.old, fault.new))
            print(f"{number:3} {result:8} {time.perf_counter() - start:4.0f} s  {fault.kind}: {fault.path}: "
                  f"{old} -> {new}  <- {line}", flush=True)
            return result

        outcomes = list(pool.map(outcome, chosen))
    for result, count in Counter(outcomes).items():
        print(f"{result}: {count} of {len(outcomes)}")
    sys.exit(outcomes.count("caught") < LEAST * len(outcomes))


if __name__ == "__main__":
    main()
