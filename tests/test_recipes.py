"""The recipes of docs/recipes.md, run from the page as it stands, and what must follow by itself."""
import importlib
import re
import runpy
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file
from toys import error_line, read, require_same_runs, stopped

import train_gsm8k
import train_imdb
from cory.commands import evaluate
from cory.config import Gsm8kConfig, ImdbConfig
from cory.experiment.flags import Parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
BLOCKS = {body.partition("\n")[0].removeprefix("# ").removesuffix(".py"): body
          for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^ {4}\s*(\S.*)$", re.sub(
    r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE)]
PYTHON = [line[1:] for line in COMMANDS if line[0] == "python"]


def command(name: str) -> list[str]:
    """Script and flags of the one run on the page that names something of NAME.py, or is NAME.py's own."""
    (found,) = [line for line in PYTHON if any(word.startswith(f"{name}:") for word in line)
                or line[0] == f"{name}.py" and line[1:]]
    return found


def edited(diff: str, text: str) -> str:
    """`text` with each line of the page's diff that begins with - replaced by the one with + below it."""
    lines = diff.splitlines()
    for old, new in zip(lines, lines[1:], strict=False):
        if old.startswith("-"):
            assert text.count(old[1:] + "\n") == 1 and new.startswith("+"), old
            text = text.replace(old[1:] + "\n", new[1:] + "\n")
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The present folder, with every file of the page in it; the modules are forgotten at the end."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, body in BLOCKS.items():
        (folder / f"{name}.py").write_text(body)
    (folder / "penalised.py").write_text(edited(DIFF, (ROOT / "cory" / "train.py").read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        runpy.run_path("mention.py", run_name="__main__")       # writes its data
        yield folder
    for name in [*BLOCKS, "penalised"]:
        sys.modules.pop(name, None)


OTHER_FLAGS = {"timed": "--iterations 1 --eval_queries 2", "chain": "--iterations 3",
               "glimpse": "--iterations 3", "memory": "--iterations 3",
               "stairs": "--iterations 6 --method ppo --role_exchange_every 5"}


@pytest.fixture(scope="module")
def run(folder, small_flags, problem_flags):
    """`run(name)`: the folder of the page's run of NAME.py, with small flags before the page's (of a flag
    that is given twice the last one holds). A run is made once; `run(name, another)` makes one more.
    """
    def run(name: str, folder: str = "", *more: str) -> Path:
        run_dir = Path(folder or name)
        if not run_dir.exists():
            script, *words = command(name) if name != "plain" else ["train_imdb.py", "--method", "cory"]
            small = problem_flags if script == "train_gsm8k.py" else small_flags
            flags = [*small, "--iterations", "2", "--eval_every", "0", *words,
                     *OTHER_FLAGS.get(name, "").split(), *more, "--run_dir", str(run_dir)]
            mains = {"train_imdb.py": train_imdb.main, "train_gsm8k.py": train_gsm8k.main}
            (mains.get(script) or importlib.import_module(name).main)(flags)
        return run_dir

    return run


def rows(run_dir: Path, file: str = "metrics.jsonl") -> list[dict]:
    """Without what `train_cory` measures of its team."""
    return [{key: value for key, value in row.items() if "/team/" not in key}
            for row in toys.rows(run_dir, file)]


# --- the page -----------------------------------------------------------------------------------------------
def test_the_pages_scripts_and_flags_are_there(folder):
    scripts = [line[0] for line in PYTHON if line[0].endswith(".py")]
    assert [name for name in scripts if not (ROOT / name).exists() and not Path(name).exists()] == []
    configs = {"train_imdb.py": ImdbConfig, "train_gsm8k.py": Gsm8kConfig,
               "penalty.py": importlib.import_module("penalty").PenaltyConfig}
    asked = [line for line in PYTHON if line[0] in configs]
    for script, *words in asked:
        Parser(configs[script], {}).parse(words)
    assert len(asked) >= len(BLOCKS)                        # one for each file


METRICS = {"short": ["llm1/characters", "eval/llm1/characters"], "glimpse": ["seen"],
           "mention": ["observer/words"], "memory": ["best_so_far"],
           "weakest": ["eval/team/observer_copies"]}
ROLES = {"chain": ["first", "second", "third"], "frozen": ["partner", "learner"], "stairs": ["pioneer"],
         "debate": ["opening", "reply", "closing"]}


@pytest.mark.parametrize("name", [*BLOCKS, "penalised"])
def test_a_run_of_the_page_shows_agents_roles_and_metrics_in_all_that_it_writes(name, run):
    run_dir, roles = run(name), ROLES.get(name, ["pioneer", "observer"])
    config, last, held_out = read(run_dir / "config.json"), rows(run_dir)[-1], read(run_dir / "eval.json")
    agents = ["llm1", "llm2", "llm3"][:{"chain": 3, "stairs": 1}.get(name, 2)]
    assert config["agents"] == agents and list(last["roles"]) == roles
    assert {*last["roles"].values()} == {*agents}
    for who in [*roles, *(agents if name != "frozen" else ["llm2"])]:
        assert f"{who}/task_reward" in last and f"{who}/kl" in last
    for who in ["base", *agents]:
        assert {"task_reward", "kl"} <= held_out[who].keys()
    log = (run_dir / "metrics.jsonl").read_text()
    assert all(f'"{metric}": ' in log for metric in METRICS.get(name, []))
    for row in rows(run_dir, "samples.jsonl"):
        for role in roles:
            assert row[role] and row[f"{role}_agent"] in agents and isinstance(row[f"{role}_reward"], float)
    assert all((run_dir / "final" / agent / "model.safetensors").exists() for agent in agents)


# --- a reward -----------------------------------------------------------------------------------------------
def test_a_setting_of_ones_own_is_a_flag_on_record(run, capsys):
    penalty, whole = importlib.import_module("penalty"), run("penalty")
    config = read(whole / "config.json")
    assert config["config"] == "penalty:PenaltyConfig" and config["per_character"] == 0.2
    for row, without in zip(rows(whole, "samples.jsonl")[:4], rows(run("plain"), "samples.jsonl")):
        assert row["pioneer"] == without["pioneer"]             # nothing is learned yet
        expected = without["pioneer_reward"] - 0.2 * len(row["pioneer"])
        assert row["pioneer_reward"] == pytest.approx(expected, abs=1e-4)
    resume = ["--resume", "--run_dir", str(stopped(whole, Path("penalty_2")))]
    penalty.main(resume)
    require_same_runs(whole, Path("penalty_2"))
    for main, words, says in (
            (penalty.main, ["--per_character", "-1"], "per_character is -1.0: must be 0 or more"),
            (penalty.main, [*resume, "--per_character", "0.3"], "per_character was 0.2, now 0.3"),
            (train_imdb.main, resume, "continue it with the script that started it")):
        assert says in error_line(main, words, capsys)


# --- what an agent is trained on ----------------------------------------------------------------------------
def test_a_reward_in_processes_has_its_time_limit(run):
    graded = importlib.import_module("timed")
    start = time.monotonic()
    assert graded.Timed.reward_of(None, ["", ""], ["four", "five!"]) == [4.0, -1.0]
    assert 1 < time.monotonic() - start < 20
    assert rows(run("timed"))[-1]["llm1/task_reward"] > -1


def test_a_length_penalty_moves_the_agents_and_not_the_logged_reward(run):
    penalised, plain = rows(run("penalised"))[1], rows(run("plain"))[1]
    for name in ("task_reward", "kl", "length"):            # the same answers, scored alike
        assert penalised[f"pioneer/{name}"] == plain[f"pioneer/{name}"]
    assert penalised["pioneer/value_loss"] != plain["pioneer/value_loss"]       # and learned from otherwise
    module = importlib.import_module("penalised")
    rollout = type("Rollout", (), {"length_B": torch.tensor([4.0, 10.0])})
    score = module.score(rollout, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]), ImdbConfig())
    assert score.tolist() == pytest.approx([1 + 3 - 0.05 * 4, 2 + 3 - 0.05 * 10])


# --- a task -------------------------------------------------------------------------------------------------
def test_a_task_on_data_of_ones_own(run):
    for row in rows(run("mention"), "samples.jsonl"):
        word, _, opening = row["query"].partition(": ")
        assert word in ("good", "story", "actors", "time") and opening
        assert row["pioneer_reward"] == float(word in row["pioneer"].lower())
    task = importlib.import_module("mention").Mention
    assert task.reward_of(task, ["time: We", "good: We"], [" Had a TIME", " had a time"]) == [1.0, 0.0]


# --- loops --------------------------------------------------------------------------------------------------
def test_the_observer_sees_the_answer_now_and_then(run, monkeypatch, capsys):
    whole = run("glimpse")
    assert 0 < sum(row["seen"] for row in rows(whole)[1:]) < 3
    with open("glimpse.py", "a") as file:
        file.write("# edited since\n")
    train_imdb.main(["--resume", "--run_dir", str(stopped(whole, Path("glimpse_2")))])
    require_same_runs(whole, Path("glimpse_2"))
    assert "other code than at the checkpoint, by which the run goes on: glimpse" in capsys.readouterr().out
    monkeypatch.setattr(importlib.import_module("glimpse"), "P", 1.0)
    always, plain = rows(run("glimpse", "always", "--iterations", "1"))[1], rows(run("plain"))[1]
    assert always.pop("seen") == 1
    assert all(always[key] == value for key, value in plain.items())    # at an end that is evaluated, too


def test_what_the_loops_of_the_page_train_on(run):
    weakest = importlib.import_module("weakest").weakest
    assert weakest(None, torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0]), None).tolist() == [1, -1]
    name, start = "transformer.h.0.attn.c_attn.weight", load_file(
        Path(read(run("plain") / "config.json")["model"], "model.safetensors"))
    for loop, moves in (("frozen", [False, True]), ("plain", [True, True])):
        finals = [load_file(run(loop) / "final" / agent / "model.safetensors") for agent in ("llm1", "llm2")]
        assert [not torch.equal(final[name], start[name]) for final in finals] == moves


def test_a_memory_resumes_and_is_what_every_observer_reads(run, monkeypatch):
    best, module, prompts = [row["best_so_far"] for row in rows(run("memory"))[1:]], None, []
    assert best == sorted(best)
    module = importlib.import_module("memory")
    collect = module.collect_rollout
    monkeypatch.setattr(module, "collect_rollout", lambda *a: prompts.append(a[1]) or collect(*a))
    train_imdb.main(["--resume", "--run_dir", str(stopped(run("memory"), Path("memory_2")))])
    require_same_runs(run("memory"), Path("memory_2"))
    quoted = {re.search(r'"(.*)" more', observer, re.DOTALL)[1].removeprefix(query)
              for query, observer in zip(*prompts)}
    assert len(quoted) == 1                                 # the same answer behind every query


def test_each_of_a_chain_sees_the_answer_before_its_own_and_is_evaluated(run, capsys, monkeypatch):
    chain = run("chain")
    played = [row["roles"]["first"] for row in rows(chain)[1:]]
    assert played == ["llm1", "llm1", "llm2"]               # exchanged after iteration 2
    first = rows(chain)[1]                                  # each has a random stream of its own
    assert len({first[f"{agent}/task_reward"] for agent in ("llm1", "llm2", "llm3")}) == 3

    module, prompts, scores = importlib.import_module("chain"), [], []
    collect, update = module.collect_rollout, module.ppo_update
    monkeypatch.setattr(module, "collect_rollout", lambda *a: prompts.append(a[1]) or collect(*a))
    monkeypatch.setattr(module, "ppo_update", lambda *a: scores.append(a[2].tolist()) or update(*a))
    train_imdb.main(["--resume", "--run_dir", str(stopped(chain, Path("chain_2")))])
    require_same_runs(chain, Path("chain_2"))
    sample = [row for row in rows(chain, "samples.jsonl") if row["iteration"] == 3][0]
    assert prompts[0][0] == sample["query"]
    for prompt, role in zip((prompts[1][0], prompts[2][0]), ("first", "second")):
        assert f'"{sample["query"]}{sample[role][:2]}' in prompt    # an observer's prompt cuts broken bytes
    total = sum(sample[f"{role}_reward"] for role in ROLES["chain"])
    assert [score[0] for score in scores] == pytest.approx([total] * 3)

    evaluate.main([str(chain), "--samples", "2", "--k", "1", "2", "--queries", "6", "--device", "cpu"])
    assert "CHAIN LLM3" in capsys.readouterr().out


# --- advantage, schedule, checker ---------------------------------------------------------------------------
def test_an_advantage_of_ones_own_against_arithmetic_and_without_a_critic(run):
    median = importlib.import_module("median").median
    reward = torch.tensor([[1.0, 2], [0, 7], [4, 9], [5, 5]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 0], [1, 1]])
    # returns 3, 7, 4, 10: their median is (4 + 7) / 2
    assert median(reward, mask, 4).tolist() == [[-2.5, -2.5], [1.5, 1.5], [-1.5, 0], [4.5, 4.5]]
    assert not any("value" in key for row in rows(run("median")) for key in row)


def test_a_schedule_of_ones_own_sets_the_rate(run):
    rates = [row["llm1/learning_rate"] for row in rows(run("stairs"))[1:]]
    # two iterations of warm-up, then progress 0, 1/4, 2/4, 3/4: stairs 0, 0, 1, 2
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 5e-4, 2.5e-4])


def test_a_checker_of_ones_own_makes_the_reward(run):
    stated = importlib.import_module("stated").stated
    for text, answer in (("the answer is 1,234 eggs of 50", "1,234"), ("The answer is: $7.5.", "7.5"),
                         ("the answer is 3 Question: the answer is 4", "3"), ("5 and 6", 6), ("none", None)):
        assert stated(text) == answer, text
    assert read(run("stated") / "config.json")["checker"] == "stated:stated"
    assert "unparsed" in read(run("stated") / "eval.json")["llm1"]
