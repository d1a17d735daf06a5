"""Each file of examples/ runs for two iterations by the commands in its docstring. Some of them by hand."""
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_example_methods import Team, numbers, require
from toys import agent_of, bigram, close, finished, read, rows, settings

from cory.config import import_name
from cory.loading import load_language_model
from cory.ppo.model import LanguageModel, Policy
from cory.ppo.sampling import collect_rollout
from examples.tasks import crossplay

CPU = torch.device("cpu")
HOME = Path(__file__).parents[1]
FILES = {path: path.read_text() for path in HOME.glob("examples/*/*.py")}
COMMANDS = re.findall(r"^    python ((?:.*\\\n)*.*)", "".join(FILES.values()), re.MULTILINE)
TRAINING = [command for command in COMMANDS if "--method" in command]
README = (HOME / "README.md").read_text()
BEST, BEST_COMMAND = re.search("```python\n(.*?)```\n\n    python (.*?)\n", README, re.DOTALL).groups()
SHORT = ("--iterations 2 --batch_size 8 --mini_batch_size 4 --gradient_accumulation_steps 1 "
         "--max_response_length 3 --eval_every 0 --save_every 2").split()
pytestmark = pytest.mark.usefixtures("read_once")


@pytest.mark.parametrize("command", [*sorted(TRAINING), BEST_COMMAND])
def test_a_command_runs_to_its_end(command, tmp_path, monkeypatch, small_flags, problem_flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Policy, "logits", LanguageModel.logits)         # which an example changes
    Path("best.py").write_text(BEST)
    if "mention" in command:
        import_name("examples.tasks.mention:main")()                    # writes its data
    script, *words = shlex.split(command.replace("\\\n", "").removeprefix("-m "))
    small = problem_flags if "gsm8k" in script else small_flags
    main = import_name(script.removesuffix(".py") + ":main")
    main([*small, *words, *SHORT, "--run_dir", "run"])                  # the last value of a flag holds
    assert "base" in read(Path("run/eval.json"))


def test_files_are_short_have_a_command_and_are_linked():
    page = (HOME / "examples/README.md").read_text()
    links = re.findall(r"\]\(([^):]+)\)", page)
    linked = {(HOME / "examples" / link).resolve() for link in links}
    assert FILES.keys() <= linked and all(path.exists() for path in linked)
    for path, text in FILES.items():
        assert "\n\n    python " in text and len(re.findall(r"\S.*", text)) <= 45, path
        for docstring in re.findall('"""(.*?)"""', text, re.DOTALL):
            paragraph, *_ = docstring.strip().split("\n\n")
            assert paragraph.count("\n") < 4, path


def test_crossplay_of_a_run_with_itself_is_its_team(tmp_path, small_flags, monkeypatch, capsys):
    finished([*small_flags, *SHORT], tmp_path, "--lora_rank", 2)
    teams = []
    evaluate_team = crossplay.evaluate_team

    def record(method, players):
        teams.append([*players])
        return evaluate_team(method, players)

    monkeypatch.setattr(crossplay, "evaluate_team", record)
    crossplay.main([str(tmp_path), f"{tmp_path}/."])
    reward = read(tmp_path / "eval.json")["team"]["observer_task_reward"]
    assert capsys.readouterr().out.count(f" llm2: {reward:.3f}\n") == 4
    (pioneer, observer), (_, other_observer), (other_pioneer, _), _ = teams
    assert (pioneer.name, observer.name) == ("llm1", "llm2")
    pairs = product((pioneer, other_pioneer), (observer, other_observer))
    assert teams == [[*pair] for pair in pairs]
    assert other_pioneer != pioneer


# --- by hand ---
def test_mention(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import_name("examples.tasks.mention:main")()
    assert rows("runs", "mention.jsonl")[1] == {"opening": "The movie reactes almost", "word": "story"}
    task = import_name("examples.tasks.mention:Mention")
    assert task.compute_rewards(None, ["good: It", "bad: It"], [" Good!", " good"]) == [1, 0]


def test_scores():
    both = "1 2 3 4 5 6", "7 8 9 10 11 12"
    Team("credit:Credit", *both, partner_reward=0.5).require_scores("4.5 6 7.5 9 10.5 12", both[1])
    team = Team("together:Together", *both)
    team.require_scores(*["17 28 39 410 511 612"] * 2)                  # 1 and 7 are joined to 17
    assert team.metrics() == {"joint_reward": 269.5}                    # 1617 / 6
    team = Team("dense:Dense", *both)
    team.rollouts[0].mask_BT[1, 1] = 0
    first, _ = team.method.scores(team.rollouts, team.rewards)          # of 8, 10, 12, ...
    require(first[:3], "3.99 3.99 9.99 0 5.99 5.99")


def test_merit():
    merit = Team("merit:Merit", "1 1 1 1 1 1", "2 2 2 2 2 2").method
    assert merit.assign_roles([1, 2], 2) == [2, 1]
    merit.scores(None, [numbers("3"), numbers("2")])
    assert merit.memory == {"exchanges": 1}
    merit.scores(None, [numbers("2"), numbers("3")])
    assert merit.assign_roles([1, 2], 4) == [1, 2]


def test_two_turns(monkeypatch):
    monkeypatch.setattr("cory.train.ppo_update", lambda *given: given)
    team = Team("two_turns:TwoTurns", "1 2 3 4 5 6", "0 0 0 0 0 0", "7 8 9 10 11 12", partner_reward=0.0)
    assert team.update(0) == {}
    _, rollout, score_B = team.update(2)
    require(score_B, "1 2 3 4 5 6 7 8 9 10 11 12")
    require(numbers(" ".join(rollout.text)), "1 2 3 4 5 6 7 8 9 10 11 12")
    require(rollout.group_B, "0 0 0 1 1 1 2 2 2 3 3 3")


def test_dynamic_sampling():
    """Two responses to a query, each with its reward after a letter. A fourth batch is not asked for."""
    batches = {1: "a0 b0 c0 d0", 10: "e1 f0 g1 h1", 19: "i0 j1 k0 l0"}
    task = SimpleNamespace(iteration=1, training=True, pioneer_prompts=lambda queries: queries)
    task.batch = lambda iteration: (batches[iteration].split(), 2)
    task.reward = lambda queries, texts: numbers(" ".join(text[1] for text in texts))
    agent = agent_of(bigram())
    sample = lambda _, prompts, queries: replace(collect_rollout(agent, prompts, queries, 2), text=queries)
    cfg = settings(iterations=9, responses_per_query=2)
    method = import_name("examples.methods.dynamic:Dynamic")(cfg, task)
    (rollout,) = method.respond([agent], batches[1].split(), sample)
    assert " ".join(rollout.text) == "e1 f0 i0 j1"
    require(rollout.group_B, "0 0 1 1")


@pytest.mark.parametrize("name, loss", [
    ("gspo", "-1.1 -1.1 0.9 0"),                    # ratios exp(0.2) and exp(-0.5), both clipped
    ("clip_higher", "-1.28 -1.1051709 0.9 0"),      # exp(0.3) is above 1.28, exp(0.1) below
    ("entropy_bonus", "-1.115 -1.1225 0.87 0")])    # 1.1, 1.1 and 0.9, and 0.01 * 3 / 4 of 2, 3 and 4 nats
def test_losses(name, loss):
    """Two responses, of two tokens and of one, with the advantages 1 and -1."""
    mask_BT = numbers("1 1 1 0").view(2, 2)
    logp_BT = numbers("-1 -2 -3 0").view(2, 2)
    advantage_BT = numbers("1 1 -1 0").view(2, 2)
    rollout = SimpleNamespace(mask_BT=mask_BT, logp_BT=logp_BT, advantage_BT=advantage_BT)
    agent = SimpleNamespace(cfg=settings(iterations=4, cliprange=0.1), iteration=2)
    new_logp_BT = logp_BT + numbers("0.3 0.1 -0.5 0").view(2, 2)
    entropy_BT = numbers("2 3 4 0").view(2, 2)
    loss_BT, _ = import_name(f"examples.parts.losses:{name}")(agent, rollout, new_logp_BT, entropy_BT, None)
    require(loss_BT * mask_BT, loss)


def test_another_engine_samples_from_the_policy(small):
    """A response has the log-probability that the policy gives it."""
    base = load_language_model(str(small), settings(), CPU)
    base.lm.generation_config.eos_token_id = [*range(0, 257, 9)]                # so that rows end
    agent = agent_of(base, sampler="examples.parts.engine:by_generate")
    rollout = collect_rollout(agent, ["a", "a longer prompt"] * 4, [*"abcdefgh"], 6)
    assert 0 < rollout.truncated_B.sum() < 8
    assert rollout.sampling_gap < 1e-5


def test_truncated_importance_sampling():
    """Ratios of policy and engine of 1/2 and of 5, which counts as 2."""
    mask_BT = numbers("1 1").view(1, 2)
    batch = SimpleNamespace(mask_BT=mask_BT, logp_BT=numbers("0.5 5").log().view(1, 2),
                            sampling_logp_BT=0 * mask_BT, advantage_BT=numbers("3 -7").view(1, 2))
    agent = SimpleNamespace(cfg=settings())
    loss = import_name("examples.parts.engine:truncated_importance")
    loss_BT, _ = loss(agent, batch, batch.logp_BT, mask_BT, None)
    require(loss_BT, "-1.5 14")


def test_whitening_by_group():
    estimate = import_name("examples.parts.advantages:whitened_by_group")
    reward_BT = numbers("0 1 4 0 0 10 0 30").view(4, 2)
    mask_BT = numbers("1 1 1 0 1 1 1 1").view(4, 2)
    given = dict(reward_BT=reward_BT, value_BT=0 * mask_BT, gamma=1.0, lam=1.0)
    advantage_BT, return_BT = estimate(mask_BT, numbers("0 0 1 1"), **given)
    require(advantage_BT[:2] * 2**0.5, "-1 -1 2 0")         # 1, 1 and 4 have the mean and the variance 2
    require(advantage_BT[2:], "-1 -1 1 1")
    require(return_BT, "1 1 4 0 10 10 30 30")


def test_controllers():
    cfg = settings(iterations=4, init_kl_coef=0.2, kl_target=3.0)
    agent = SimpleNamespace(cfg=cfg, iteration=3, kl_coef=0.02)
    close(import_name("examples.parts.controllers:linear")(agent, None), 0.05)
    dual = import_name("examples.parts.controllers:dual")
    close(dual(agent, numbers("5 7")), 0.05)                # 0.02 + 0.01 * (6 - 3)
    assert dual(agent, numbers("0 0")) == 0
