"""The recipes of docs/recipes.md, run from the page as it stands, and what must follow by itself."""
import importlib
import re
import runpy
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file
from toys import error_line, read

import train_gsm8k
import train_imdb
from cory.commands import evaluate, report
from cory.config import Gsm8kConfig, ImdbConfig
from cory.experiment import run as run_module
from cory.experiment.flags import Parser
from cory.experiment.saved_config import load_config
from cory.ppo.loading import load_language_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
BLOCKS = {body.partition("\n")[0].removeprefix("# "): body
          for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^ {4}\s*(\S.*)$", re.sub(
    r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE)]


def command(*words: str) -> list[str]:
    """What follows `python SCRIPT` in the one command of the page that has these words."""
    (found,) = [line for line in COMMANDS if line[0] == "python" and set(words) <= set(line)]
    return found[2:]


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
        (folder / name).write_text(body)
    (folder / "penalised.py").write_text(edited(DIFF, (ROOT / "cory" / "train.py").read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    for name in [*BLOCKS, "penalised.py"]:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def quick(monkeypatch):
    """Runs and reports without a picture: drawing takes longer than training here."""
    monkeypatch.setattr(run_module, "draw_curves", lambda run_dir: None)
    monkeypatch.setattr(report, "draw_runs", lambda *args, **options: None)


def run(name: str, *flags: str, main=train_imdb.main) -> Path:
    """Of a flag that is given twice the last one holds: small flags first, then the page's."""
    main([*flags, "--run_dir", name])
    return Path(name)


def rows(run_dir: Path, file: str = "metrics.jsonl") -> list[dict]:
    """Without what `train_cory` measures of its team."""
    return [{key: value for key, value in row.items() if "/team/" not in key}
            for row in toys.rows(run_dir, file)]


def require_same_runs(a: Path, b: Path) -> None:
    """Metrics, samples, held-out metrics and final weights, bit for bit."""
    assert rows(a) == rows(b) and rows(a, "samples.jsonl") == rows(b, "samples.jsonl")
    assert read(a / "eval.json") == read(b / "eval.json")
    for agent in read(a / "config.json")["agents"]:
        ours, others = (load_file(x / "final" / agent / "model.safetensors") for x in (a, b))
        assert all(torch.equal(ours[key], others[key]) for key in ours | others)


def require_everywhere(run_dir: Path, agents: list[str], roles: list[str], metrics: list[str] = ()) -> None:
    """A finished run shows its agents, roles and metrics in everything that it writes."""
    config, last, held_out = read(run_dir / "config.json"), rows(run_dir)[-1], read(run_dir / "eval.json")
    assert config["agents"] == agents and list(last["roles"]) == roles
    assert sorted(last["roles"].values()) == sorted(agents)
    for name in [*roles, *agents]:
        assert f"{name}/task_reward" in last and f"{name}/kl" in last
    for name in ["base", *agents]:
        assert {"task_reward", "kl"} <= held_out[name].keys()
    assert set(metrics) <= last.keys()
    for row in rows(run_dir, "samples.jsonl"):
        for role in roles:
            assert row[role] and row[f"{role}_agent"] in agents and isinstance(row[f"{role}_reward"], float)
    for agent in agents:
        assert (run_dir / "final" / agent / "model.safetensors").exists()


@pytest.fixture(scope="module")
def flags(small_flags) -> list[str]:
    return [*small_flags, "--iterations", "3", "--eval_every", "2"]


@pytest.fixture(scope="module")
def short(folder, flags) -> Path:
    return run("short", *flags, *command("short:Short"))


@pytest.fixture(scope="module")
def chain(folder, flags) -> Path:
    return run("chain", *flags, *command("chain:train_chain"))


@pytest.fixture(scope="module")
def plain(folder, flags) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "draw_curves", lambda run_dir: None)
        return run("plain", "--method", "cory", *flags)


# --- the page -----------------------------------------------------------------------------------------------
def test_every_recipe_is_a_short_file_with_a_name():
    assert len(BLOCKS) >= 9
    for name, body in BLOCKS.items():
        assert re.fullmatch(r"\w+\.py", name), name
        assert 10 <= len(body.splitlines()) <= 35, name
    assert max(map(len, PAGE.splitlines())) <= 100


def test_the_pages_scripts_and_flags_are_there(folder):
    scripts = [line[1] for line in COMMANDS if line[0] == "python" and line[1].endswith(".py")]
    assert [name for name in scripts if name not in BLOCKS and not (ROOT / name).exists()] == []
    configs = {"train_imdb.py": ImdbConfig, "train_gsm8k.py": Gsm8kConfig,
               "penalty.py": importlib.import_module("penalty").PenaltyConfig}
    asked = [line for line in COMMANDS if line[0] == "python" and line[1] in configs]
    for _, script, *words in asked:
        words = [{"$lr": "1e-4", "$seed": "1"}.get(word, word) for word in words]
        Parser(configs[script], {}).parse(words)
    assert len(asked) >= len(BLOCKS) + 1                    # one for each file, and the sweep's


# --- a reward -----------------------------------------------------------------------------------------------
def test_a_reward_of_ones_own_trains_evaluates_and_draws(short):
    require_everywhere(short, ["llm1", "llm2"], ["pioneer", "observer"])
    last = rows(short)[-1]
    assert last["pioneer/characters"] > 0 and "eval/llm1/characters" in last and last["llm1/task_reward"] < 0
    assert (short / "curves.png").stat().st_size > 10_000
    for row in rows(short, "samples.jsonl"):                # the role's reward falls with its letters
        assert row["pioneer_reward"] < 20 - 0.1 * len(row["pioneer"])


def test_evaluation_scores_with_the_runs_own_reward(short, capsys):
    evaluate.main([str(short), "--samples", "2", "--k", "1", "2", "--queries", "6", "--device", "cpu"])
    assert "greedy characters" in capsys.readouterr().out
    cfg = replace(load_config(short), eval_queries=6)
    task_class = importlib.import_module("short").Short
    task = task_class(cfg, task_class.load_data(cfg), load_language_model(cfg.model))
    for name in ("base", "llm1", "llm2"):
        answers = rows(short / "evaluation", f"{name}.jsonl")[0]["responses"]
        praise = task.reward_model([q + a for q, a in zip(task.held_out_queries, answers, strict=True)])
        by_hand = [p - 0.1 * len(a) for p, a in zip(praise, answers, strict=True)]
        metrics = read(short / "evaluation" / "results.json")[name]
        assert metrics["greedy_task_reward"] == pytest.approx(sum(by_hand) / 6, abs=1e-3) and sum(by_hand) < 0
        assert metrics["greedy_characters"] == pytest.approx(sum(map(len, answers)) / 6)


def test_a_setting_of_ones_own_is_a_flag_on_record(folder, flags, quick, plain, capsys):
    penalty = importlib.import_module("penalty")
    whole = run("penalty", *flags, *command("--per_character"), main=penalty.main)
    config = read(whole / "config.json")
    assert config["config"] == "penalty:PenaltyConfig" and config["per_character"] == 0.2
    require_everywhere(whole, ["llm1", "llm2"], ["pioneer", "observer"])
    for row, without in zip(rows(whole, "samples.jsonl")[:4], rows(plain, "samples.jsonl"), strict=False):
        assert row["pioneer"] == without["pioneer"]             # nothing is learned yet
        expected = without["pioneer_reward"] - 0.2 * len(row["pioneer"])
        assert row["pioneer_reward"] == pytest.approx(expected, abs=1e-4)
    run("penalty_2", *flags, *command("--per_character"), "--iterations", "2", main=penalty.main)
    require_same_runs(whole, run("penalty_2", "--resume", "--iterations", "3", main=penalty.main))

    continued = ["--run_dir", "penalty", "--resume"]
    for main, words, says in (
            (penalty.main, ["--per_character", "-1"], "per_character is -1.0: must be 0 or more"),
            (penalty.main, [*continued, "--per_character", "0.3"], "per_character was 0.2, now 0.3"),
            (train_imdb.main, continued, "continue it with the script that started it")):
        assert says in error_line(main, words, capsys)


# --- what an agent is trained on ----------------------------------------------------------------------------
def test_a_reward_in_processes_has_its_time_limit(folder, flags, quick):
    graded = importlib.import_module("timed")
    start = time.monotonic()
    assert graded.Timed.reward_of(None, ["", ""], ["four", "five!"]) == [4.0, -1.0]
    assert 1 < time.monotonic() - start < 20
    done = run("timed", *flags, *command("timed:Timed"), "--iterations", "1", "--eval_queries", "2")
    assert rows(done)[-1]["llm1/task_reward"] > -1


def test_a_length_penalty_moves_the_agents_and_not_the_logged_reward(folder, flags, quick, plain, capsys):
    penalised = run("penalised", *flags, *command("penalised:train_cory"), "--iterations", "2")
    first, plain_first = rows(penalised)[1], rows(plain)[1]
    for name in ("task_reward", "kl", "length"):            # the same answers, scored alike
        assert first[f"pioneer/{name}"] == plain_first[f"pioneer/{name}"]
    assert first["pioneer/value_loss"] != plain_first["pioneer/value_loss"]     # and learned from otherwise

    module = importlib.import_module("penalised")
    rollout = type("Rollout", (), {"length_B": torch.tensor([4.0, 10.0])})
    score = module.score(rollout, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]), ImdbConfig())
    assert score.tolist() == pytest.approx([1 + 3 - 0.05 * 4, 2 + 3 - 0.05 * 10])

    assert read(penalised / "config.json")["method"] == "penalised:train_cory"
    capsys.readouterr()
    report.main([str(plain), str(penalised), "--by", "iterations", "--out", "penalised.png"])
    shown = capsys.readouterr().out
    assert "PENALISED-CORY LLM1" in shown and " CORY LLM1" in shown       # two groups, not two seeds


# --- a task -------------------------------------------------------------------------------------------------
def test_a_task_on_data_of_ones_own(folder, flags, quick):
    runpy.run_path("mention.py", run_name="__main__")
    run_dir = run("mention", *flags, *command("mention:Mention"), "--iterations", "2")
    require_everywhere(run_dir, ["llm1", "llm2"], ["pioneer", "observer"])
    assert rows(run_dir)[-1]["observer/words"] > 0 and "words" in read(run_dir / "eval.json")["base"]
    for row in rows(run_dir, "samples.jsonl"):
        word, _, opening = row["query"].partition(": ")
        assert word in ("good", "story", "actors", "time") and opening
        assert row["pioneer_reward"] == float(word in row["pioneer"].lower())
    task = importlib.import_module("mention").Mention
    assert task.reward_of(task, ["time: We", "good: We"], [" Had a TIME", " had a time"]) == [1.0, 0.0]


# --- loops --------------------------------------------------------------------------------------------------
def test_a_metric_of_both_answers_stands_in_the_log(folder, flags, quick, plain, monkeypatch):
    module = importlib.import_module("copied")
    answers, collect = [], module.collect_rollout
    monkeypatch.setattr(module, "collect_rollout", lambda *a: answers.append(collect(*a)) or answers[-1])
    run_dir = run("copied", *flags, *command("copied:train_copied"))
    require_everywhere(run_dir, ["llm1", "llm2"], ["pioneer", "observer"], ["copied"])
    found, expected = rows(run_dir), rows(plain)
    for i in (1, 2, 3):
        a1, a2 = answers[2 * i - 2].text, answers[2 * i - 1].text
        assert found[i].pop("copied") == sum(x.strip() == y.strip() for x, y in zip(a1, a2, strict=True)) / 8
    assert found == expected                                # all else is train_cory's, bit for bit


def test_the_observer_sees_the_answer_now_and_then(folder, flags, quick, plain, monkeypatch, capsys):
    whole = run("glimpse", *flags, *command("glimpse:train_glimpse"))
    assert 0 < sum(row["seen"] for row in rows(whole)[1:]) < 3
    run("glimpse_2", *flags, *command("glimpse:train_glimpse"), "--iterations", "2")
    assert "other code" not in capsys.readouterr().out
    with open("glimpse.py", "a") as file:
        file.write("# edited since\n")
    require_same_runs(whole, run("glimpse_2", "--resume", "--iterations", "3"))
    assert "other code than at the checkpoint, by which the run goes on: glimpse" in capsys.readouterr().out

    monkeypatch.setattr(importlib.import_module("glimpse"), "P", 1.0)
    always = rows(run("always", *flags, *command("glimpse:train_glimpse"), "--iterations", "2"))
    assert [row.pop("seen") for row in always[1:]] == [1, 1] and always == rows(plain)[:3]


LOOPS = [                                                   # file, roles, metrics of its own
    ("weakest", ["pioneer", "observer"], ["eval/team/observer_copies"]),
    ("frozen", ["partner", "learner"], []),
    ("debate", ["opening", "reply", "closing"], []),
    ("memory", ["pioneer", "observer"], ["best_so_far"])]


@pytest.mark.parametrize("name, roles, metrics", LOOPS, ids=[name for name, *_ in LOOPS])
def test_a_loop_of_the_page_is_shown_and_resumes(name, roles, metrics, folder, flags, quick):
    whole = run(name, *flags, *command(f"{name}:train_{name}"))
    last = rows(whole)[-1]
    assert list(last["roles"]) == roles and {*last["roles"].values()} == {"llm1", "llm2"}
    assert all(f'"{metric}": ' in (whole / "metrics.jsonl").read_text() for metric in metrics)
    run(f"{name}_2", *flags, *command(f"{name}:train_{name}"), "--iterations", "2")
    require_same_runs(whole, run(f"{name}_2", "--resume", "--iterations", "3"))


def test_what_the_loops_of_the_page_train_on(folder, flags, quick, monkeypatch):
    weakest = importlib.import_module("weakest").weakest
    assert weakest(None, torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0]), None).tolist() == [1, -1]

    moved = {}
    for name in ("frozen", "plain"):
        final = Path(name) / "final"
        a, b = (load_file(final / agent / "model.safetensors") for agent in ("llm1", "llm2"))
        base = load_language_model(load_config(Path(name)).model).lm.state_dict()
        moved[name] = [not all(torch.equal(x[key], base[key]) for key in x) for x in (a, b)]
    assert moved == {"frozen": [False, True], "plain": [True, True]}

    module, prompts = importlib.import_module("memory"), []
    collect = module.collect_rollout
    monkeypatch.setattr(module, "collect_rollout", lambda *a: prompts.append(a[1]) or collect(*a))
    run("memory_3", *flags, *command("memory:train_memory"))
    best = [row["best_so_far"] for row in rows(Path("memory_3"))[1:]]
    assert best == sorted(best)
    for observers, i in ((1, 0), (3, 1), (5, 2)):                 # the same answer behind every query
        quoted = {re.search(r'"(.*)" more', p, re.DOTALL)[1].removeprefix(q)
                  for p, q in zip(prompts[observers], prompts[observers - 1], strict=True)}
        assert len(quoted) == 1, i


def test_two_different_models_train_together(folder, flags, quick):
    words = [word.replace("cory/assets", str(ROOT / "cory/assets")) for word in command("--llm2")]
    whole = run("two", *flags, *words)
    held_out, last = read(whole / "eval.json"), rows(whole)[-1]
    assert {"base", "base_llm2", "llm1", "llm2"} <= held_out.keys()
    assert last["llm2/learning_rate"] == 5e-4 and last["llm1/learning_rate"] == 1e-3
    shapes = [read(whole / "final" / agent / "config.json")["model_type"] for agent in ("llm1", "llm2")]
    assert shapes == ["gpt2", "llama"]
    run("two_2", *flags, *words, "--iterations", "2")
    require_same_runs(whole, run("two_2", "--resume", "--iterations", "3"))


def test_a_chain_of_three_is_shown_everywhere_and_resumes(chain, flags, quick, capsys, monkeypatch):
    agents, roles = ["llm1", "llm2", "llm3"], ["first", "second", "third"]
    require_everywhere(chain, agents, roles)
    played = [row["roles"]["first"] for row in rows(chain)[1:]]
    assert played == ["llm1", "llm1", "llm2"]               # exchanged after iteration 2
    assert (chain / "curves.png").stat().st_size > 10_000
    first = rows(chain)[1]                                  # each has a random stream of its own
    assert len({first[f"{agent}/task_reward"] for agent in agents}) == 3

    module, prompts, scores = importlib.import_module("chain"), [], []
    collect, update = module.collect_rollout, module.ppo_update
    monkeypatch.setattr(module, "collect_rollout", lambda *a: prompts.append(a[1]) or collect(*a))
    monkeypatch.setattr(module, "ppo_update", lambda *a: scores.append(a[2].tolist()) or update(*a))
    run("chain_2", *flags, *command("chain:train_chain"), "--iterations", "2")
    sample = rows(chain, "samples.jsonl")[0]                # each sees the answer before its own
    assert prompts[0][0] == sample["query"] and sample["first"][:2] != sample["second"][:2]
    for prompt, role in zip((prompts[1][0], prompts[2][0]), roles, strict=False):
        assert f'"{sample["query"]}{sample[role][:2]}' in prompt    # an observer's prompt cuts broken bytes
    total = sum(sample[f"{role}_reward"] for role in roles)
    assert [score[0] for score in scores[:3]] == pytest.approx([total] * 3)
    require_same_runs(chain, run("chain_2", "--resume", "--iterations", "3"))

    evaluate.main([str(chain), "--samples", "2", "--k", "1", "2", "--queries", "6", "--device", "cpu"])
    assert set(agents) <= read(chain / "evaluation" / "results.json").keys()
    assert "CHAIN LLM3" in capsys.readouterr().out
    report.main([str(chain), "--out", "chain.png"])
    assert "CHAIN LLM3" in capsys.readouterr().out


# --- advantage, schedule, checker ---------------------------------------------------------------------------
def test_an_advantage_of_ones_own_against_arithmetic_and_without_a_critic(folder, problem_flags, quick):
    median = importlib.import_module("median").median
    reward = torch.tensor([[1.0, 2], [0, 7], [4, 9], [5, 5]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 0], [1, 1]])
    # returns 3, 7, 4, 10: their median is (4 + 7) / 2
    assert median(reward, mask, 4).tolist() == [[-2.5, -2.5], [1.5, 1.5], [-1.5, 0], [4.5, 4.5]]

    flags = [*problem_flags, *command("median:median"), "--iterations", "2", "--eval_every", "0"]
    run_dir = run("median", *flags, main=train_gsm8k.main)
    require_everywhere(run_dir, ["llm1", "llm2"], ["pioneer", "observer"])
    assert not any("value" in key for row in rows(run_dir) for key in row)


def test_a_schedule_of_ones_own_sets_the_rate(folder, flags, quick):
    words = [*flags, *command("stairs:stairs"), "--iterations", "6", "--eval_every", "0", "--method", "ppo",
             "--role_exchange_every", "5"]
    rates = [row["llm1/learning_rate"] for row in rows(run("stairs", *words))[1:]]
    # two iterations of warm-up, then progress 0, 1/4, 2/4, 3/4: stairs 0, 0, 1, 2
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 5e-4, 2.5e-4])


def test_a_checker_of_ones_own_makes_the_reward(folder, problem_flags, quick):
    stated = importlib.import_module("stated").stated
    for text, answer in (("the answer is 1,234 eggs of 50", "1,234"), ("The answer is: $7.5.", "7.5"),
                         ("the answer is 3 Question: the answer is 4", "3"), ("5 and 6", 6), ("none", None)):
        assert stated(text) == answer, text
    flags = [*problem_flags, *command("stated:stated"), "--iterations", "1", "--eval_every", "0"]
    run_dir = run("stated", *flags, main=train_gsm8k.main)
    assert read(run_dir / "config.json")["checker"] == "stated:stated"
    assert "unparsed" in read(run_dir / "eval.json")["llm1"]


# --- a sweep ------------------------------------------------------------------------------------------------
def test_the_sweeps_commands_compare_rates(folder, flags, quick, capsys, monkeypatch):
    (compare,) = [line for line in COMMANDS if line[:4] == ["python", "-m", "cory", "report"]]
    train = command("$lr")
    for lr in ("7e-4", "2e-3"):
        words = [word.replace("$lr", lr).replace("$seed", "0") for word in train]
        train_imdb.main([*flags, "--iterations", "1", *words])
    capsys.readouterr()
    monkeypatch.undo()                                      # this report draws
    run_dirs = sorted(map(str, Path().glob(compare[4])))
    report.main([*run_dirs, *compare[5:]])
    shown = capsys.readouterr().out
    assert "learning_rate 0.0007" in shown and "learning_rate 0.002" in shown and Path("rates.png").exists()
    assert "--by learning_rate" in error_line(report.main, run_dirs, capsys)
