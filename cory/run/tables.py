"""Markdown tables of held-out metrics, for any agents and metrics."""
from collections import defaultdict
from typing import Sequence

import numpy as np

from cory.names import short_name

FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f"}                                # others: .3f


def grouped(runs: list[tuple[dict, dict]], by: Sequence[str] = ()) -> dict[str, list]:
    """{label: [what belongs to it, for each seed]} of runs (config.json, {base, agent or "team": ...}).

    A group is an agent or the team, of one method, and of one value of each setting in `by`, e.g. `CORY LLM2,
    learning_rate 0.001`. Bases come first, once where all runs agree.
    """
    bases, groups = defaultdict(list), defaultdict(list)
    for config, parts in runs:
        method = short_name(config["method"]).upper()
        values = "".join(f", {name} {config[name]}" for name in by if name != "method")
        for name, part in parts.items():
            if name in config["agents"].values():
                agree = all(other.get(name, part) == part for _, other in runs)
                different = bases[name if agree else f"{name}{values}"]
                different += [] if part in different else [part]
            else:
                groups[f"{method} {name.upper()}{values}"].append(part)
    return bases | groups


def results_table(held_out: dict, corner: str = "held-out") -> str:
    """The tables of eval.json: every metric of the base and of each agent, then those of the team, before and
    after training.
    """
    columns = {name: [x] for name, x in held_out.items() if isinstance(x, dict)}
    team = {name: columns.pop(name) for name in ("base_team", "team") if name in columns}
    return "\n\n".join(groups_table(corner, groups) for groups in (columns, team) if groups)


def groups_table(corner: str, groups: dict[str, list[dict]]) -> str:
    """Mean ± sample std of every metric over each group's members; a dash where one of them has none."""
    def cell(name: str, values: list) -> str:
        if None in values:
            return "–"
        spec = FORMATS.get(name.removeprefix("greedy_"), ".3f")
        std = f" ± {np.std(values, ddof=1):{spec}}" if len(values) > 1 else ""
        return f"{np.mean(values):{spec}}{std}"

    names = dict.fromkeys(name for members in groups.values() for member in members for name in member)
    rows = [[name.replace("_", " "), *(cell(name, [member.get(name) for member in members])
                                       for members in groups.values())] for name in names]
    if any(len(members) > 1 for members in groups.values()):
        rows.insert(0, ["runs", *(str(len(members)) for members in groups.values())])
    rows.insert(0, [corner, *groups])
    return table(rows if len(groups) <= 6 else list(zip(*rows, strict=True)))       # many groups: one per row


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, first column aligned left, the others right; rows[0] is the header."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows]
    head, *lines = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = "|".join(["", "-" * (first + 2), *("-" * (width + 1) + ":" for width in others), ""])
    return "\n".join([head, rule, *lines])
