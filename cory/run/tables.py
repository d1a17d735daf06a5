"""Tables of held-out metrics, as Markdown: whatever agents and metrics there are."""
from collections import defaultdict
from typing import Sequence

import numpy as np

from cory.names import short_name

FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f"}                                # others: .3f


def grouped(runs: list[tuple[dict, dict]], by: Sequence[str] = ()) -> dict[str, list]:
    """{label: [what belongs to it, for each seed]} of runs (config.json, {"base", agent, role, "team": ...}).

    A group is one of these names, of one method, and of one value of each setting in `by`. Labels read
    `PPO LLM1`, or by learning_rate `CORY LLM2, learning_rate 0.001`. Bases come first, once where runs
    agree.
    """
    bases, groups = defaultdict(dict), defaultdict(list)
    for config, parts in runs:
        method = short_name(config["method"]).upper()
        values = "".join(f", {name} {value_of(config, name)}" for name in by if name != "method")
        for name, part in parts.items():
            if name.startswith("base"):
                bases[name].setdefault(values, [part])
            else:
                groups[f"{method} {name.upper()}{values}"].append(part)
    labels = {}
    for name, of_values in bases.items():
        first, *others = of_values.values()
        agree = all(other == first for other in others)
        labels |= {name: first} if agree else {f"{name}{values}": part for values, part in of_values.items()}
    return labels | groups


def value_of(config: dict, setting: str) -> str:
    """A setting's value, and after a stroke each other one that an agent has for itself."""
    own = [settings[setting] for settings in config["agent_settings"].values() if setting in settings]
    return "/".join(dict.fromkeys(map(str, [config[setting], *own])))


def results_table(held_out: dict) -> str:
    """The tables of eval.json: every metric of the base and of each agent, then those of the team."""
    columns = {name: [x] for name, x in held_out.items() if isinstance(x, dict)}
    team = {"team": columns.pop("team")} if "team" in columns else {}
    return "\n\n".join(groups_table("held-out", groups) for groups in (columns, team) if groups)


def groups_table(corner: str, groups: dict[str, list[dict]]) -> str:
    """Mean and sample std of every metric over each group's members."""
    cells = [[corner, *groups]]
    for name in dict.fromkeys(name for members in groups.values() for member in members for name in member):
        spec = FORMATS.get(name.removeprefix("greedy_"), ".3f")
        row = [mean_and_std([member.get(name) for member in members], spec) for members in groups.values()]
        cells.append([name.replace("_", " "), *row])
    return table(cells if len(groups) <= 6 else list(zip(*cells, strict=True)))     # many groups: one a row


def mean_and_std(values: list, spec: str) -> str:
    """`mean ± sample std` of a value for each seed; of one seed its value; a dash where a seed has none."""
    if None in values:
        return "–"
    std = f" ± {np.std(values, ddof=1):{spec}}" if len(values) > 1 else ""
    return f"{np.mean(values):{spec}}{std}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown with aligned columns, the first to the left, the others to the right; rows[0] is the head."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows]
    head, *lines = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = "|".join(["", "-" * (first + 2), *("-" * (width + 1) + ":" for width in others), ""])
    return "\n".join([head, rule, *lines])
