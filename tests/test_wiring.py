"""Settings and custom code reach the places where they are used, as seen in the files of finished runs. The
toy task of these runs gives each response another reward.
"""
import json
import random
import shutil
from dataclasses import fields
from statistics import fmean
from zlib import crc32

import numpy as np
import pytest
import torch
from conftest import END, SIZES, byte_tokenizer, save_model
from toys import evaluations, read, rows, samples_of, training

import train_gsm8k
import train_imdb
from cory.__main__ import main
from cory.config import ASSETS, FREE_ON_RESUME, Gsm8kConfig, ImdbConfig
from cory.ppo.model import Critic, LanguageModel
from cory.ppo.update import losses
from cory.run import evaluate
from cory.run.log import read_jsonl, write_jsonl
from cory.tasks.task import Task
from cory.train import Cory


def reward(query, text):
    """From -1 to 1, by a hash of both."""
    return crc32(f"{query}|{text}".encode()) % 2001 / 1000 - 1


class Toy(Task):
    """Its metrics are the mean reward, a drawn number, and how many responses it has learned from."""

    def pioneer_prompts(self, queries):
        self.drawn = random.random() + np.random.rand()
        self.drawn += torch.rand(1).item()
        return queries

    def observer_prompts(self, queries, responses):
        return [f"{query} <{text}>" for query, text in zip(queries, responses, strict=True)]

    def compute_rewards(self, queries, responses):
        rewards = list(map(reward, queries, responses))
        return rewards, {"twice": [2 * x for x in rewards]}

    def on_iteration_end(self, rollouts, rewards):
        self.memory.setdefault("learned", 0)
        self.memory["learned"] += sum(map(len, rewards))

    def metrics(self, queries, responses):
        return {
            "drawn": self.drawn,
            "mean": fmean(map(reward, queries, responses)),
            "learned": self.memory.get("learned", 0),
            "task_knows": self.iteration + 0.5 * self.training}


class Changing(Toy):
    """Its prompts depend on the iteration."""

    def pioneer_prompts(self, queries):
        return [f"{self.iteration} {query}" for query in super().pioneer_prompts(queries)]


class Harder(Toy):
    def compute_rewards(self, queries, responses):
        rewards, _ = super().compute_rewards(queries, responses)
        return [x - 0.5 for x in rewards]


class Chain(Cory):
    """Three agents. Scores rise by 1 with each call, in place. One metric is a random number."""
    agent_names = ("llm1", "llm2", "llm3")
    roles = ("first", "second", "third")

    def respond(self, players, queries, sample):
        """In training the queries are not those of the batch."""
        if self.training:
            queries = [f"{query}?" for query in queries]
        return super().respond(players, queries, sample)

    def scores(self, rollouts, rewards):
        self.memory.setdefault("calls", 0)
        self.memory["calls"] += 1
        rewards[2] += self.memory["calls"]
        return super().scores(rollouts, rewards)

    def team_metrics(self, rollouts, rewards):
        custom = {
            "calls": self.memory.get("calls", 0),
            "drawn": random.random(),
            "method_knows": self.iteration + 0.5 * self.training}
        return super().team_metrics(rollouts, rewards) | custom


CONTROLLER_KL = []                              # the KL of each response, at each call of `doubled`


def doubled(agent, kl_N):
    CONTROLLER_KL.append(kl_N.tolist())
    return 2 * agent.kl_coef


def zero_first(agent, kl_N):
    return 0.0 if agent.iteration == 1 else 0.3


class OneUpdate(Cory):
    """One model plays both roles, and is trained only as the observer."""

    def update(self, role, agent, rollout, score):
        if role == "pioneer":
            return {}
        return super().update(role, agent, rollout, score)


def five(response):
    return 5


class Nine(Critic):
    def __init__(self, base):
        super().__init__(base)
        torch.nn.init.constant_(self.linear.bias, 9)


def unclipped(log_ratio_BT, advantage_BT, **_):
    return -advantage_BT * log_ratio_BT, log_ratio_BT > 9


def unclipped_losses(*batch):
    return losses(*batch, policy_loss=unclipped)


TOY = ("--seed 1 --task test_wiring:Toy --dataset {at}/data.jsonl --model {at}/lm --iterations 2 "
       "--eval_every 0 --save_every 0 --max_response_length 3 --gradient_accumulation_steps 1 "
       "--num_ppo_epochs 2 --learning_rate 0.02 --lr_schedule linear --kl_penalty full "
       "--role_exchange_every 1 ")
BASES = {
    "ppo": "--method ppo", "loss": "--method ppo --kl_in loss",
    "same": "--method ppo --iterations 1 --dataset {at}/same",
    "short": "--method ppo --iterations 1 --min_response_length 1",
    "cory": "--method cory",
    "chain": "--method test_wiring:Chain --iterations 3 --kl_penalty k1 --eval_samples 4",
    "imdb": "--method ppo --iterations 1 --task imdb",
    "gsm8k": "--method ppo --iterations 1 --task gsm8k --dataset {at}/problems.jsonl"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, small, read_once):
    """`run(base, flags)` is the folder of a finished run, for several tests."""
    at = tmp_path_factory.mktemp("wiring")
    tokenizer = byte_tokenizer(eos_token=END, additional_special_tokens=["<|user|>", "<|end|>"])
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    save_model("gpt2", at / "lm", tokenizer, vocab_size=259, hidden_size=16, num_hidden_layers=1)
    swapped = shutil.copytree(ASSETS / "imdb/classifier", at / "swapped") / "config.json"
    labels = {"id2label": {0: "POSITIVE", 1: "NEGATIVE"}}
    swapped.write_text(json.dumps(read(swapped) | labels))
    (at / "same").mkdir()                                       # one text in all splits
    for split in ("train", "validation", "test"):
        write_jsonl(at / f"same/{split}.jsonl", [{"text": "always this"}] * 9)
    numbers = range(60)
    write_jsonl(at / "data.jsonl", [{"text": f"{i} films of {i * i} were good"} for i in numbers])
    write_jsonl(at / "other.jsonl", [{"text": f"{i} stories"} for i in numbers])
    problems = [{"question": f"{i}?", "answer": f"#### {i % 2 + 5}"} for i in numbers]
    write_jsonl(at / "problems.jsonl", problems)

    def finished(base, flags=""):
        name = f"{base} {flags}".replace("/", "-")
        folder = at / name[:250]
        if not folder.exists():
            words = f"{TOY} {BASES[base]} {flags}".format(at=at, small=small)
            script = train_gsm8k if base == "gsm8k" else train_imdb
            script.main([*SIZES, *words.split(), "--run_dir", str(folder)])
        return folder

    return finished


def metrics_of(row, who):
    """The metrics of an agent, a base or a team in a row of metrics.jsonl, by name."""
    metrics = {}
    for key, x in row.items():
        if key.endswith(f"/{who}"):
            metrics[key.split("/")[1]] = x
    return metrics


def test_caching_the_held_out_responses_of_bases_changes_no_metric(run, monkeypatch):
    """In the second run every model counts as a policy, so that none is cached. Prompts depend on the
    iteration, and so does what the cache must return.
    """
    flags = "--iterations 3 --eval_every 1 --task test_wiring:Changing"
    cached = run("cory", flags)
    monkeypatch.setattr(evaluate, "Policy", LanguageModel)
    assert rows(cached) == rows(run("cory", f"{flags} --wandb disabled"))
    rewards = {row["eval/task_reward/base"] for row in evaluations(cached)}
    assert len(rewards) == 4


# --- every setting changes a run where it acts, and not before ---
STAGES = {                  # of an iteration, in order, with llm1's metrics and the columns of samples
    "draws": "drawn", "queries": "query",
    "responses": "pioneer_prompt pioneer observer_prompt observer length sampling_gap",
    "rewards": "task_reward kl unparsed", "scores": "score",
    "update": "policy_loss value_loss kl_loss entropy approx_kl clip_fraction explained_variance grad_norm"}
# kl_coef, learning_rate and combined_reward are left out, since they repeat settings.

# Settings, by base run and by the stages that they change first; a final `-` says that no other one changes.
EFFECTS = {
    ("ppo", "draws 1, queries 1, responses 1"): "seed=2",
    ("same", "draws 1, responses 1"): "seed=2",
    ("ppo", "held out, queries 1"): "dataset={at}/other.jsonl",
    ("ppo", "queries 1"): "responses_per_query=2",
    ("ppo", "held out, responses 1"):
        "model={small} chat_template=true temperature=0.5 max_response_length=4",
    ("ppo", "responses 1"): "min_response_length=1 batch_size=8",
    ("ppo", "held out, rewards 1"): "task=test_wiring:Harder",
    ("ppo", "update 1"):
        "lora_rank=2 advantage=reinforce learning_rate=0.1 critic_learning_rate=0.1 mini_batch_size=1 "
        "gradient_accumulation_steps=2 num_ppo_epochs=1 kl_in=loss gamma=0.5 lam=0.1 cliprange=0.001 "
        "cliprange_value=0.001 vf_coef=1 max_grad_norm=0.01 loss=test_wiring:unclipped_losses "
        "critic=test_wiring:Nine",
    ("short", "update 1"): "loss_mean=constant",
    ("ppo", "rewards 2"): "kl_penalty=k1",
    ("ppo", "update 2"):
        "lr_schedule=constant iterations=3 init_kl_coef=3 kl_controller=test_wiring:doubled kl_target=0 "
        "kl_horizon=2",
    ("ppo", "held out"): "dtype=bfloat16",
    ("ppo", "held out, -"): "eval_split=validation eval_queries=5 eval_samples=2",
    ("loss", "update 1"): "init_kl_coef=3",
    ("loss", "update 2"): "kl_target=0",
    # without it, the observer's prompts are another draw of the toy task
    ("cory", "held out, draws 1, responses 1"): "knowledge_transfer=false",
    ("cory", "responses 1"): "share_weights=true",
    ("cory", "scores 1"): "partner_reward=0.5 method=ppo",
    ("cory", "responses 2"): "role_exchange_every=0",
    ("imdb", "held out, rewards 1"): "reward_model={at}/swapped",
    ("imdb", "held out, queries 1"): "min_query_length=7 max_query_length=3",
    ("gsm8k", "held out, rewards 1"): "checker=test_wiring:five",
    ("gsm8k", "held out, responses 1"): "one_shot=true"}
ELSEWHERE = {
    "preset": "only names the settings", "run_dir": "where files are written", "wandb": "test_log",
    "wandb_project": "test_log", "resume": "test_resume",
    "save_every": "test_resume",
    "eval_every": "test_methods", "shard": "test_distributed",
    "sampler": "test_examples", "chat_template_kwargs": "test_loading", "system_prompt": "test_loading",
    "device": "needs a GPU", "load_in_4bit": "needs bitsandbytes"}
effects = []
for (base, where), settings in EFFECTS.items():
    for setting in settings.split():
        effects.append(pytest.param(base, setting, where.split(", "), id=f"{base} {setting}"))


def test_every_setting_is_tested_here_or_elsewhere():
    tested = {effect.values[1].partition("=")[0] for effect in effects}
    settings = [*fields(ImdbConfig), *fields(Gsm8kConfig)]
    assert tested | ELSEWHERE.keys() == {setting.name for setting in settings}
    assert not tested & FREE_ON_RESUME          # what changes a run cannot be changed when it is resumed


def stages(folder):
    """{"held out": {name: value}, "draws 1": ..., "update 2": ...}, the first before training."""
    found = {"held out": rows(folder)[0]}
    for iteration in (1, 2):
        values = {}
        for row in training(folder):
            if row["iteration"] == iteration:
                values = metrics_of(row, "llm1")
        for sample in samples_of(folder, iteration):
            for column, x in sample.items():
                values.setdefault(column, []).append(x)
        for stage, names in STAGES.items():
            known = values.keys() & names.split()
            found[f"{stage} {iteration}"] = {name: values[name] for name in known}
    return found


def differ(a, b):
    """Whether a value that both have differs by more than rounding."""
    for name in a.keys() & b.keys():
        expected = b[name]
        if not isinstance(expected, list):
            expected = pytest.approx(expected, rel=1e-5, abs=1e-6)
        if a[name] != expected:
            return True
    return False


@pytest.mark.parametrize("base, setting, where", effects)
def test_a_setting_changes_a_run_where_it_acts_and_not_before(base, setting, where, run):
    needs_two_iterations = where[-1].endswith("2")
    flags = f"--{setting}" if needs_two_iterations else f"--iterations 1 --{setting}"
    folder = run(base, flags)
    cfg = read(folder / "config.json")
    held_out = read(folder / "eval.json")
    assert held_out["iteration"] == cfg["iterations"]
    for name in ("split", "queries", "samples"):
        assert held_out[name] == cfg[f"eval_{name}"]
    before = stages(run(base))
    after = stages(folder)
    for key, x in after["held out"].items():
        if key.startswith("eval/kl/"):                  # every agent is its base, before training
            assert x == pytest.approx(0, abs=1e-6)
    changed = [stage for stage in before if differ(before[stage], after[stage])]
    assert [*changed, "-"][:len(where)] == where               # the first stages that changed


# --- a run's metrics and samples, recomputed ---
@pytest.mark.parametrize("base, flags", [
    ("cory", ""), ("cory", "--iterations 1 --share_weights=true"), ("chain", ""),
    ("ppo", "--iterations 1 --eval_split=validation"),
    ("ppo", "--iterations 1 --lora_rank=2 --dtype=bfloat16")])
def test_evaluate_repeats_the_held_out_metrics_of_the_run(base, flags, run):
    """Roles are exchanged before the last iteration, and after it."""
    folder = run(base, flags)
    held_out = read(folder / "eval.json")
    assert ("team" in held_out) == (base != "ppo")          # which has one role
    samples = held_out["samples"]
    main(["evaluate", str(folder), "--samples", str(samples)])
    results = read(folder / "evaluation/results.json")
    for who in {"llm1", "llm2", "llm3", "team"} & held_out.keys():
        metrics = results[who]
        again = {name: metrics[name] for name in held_out[who]}
        assert again == pytest.approx(held_out[who], rel=1e-4, abs=1e-5), who
        expected = set()
        if who != "team":
            assert metrics["greedy_mean"] == pytest.approx(metrics["greedy_task_reward"], abs=1e-6)
            expected = {f"pass@{k}" for k in (1, 2, 4) if k <= samples}
        assert {name for name in metrics if "@" in name} == expected
    for path in folder.glob("evaluation/*.jsonl"):
        for row in read_jsonl(path):
            texts = [*row["sampled"], row["greedy"]]
            rewards = [*row["rewards"], row["greedy_reward"]]
            assert rewards == pytest.approx([reward(row["query"], text) for text in texts])
            assert max(map(len, texts)) <= 3                    # tokens are bytes, and the limit is 3


@pytest.mark.parametrize("base", ["cory", "chain"])
def test_before_training_the_team_is_the_team_of_bases(base, run):
    first = rows(run(base))[0]
    team = metrics_of(first, "team")
    assert team
    assert team == pytest.approx(metrics_of(first, "base_team"), abs=1e-5)


def responses_of_base(folder):
    """256 samples and the greedy response to one held-out query."""
    main(["evaluate", str(folder), "--samples", "256", "--queries", "1"])
    (row,) = read_jsonl(folder / "evaluation/base.jsonl")
    return row


def test_held_out_samples_have_different_random_numbers_and_greedy_responses_have_none(run):
    row = responses_of_base(run("ppo"))
    cooler = responses_of_base(run("ppo", "--iterations 1 --temperature=0.5"))
    texts = row["sampled"]
    assert not any(texts[i:] == texts[:-i] for i in range(1, 240))
    assert texts != cooler["sampled"]
    assert row["greedy"] == cooler["greedy"]


@pytest.mark.parametrize("flags", ["", "--iterations 1 --knowledge_transfer false"])
def test_each_role_of_a_chain_reads_the_role_before_it_and_is_scored_by_the_sum_of_rewards(flags, run):
    """Roles are exchanged after each iteration. samples.jsonl has all four queries of a batch."""
    folder = run("chain", flags)
    for i, row in enumerate(training(folder), start=1):
        samples = samples_of(folder, i)
        assert len({sample["query"] for sample in samples}) == 4
        total = sum(metrics_of(row, agent)["task_reward"] for agent in Chain.agent_names)
        for place, role in enumerate(Chain.roles):
            agent = f"llm{(place + i - 1) % 3 + 1}"
            for sample in samples:
                query = sample["query"]
                prompt = query
                if place > 0 and not flags:
                    previous = Chain.roles[place - 1]
                    prompt = f"{query} <{sample[previous]}>"
                assert sample[f"{role}_prompt"] == prompt
                assert sample[f"{role}_reward"] == pytest.approx(reward(query, sample[role]))
                assert sample[f"{role}_agent"] == agent
            mean = fmean(sample[f"{role}_reward"] for sample in samples)
            metrics = metrics_of(row, agent)
            assert metrics["role"] == place
            assert metrics["learned"] == 12 * (i - 1)
            assert metrics["task_reward"] == pytest.approx(mean, abs=1e-6)
            assert metrics["mean"] == pytest.approx(mean, abs=1e-6)
            assert metrics["twice"] == pytest.approx(2 * metrics["task_reward"])
            assert metrics["score"] == pytest.approx(total + i)         # `scores` is not called held out


def test_hooks_know_the_iteration_and_whether_it_is_training(run):
    """Iteration n is n + 1/2 in training, n in held-out evaluation."""
    chain = run("chain")
    for row in rows(chain):
        expected = row["iteration"]
        if "train/role/llm1" in row:
            expected += 0.5
        known = {x for key, x in row.items() if "_knows" in key}
        assert known == {expected}
    drawn = {row["train/drawn/team"] for row in training(chain)}
    assert len(drawn) == 3                                  # a new number in each iteration


# --- controllers of eta ---
def test_a_controller_gets_the_signed_kl_of_each_response_and_returns_the_next_eta(run):
    CONTROLLER_KL.clear()
    doubling = training(run("ppo", "--kl_controller test_wiring:doubled --kl_penalty k1 --iterations 3"))
    assert [row["train/kl_coef/llm1"] for row in doubling] == pytest.approx([0.15, 0.3, 0.6])
    means = [fmean(kl_N) for kl_N in CONTROLLER_KL]
    assert means == pytest.approx([row["train/kl/llm1"] for row in doubling], abs=1e-6)
    assert min(map(min, CONTROLLER_KL)) < -1e-3
    assert {len(kl_N) for kl_N in CONTROLLER_KL} == {4}
    run("cory", "--iterations 1 --share_weights --method test_wiring:OneUpdate "
        "--kl_controller test_wiring:doubled")
    assert len(CONTROLLER_KL[-1]) == 4                      # of the one role in which it was trained
    zero = training(run("ppo", "--kl_controller test_wiring:zero_first --iterations 3"))
    assert [row["train/kl_coef/llm1"] for row in zero] == pytest.approx([0.15, 0, 0.3])
