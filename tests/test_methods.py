"""The methods: PPO, CORY, and those of one's own."""
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import save_llama
from safetensors.torch import load_file
from toys import (
    bigram,
    error_line,
    read,
    require_same_runs,
    rows,
    same_tensors,
    saved_tensors,
    settings,
    stopped,
)

import train_imdb
from cory import train
from cory.ppo import agent as agents
from cory.ppo.agent import Agent
from cory.ppo.rollout import collect_rollout
from cory.run.checkpoint import checkpoints_of
from cory.run.run import Turn, seed_generators
from cory.train import Cory, Ppo

QUICK = ("--batch_size 4 --mini_batch_size 2 --num_ppo_epochs 1 --max_response_length 6 --eval_queries 4 "
         "--kl_target 0.001 --kl_horizon 1").split()


@pytest.fixture(scope="module")
def flags(small_flags) -> list[str]:
    return [*small_flags, *QUICK]


def run(flags, folder: Path, *more) -> Path:
    train_imdb.main([*flags, "--run_dir", str(folder), *map(str, more)])
    return folder


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    """A finished CORY run, for several tests."""
    return run(flags, tmp_path_factory.mktemp("whole") / "cory")


# --- CORY ---
def test_roles_follow_the_exchange_and_metrics_stand_under_role_and_agent(whole):
    found = rows(whole)
    for row in found[1:]:                                   # exchanged after iterations 2 and 4
        exchanged = (row["iteration"] - 1) // 2 % 2
        played = {"pioneer": "llm2" if exchanged else "llm1", "observer": "llm1" if exchanged else "llm2"}
        assert row["roles"] == played
        for role, agent in played.items():
            for key in ("task_reward", "kl", "combined_reward", "entropy", "kl_coef"):
                assert row[f"{role}/{key}"] == row[f"{agent}/{key}"]
        # charged by the first coefficient: the controller moves it, and the metric stays comparable
        charged = row["pioneer/task_reward"] - 0.15 * row["pioneer/kl"]
        assert row["pioneer/combined_reward"] == pytest.approx(charged, rel=1e-5)
        assert row["iteration"] == 1 or row["llm1/kl"] != row["llm2/kl"] and row["llm1/kl_coef"] != 0.15
    for name, evaluated in (("base", [0]), ("llm1", [3, 5]), ("llm2", [3, 5]), ("team", [0, 3, 5])):
        assert evaluated == [row["iteration"] for row in found if any(f"eval/{name}/" in key for key in row)]
    samples = rows(whole, "samples.jsonl")
    assert len(samples) == 5 * 4 and samples[-5]["pioneer_agent"] == "llm2"
    for row in samples:                                     # what each has read
        assert row["pioneer_prompt"] == row["query"]
        assert row["query"] in row["observer_prompt"] and row["pioneer"] in row["observer_prompt"]


def test_an_iteration_tells_its_times(whole):
    for line in (whole / "metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        phases = [row[f"{phase}_seconds"] for phase in ("sampling", "logprob", "update")]
        assert min(phases) > 0 and sum(phases) < row["seconds"]
        tokens = 4 * (row["pioneer/length"] + row["observer/length"])
        assert row["tokens_per_second"] * row["sampling_seconds"] == pytest.approx(tokens)


def test_two_exchanges_are_the_identity_bit_for_bit(monkeypatch):
    """The loop with exchanges, its rollouts and updates taken out: all state stays with its agent."""
    pair = [Agent(name, bigram(seed=i), settings(), i) for i, name in enumerate(["llm1", "llm2"])]
    for agent, kl_coef in zip(pair, (0.11, 0.22)):
        sum(p.sum() for p in agent.policy.parameters()).backward()      # gives Adam moments to lose
        agent.optimizer.step()
        agent.kl_coef, agent.draws = kl_coef, int(100 * kl_coef)

    def state():
        return [(a.numbers(), a.policy.state_dict(), a.optimizer.state_dict()["state"]) for a in pair]

    before, queued = copy.deepcopy(state()), []
    task = SimpleNamespace(batch=lambda _: (["q"], 4), reward=lambda *_: torch.zeros(1), cut=str,
                           pioneer_prompts=lambda queries: queries, observer_prompts=lambda *_: ["p"])
    the_run = SimpleNamespace(
        cfg=settings(role_exchange_every=1), task=task, roles=pair, iterations=lambda: [1, 2],
        finish_iteration=lambda *_, roles: queued.append([agent.name for agent in roles]))
    monkeypatch.setattr(train, "collect_rollout", lambda *_, **__: SimpleNamespace(
        text=["x"], kl_B=torch.ones(1)))
    monkeypatch.setattr(train, "ppo_update", lambda *_: {})
    Cory().train(the_run)
    assert queued == [["llm2", "llm1"], ["llm1", "llm2"]]
    torch.testing.assert_close(state(), before, rtol=0, atol=0)


def weights(run_dir: Path, agent: str = "llm1") -> dict:
    return {name: x for path in (run_dir / "final" / agent).glob("*.safetensors")
            for name, x in load_file(path).items()}


def test_cory_without_its_three_ideas_is_ppo(whole, flags, tmp_path):
    """No knowledge transfer, no shared reward, no exchange: LLM1 is then trained exactly as by PPO."""
    without = "--knowledge_transfer false --partner_reward 0 --role_exchange_every 0".split()
    bare = run(flags, tmp_path / "bare", *without, "--iterations", 3)
    ppo = run(flags, tmp_path / "ppo", "--method", "ppo", "--role_exchange_every", 5, "--iterations", 3)
    assert same_tensors(weights(bare), weights(ppo))
    for a, b in zip(rows(bare), rows(ppo)):
        assert all(a[key] == value for key, value in b.items() if key != "roles")
    assert not same_tensors(weights(bare), weights(bare, "llm2"))       # each draws random numbers of its own
    first, seeing = rows(bare)[1], rows(whole)[1]           # by untouched models, from other prompts
    assert first["observer/task_reward"] != seeing["observer/task_reward"]


def test_one_model_can_play_both_roles(flags, tmp_path):
    """Its second update is on responses from before the first, so that its first ratio is not 1."""
    folder = run(flags, tmp_path / "r", "--share_weights", "--role_exchange_every", 5, "--iterations", 2,
                 "--kl_horizon", 4)
    row = rows(folder)[1]
    assert row["roles"] == {"pioneer": "llm1", "observer": "llm1"}
    assert row["pioneer/approx_kl"] < 1e-9 < 1e-6 < row["observer/approx_kl"]
    assert row["llm1/task_reward"] == (row["pioneer/task_reward"] + row["observer/task_reward"]) / 2
    # eta takes one step an iteration, of 8 responses: a KL of 0 is below its target
    expected = [0.15, 0.15 * (1 - 0.2 * 8 / 4)]
    assert [row["llm1/kl_coef"] for row in rows(folder)[1:]] == pytest.approx(expected)


def test_reset_at_an_exchange_forgets_moments_and_the_kl_coefficients(flags, tmp_path):
    folder = run(flags, tmp_path / "r", "--reset_on_exchange", "--iterations", 3)
    for agent in ("llm1", "llm2"):
        kl_coefs = [row[f"{agent}/kl_coef"] for row in rows(folder)[1:]]
        assert kl_coefs[0] == kl_coefs[2] == 0.15 != kl_coefs[1]
    later, exchanged = map(saved_tensors, checkpoints_of(folder))
    assert any("/adam/" in key for key in later) and not any("/adam/" in key for key in exchanged)


def test_no_two_streams_of_random_numbers_start_from_one_seed(monkeypatch):
    """Adapters of two agents and PyTorch's generator in each iteration; then the agents' own generators."""
    seeds = []
    monkeypatch.setattr(agents, "add_adapter", lambda lm, name, cfg, seed: seeds.append(seed))
    pair = [Agent(name, bigram(), settings(lora_rank=2), i) for i, name in enumerate(["llm1", "llm2"])]
    for iteration in range(6):
        seed_generators(0, iteration)
        seeds.append(torch.initial_seed())
    assert len({0, *seeds}) == 9
    drawn = [agent.generator().random() for agent in pair for _ in range(3)]
    drawn += [np.random.default_rng(seed).random() for seed in seeds]
    assert len(set(drawn)) == len(drawn)


# --- agents that differ ---
def test_two_families_train_together_and_resume_bit_for_bit(flags, tmp_path):
    """llm1 is a GPT-2, llm2 a Llama with a learning rate and an eta of its own."""
    own = ["--llm2", f"model={save_llama(tmp_path / 'llama')}", "learning_rate=0.02", "init_kl_coef=0.7"]
    whole = run(flags, tmp_path / "whole", "--iterations", 2, *own, "--eval_every", 1)
    part = stopped(whole, tmp_path / "part")
    train_imdb.main(["--resume", "--run_dir", str(part)])
    require_same_runs(whole, part)
    first, *_, last = rows(whole)
    assert first["eval/base/base_perplexity"] != first["eval/base_llm2/base_perplexity"]
    for agent, eta in (("llm1", 0.15), ("llm2", 0.7)):
        reward, kl = last[f"eval/{agent}/task_reward"], last[f"eval/{agent}/kl"]
        assert last[f"eval/{agent}/combined_reward"] == pytest.approx(reward - eta * kl)
    assert last["llm2/learning_rate"] == 0.02 != last["llm1/learning_rate"]
    assert {"base", "base_llm2", "llm1", "llm2"} <= read(whole / "eval.json").keys()


# --- methods of one's own ---
class TwoDrafts(Cory):
    """The observer reads two responses of the pioneer, and each agent has a score of its own."""
    asked = []

    def respond(self, run, queries, pioneer, observer, sample):
        a1, second = (sample(pioneer, run.task.pioneer_prompts(queries)) for _ in range(2))
        shown = [f"{first}|{other}" for first, other in zip(a1.text, second.text)]
        self.asked.append(queries)
        return a1, sample(observer, run.task.observer_prompts(queries, shown))

    def score(self, agent, rollout, reward_B, partner_B):
        return reward_B + agent.index

    def team_metrics(self, run):
        return super().team_metrics(run) | {"pioneer": torch.tensor(run.roles[0].index)}


def test_a_method_of_ones_own_is_what_is_trained_and_evaluated(flags, tmp_path):
    """Iteration 0 and the two others are evaluated; roles are exchanged after both."""
    folder = run(flags, tmp_path / "r", "--method", "test_methods:TwoDrafts", "--iterations", 2,
                 "--eval_every", 1, "--role_exchange_every", 1)
    held_out, first, again, second, end = TwoDrafts.asked
    assert held_out == again == end and held_out not in (first, second)
    for row in rows(folder, "samples.jsonl"):
        assert f"{row['pioneer']}|" in row["observer_prompt"]
    for row in rows(folder)[1:]:
        assert row["llm1/score"] == pytest.approx(row["llm1/task_reward"])
        assert row["llm2/score"] == pytest.approx(row["llm2/task_reward"] + 1)
    assert [row["eval/team/pioneer"] for row in rows(folder)] == [0, 0, 1]      # in the roles played
    assert read(folder / "eval.json")["team"]["pioneer"] == 1


class Silent(Ppo):
    def train(self, run):
        next(run.iterations())


class Stranger(Ppo):
    def train(self, run):
        own = Agent("llm2", run.bases["base"], run.cfg, 1)
        iteration, a = next(run.iterations()), collect_rollout(own, ["a film"], 4)
        run.finish_iteration(iteration, ["a film"], [Turn("pioneer", own, a, a.kl_B, {})], [own])


class Four(Cory):
    agents = ("llm1", "llm2", "llm3", "llm4")


class Texts(Ppo):
    def team_metrics(self, run):
        return {"pioneer": run.roles[0].name}


@pytest.mark.parametrize("name, says", [
    ("Silent", "stopped after iteration 0; call run.finish_iteration"),
    ("Stranger", "must be all agents of the run"), ("Texts", "is not one number"),
    ("Four", "must be two, or `train` must be overridden")])
def test_a_method_whose_results_would_be_wrong_is_refused(name, says, flags, tmp_path, capsys):
    words = [*flags, "--method", f"test_methods:{name}", "--iterations", "1", "--run_dir", tmp_path / "r"]
    assert says in error_line(train_imdb.main, words, capsys)


# --- the team ---
REWARD = {"bad": 0.0, "good": 1.0, " good": 1.0, "best": 3.0}
TASK = SimpleNamespace(
    held_out_queries=["q1", "q2", "q3", "q4"], cut=str,
    pioneer_prompts=lambda queries: [f"{query}:" for query in queries],
    observer_prompts=lambda queries, texts: [f"{query} {text}:" for query, text in zip(queries, texts)],
    reward=lambda queries, texts: torch.tensor([REWARD[text] for text in texts]))


@pytest.mark.parametrize("knowledge_transfer, said, expected", [
    # copies: q2 alone. The pioneer's mean is 0.5. Better at q2, q3: (1 + 0) / 2; worse at q1, q4: (3 + 1) / 2
    (True, {"q1:": "bad", "q2:": "good", "q3:": "good", "q4:": "bad",
            "q1 bad:": "best", "q2 good:": " good", "q3 good:": "bad", "q4 bad:": "good"},
     {"observer_copies": 0.25, "observer_after_better": 0.5, "observer_after_worse": 2.0}),
    # it reads the query alone, and equal rewards have no sides
    (False, {f"q{i}:": "good" for i in range(1, 5)}, {"observer_copies": 1.0})])
def test_transfer_is_measured_by_hand(knowledge_transfer, said, expected, monkeypatch):
    asked = []

    def responses(model, prompts, length, seed):
        asked.append((model, seed))
        return SimpleNamespace(text=[said[prompt] for prompt in prompts])

    monkeypatch.setattr(train, "sample_responses", responses)
    cfg = SimpleNamespace(knowledge_transfer=knowledge_transfer, max_response_length=4)
    roles = [SimpleNamespace(policy=role) for role in ("pioneer", "observer")]
    assert Cory().team_metrics(SimpleNamespace(task=TASK, cfg=cfg, roles=roles)) == expected
    assert asked == [("pioneer", 1), ("observer", 2)]       # with one seed, like agents would agree by chance
