"""The command line and the presets."""
import re
from dataclasses import fields
from pathlib import Path

import pytest

import train_imdb
from cory.config import GSM8K_PRESETS, IMDB_PRESETS, Gsm8kConfig, ImdbConfig
from cory.errors import UserError
from cory.experiment.flags import parse

ROOT = Path(__file__).parents[1]
# Tables of the paper (protocol, section 2); PPO and CORY alike.
OF_BOTH = dict(gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1, role_exchange_every=5,
               iterations=100, max_grad_norm=0.0, kl_penalty="full")
GPT2_LARGE = OF_BOTH | dict(
    model="gpt2-large", reward_model="lvwerra/distilbert-imdb", dataset="stanfordnlp/imdb",
    learning_rate=1.41e-5, batch_size=256, mini_batch_size=256, gradient_accumulation_steps=1,
    num_ppo_epochs=4, init_kl_coef=0.3, temperature=1.0, min_query_length=2, max_query_length=8,
    min_response_length=4, max_response_length=15, partner_reward=1.0, knowledge_transfer=True)
LLAMA2_7B = OF_BOTH | dict(     # what the paper leaves open (LoRA, response length, epochs) is not in it
    model="meta-llama/Llama-2-7b-chat-hf", dataset="openai/gsm8k", load_in_4bit=True, learning_rate=1e-5,
    batch_size=32, mini_batch_size=2, gradient_accumulation_steps=16, init_kl_coef=0.01,
    checker="last_number", one_shot=True)


def of(*argv) -> ImdbConfig:
    return parse(ImdbConfig, IMDB_PRESETS, list(argv))


@pytest.mark.parametrize("method", ["ppo", "cory"])
def test_presets_are_the_papers_settings(method):
    cfg = of("--method", method, "--preset", "gpt2-large")
    assert {name: getattr(cfg, name) for name in GPT2_LARGE} == GPT2_LARGE
    for preset, rate in (("llama2-7b", 1e-5), ("llama2-7b-lr1e-4", 1e-4)):
        cfg = parse(Gsm8kConfig, GSM8K_PRESETS, ["--method", method, "--preset", preset])
        found = {name: getattr(cfg, name) for name in LLAMA2_7B}
        assert found == LLAMA2_7B | {"learning_rate": rate}
    assert IMDB_PRESETS["gpt2"] == {"model": "gpt2"} and IMDB_PRESETS["gpt2-xl"] == {"model": "gpt2-xl"}


def test_a_flag_overrides_the_preset_and_leaves_the_rest():
    changed = of("--preset", "gpt2", "--learning_rate", "3e-5", "--knowledge_transfer", "false")
    plain = of("--preset", "gpt2")
    differ = {f.name for f in fields(plain) if getattr(changed, f.name) != getattr(plain, f.name)}
    assert differ == {"learning_rate", "knowledge_transfer"}
    assert changed.learning_rate == 3e-5 and changed.knowledge_transfer is False


def test_every_setting_has_help_and_is_read_somewhere():
    code = "".join(p.read_text() for p in ROOT.glob("cory/**/*.py") if p.name != "config.py")
    derived = {"mini_batch_size", "gradient_accumulation_steps", "resume", "run_dir", "load_in_4bit",
               "whiten_advantages"}
    for f in (*fields(ImdbConfig), *fields(Gsm8kConfig)):
        assert len(f.metadata["help"]) > 10, f.name
        assert f.name in derived or re.search(rf"cfg\.{f.name}\b", code), f"{f.name} is read nowhere"


def test_help_shows_the_effective_default_of_the_preset(capsys):
    with pytest.raises(SystemExit) as stop:
        of("--help")
    shown = " ".join(capsys.readouterr().out.split())
    tiny, paper = IMDB_PRESETS["tiny"]["learning_rate"], ImdbConfig().learning_rate
    assert stop.value.code == 0 and "--role_exchange_every" in shown
    assert f"(default: {tiny})" in shown and f"(default: {paper})" not in shown


BAD = [                                 # one case of each kind
    ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate"]),
    ("--zzz", ["--zzz", "--help"]),
    ("--learning_rate fast", ["--learning_rate", "'fast'"]),
    ("--knowledge_transfer maybe", ["--knowledge_transfer", "maybe"]),
    (f"--wandb_tags a,{'x' * 65}", ["wandb_tags is ", "at most 64"]),
    ("--kl_in rewards", ["--kl_in", "rewards"]),
    ("--method grpo", ["method is 'grpo'", "choose from ppo, cory, or name one of your own as module:Name"]),
    ("--preset huge", ["preset is 'huge'", "gpt2-large"]),
    ("--resume", ["run_dir is ''", "no run to resume"]),
    ("--resume --run_dir /nowhere", ["run_dir is '/nowhere'", "holds no run (no config.json)"]),
    # numbers
    ("--learning_rate nan", ["learning_rate is nan", "finite"]),
    ("--cliprange 0", ["cliprange is 0.0", "above 0"]),
    ("--gamma 1.1", ["gamma is 1.1", "1 or less"]),
    ("--init_kl_coef -1", ["init_kl_coef is -1.0", "0 or more"]),
    ("--temperature 0", ["temperature is 0.0", "0.01 or more"]),
    ("--iterations 0", ["iterations is 0", "1 or more"]),
    ("--seed 2147483648", ["seed is 2147483648"]),
    # sizes
    ("--batch_size 100 --mini_batch_size 32", ["batch_size is 100", "32 x 1 = 32"]),
    ("--responses_per_query 3", ["responses_per_query is 3", "batch_size = 128"]),
    ("--adap_kl_ctrl true --kl_horizon 6", ["kl_horizon is 6.0", "0.2 x batch_size = 25.6"]),
    ("--min_response_length 9 --max_response_length 8",
     ["min_response_length is 9", "max_response_length = 8"]),
    ("--min_query_length 9", ["min_query_length is 9", "max_query_length = 8"]),
    ("--warmup_iterations 44", ["warmup_iterations is 44", "iterations = 44"]),
    # combinations
    ("--advantage rloo", ["advantage is 'rloo'", "--responses_per_query"]),
    ("--advantage rloo --responses_per_query 4 --gamma 0.9", ["gamma is 0.9", "rloo"]),
    ("--advantage grpo --responses_per_query 4 --whiten_advantages true",
     ["whiten_advantages is 'true'", "grpo"]),
    ("--load_in_4bit true --lora false", ["load_in_4bit is True", "add --lora true"]),
    # flags that nothing reads beside others
    ("--method ppo --knowledge_transfer false", ["knowledge_transfer is False", "a method of two agents"]),
    ("--method ppo --partner_term critic", ["partner_term is 'critic'", "a method of two agents"]),
    ("--role_exchange_every 0 --reset_on_exchange true", ["reset_on_exchange is True", "above 0"]),
    ("--share_weights true --role_exchange_every 3", ["role_exchange_every is 3", "--share_weights false"]),
    ("--partner_reward 0 --partner_term critic", ["partner_term is 'critic'", "that is not 0"]),
    ("--lora false --lora_rank 4", ["lora_rank is 4", "--lora true"]),
    ("--vf_coef 0 --cliprange_value 1", ["cliprange_value is 1.0", "--vf_coef above 0"]),
    ("--task gsm8k", ["task is 'gsm8k'", "has its own script, train_gsm8k.py"]),
    ("--partner_term critic --llm1 advantage=reinforce", ["llm1: partner_term is 'critic'"]),
    ("--kl_target 3", ["kl_target is 3.0", "--adap_kl_ctrl true"]),
    ("--advantage reinforce --vf_coef 1", ["vf_coef is 1.0", "--advantage gae"]),
]


@pytest.mark.parametrize("argv", [
    "--kl_target 3 --llm2 adap_kl_ctrl=true",               # an agent reads it
    "--method cory --lora true --lora_rank 4", "--method ppo --role_exchange_every 5",
    "--method mine:loop --share_weights true --role_exchange_every 2",
    "--method mine:loop --partner_reward 0 --partner_term critic"])
def test_flags_that_something_reads_are_taken(argv):
    of(*argv.split())


@pytest.mark.parametrize("argv, says", BAD, ids=[argv for argv, _ in BAD])
def test_bad_command_lines_exit_2_with_one_line(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        train_imdb.main(argv.split())
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    assert all(word in err for word in says), err


@pytest.mark.parametrize("changes, says", [
    (dict(batch_size=7, mini_batch_size=2), "batch_size is 7"), (dict(seed="3"), "must be of type int"),
    (dict(lora=1), "must be of type bool"), (dict(kl_in="rewards"), "choose from reward, loss")])
def test_settings_can_be_built_in_code_and_are_checked_there_too(changes, says):
    with pytest.raises(UserError, match=says):
        ImdbConfig(**changes)
