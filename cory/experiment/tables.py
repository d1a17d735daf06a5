"""Tables of held-out metrics, as Markdown: whatever agents and metrics there are."""
from typing import Sequence

import numpy as np

from cory.experiment.groups import grouped

SHARES = ("distinct_1", "distinct_2", "repeated_tokens", "accuracy", "strict_accuracy", "unparsed", "solved")
FORMATS = {"task_reward": "{:.2f}", "kl": "{:.1f}", "combined_reward": "{:.2f}", "length": "{:.1f}",
           "base_perplexity": "{:.0f}", "share_of_limit": "{:.2f}", **dict.fromkeys(SHARES, "{:.3f}")}


def results_table(held_out: dict) -> str:
    """The table of eval.json: every metric of the base and of each agent in it."""
    return groups_table("held-out", {name: [x] for name, x in held_out.items() if isinstance(x, dict)})


def pass_at_k_table(runs: list[tuple[dict, dict]], by: Sequence[str] = ()) -> str:
    """Greedy metrics and pass@k, which `runs` hold for the base and for each agent, as in `grouped`."""
    return groups_table(f"held-out, {runs[0][0]['eval_queries']} queries", grouped(runs, by), "{:.3f}")


def groups_table(corner: str, groups: dict[str, list[dict]], fmt: str | None = None) -> str:
    """Mean and sample std of every metric over each group's members, in `fmt` or the metric's own format."""
    cells = [[corner, *groups]]
    for name in dict.fromkeys(name for members in groups.values() for found in members for name in found):
        own = fmt or FORMATS.get(name.removeprefix("greedy_"), "{:.4g}")
        values = [[found.get(name) for found in members] for members in groups.values()]
        cells.append([name.replace("_", " "), *(mean_and_std(of_seeds, own) for of_seeds in values)])
    return table(cells if len(groups) <= 6 else list(zip(*cells, strict=True)))     # many groups: one a row


def mean_and_std(values: list, fmt: str) -> str:
    """`mean ± sample std` of a value for each seed; of one seed its value; a dash unless all are numbers."""
    if not all(isinstance(value, (int, float)) for value in values):
        return "–"
    std = " ± " + fmt.format(np.std(values, ddof=1)) if len(values) > 1 else ""
    return fmt.format(np.mean(values)) + std


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown with aligned columns, the first to the left, the others to the right; rows[0] is the head."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows]
    head, *lines = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = "|".join(["", "-" * (first + 2), *("-" * (width + 1) + ":" for width in others), ""])
    return "\n".join([head, rule, *lines])
