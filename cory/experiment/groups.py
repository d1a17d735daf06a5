"""Which runs belong together: seeds of one method and of one value of each setting that the reader names."""
from typing import Sequence

import numpy as np

from cory.names import short_name


def grouped(runs: list[tuple[dict, dict]], by: Sequence[str] = ()) -> dict[str, list]:
    """{label: [what belongs to the agent, for each seed]} of runs (config.json, {agent: what belongs to it}).

    Labels read `PPO LLM1`, or with by=["learning_rate"] `CORY LLM2, learning_rate 1e-4`. What belongs to
    "base" comes first: as `base` where all runs agree on it, else for each combination of values.
    """
    by = [name for name in dict.fromkeys(by) if name != "method"]
    order = ("method", *by, "seed")
    runs = sorted(runs, key=lambda run: [(isinstance(run[0][name], str), run[0][name]) for name in order])
    names = {config["method"]: short_name(config["method"]).upper() for config, _ in runs}
    if len(set(names.values())) < len(names):                       # a:train_chain and b:train_chain
        names = {method: method for method in names}
    bases, groups = {}, {}
    for config, of_agent in runs:
        values = "".join(f", {name} {shown(config[name])}" for name in by)
        if "base" in of_agent:
            bases.setdefault(f"base{values}", [of_agent["base"]])
        for agent in config["agents"]:
            label = f"{names[config['method']]} {agent.upper()}{values}"
            groups.setdefault(label, []).append(of_agent[agent])
    found = list(bases.values())
    if found and found.count(found[0]) == len(found):
        bases = {"base": found[0]}
    return bases | groups


def shown(value) -> str:
    """A setting as a user writes it: 1e-4, 0.3, true. Different values read differently."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return np.format_float_scientific(value, trim="-", exp_digits=1)
    return str(value).lower() if isinstance(value, bool) else str(value)
