"""Tables of held-out metrics, as Markdown: whatever agents and metrics there are."""
from collections import defaultdict
from typing import Sequence

import numpy as np

from cory.names import short_name

FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f", "share_of_limit": ".2f"}        # others: .3f


def grouped(runs: list[tuple[dict, dict]], by: Sequence[str] = ()) -> dict[str, list]:
    """{label: [what belongs to the agent, for each seed]} of runs (config.json, {agent: what belongs to it}).

    A group is an agent of one method, and of one value of each setting in `by`. Labels read `PPO LLM1`, or
    with by=["learning_rate"] `CORY LLM2, learning_rate 0.001`. What belongs to "base" comes first: as `base`
    where all runs agree on it, else for each combination of values.
    """
    by = [name for name in dict.fromkeys(by) if name != "method"]
    order = ("method", *by, "seed")
    methods = {config["method"] for config, _ in runs}
    short = {method: short_name(method).upper() for method in methods}
    if len({*short.values()}) < len(methods):       # a:train_chain and b:train_chain
        short = {method: method for method in methods}
    bases, groups = {}, defaultdict(list)
    for config, of_name in sorted(runs, key=lambda run: [sortable(run[0][name]) for name in order]):
        for name in of_name:
            whose = config["agents"] if name == "team" else [name]
            values = "".join(f", {setting} {values_of(config, whose, setting)}" for setting in by)
            if name.startswith("base"):
                bases.setdefault(f"{name}{values}", [of_name[name]])
            elif name in (*config["agents"], "team"):
                groups[f"{short[config['method']]} {name.upper()}{values}"].append(of_name[name])
    first, *others = bases.values() or [None]
    if first and all(base == first for base in others):
        bases = {"base": first}
    return bases | groups


def values_of(config: dict, agents: list[str], setting: str) -> str:
    """A setting's value of these agents, or their values with strokes between them."""
    own = [config.get("agent_settings", {}).get(name, {}) for name in agents]
    return "/".join(dict.fromkeys(str(settings.get(setting, config[setting])) for settings in own))


def sortable(setting) -> tuple:
    """Numbers in order, then all else by its text."""
    is_number = isinstance(setting, (int, float))
    return (not is_number, setting if is_number else str(setting))


def results_table(held_out: dict) -> str:
    """The tables of eval.json: every metric of the base and of each agent, then those of the team."""
    columns = {name: [x] for name, x in held_out.items() if isinstance(x, dict)}
    team = {"team": columns.pop("team", [{}])}
    tables = [groups_table("held-out", columns)]
    return "\n\n".join(tables + [groups_table("held-out", team)] * any(team["team"]))


def groups_table(corner: str, groups: dict[str, list[dict]]) -> str:
    """Mean and sample std of every metric over each group's members."""
    cells = [[corner, *groups]]
    for name in dict.fromkeys(name for members in groups.values() for member in members for name in member):
        spec = FORMATS.get(name.removeprefix("greedy_"), ".3f")
        row = [mean_and_std([member.get(name) for member in members], spec) for members in groups.values()]
        cells.append([name.replace("_", " "), *row])
    return table(cells if len(groups) <= 6 else list(zip(*cells, strict=True)))     # many groups: one a row


def mean_and_std(values: list, spec: str) -> str:
    """`mean ± sample std` of a value for each seed; of one seed its value; a dash unless all are numbers."""
    if not all(isinstance(value, (int, float)) for value in values):
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
