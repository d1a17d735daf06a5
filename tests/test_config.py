"""Settings: the paper's tables, what may not stand together, flags without an effect."""
import re
from dataclasses import fields

import pytest
from test_flags import imdb
from toys import error_line

import train_imdb
from cory.config import ASSETS, GSM8K_PRESETS, IMDB_PRESETS, Gsm8kConfig, ImdbConfig
from cory.errors import UserError
from cory.flags import parse

# Tables of the paper; PPO and CORY alike.
OF_BOTH = dict(gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1, role_exchange_every=5,
               iterations=100, kl_penalty="full", kl_in="reward", advantage="gae", partner_reward=1.0,
               partner_term="sampled", knowledge_transfer=True, max_grad_norm=0.0)
GPT2_LARGE = OF_BOTH | dict(
    model="gpt2-large", reward_model="lvwerra/distilbert-imdb", dataset="stanfordnlp/imdb", batch_size=256,
    learning_rate=1.41e-5, mini_batch_size=256, gradient_accumulation_steps=1, num_ppo_epochs=4,
    init_kl_coef=0.3, min_query_length=2, max_query_length=8, min_response_length=4, max_response_length=15)
LLAMA2_7B = OF_BOTH | dict(
    model="meta-llama/Llama-2-7b-chat-hf", dataset="openai/gsm8k", load_in_4bit=True, one_shot=True,
    batch_size=32, mini_batch_size=2, gradient_accumulation_steps=16, init_kl_coef=.01, checker="last_number")


@pytest.mark.parametrize("config, presets, name, expected", [
    (ImdbConfig, IMDB_PRESETS, "gpt2-large", GPT2_LARGE),
    (Gsm8kConfig, GSM8K_PRESETS, "llama2-7b", LLAMA2_7B | {"learning_rate": 1e-5}),
    (Gsm8kConfig, GSM8K_PRESETS, "llama2-7b-lr1e-4", LLAMA2_7B | {"learning_rate": 1e-4})])
def test_presets_are_the_papers_settings(config, presets, name, expected):
    for method in ("ppo", "cory"):
        cfg = parse(config, presets, ["--method", method, "--preset", name])
        assert {setting: getattr(cfg, setting) for setting in expected} == expected


def test_every_setting_has_help_and_is_read_somewhere():
    files = [path for path in ASSETS.parent.rglob("*.py") if path.name != "config.py"]
    read = {*re.findall(r"(?:cfg|\))\.(\w+)", "".join(path.read_text() for path in files))}
    by_property = {"gradient_accumulation_steps"}
    for f in (*fields(ImdbConfig), *fields(Gsm8kConfig)):
        assert f.metadata["help"] and f.name in read | by_property, f.name


BAD = [                                 # one of each kind
    ("--method grpo", "method is 'grpo': unknown; choose from ppo, cory, or"),
    ("--lr_schedule liner", "did you mean linear?"), ("--learning_rate nan", "must be a finite number"),
    ("--cliprange 0", "must be above 0"), ("--gamma 1.1", "must be 1 or less"),
    # sizes
    ("--batch_size 100 --mini_batch_size 32", "batch_size is 100: must be a multiple"),
    ("--responses_per_query 3", "must divide batch_size"), ("--kl_target 6 --kl_horizon 6", "must exceed"),
    ("--min_response_length 16", "must not exceed max_response_length = 15"),
    ("--min_query_length 9", "must not exceed max_query_length = 8"),
    # settings that contradict each other
    ("--advantage grpo --responses_per_query 4", "add --kl_in loss"),
    ("--load_in_4bit --lora_rank 0", "trains nothing"), ("--load_in_4bit --shard", "cannot be divided"),
    ("--llm2 lora_rank=0", "all agents train adapters"), ("--task gsm8k", "has its own script"),
    # flags without effect given the others
    ("--share_weights true --batch_size 64 --kl_target 6 --kl_horizon 20", "must exceed 0.2 x 128 responses"),
    ("--method ppo --knowledge_transfer false", "only with a method of two agents"),
    ("--role_exchange_every 0 --reset_on_exchange", "only with --role_exchange_every above 0"),
    ("--share_weights --role_exchange_every 3", "only with --share_weights false"),
    ("--partner_reward 0 --partner_term critic", "only with a --partner_reward that is not 0"),
    ("--advantage rloo --responses_per_query 4 --gamma 0.9", "is not used by rloo"),
    ("--vf_coef 0 --cliprange_value 1", "only with --vf_coef above 0"),
    ("--kl_horizon 99", "--kl_target above 0"), ("--init_kl_coef 0 --kl_target 3", "--init_kl_coef above 0"),
    ("--advantage reinforce --lam 0.5", "only with a critic")]


@pytest.mark.parametrize("argv, says", BAD, ids=[argv for argv, _ in BAD])
def test_bad_settings_are_one_line(argv, says, capsys):
    assert says in error_line(imdb, argv.split(), capsys)


@pytest.mark.parametrize("argv", [
    "--kl_horizon 99 --llm2 kl_target=3", "--init_kl_coef 0 --kl_target 0",
    "--advantage grpo --responses_per_query 4 --kl_in loss",
    "--method mine:Method --share_weights true --role_exchange_every 2 --advantage mine:own --lam 0.5"])
def test_flags_that_something_may_read_are_taken(argv):
    imdb(argv.split())


def test_a_misspelt_word_in_a_preset_is_refused():
    with pytest.raises(UserError, match="kl_in is 'Loss': choose from reward, loss"):
        parse(ImdbConfig, {"mine": {"kl_in": "Loss"}}, [])


@pytest.mark.parametrize("more", ["--advantage own_advantage:plain", "--llm2 advantage=reinforce"])
def test_the_partners_critic_needs_one(more, small_flags, tmp_path, monkeypatch, capsys):
    """An estimator that asks for no value has no critic: refused before the first iteration."""
    (tmp_path / "own_advantage.py").write_text("def plain(reward_BT, mask_BT):\n    return reward_BT\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = [*small_flags, "--partner_term", "critic", *more.split(), "--run_dir", tmp_path / "run"]
    assert "partner_term is 'critic': needs a critic" in error_line(train_imdb.main, flags, capsys)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
