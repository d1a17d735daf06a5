"""What each run of a study reached: out of its folder, or of its row in a page's `runs.jsonl`."""
import math
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import fmean

from cory.config import METHODS
from cory.errors import UserError
from cory.experiment.checkpoint import checkpoints_of, read_state
from cory.experiment.saved_config import portable, read_config
from cory.names import find
from cory.studies.runs import MEASURES, StudyRun
from cory.system.files import read_json, read_log

REWARD = {"imdb": "task_reward", "gsm8k": "greedy_accuracy"}        # of held-out bare queries
NAMES = {"imdb": "task reward", "gsm8k": "greedy accuracy"}
# What is alike in runs that are alike in these flags. The fingerprint of the weights is also of how the
# tokenizer reads some held-out queries.
ALIKE = {"data": ("--dataset", "--eval_queries"),
         "weights": ("--model", "--dataset", "--eval_queries", "--min_query_length", "--max_query_length",
                     "--lora", "--load_in_4bit", "--dtype"),
         "dtype": ("--dtype",), "head_precision": ("--head_precision",)}


@dataclass(frozen=True)
class Point:
    """Held-out figures of one agent, or the mean of a run's agents, after an iteration."""
    iteration: int
    reward: float               # REWARD of the task
    sampled_reward: float       # mean task reward of the sampled answers that KL is of; on IMDB the same
    kl: float                   # nats per response, on the bare query
    combined: float             # sampled reward - eta KL, with the run's own eta
    distinct_2: float           # different pairs of neighbouring tokens over all pairs
    repeated_tokens: float      # share of tokens that stood earlier in the same response


FIGURES = tuple(field.name for field in fields(Point))[1:]


@dataclass(frozen=True)
class Result:
    run: StudyRun
    agents: dict[str, list[Point]]          # with the base's figures as iteration 0
    roles: dict[str, dict[str, float]]      # role: means of its training metrics, last quarter of iterations
    unsteady: float                         # `unsteadiness` of its training rewards
    measured: dict                          # what was measured of the finished run, {} if nothing was
    responses: int = 0                      # sampled and trained on in an iteration, by all roles
    config: dict = field(default_factory=dict)      # its config.json but for the folder; {} if there is none
    made_by: dict[str, str] = field(default_factory=dict)       # commit, versions of packages, dtype
    answers: list[dict] = field(default_factory=list)   # of the last iteration, as `answers_of` has them
    diverged: bool = False                  # it has no end, and no figures

    @property
    def mean_of_agents(self) -> list[Point]:
        """Point by point; PPO's one agent is itself."""
        return [Point(points[0].iteration, *(fmean(getattr(p, name) for p in points) for name in FIGURES))
                for points in zip(*self.agents.values(), strict=True)]

    @property
    def last(self) -> Point:
        return self.mean_of_agents[-1]

    @property
    def base(self) -> Point:
        """The untrained model's figures, which all agents start from."""
        return next(iter(self.agents.values()))[0]

    @property
    def eta(self) -> float:
        return self.config["init_kl_coef"]

    @property
    def dtype(self) -> str:
        return self.config["dtype"]

    @property
    def share_collapsed(self) -> float:
        """Of its agents. By our rule one has collapsed if at its end its reward is below the base's by more
        than a tenth of that or 0.05, whichever is more; or its answers say the same: pairs of neighbouring
        tokens are less than a third as varied as the base's, or of 100 tokens 20 more than of the base's
        stood earlier in the same answer; or if the run diverged.
        """
        def gone(base: Point, end: Point) -> bool:
            return (end.reward < base.reward - max(0.05, abs(base.reward) / 10)
                    or end.distinct_2 < base.distinct_2 / 3
                    or end.repeated_tokens > base.repeated_tokens + 0.2)

        if self.diverged:
            return 1.0
        return fmean(gone(points[0], points[-1]) for points in self.agents.values())

    @property
    def collapsed(self) -> bool:
        """One of its agents has."""
        return self.share_collapsed > 0


Groups = dict[str, dict[int, Result]]       # {variant: {seed: result}} of one task, in the study's order


def of_ended(runs: list[StudyRun]) -> list[Result]:
    """Of those that are finished or have diverged."""
    return [read(run) for run in runs if run.finished or run.diverged]


def read(run: StudyRun) -> Result:
    """The figures of a finished run, or of one that diverged."""
    if run.row is not None:
        return of_row(run, run.row)
    if not run.trained:
        return Result(run, {}, {}, math.nan, {}, config=config_of(run), made_by=made_by(run), diverged=True)
    rows, cfg = rows_of(run), config_of(run)

    def points(agent: str) -> list[Point]:
        evaluated = [row for row in rows[1:] if f"eval/{agent}/kl" in row]
        return [point("base", rows[0], run.task), *(point(agent, row, run.task) for row in evaluated)]

    trained = rows[1:]
    late = trained[-max(1, len(trained) // 4):]
    half = trained[len(trained) // 2:]

    def played(role: str, name: str, some: list[dict]) -> list[float]:
        """By iteration; a role of a loop of one's own need not play in each."""
        return [row[f"{role}/{name}"] for row in some if f"{role}/{name}" in row]

    roles = {role: {name: fmean(played(role, name, late)) for name in ("task_reward", "kl")}
             for role in trained[-1]["roles"] if played(role, "kl", late)}
    unsteady = fmean(unsteadiness(played(role, "task_reward", half)) for role in roles) if roles else math.nan
    measured = read_json(run.folder / MEASURES[run.measure].file) if run.measure else {}
    responses = cfg["batch_size"] * len(find("method", cfg["method"], METHODS).agents)
    return Result(run, {name: points(name) for name in cfg["agents"]}, roles, unsteady, measured, responses,
                  cfg, made_by(run), answers_of(run, rows[-1]["iteration"]))


def config_of(run: StudyRun) -> dict:
    """What config.json holds of a run wherever it lies; of one that diverged the log may be all there is."""
    cfg = read_config(run.folder) if run.started else {}
    return portable({name: value for name, value in cfg.items() if name != "run_dir"})


def answers_of(run: StudyRun, iteration: int) -> list[dict]:
    """Rows of query, answer, reward, base, base_reward: what the pioneer, or PPO's agent, and the base have
    answered in an iteration to the queries of samples.jsonl.
    """
    found = []
    for row in read_log(run.folder / "samples.jsonl"):
        if row["iteration"] == iteration:
            role = "pioneer" if "pioneer" in row else next(key for key in row if f"{key}_reward" in row)
            found.append({"query": row["query"], "answer": row[role], "reward": row[f"{role}_reward"],
                          "base": row["base"], "base_reward": row["base_reward"]})
    return found


def row_of(study: str, result: Result) -> dict:
    """What a page's `runs.jsonl` holds of a run: all that its tables, verdicts and pictures are made of."""
    run = result.run
    if run.row is not None:
        return run.row | {"study": study, "variant": run.variant, "collapsed": result.collapsed}
    return {"study": study, "task": run.task, "metric": REWARD[run.task],
            "variant": run.variant, "seed": run.seed,
            "folder": run.folder.name, "flags": list(run.flags), "made_by": result.made_by,
            "agents": {agent: [vars(p) for p in points] for agent, points in result.agents.items()},
            "roles": result.roles, "unsteady": None if math.isnan(result.unsteady) else result.unsteady,
            "responses": result.responses, "measured": result.measured, "diverged": result.diverged,
            "collapsed": result.collapsed, "config": result.config, "answers": result.answers}


def of_row(run: StudyRun, row: dict) -> Result:
    """The inverse of `row_of`."""
    agents = {agent: [Point(**p) for p in points] for agent, points in row["agents"].items()}
    roles = {role: {name: float(of_role[name]) for name in ("task_reward", "kl")}
             for role, of_role in row["roles"].items()}
    unsteady = math.nan if row["unsteady"] is None else float(row["unsteady"])
    answers = [{name: answer[name] for name in ("query", "answer", "reward", "base", "base_reward")}
               for answer in row["answers"]]
    made_by = {"commit": row["made_by"]["commit"]} | row["made_by"]
    return Result(run, agents, roles, unsteady, row["measured"], int(row["responses"]), row["config"],
                  made_by, answers, row["diverged"] is True)


def rows_of(run: StudyRun) -> list[dict]:
    """Of a finished run's metrics.jsonl, the base's first. Raises `UserError` where they are not whole."""
    path = run.folder / "metrics.jsonl"
    rows = read_log(path)
    if [row["iteration"] for row in rows] != [*range(read_config(run.folder)["iterations"] + 1)]:
        raise UserError("file", str(path), "lacks iterations; put back a copy of it, or delete the run")
    return rows


def point(agent: str, row: dict, task: str) -> Point:
    """Of a row of metrics.jsonl in which the agent, or the base, was evaluated."""
    keys = (REWARD[task], "task_reward", "kl", "combined_reward", "distinct_2", "repeated_tokens")
    return Point(row["iteration"], *(row[f"eval/{agent}/{key}"] for key in keys))


def require_alike(results: list[Result]) -> None:
    """Runs of a task were made of the same data and weights and in the same dtype, unless their flags ask for
    others, where their config.json names them; and those of one variant were rewarded and evaluated alike:
    the base has the same figures in each. Raises `UserError`.
    """
    way_out = "delete one of the two, take another --out, or leave a file of --published out"
    first, first_base = {}, {}
    for result in results:
        run = result.run
        if result.diverged:
            continue
        given, prints = dict(pairwise(run.flags)), result.config.get("fingerprints", {})
        found = result.config | {"data": prints.get("data"), "weights": prints.get("model")}
        for name, flags in ALIKE.items():
            value, asked = found[name], tuple(given.get(flag) for flag in flags)
            if value is None:                                   # a run of before fingerprints were kept
                continue
            other, folder = first.setdefault((run.task, name, asked), (value, run.folder))
            if value != other:
                why = f"was made with {name} {value}, {folder.name} with {other}"
                raise UserError("run_dir", str(run.folder), f"{why}; {way_out}")
        other, folder = first_base.setdefault((run.task, run.variant), (result.base, run.folder))
        for name in unlike(result.base, other, result.dtype):
            values = f"{getattr(result.base, name):.2f} here and {getattr(other, name):.2f} in {folder.name}"
            why = (f"the untrained model's {name} is {values}: the reward or its evaluation was changed, or "
                   "another kind of GPU drew other answers")
            raise UserError("run_dir", str(run.folder), f"{why}; {way_out}")


def unlike(base: Point, other: Point, dtype: str) -> list[str]:
    """Figures of an untrained model that differ by more than the rounding of two processors makes them: in
    float32 few answers are drawn otherwise by it, in bfloat16 most.
    """
    most = 0.05 if dtype == "float32" else 0.15

    def differ(x: float, y: float) -> bool:
        return abs(x - y) > most * max(1, abs(y))

    return [name for name in ("reward", "sampled_reward", "distinct_2", "repeated_tokens")
            if differ(getattr(base, name), getattr(other, name))]


def unsteadiness(values: list[float]) -> float:
    """How far values jump from one iteration to the next: the standard deviation of the steps between
    neighbours over sqrt(2), which is the noise's own where it is independent. A trend does not count, nor do
    slow swings. NaN of two values or fewer.
    """
    steps = [y - x for x, y in pairwise(values)]
    if len(steps) < 2:
        return math.nan
    return (fmean((step - fmean(steps)) ** 2 for step in steps) / 2) ** 0.5


def by_variant(results: list[Result], task: str, diverged: bool = False) -> Groups:
    """With or without the runs that diverged, which have no figures."""
    found = {}
    for result in results:
        if result.run.task == task and (diverged or not result.diverged):
            found.setdefault(result.run.variant, {})[result.run.seed] = result
    return found


def made_by(run: StudyRun) -> dict[str, str]:
    """Commit and versions of packages by which a run was finished, out of its last checkpoint; its dtype."""
    if not (run.folder / "config.json").exists():           # of one that diverged the log may be all there is
        return {"commit": "unknown", "dtype": "unknown"}
    saved = checkpoints_of(run.folder)
    versions = read_state(saved[0])["versions"] if saved else {"commit": "unknown"}
    return {**versions, "dtype": read_config(run.folder)["dtype"]}


