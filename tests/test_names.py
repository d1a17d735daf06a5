"""Names of a user's own things: found again, or refused in one line; and what a loop or task of one's own may
not do silently.
"""
import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import agent_of, bigram, error_line, settings, train_on

import train_imdb
from cory import names
from cory.commands import evaluate
from cory.config import ADVANTAGES, IMDB_PRESETS, METHODS, ImdbConfig
from cory.errors import UserError
from cory.experiment.flags import parse
from cory.experiment.run import Run, Turn, agents_of, find_task
from cory.names import find, name_of, short_name
from cory.ppo.agent import Agent
from cory.ppo.rollout import collect_rollout
from cory.train import train_cory

MINE = """
from cory.tasks.imdb import Imdb

class Mine(Imdb):
    def reward_of(self, queries, responses):
        return [-1.0 * len(response) for response in responses]
"""
# the two ways of forgetting the guard
STARTS = """
from cory.experiment.flags import parse
from cory.config import IMDB_PRESETS, ImdbConfig
from cory.train import train
flags = "--iterations 1 --batch_size 8 --mini_batch_size 8 --wandb disabled --run_dir started"
train(parse(ImdbConfig, IMDB_PRESETS, flags.split()))
"""
STARTS_AND_EXITS = STARTS.replace("train(parse", "@exit_on_user_error\ndef main():\n    train(parse").replace(
    "from cory.train", "from cory.errors import exit_on_user_error\nfrom cory.train") + "main()\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The present folder, empty; `here(name, code)` writes a module. Modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)       # an edit within a second is read, too
    written = []

    def write(name: str, code: str) -> None:
        Path(f"{name}.py").write_text(code)
        written.append(name)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def finished(small_flags, tmp_path_factory) -> Path:
    """A folder with mine.py and a finished run of its task."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        train_imdb.main([*small_flags, "--iterations", "1", "--task", "mine:Mine", "--run_dir", "run"])
    sys.modules.pop("mine")
    return folder


RESUME = ["--run_dir", "run", "--resume", "--iterations", "2"]
EVALUATE = ["run", "--samples", "1", "--k", "1", "--queries", "2", "--device", "cpu"]


# --- find ---------------------------------------------------------------------------------------------------
def test_a_name_is_a_short_one_or_ones_own():
    assert find("method", "cory", METHODS) is train_cory
    assert find("method", "cory.train:train_cory", METHODS) is train_cory
    assert find("checker", "numpy:median", {}) is np.median


@pytest.mark.parametrize("name, says", [
    ("rlo", "advantage is 'rlo': unknown; did you mean rloo? choose from gae, rloo, grpo, reinforce, or"),
    ("median", "unknown; choose from gae, rloo, grpo, reinforce, or name one of your own as module:Name"),
    (":median", "unknown"),
    ("numpy:meedian", "the module numpy has no meedian; name one that it defines"),
    ("nowhere:median", "there is no module nowhere here; name it without .py, and run this in its folder"),
    ("own.py:median", "there is no module own.py here; name it without .py"),
    ("os:system", "is Python's own, and none of these")])
def test_unknown_names_are_refused_with_the_way_out(name, says, here):
    here("own", "")
    with pytest.raises(UserError) as error:
        find("advantage", name, ADVANTAGES)
    assert says in str(error.value)


def test_the_present_folder_is_looked_in(here, monkeypatch):
    here("own", "x = 7")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p) != Path.cwd()])
    assert find("advantage", "own:x", {}) == 7


def test_a_module_that_lacks_an_import_keeps_its_traceback(here):
    here("lacking", "import lack")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lack'"):
        find("task", "lacking:Mine", {})
    assert names.being_imported == []


def test_names_of_things_are_where_they_stand(monkeypatch):
    assert name_of(ImdbConfig) == "cory.config:ImdbConfig" and name_of(train_cory) == METHODS["cory"]
    script = type("MyConfig", (ImdbConfig,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/somewhere/penalty.py", raising=False)
    assert name_of(script) == "penalty:MyConfig"                # of a script its own name, to be found again


@pytest.mark.parametrize("name, short", [
    ("cory", "cory"), ("chain:train_chain", "chain"), ("my.short:Short", "Short"),
    ("cory.train:train_ppo", "ppo"), ("mine:train_ppo", "mine-ppo")])
def test_short_names(name, short):
    assert short_name(name) == short


# --- a module that starts a run -----------------------------------------------------------------------------
@pytest.mark.parametrize("code", [STARTS, STARTS_AND_EXITS], ids=["bare", "main"])
def test_evaluation_refuses_a_module_that_starts_a_run(code, here, finished, capsys):
    shutil.copytree(finished / "run", "run")
    here("mine", MINE + code)
    with pytest.raises(SystemExit) as stop:
        evaluate.main(EVALUATE)
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and "task is 'mine:Mine': importing mine starts something" in last
    assert 'keep its last lines under `if __name__ == "__main__":`' in last
    assert not Path("started").exists() and not Path("run/evaluation").exists()


# --- a task that is another one now -------------------------------------------------------------------------
@pytest.mark.parametrize("main, argv", [(train_imdb.main, RESUME), (evaluate.main, EVALUATE)],
                         ids=["resume", "evaluate"])
def test_a_run_whose_task_is_gone_or_was_edited_is_refused(main, argv, here, finished, capsys):
    def tree() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}

    shutil.copytree(finished / "run", "run")
    before = tree()
    line = error_line(main, argv, capsys)
    assert "task is 'mine:Mine': there is no module mine here" in line
    here("mine", MINE.replace("-1.0", "-2.0"))
    line = error_line(main, argv, capsys)
    assert "task is 'Mine': gives -" in line and "and gave it -" in line and "start a new run" in line
    assert tree() == before
    here("mine", MINE)                                          # put back, it goes on
    main(argv)


# --- what is no task and no loop ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["numpy:ndarray", "numpy:median"])
def test_a_task_that_is_no_task_is_refused(name):
    with pytest.raises(UserError, match="is no subclass of cory.tasks.task.Task; make it one"):
        find_task(ImdbConfig(task=name))


@pytest.mark.parametrize("agents, says", [
    (None, r'does not say which agents it trains; put @trains\("llm1", ...\) above it'),
    (("base",), "agent is 'base': is no name, or that of another role, agent or column; give each agent one"),
    (("llm1", "LLM1"), "agent is 'llm1'"), ((["llm1", "llm2"],), "agent is")])
def test_loops_whose_agents_cannot_be_are_refused(agents, says):
    def loop(run):
        pass

    if agents is not None:
        loop.agents = agents
    with pytest.raises(UserError, match=says):
        agents_of(ImdbConfig(method="own:loop"), loop)


# --- what a loop hands over ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def played(small_flags, tmp_path_factory):
    """A run that has not begun, and a rollout of its first agent with reward."""
    folder = tmp_path_factory.mktemp("played")
    run = Run(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--run_dir", str(folder)]))
    run.clock = 0.0
    queries, limit = run.task.batch(1)
    a = collect_rollout(run.roles[0], run.task.pioneer_prompts(queries), limit)
    yield run, a, run.task.reward(queries, a.text)
    run.close()


ROLES, PIONEER = [0, 1], [("pioneer", 0)]
NO_AGENTS = "must be the run's agents"


@pytest.mark.parametrize("turns, roles, update, metrics, says", [
    # roles that would hide something
    ([("llm1", 0)], ROLES, {}, {}, "role is 'llm1': is no name, or that of another role, agent or column"),
    ([("pioneer", 0), ("pioneer", 1)], ROLES, {}, {}, "role is 'pioneer'"),
    ([("a/b", 0)], ROLES, {}, {}, "role is 'a/b'"), ([("eval", 0)], ROLES, {}, {}, "role is 'eval'"),
    # agents that are not the run's: it would resume with one agent in both roles, or not at all
    ([], ROLES, {}, {}, "give finish_iteration a Turn of each agent that played"),
    ([("pioneer", 2)], ROLES, {}, {}, "turns is 'llm3': give finish_iteration a Turn of each agent that"),
    (PIONEER, [0, 2], {}, {}, f"roles is 'llm1, llm3': {NO_AGENTS} in another order: llm1, llm2"),
    (PIONEER, [0, 0], {}, {}, NO_AGENTS),
    # metrics that would be lost
    (PIONEER, ROLES, {"kl": 77.0}, {}, "metrics is 'kl': is taken"),
    (PIONEER, ROLES, {}, {"seconds": 0.5}, "metrics is 'seconds': is taken"),
    (PIONEER, ROLES, {}, {"both/copied": 0.5}, "metrics is 'both/copied': is taken or holds a slash"),
    (PIONEER, ROLES, {}, {"copied": [0.5, 1.0]}, "metrics is 'copied': is '.0.5, 1.0.', not one number")])
def test_what_a_loop_may_not_hand_over(turns, roles, update, metrics, says, played):
    """`finish_iteration` refuses it, and logs nothing."""
    run, a, r = played
    known = [*run.agents, Agent("llm3", run.bases["base"], run.cfg, 2)]
    turns = [Turn(role, known[player], a, r, update) for role, player in turns]
    queries, limit = run.task.batch(1)
    with pytest.raises(UserError, match=says):
        run.finish_iteration(1, queries, limit, turns, roles=[known[i] for i in roles], metrics=metrics)
    assert (run.run_dir / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("body, says", [
    ("def metrics(self, queries, responses):\n        return {'distinct_1': 0.0}", "metrics is 'distinct_1'"),
    ("def metrics(self, queries, responses):\n        pass", "metrics is None: are no dict"),
    ("def reward_of(self, queries, responses):\n        raise SystemExit", "would end the run as if it were"),
    ("def reward(self, queries, responses):\n        return [0.0] * len(queries)", "name it reward_of")])
def test_what_a_task_may_not_define_or_return(body, says, here, small_flags, capsys):
    here("own", MINE + f"    {body}\n")
    flags = [*small_flags, "--iterations", "1", "--task", "own:Mine", "--run_dir", "run"]
    assert says in error_line(train_imdb.main, flags, capsys)


def test_a_loop_that_never_finishes_an_iteration_is_one_line(here, small_flags, capsys):
    here("idle", """
from cory.train import trains

@trains("llm1")
def train_idle(run):
    for iteration in run.iterations():
        pass
""")
    flags = [*small_flags, "--method", "idle:train_idle", "--run_dir", "run"]
    line = error_line(train_imdb.main, flags, capsys)
    assert "stopped after iteration 0; call run.finish_iteration" in line


def negative(progress):
    return -1.0


def column(reward_BT):
    return reward_BT.sum(1)


NO_SCORE = "8,\\): a number for each response"


@pytest.mark.parametrize("changes, score, says", [
    (dict(lr_schedule="test_names:negative"), torch.zeros(8), "'test_names:negative': must be a function"),
    (dict(lr_schedule="test_names:RESUME"), torch.zeros(8), "'test_names:RESUME': must be a function"),
    (dict(advantage="test_names:column"), torch.zeros(8), "test_names:column is 'a tensor of shape"),
    (dict(advantage="torch:relu"), torch.zeros(8), "'torch:relu': has no parameters that Python knows"),
    ({}, torch.zeros(8, 1), NO_SCORE), ({}, [0.0] * 8, NO_SCORE)])
def test_schedules_estimators_and_scores_that_are_nonsense_are_one_line(changes, score, says):
    agent = agent_of(bigram())
    rollout = collect_rollout(agent, ["a"] * 8, 3)
    with pytest.raises(UserError, match=says):
        train_on(agent, rollout, score, 1, settings(**changes))
