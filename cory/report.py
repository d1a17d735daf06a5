"""What a run shows: JSON lines, Weights & Biases, the progress bar, curves; and the comparison of finished runs.

    python -m cory.report RUN_DIR [RUN_DIR ...] --out comparison.png      # mean and std over seeds, by method
"""
import argparse
import json
import netrc
import os
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
from tqdm import tqdm

from cory.config import Config, OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.experiment.files import append_jsonl, read_jsonl, replace_text

TABLE = {"task_reward": "{:.2f}", "kl": "{:.1f}", "combined_reward": "{:.2f}", "length": "{:.1f}", "distinct_1": "{:.3f}",
         "distinct_2": "{:.3f}", "repeated_tokens": "{:.3f}", "base_perplexity": "{:.0f}", "accuracy": "{:.3f}", "strict_accuracy": "{:.3f}",
         "unparsed": "{:.3f}", "greedy_accuracy": "{:.3f}", "greedy_strict_accuracy": "{:.3f}", "greedy_unparsed": "{:.3f}"}


class RunLog:
    """One call per iteration writes the local files, W&B and the bar. A resumed log drops what the checkpoint does not know of."""

    def __init__(self, cfg: Config, run_dir: Path, start: int, wandb_id: str):
        self.metrics, self.samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        for path in (self.metrics, self.samples):
            kept = [row for row in read_jsonl(path) if row["iteration"] <= start] if start else []
            replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.sample_rows = read_jsonl(self.samples)
        self.wandb = start_wandb(cfg, run_dir, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.bar = tqdm(total=cfg.iterations, initial=start, desc=cfg.method, unit="it", dynamic_ncols=True)

    def iteration(self, step: int, metrics: dict[str, float], samples: list[dict]) -> None:
        append_jsonl(self.metrics, [{"iteration": step, **metrics}])
        append_jsonl(self.samples, samples)
        self.sample_rows += samples
        evaluated = any(key.startswith("eval/") for key in metrics)
        if self.wandb:
            tables = {"samples": self.table()} if evaluated and self.sample_rows else {}
            self.wandb.log({**metrics, **tables}, step=step)
        if step:
            shown = {k: " / ".join(f"{metrics[f'{a}/{k}']:.2f}" for a in ("llm1", "llm2") if f"{a}/{k}" in metrics)
                     for k in ("task_reward", "kl")}
            self.bar.set_postfix_str(f"reward {shown['task_reward']}, KL {shown['kl']}", refresh=False)
            self.bar.update()

    def table(self):
        """Query, pioneer, observer and base responses side by side with their rewards."""
        import wandb
        columns = list(self.sample_rows[0])
        return wandb.Table(columns=columns, data=[[row[c] for c in columns] for row in self.sample_rows])

    def finish(self, held_out: dict) -> None:
        if self.wandb:
            self.wandb.summary.update({"held_out": held_out})
            self.wandb.finish()


# --- Weights & Biases -------------------------------------------------------------------------------------------------
def start_wandb(cfg: Config, run_dir: Path, wandb_id: str):
    """A W&B run, or None when disabled. Without a key, or if going online fails, it runs offline and says how to sync."""
    choice = os.environ.get("WANDB_MODE", "auto") if cfg.wandb == "auto" else cfg.wandb
    choice = "offline" if choice == "dryrun" else choice            # W&B's older name
    if choice == "disabled":
        return None
    import wandb
    options = dict(project=cfg.wandb_project, name=run_dir.name, config=asdict(cfg), dir=run_dir, id=wandb_id or None,
                   settings=wandb.Settings(silent=True, console="off"))
    why = "asked for" if choice == "offline" else "no key found, `wandb login` stores one"
    if choice != "offline" and has_wandb_key():
        try:
            return wandb.init(mode="online", resume="allow", **options)
        except wandb.errors.Error as error:
            why = f"going online failed: {' '.join(str(error).split())[:200]}"
    run = wandb.init(mode="offline", **options)
    print(f"W&B is offline ({why}); upload later with: wandb sync {'--append ' if wandb_id else ''}{run_dir}/wandb/offline-run-*", flush=True)
    return run


def has_wandb_key() -> bool:
    """A key in WANDB_API_KEY, or in netrc for the host of WANDB_BASE_URL."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


# --- pictures and tables ----------------------------------------------------------------------------------------------
def results_table(held_out: dict) -> str:
    """Markdown table of eval.json: held-out figures of the base and of each agent."""
    names = [name for name in ("base", "llm1", "llm2") if name in held_out]
    return table(["held-out", *names], [[key.replace("_", " "), *(fmt.format(held_out[n][key]) for n in names)] for key, fmt in TABLE.items()
                                          if key in held_out["base"]])


def table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    line = lambda cells: "| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))) + " |"
    return "\n".join([line(head), "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|", *map(line, rows)])


def series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    found = [(row["iteration"], row[key]) for row in rows if key in row]
    return [i for i, _ in found], [v for _, v in found]


PANELS = [("task_reward", "task reward"), ("kl", "KL per response (nats)"), ("combined_reward", "reward - eta KL"),
          ("entropy", "entropy per token (nats)"), ("explained_variance", "explained variance")]
GREEDY = ("greedy_accuracy", "held-out greedy accuracy")           # in the place of the last panel, for tasks that have it
COLORS = {"llm1": "tab:blue", "llm2": "tab:orange"}
METHOD_COLORS = {"PPO LLM1": "tab:red", "CORY LLM1": "tab:blue", "CORY LLM2": "tab:cyan"}
FREE_BETWEEN_RUNS = {"method", "seed", "run_dir", "resume", "wandb", "wandb_project", "save_every", "sample_rows", "device"}


def draw_curves(run_dir: Path) -> None:
    """curves.png: training curves of each agent, dots where held-out figures were taken; last panel reward against KL."""
    from matplotlib.figure import Figure
    rows, cfg = read_jsonl(run_dir / "metrics.jsonl"), json.loads((run_dir / "config.json").read_text())
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, 3).flat
    agents = [name for name in ("llm1", "llm2") if any(f"{name}/kl" in row for row in rows)]
    for ax, (key, title) in zip(axes, [*PANELS[:-1], GREEDY] if "eval/base/greedy_accuracy" in rows[0] else PANELS):
        for name in agents:
            ax.plot(*series(rows, f"{name}/{key}"), color=COLORS[name], label=name, linewidth=1.2)
            ax.plot(*series(rows, f"eval/{name}/{key}"), "o", color=COLORS[name], markersize=5, markeredgecolor="white")
        base = series(rows, f"eval/base/{key}")[1]
        if base:
            ax.axhline(base[0], color="gray", linestyle=":", label="base")
        ax.set(title=title, xlabel="iteration")
        ax.grid(alpha=0.3)
    for name in agents:
        frontier(figure.axes[-1], rows, name, COLORS[name], name)
    figure.axes[0].legend()
    figure.suptitle(f"{cfg['method'].upper()}, preset {cfg['preset']}, seed {cfg['seed']}: lines are training batches, dots held-out queries")
    figure.savefig(run_dir / "curves.png", dpi=110)


def frontier(ax, rows: list[dict], name: str, color: str, label: str | None) -> None:
    """Held-out reward against held-out KL along training, from the base at KL 0."""
    at_base = series(rows, "eval/base/task_reward")[1]
    ax.plot([0.0] * len(at_base) + series(rows, f"eval/{name}/kl")[1], at_base + series(rows, f"eval/{name}/task_reward")[1], "o-",
            color=color, label=label, markersize=4, linewidth=1)
    ax.set(title="held-out reward against KL", xlabel="KL per response (nats)", ylabel="task reward")
    ax.grid(alpha=0.3)


def require_finished(run_dirs: list[Path]) -> None:
    for i, run_dir in enumerate(run_dirs):
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is no finished run (no eval.json); finish it with --resume")
        if run_dir.resolve() in [other.resolve() for other in run_dirs[:i]]:
            raise UserError("run_dirs", str(run_dir), "is named twice; name each run once")


def require_picture(path: Path | None, field: str = "out") -> None:
    """A picture can be written there: said before work is done for it."""
    if path and path.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(field, str(path), "must end in .png, .pdf or .svg")
    if path and not os.access(path.absolute().parent, os.W_OK):
        raise UserError(field, str(path), "its folder is missing or not writable; name another place")


def require_same_settings(run_dirs: list[Path], configs: list[dict]) -> None:
    """Raises `UserError` if runs differ in a setting that is not in `FREE_BETWEEN_RUNS`."""
    for folder, cfg in zip(run_dirs, configs):
        differ = [k for k in {**cfg, **configs[0]} if cfg.get(k) != configs[0].get(k) and k not in FREE_BETWEEN_RUNS]
        if differ:
            raise UserError("run_dirs", str(folder), f"differs from {run_dirs[0]} in {', '.join(differ)}; compare runs of the same settings")


def by_method_and_agent(runs: list[tuple[str, int, dict]]) -> dict[str, list]:
    """[(method, seed, {agent: x})] -> {"PPO LLM1": [x of each seed], ...}, ordered by method, then agent."""
    groups = {}
    for method, _, of_agent in sorted(runs, key=lambda run: run[:2]):
        for agent in ("llm1", "llm2")[:1 if method == "ppo" else 2]:
            groups.setdefault(f"{method} {agent}".upper(), []).append(of_agent[agent])
    return dict(sorted(groups.items()))


def mean_and_std(values: list[float], fmt: str) -> str:
    return fmt.format(np.mean(values)) + (" ± " + fmt.format(np.std(values, ddof=1)) if len(values) > 1 else "")


def band(ax, x: list, y: np.ndarray, **style) -> None:
    """A line at the mean over seeds, y (seeds, points), in a band of one sample standard deviation."""
    mean, std = y.mean(0), y.std(0, ddof=1) if len(y) > 1 else 0 * y[0]
    line, = ax.plot(x, mean, **style)
    ax.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.2, linewidth=0)


def compare(run_dirs: list[Path], out: Path) -> str:
    """Curves of methods over seeds (mean, band of one sample std), reward against KL of each run, and the held-out table.

    Raises `UserError` if the runs differ in a setting that is not in `FREE_BETWEEN_RUNS`.
    """
    from matplotlib.figure import Figure
    configs, metrics, finals = ([json.loads((d / name).read_text()) for d in run_dirs] if name != "metrics.jsonl" else
                                [read_jsonl(d / name) for d in run_dirs] for name in ("config.json", "metrics.jsonl", "eval.json"))
    require_same_settings(run_dirs, configs)
    groups = by_method_and_agent([(cfg["method"], cfg["seed"], {agent: (rows, final.get(agent)) for agent in ("llm1", "llm2")})
                                  for cfg, rows, final in zip(configs, metrics, finals)])
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    last = GREEDY if "greedy_accuracy" in finals[0]["base"] else ("repeated_tokens", "held-out share of repeated tokens")
    panels = [(f"{{}}/{key}", f"{title}, training batches") for key, title in PANELS[:2]] + [
        ("eval/{}/task_reward", "held-out task reward"), ("eval/{}/kl", "held-out KL per response (nats)"), (f"eval/{{}}/{last[0]}", last[1])]
    for ax, (key, title) in zip(figure.subplots(2, 3).flat, panels):
        for label, members in groups.items():
            name = key.format(label.split()[1].lower())
            found = [dict(zip(*series(rows, name))) for rows, _ in members]
            x = sorted(set.intersection(*map(set, found)))              # iterations that every seed has
            band(ax, x, np.array([[values[i] for i in x] for values in found]), color=METHOD_COLORS[label],
                 label=f"{label}, {len(members)} seeds", linewidth=1.4)
        base = series(metrics[0], key.format("base"))[1]
        if base:
            ax.axhline(base[0], color="gray", linestyle=":", label="base")
        ax.set(title=title, xlabel="iteration")
        ax.grid(alpha=0.3)
    for label, members in groups.items():
        for i, (rows, _) in enumerate(members):
            frontier(figure.axes[-1], rows, label.split()[1].lower(), METHOD_COLORS[label], label if i == 0 else None)
    figure.axes[0].legend(fontsize=8)
    figure.axes[-1].legend(fontsize=8)
    figure.savefig(out, dpi=110)
    base = finals[0]["base"]
    return table(["held-out", "base", *groups],
                 [[key.replace("_", " "), fmt.format(base[key]), *(mean_and_std([held[key] for _, held in members], fmt)
                   for members in groups.values())] for key, fmt in TABLE.items() if key in base])


def evaluation_groups(runs: list[tuple[Config, dict]]) -> dict[str, list[dict]]:
    return {"base": [runs[0][1]["base"]]} | by_method_and_agent([(cfg.method, cfg.seed, figures) for cfg, figures in runs])


def pass_at_k_table(runs: list[tuple[Config, dict]]) -> str:
    """Greedy figures and pass@k of the base and of each method's agents, mean and sample std over runs."""
    groups = evaluation_groups(runs)
    return table([f"held-out, {runs[0][0].eval_queries} queries", *groups],
                 [[key.replace("_", " "), *(mean_and_std([figures[key] for figures in members], "{:.3f}") for members in groups.values())]
                  for key in groups["base"][0]])


def draw_pass_at_k(runs: list[tuple[Config, dict]], ks: list[int], out: Path) -> None:
    """pass@k against k, base and each method's agents, mean over runs in a band of one sample std."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    ax, ks = figure.subplots(), sorted(set(ks))
    for label, members in evaluation_groups(runs).items():
        seeds = f", {len(members)} seeds" if len(members) > 1 else ""
        band(ax, ks, np.array([[figures[f"pass@{k}"] for k in ks] for figures in members]), color=METHOD_COLORS.get(label, "gray"),
             label=label + seeds, marker="o", markersize=4, linewidth=1.4)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set(title=f"{runs[0][0].task}: pass@k on {runs[0][0].eval_queries} held-out queries, temperature {runs[0][0].temperature:g}",
           xlabel="k responses per query", ylabel="share of queries solved by one of k")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(out, dpi=110)


def draw_sweep(rows: list[dict], out: Path) -> None:
    """Seconds and peak memory per iteration, as `cory.benchmark` measures them, against batch size and against response length.
    Dashed: proportional, through the last point."""
    from matplotlib.figure import Figure
    sizes = [name for name in ("batch", "response") if len({row[name] for row in rows}) > 1]
    figure = Figure(figsize=(10, 3.8 * len(sizes)), layout="constrained")
    for (left, right), x in zip(figure.subplots(len(sizes), 2, squeeze=False), sizes):
        fixed = "response" if x == "batch" else "batch"
        for i, size in enumerate(sorted({row[fixed] for row in rows})):
            line = sorted((row for row in rows if row[fixed] == size), key=lambda row: row[x])
            at, seconds = [row[x] for row in line], [row["seconds"]["total"] for row in line]
            left.plot(at, seconds, color=f"C{i}", marker="o", markersize=4, label=f"{fixed} {size}")
            left.plot([0, at[-1]], [0, seconds[-1]], color=f"C{i}", linestyle="--", linewidth=0.8)
            right.plot(at, [row.get("peak_cuda_gib", row["peak_rss_gib"]) for row in line], color=f"C{i}", marker="o", markersize=4)
        for ax, label in ((left, "seconds per iteration"), (right, "peak memory, GiB")):
            ax.set(xlabel="queries per iteration" if x == "batch" else "tokens per response", ylabel=label, xlim=(0, None))
            ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
            ax.grid(alpha=0.3)
        left.legend(fontsize=8)
    figure.savefig(out, dpi=110)


@exit_on_user_error
def main() -> None:
    parser = OneLineParser(prog="python -m cory.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help="picture to write")
    args = parser.parse_args()
    require_finished(args.run_dirs)
    require_picture(args.out)
    print(compare(args.run_dirs, args.out))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
