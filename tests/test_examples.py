"""Each file of examples/ runs for two iterations by the commands in its docstring, and computes what it says."""
import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toys import close, finished, read, settings

from cory.ppo.model import LanguageModel, Policy
from cory.ppo.rollout import Rollout
from cory.run.evaluate import evaluate_run
from examples.methods.credit import Credit
from examples.methods.dense import Dense
from examples.methods.dynamic import Dynamic
from examples.methods.merit import Merit
from examples.methods.together import Together
from examples.methods.two_turns import TwoTurns
from examples.parts import controllers, losses
from examples.parts.advantages import whitened_by_group
from examples.tasks import crossplay, mention

HOME = Path(__file__).parents[1]
FILES = sorted(HOME.glob("examples/*/*.py"))
PAGE = (HOME / "examples/README.md").read_text()
BEST = re.search("```python\n(# best.py\n.*?)```\n\n    (python .*?)\n", (HOME / "README.md").read_text(), re.DOTALL)
# of a flag that is given twice the last one holds
SHORT = "--iterations 2 --batch_size 8 --eval_every 0 --save_every 2".split()
pytestmark = pytest.mark.usefixtures("read_once")


def docstrings(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            found.append(ast.get_docstring(node) or "")
    return found


COMMANDS = []
for path in FILES:
    COMMANDS += re.findall("^ *(python .*)", docstrings(path)[0], re.MULTILINE)
TRAINING = [command for command in COMMANDS if "--method" in command]


@pytest.fixture
def train(tmp_path, monkeypatch, small_flags, problem_flags):
    """Runs a command of training, and evaluates what it has trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Policy, "logits", LanguageModel.logits)         # which an example changes

    def run(command):
        _, name, *words = shlex.split(command.replace("-m ", ""))
        small = problem_flags if "gsm8k" in name else small_flags
        run_dir = tmp_path / "run"
        main = importlib.import_module(name.removesuffix(".py")).main
        main([*small, *words, *SHORT, "--run_dir", str(run_dir)])
        assert "base" in read(run_dir / "eval.json")
    return run


@pytest.mark.parametrize("command", TRAINING)
def test_an_example_trains_and_its_run_can_be_evaluated(command, train):
    if "mention" in command:
        mention.main()
    train(command)


def test_the_class_of_readme_trains(train, monkeypatch):
    text, command = BEST.groups()
    Path("best.py").write_text(text)
    monkeypatch.syspath_prepend(".")
    train(command)


def test_each_file_is_short_has_a_command_and_is_linked():
    for path in FILES:
        assert "\n    python " in docstrings(path)[0], path
        assert len(path.read_text().splitlines()) <= 45, path
        for text in docstrings(path):
            assert len(text.replace("\n\n", "\n").splitlines()) <= 4, path
    linked = {(HOME / "examples" / link).resolve() for link in re.findall(r"\]\(([^)#]*)", PAGE)}
    assert all(path.exists() for path in linked)
    assert {path for path in linked if "examples" in path.parts} == {*FILES}


def test_mention_writes_its_data_and_rewards_the_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mention.main()
    rows = [json.loads(line) for line in Path("runs/mention.jsonl").open()]
    assert [row["word"] for row in rows[:4]] == ["good", "story", "time", "good"]
    assert len(rows) == 9000 and all(len(row["opening"].split()) <= 4 for row in rows)
    queries = [mention.Mention.query(None, row, None) for row in (["It is", "good"], ["It is", "time"])]
    assert mention.Mention.compute_rewards(None, queries, [" Good!", " good."]) == [1.0, 0.0]


def test_a_run_that_plays_with_itself_is_its_team(tmp_path, monkeypatch, small_flags, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in "12":
        finished([*small_flags, *SHORT], Path(seed), "--lora_rank", 2, "--seed", seed)
    crossplay.main("12")
    said = capsys.readouterr().out
    assert "1 llm1, 2 llm2: " in said and "2 llm1, 1 llm2: " in said
    for seed in "12":
        reward = read(Path(seed, "eval.json"))["team"]["observer_task_reward"]
        assert f"{seed} llm1, {seed} llm2: {reward:.3f}\n" in said


# --- numbers by hand ---
def test_scores():
    rewards = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])]
    cfg = settings(partner_reward=0.5)
    close(torch.stack(Credit(cfg, None).scores(None, rewards)), [[3, 6], [4, 8]])
    rollout = SimpleNamespace(mask_BT=torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    dense = Dense(cfg, None).scores([rollout, rollout], rewards)            # of [3, 6] and [4.5, 9]
    close(torch.stack(dense), [[[1.49, 1.49], [5.99, 0]], [[2.24, 2.24], [8.99, 0]]])
    task = SimpleNamespace(reward=lambda queries, texts: torch.tensor([float(text) for text in texts]))
    both = [SimpleNamespace(query=None, text=["1", "2"]), SimpleNamespace(text=["3", "5"])]
    close(torch.stack(Together(cfg, task).scores(both, rewards)), [[13, 25], [13, 25]])
    assert Together(cfg, task).team_metrics(both, rewards) == {"joint_reward": 19}


def test_merit():
    merit = Merit(settings(), None)
    for pioneer, observer, next_pioneer in ((1, 0, "llm1"), (0, 1, "llm2"), (1, 1, "llm2"), (0, 2, "llm1")):
        merit.scores(None, [torch.tensor([float(pioneer)]), torch.tensor([float(observer)])])
        assert merit.assign_roles(["llm1", "llm2"], 1)[0] == next_pioneer
    assert merit.memory == {"exchanges": 2}


def rollout_of(texts: list[str]) -> Rollout:
    one_B1 = torch.ones(len(texts), 1)
    return Rollout(texts, texts, one_B1, one_B1, one_B1, one_B1, one_B1, one_B1[:, 0])


def test_two_turns(monkeypatch):
    updates = []
    monkeypatch.setattr("cory.train.ppo_update", lambda *update: updates.append(update))
    method = TwoTurns(settings(), None)
    for i, role in enumerate(method.roles):
        method.update(role, None, rollout_of([role]), torch.tensor([i]))
    trained = [(rollout.text, score.tolist()) for _, rollout, score in updates]
    assert trained == [(["observer"], [1]), (["pioneer", "reviser"], [0, 2])]


@pytest.mark.parametrize("iteration, kept, asked", [
    (1, ["c0", "d1", "e1", "f0"], [1, 11]), (2, ["i0", "j0", "k0", "l0"], [2, 12, 22, 32])])
def test_dynamic_sampling(iteration, kept, asked):
    batches = {1: ["a0", "b0", "c0", "d1"], 11: ["e1", "f0", "g0", "h0"]}
    batch_of, calls = lambda i: batches.get(i, ["i0", "j0", "k0", "l0"]), []
    task = SimpleNamespace(
        iteration=iteration, training=True, pioneer_prompts=None or (lambda queries: queries),
        batch=lambda i: calls.append(i) or (batch_of(i), 6),
        reward=lambda queries, texts: torch.tensor([float(text[1]) for text in texts]))
    method = Dynamic(settings(iterations=10, responses_per_query=2), task)
    (rollout,) = method.respond([None], batch_of(iteration), lambda player, prompts, queries: rollout_of(queries))
    assert rollout.text == kept and rollout.group_B.tolist() == [0, 0, 1, 1] and calls == asked
