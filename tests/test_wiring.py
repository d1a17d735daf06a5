"""Settings, and code of a user's own, reach the places where they are used, as seen in the files of finished
runs. In their toy task no two responses have the same reward.
"""
import json
import random
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path
from statistics import fmean
from zlib import crc32

import numpy as np
import pytest
import torch
from conftest import SIZES, byte_tokenizer, save_model
from toys import evaluations, read, rows, training

import train_gsm8k
import train_imdb
from cory.__main__ import main
from cory.config import ASSETS, FREE_ON_RESUME, Gsm8kConfig, ImdbConfig
from cory.ppo.model import Critic, LanguageModel
from cory.ppo.update import losses
from cory.run import evaluate
from cory.run.log import read_jsonl
from cory.tasks.task import Task
from cory.train import Cory


def reward(query: str, text: str) -> float:
    """From -1 to 1, by a hash of both."""
    return crc32(f"{query}|{text}".encode()) % 2001 / 1000 - 1


class Toy(Task):
    """Its metrics are the mean reward, a drawn number, and how many responses it has learned from."""

    def pioneer_prompts(self, queries):
        self.drawn = random.random() + np.random.rand() + torch.rand(1).item()
        return queries

    def observer_prompts(self, queries, responses):
        return [f"{query} <{text}>" for query, text in zip(queries, responses, strict=True)]

    def compute_rewards(self, queries, responses):
        rewards = [*map(reward, queries, responses)]
        return rewards, {"twice": [2 * x for x in rewards]}

    def on_iteration_end(self, rollouts, rewards):
        self.memory["learned"] = self.memory.get("learned", 0) + sum(map(len, rewards))

    def metrics(self, queries, responses):
        mean = fmean(map(reward, queries, responses))
        return {"drawn": self.drawn, "mean": mean, "learned": self.memory.get("learned", 0),
                "task_knows": self.iteration + 0.5 * self.training}


class Changing(Toy):
    """Its prompts depend on the iteration."""

    def pioneer_prompts(self, queries):
        return [f"{self.iteration} {query}" for query in super().pioneer_prompts(queries)]


class Harder(Toy):
    def compute_rewards(self, queries, responses):
        return [x - 0.5 for x in super().compute_rewards(queries, responses)[0]]


class Chain(Cory):
    """Three agents. Scores rise by 1 each time that they are asked for, in place; a metric is drawn."""
    agent_names = ("llm1", "llm2", "llm3")
    roles = ("first", "second", "third")

    def respond(self, players, queries, sample):
        """In training, to other queries than the batch's."""
        if self.training:
            queries = [f"{query}?" for query in queries]
        return super().respond(players, queries, sample)

    def scores(self, rollouts, rewards):
        self.memory["asked"] = self.memory.get("asked", 0) + 1
        rewards[2] += self.memory["asked"]
        return super().scores(rollouts, rewards)

    def team_metrics(self, rollouts, rewards):
        return super().team_metrics(rollouts, rewards) | {
            "asked": self.memory.get("asked", 0),
            "drawn": random.random(),
            "method_knows": self.iteration + 0.5 * self.training}


NOTED = []                                              # the KL that the controller below was given


def zero_first(agent, kl_N):
    return 0.0 if agent.iteration == 1 else 0.3


def doubled(agent, kl_N):
    NOTED.append(kl_N.tolist())
    return 2 * agent.kl_coef


class OneUpdate(Cory):
    """One model plays both roles, and is trained in one of them."""

    def update(self, role, agent, rollout, score):
        return super().update(role, agent, rollout, score) if role == "observer" else {}


five = lambda response: 5


class Nine(Critic):
    def __init__(self, base):
        super().__init__(base)
        torch.nn.init.constant_(self.linear.bias, 9)


unclipped = lambda log_ratio_BT, advantage_BT, **_: (-advantage_BT * log_ratio_BT, log_ratio_BT > 9)
plain = lambda *given: losses(*given, policy_loss=unclipped)

TOY = ("--seed 1 --task test_wiring:Toy --dataset {data} --model {lm} --iterations 2 --eval_every 0 "
       "--save_every 0 --max_response_length 3 --gradient_accumulation_steps 1 --num_ppo_epochs 2 "
       "--learning_rate 0.02 --lr_schedule linear --kl_penalty full --role_exchange_every 1 ")
BASES = {
    "ppo": "--method ppo", "loss": "--method ppo --kl_in loss",
    "same": "--method ppo --iterations 1 --dataset {same}",
    "short": "--method ppo --iterations 1 --min_response_length 1",
    "cory": "--method cory",
    "chain": "--method test_wiring:Chain --iterations 3 --kl_penalty k1 --eval_samples 4",
    "imdb": "--method ppo --iterations 1 --task imdb",
    "gsm8k": "--method ppo --iterations 1 --task gsm8k --dataset {problems}"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, small, read_once):
    """`run(base, flags)` is the folder of a finished run, for several tests."""
    at = tmp_path_factory.mktemp("wiring")
    tokenizer = byte_tokenizer(eos_token="<|endoftext|>", additional_special_tokens=["<|user|>", "<|end|>"])
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    lm = save_model("gpt2", at / "lm", tokenizer, vocab_size=259, hidden_size=16, num_hidden_layers=1)
    swapped = shutil.copytree(ASSETS / "imdb/classifier", at / "swapped")
    labels = {"id2label": {0: "POSITIVE", 1: "NEGATIVE"}}
    (swapped / "config.json").write_text(json.dumps(read(swapped / "config.json") | labels))
    places = {"lm": lm, "small": small, "swapped": swapped}
    places["same"] = at / "same"                         # a folder, so that one text is in all splits
    places["same"].mkdir()
    for split in ("train", "validation", "test"):
        (places["same"] / f"{split}.jsonl").write_text('{"text": "always this"}\n' * 9)
    for name, row in (("data", lambda i: {"text": f"{i} films of {i * i} were good"}),
                      ("other", lambda i: {"text": f"{i} stories"}),
                      ("problems", lambda i: {"question": f"{i}?", "answer": f"#### {i % 2 + 5}"})):
        places[name] = at / f"{name}.jsonl"
        places[name].write_text("".join(json.dumps(row(i)) + "\n" for i in range(60)))

    @cache
    def finished(base: str, flags: str) -> Path:
        folder = at / f"{base} {flags}".replace("/", "-")[:99]
        words = f"{TOY} {BASES[base]} {flags}".format(**places).split()
        script = train_gsm8k if base == "gsm8k" else train_imdb
        script.main([*SIZES, *words, "--run_dir", str(folder)])
        return folder

    return lambda base, flags="": finished(base, flags)


def test_held_out_responses_that_are_kept_are_those_that_would_be_sampled_again(run, monkeypatch):
    """A base's are kept; here, in the second run, no model's are. Prompts depend on the iteration."""
    flags = "--iterations 3 --eval_every 1 --task test_wiring:Changing"
    kept = run("cory", flags)
    monkeypatch.setattr(evaluate, "Policy", LanguageModel)
    assert rows(kept) == rows(run("cory", f"{flags} --wandb disabled"))
    rewards = {row["eval/task_reward/base"] for row in evaluations(kept)}
    assert len(rewards) == 4


# --- every setting changes a run where it acts, and not before ---
STAGES = {                  # of an iteration, in order, and what llm1's metrics and the samples say of each
    "draws": "drawn", "queries": "query",
    "responses": "pioneer_prompt pioneer observer_prompt observer length sampling_gap",
    "rewards": "task_reward kl unparsed", "scores": "score",
    "update": "policy_loss value_loss kl_loss entropy approx_kl clip_fraction explained_variance grad_norm"}
# kl_coef, learning_rate and combined_reward are left out, since they repeat settings.

EFFECTS = {                 # by base, and by where they act first; `-`: nowhere else
    ("ppo", "draws 1, queries 1, responses 1"): "seed=2",
    ("same", "draws 1, responses 1"): "seed=2",
    ("ppo", "held out, queries 1"): "dataset={other}",
    ("ppo", "queries 1"): "responses_per_query=2",
    ("ppo", "held out, responses 1"):
        "model={small} chat_template=true temperature=0.5 max_response_length=4",
    ("ppo", "responses 1"): "min_response_length=1 batch_size=8",
    ("ppo", "held out, rewards 1"): "task=test_wiring:Harder",
    ("ppo", "update 1"):
        "lora_rank=2 advantage=reinforce learning_rate=0.1 critic_learning_rate=0.1 mini_batch_size=1 "
        "gradient_accumulation_steps=2 num_ppo_epochs=1 kl_in=loss gamma=0.5 lam=0.1 cliprange=0.001 "
        "cliprange_value=0.001 vf_coef=1 max_grad_norm=0.01 loss=test_wiring:plain "
        "critic=test_wiring:Nine",
    ("short", "update 1"): "loss_mean=constant",
    ("ppo", "rewards 2"): "kl_penalty=k1",
    ("ppo", "update 2"):
        "lr_schedule=constant iterations=3 init_kl_coef=3 kl_controller=test_wiring:doubled kl_target=0 "
        "kl_horizon=2",
    ("ppo", "held out"): "dtype=bfloat16",
    ("ppo", "held out, -"): "eval_split=validation eval_queries=3 eval_samples=2",
    ("loss", "update 1"): "init_kl_coef=3",
    ("loss", "update 2"): "kl_target=0",
    ("cory", "held out, responses 1"): "knowledge_transfer=false",
    ("cory", "responses 1"): "share_weights=true",
    ("cory", "scores 1"): "partner_reward=0.5 method=ppo",
    ("cory", "responses 2"): "role_exchange_every=0",
    ("imdb", "held out, rewards 1"): "reward_model={swapped}",
    ("imdb", "held out, queries 1"): "min_query_length=7 max_query_length=3",
    ("gsm8k", "held out, rewards 1"): "checker=test_wiring:five",
    ("gsm8k", "held out, responses 1"): "one_shot=true"}
ELSEWHERE = {
    "preset": "only names the settings", "run_dir": "where files are written", "wandb": "test_log",
    "wandb_project": "test_log", "resume": "test_resume",
    "save_every": "test_resume",
    "eval_every": "test_methods", "shard": "test_distributed",
    "device": "needs a GPU", "load_in_4bit": "needs bitsandbytes"}
effects = [pytest.param(base, setting, where.split(", "), id=f"{base} {setting}")
           for (base, where), settings in EFFECTS.items() for setting in settings.split()]


def test_no_setting_is_left_out():
    named = {effect.values[1].partition("=")[0] for effect in effects}
    assert named | ELSEWHERE.keys() == {f.name for f in (*fields(ImdbConfig), *fields(Gsm8kConfig))}
    assert not named & FREE_ON_RESUME           # what changes a run is not changed when it is resumed


def stages(folder: Path) -> dict[str, dict]:
    """{"held out": {name: value}, "draws 1": ..., "update 2": ...}, the first before training."""
    found = {"held out": rows(folder)[0]}
    for iteration in (1, 2):
        row = next((row for row in training(folder) if row["iteration"] == iteration), {})
        values = {key.split("/")[1]: x for key, x in row.items() if key.endswith("/llm1")}
        samples = [row for row in rows(folder, "samples.jsonl") if row["iteration"] == iteration]
        for stage, names in STAGES.items():
            values |= {name: [row[name] for row in samples] for row in samples for name in row}
            found[f"{stage} {iteration}"] = {
                name: values[name] for name in names.split() if name in values}
    return found


def differ(a: dict, b: dict) -> bool:
    """Whether a value that both have differs by more than rounding."""
    close = lambda x: x if isinstance(x, list) else pytest.approx(x, rel=1e-5, abs=1e-6)
    return any(a[name] != close(b[name]) for name in a.keys() & b.keys())


@pytest.mark.parametrize("base, setting, where", effects)
def test_a_setting_changes_a_run_where_it_acts_and_not_before(base, setting, where, run):
    short = "" if where[-1].endswith("2") else "--iterations 1 "
    folder = run(base, f"{short}--{setting}")
    cfg, held_out = read(folder / "config.json"), read(folder / "eval.json")
    assert [held_out[name] for name in ("iteration", "split", "queries", "samples")] == [
        cfg[name] for name in ("iterations", "eval_split", "eval_queries", "eval_samples")]
    before, after = stages(run(base)), stages(folder)
    for key, x in after["held out"].items():            # every agent is its base, before training
        assert x == pytest.approx(0, abs=1e-6) or not key.startswith("eval/kl/")
    changed = [stage for stage in before if differ(before[stage], after[stage])]
    assert [*changed, "-"][:len(where)] == where


# --- what a run says of itself ---
@pytest.mark.parametrize("base, flags", [
    ("ppo", ""), ("cory", ""), ("cory", "--iterations 1 --share_weights=true"), ("chain", ""),
    ("ppo", "--iterations 1 --eval_split=validation"),
    ("ppo", "--iterations 1 --lora_rank=2 --dtype=bfloat16")])
def test_evaluate_gives_what_the_run_itself_gave(base, flags, run):
    """Roles are exchanged before the last iteration, and after it."""
    folder = run(base, flags)
    held_out = read(folder / "eval.json")
    samples = held_out["samples"]
    main(["evaluate", str(folder), "--samples", str(samples)])
    results = read(folder / "evaluation/results.json")
    for who in {"llm1", "llm2", "llm3", "team"} & held_out.keys():
        again = {name: results[who][name] for name in held_out[who]}
        assert again == pytest.approx(held_out[who], rel=1e-4, abs=1e-5), who
        if who != "team":
            assert results[who]["greedy_mean"] == pytest.approx(results[who]["greedy_task_reward"], abs=1e-6)
        pass_at = {f"pass@{k}" for k in (1, 2, 4) if k <= samples and who != "team"}
        assert {name for name in results[who] if "@" in name} == pass_at
    for row in sum(map(read_jsonl, folder.glob("evaluation/*.jsonl")), []):
        texts, found = [*row["sampled"], row["greedy"]], [*row["rewards"], row["greedy_reward"]]
        assert found == pytest.approx([reward(row["query"], text) for text in texts])
        assert max(len(text.encode()) for text in texts) <= 9 and len(row["greedy"]) <= 3


@pytest.mark.parametrize("base", ["cory", "chain"])
def test_before_training_the_team_is_the_team_of_bases(base, run):
    first = rows(run(base))[0]
    team, bases = ({key.removesuffix(who): x for key, x in first.items() if key.endswith(who)}
                   for who in ("/team", "/base_team"))
    assert team == pytest.approx(bases, abs=1e-5) and team


def responses_of_base(folder: Path, *words: str) -> list[dict]:
    main(["evaluate", str(folder), *words])
    return read_jsonl(folder / "evaluation/base.jsonl")


def test_each_held_out_sample_has_random_numbers_of_its_own_and_a_greedy_response_has_none(run):
    (row,), (cooler,) = (responses_of_base(run("ppo", flags), "--samples", "256", "--queries", "1")
                         for flags in ("", "--iterations 1 --temperature=0.5"))
    texts = row["sampled"]
    assert not any(texts[i:] == texts[:-i] for i in range(1, 240))
    assert row["greedy"] == cooler["greedy"] and texts != cooler["sampled"]


@pytest.mark.parametrize("flags", ["", "--iterations 1 --knowledge_transfer false"])
def test_what_each_role_of_a_chain_has_read_and_earned(flags, run):
    """Roles are exchanged after each iteration. samples.jsonl has all four queries of a batch."""
    folder = run("chain", flags)
    for i, row in enumerate(training(folder), start=1):
        samples = [sample for sample in rows(folder, "samples.jsonl") if sample["iteration"] == i]
        assert len({sample["query"] for sample in samples}) == 4
        for place, role in enumerate(Chain.roles):
            agent = f"llm{(place + i - 1) % 3 + 1}"
            for sample in samples:
                seen = "" if flags or place == 0 else f" <{sample[Chain.roles[place - 1]]}>"
                assert sample[f"{role}_prompt"] == sample["query"] + seen
                assert sample[f"{role}_reward"] == pytest.approx(reward(sample["query"], sample[role]))
                assert sample[f"{role}_agent"] == agent
            assert row[f"train/role/{agent}"] == place and row[f"train/learned/{agent}"] == 12 * (i - 1)
            for metric in ("task_reward", "mean"):
                own = fmean(sample[f"{role}_reward"] for sample in samples)
                assert row[f"train/{metric}/{agent}"] == pytest.approx(own, abs=1e-6)
            assert row[f"train/twice/{agent}"] == pytest.approx(2 * row[f"train/task_reward/{agent}"])
            of_all = sum(row[f"train/task_reward/{each}"] for each in Chain.agent_names)
            assert row[f"train/score/{agent}"] == pytest.approx(of_all + i)       # it is not asked for held out


def test_hooks_know_the_iteration_and_whether_it_is_training(run):
    """Iteration n is n + 1/2 in training, n in held-out evaluation."""
    for row in rows(run("chain")):
        known = {x for key, x in row.items() if "_knows" in key}
        assert known == {row["iteration"] + (0.5 if "train/role/llm1" in row else 0)}
    assert len({row["train/drawn/team"] for row in training(run("chain"))}) == 3       # a new number in each iteration


def test_samples_are_of_different_queries(run):
    samples = rows(run("ppo", "--iterations 1 --responses_per_query=2"), "samples.jsonl")
    assert len(samples) == len({row["query"] for row in samples}) == 2
    for row in samples:
        assert row["pioneer_reward"] == pytest.approx(reward(row["query"], row["pioneer"]))


# --- eta, and code of one's own ---
def test_a_controller_has_the_signed_kl_of_each_response_and_gives_the_next_eta(run):
    NOTED.clear()
    found = training(run("ppo", "--kl_controller test_wiring:doubled --kl_penalty k1 --iterations 3"))
    assert [row["train/kl_coef/llm1"] for row in found] == pytest.approx([0.15, 0.3, 0.6])
    assert [*map(fmean, NOTED)] == pytest.approx([row["train/kl/llm1"] for row in found], abs=1e-6)
    assert min(map(min, NOTED)) < 0 and {*map(len, NOTED)} == {4}
    run("cory", "--iterations 1 --share_weights --method test_wiring:OneUpdate "
        "--kl_controller test_wiring:doubled")
    assert len(NOTED[-1]) == 4                  # in the role in which it was trained
    found = training(run("ppo", "--kl_controller test_wiring:zero_first --iterations 3"))
    assert [row["train/kl_coef/llm1"] for row in found] == pytest.approx([0.15, 0, 0.3])
