"""Study `methods`: what a team returns, and what its better agent does alone.

    python docs/studies/teams.py measure methods_rates  # writes studies/methods_rates/teams.csv.gz
    python docs/studies/teams.py    # prints the tables, from NAME.teams.csv.gz here

A row is of one agent alone, or of the team, that is, of its last role's response in that role.
"""
import json
import sys
from argparse import ArgumentParser
from itertools import product
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from docs.studies.grid import GridRun, plan
from docs.studies.table import HERE, difference, holm, markdown, read

QUERIES = {"validation": 400, "test": 512}
KEYS = ["task", "variant", "seed"]
MEASURES = ["combined_reward", "task_reward", "kl"]
TASKS = {"imdb": "reviews", "gsm8k": "word problems"}
OUTCOMES = {"team": "the team's last response", "agent": "the better agent alone"}
NAMES = {"ppo": "PPO", "cory": "CORY", "no partner's reward": "CORY, no partner's reward", "credit": "credit",
         "ccpo": "CCPO", "c3": "C3", "magrpo": "MAGRPO", "atgrpo": "AT-GRPO", "drmas": "Dr. MAS",
         "marft": "MARFT", "centralized": "central critic"}
BASELINES = {"ppo": "P", "cory": "C"}


def measure(run: GridRun, split: str, untrained: bool = False) -> list[dict]:
    """Rows of a finished run on a split: its agents and its team, or what they were before training, as the
    variant `base`.
    """
    from cory.run.evaluate import as_base, evaluate_team, finished_run, respond_alone
    from cory.run.log import read_jsonl

    finished, agents = finished_run(run.folder, eval_split=split, eval_queries=QUERIES[split])
    queries = finished.task.held_out_queries
    roles = finished.method.roles
    last = read_jsonl(run.folder / "samples.jsonl")[-1]             # it names who played which role
    by_name = {agent.name: agent for agent in agents}
    players = [by_name[last[f"{role}_agent"]] for role in roles]
    if untrained:
        agents = [as_base(agents[0])]
        players = [as_base(player) for player in players]
    found = {}
    for agent in agents:
        _, _, found[agent.name] = respond_alone(agent, finished.task, queries, seed=0)
    found["team"] = found[agents[0].name]
    if len(roles) > 1:
        metrics = evaluate_team(finished.method, players)
        found["team"] = {name: metrics[f"{roles[-1]}_{name}"] for name in MEASURES}
    about = {"task": run.task, "variant": "base" if untrained else run.variant, "seed": run.seed,
             "commit": run.log[0], "split": split}
    return [about | {"who": who} | {name: x[name] for name in MEASURES} for who, x in found.items()]


def measure_all(study: str, splits: list[str]) -> None:
    """Measures the finished runs that have not been measured, and the bases by a run of CORY."""
    out = Path("studies", study).resolve()
    file = out / "teams.csv.gz"
    rows = pd.read_csv(file, dtype={"commit": str}).to_dict("records") if file.exists() else []
    done = {(row["task"], row["variant"], row["seed"]) for row in rows}
    spec = json.loads((HERE / "studies.json").read_text())[study]
    for run in plan(spec, out):
        if run.state == "finished" and (run.task, run.variant, run.seed) not in done:
            for split in splits:
                rows += measure(run, split)
                if run.variant == "cory" and run.seed == spec["seeds"][0]:
                    rows += measure(run, split, untrained=True)
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.7g",
                                      compression={"method": "gzip", "mtime": 0})
            print(run.task, run.variant, run.seed, flush=True)


def chosen_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """The team's mean combined reward on validation queries: a row for each method, a column for each rate.
    """
    rows = rows[(rows.who == "team") & (rows.split == "validation")]
    names = rows.variant.str.extract("(?P<method>.+), learning rate (?P<rate>.+)")
    means = rows.join(names).groupby(["task", "method", "rate"], sort=False).combined_reward.mean()
    return means.unstack("rate", sort=False)


def outcomes(rows: pd.DataFrame) -> pd.DataFrame:
    """By task, variant and seed: the combined reward on test queries of `team`, and of `agent`, the one whose
    combined reward alone is the highest on validation queries.
    """
    values = rows.set_index([*KEYS, "split", "who"]).combined_reward.unstack("who", sort=False)
    validation = values.xs("validation", level="split")
    test = values.xs("test", level="split")
    agents = values.columns.drop("team")
    better = validation[agents].idxmax(axis=1)
    alone = [test.at[key, name] for key, name in better.items()]
    return pd.DataFrame({"team": test.team, "agent": alone}, index=test.index).sort_index()


def differences(found: pd.DataFrame) -> pd.DataFrame:
    """All planned tests: of each task, outcome, method and baseline, with adjusted p values."""
    tests = []
    for task, outcome, baseline, method in product(TASKS, OUTCOMES, BASELINES, NAMES):
        if method == baseline or (method, baseline) == ("ppo", "cory"):
            continue
        values = found.loc[task, outcome].unstack("variant")
        tests.append([task, outcome, baseline, method, difference(values[method], values[baseline])])
    table = pd.DataFrame(tests, columns=["task", "outcome", "baseline", "method", "difference"])
    table["adjusted"] = holm([x.p for x in table.difference])
    return table


def table_of(found: pd.DataFrame) -> str:
    """A line for each method with its means over seeds. P marks a mean that differs significantly from PPO's,
    C one that differs significantly from CORY's.
    """
    tests = differences(found)
    significant = tests[tests.adjusted < 0.05].groupby(["task", "outcome", "method"]).baseline.agg(list)
    titles = [f"{data}: {title}" for data, title in product(TASKS.values(), OUTCOMES.values())]
    lines = [["method", *titles]]
    for method, name in {"base": "base", **NAMES}.items():
        line = [name]
        for task, outcome in product(TASKS, OUTCOMES):
            mean = found.loc[(task, method), outcome].mean()
            marks = [BASELINES[baseline] for baseline in significant.get((task, outcome, method), [])]
            line.append(" ".join([f"{mean:.2f}", *marks]))
        lines.append(line)
    return markdown(lines)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=["measure"])
    parser.add_argument("study", nargs="?", choices=["methods_rates", "methods"])
    args = parser.parse_args(argv)
    if args.command:
        measure_all(args.study, ["validation"] if args.study == "methods_rates" else ["validation", "test"])
        return
    rates = chosen_rates(read("methods_rates.teams"))
    lines = [["task, method", *rates, "chosen"]]
    for (task, method), means in rates.iterrows():
        lines.append([f"{task}, {method}", *means, means.idxmax()])
    print(markdown(lines))
    found = outcomes(read("methods.teams"))
    print(table_of(found))
    print(differences(found).to_string(index=False))


if __name__ == "__main__":
    main()
