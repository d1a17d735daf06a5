import json
import os
import random
import signal
from pathlib import Path

# Read when the libraries are imported, the last at the first use of a GPU.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models gain nothing by threads; `-n 2` uses both cores
os.environ.update({} if "TEST_GPU" in os.environ else {"CUDA_VISIBLE_DEVICES": ""})  # one test is of a GPU

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a script's background, and a run keeps to that
    signal.signal(signal.SIGINT, signal.default_int_handler)

SIZES = (
    "--batch_size 4 --mini_batch_size 2 --gradient_accumulation_steps 2 --num_ppo_epochs 1 --eval_queries 4 "
    "--eval_samples 1 --eval_every 3 --save_every 1 --iterations 5 --max_response_length 6 --lora_rank 0 "
    "--learning_rate 1e-3 --critic_learning_rate 0 --lr_schedule constant --kl_target 0.1 --kl_horizon 20 "
    "--role_exchange_every 2 --wandb disabled --device cpu"
).split()


def byte_tokenizer(**special) -> PreTrainedTokenizerFast:
    """256 bytes and one end-of-text token: every string has ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<|endoftext|>"])}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, **(special or {"eos_token": "<|endoftext|>"}))


def save_gpt2(folder: Path, tokenizer=None, **changes) -> Path:
    torch.manual_seed(0)
    config = dict(
        vocab_size=257, n_positions=160, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256)
    GPT2LMHeadModel(GPT2Config(**{**config, **changes})).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


SLOW = ["test_distributed", "test_recipes", "test_resume", "test_methods", "test_end_to_end"]


def pytest_collection_modifyitems(items):
    """Slow files first, so that two workers end together."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.fixture(scope="session", autouse=True)
def no_plots():
    """A plot takes as long as three iterations of a small model: runs do not draw it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cory.run.draw_runs", lambda *_: None)
        yield


def save_small(folder: Path) -> Path:
    """A random 2-layer GPT-2 over bytes (dropout 0.1 in its config), a random classifier, and openings."""
    save_gpt2(folder / "lm")
    torch.manual_seed(1)
    DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=257, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=160,
            initializer_range=0.5, id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1})).save_pretrained(folder / "classifier")
    byte_tokenizer(pad_token="<|endoftext|>").save_pretrained(folder / "classifier")
    words = "the film was a story of one good man and his bad old dog who saw every scene in it".split()
    rng = random.Random(0)
    (folder / "openings").mkdir()
    for split, rows in (("train", 40), ("test", 20)):
        texts = [" ".join(rng.choices(words, k=10)) for _ in range(rows)]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / "openings" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    return save_small(tmp_path_factory.mktemp("small"))


def save_llama(folder: Path, tokenizer=None, **changes) -> Path:
    torch.manual_seed(0)
    config = dict(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, bos_token_id=256, eos_token_id=256,
        initializer_range=0.2)
    LlamaForCausalLM(LlamaConfig(**{**config, **changes})).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def problems(tmp_path_factory) -> Path:
    """A random two-layer Llama and 60 problems in GSM8K's layout."""
    folder = save_llama(tmp_path_factory.mktemp("problems") / "lm").parent
    rng = random.Random(0)
    for split, count in (("train", 40), ("test", 20)):
        pairs = [(a, rng.randint(1, 99)) for a in range(count)]
        rows = [{"question": f"Ann has {a} {split} eggs and gets {b} more. How many?",
                 "answer": f"{a} + {b} = {a + b}.\n#### {a + b}"} for a, b in pairs]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def problem_flags(problems) -> list[str]:
    """Command line of a GSM8K run over `problems` that takes about a second. 5 iterations, T_REx = 2."""
    return ["--model", str(problems / "lm"), "--dataset", str(problems), *SIZES]


@pytest.fixture(scope="session")
def small_flags(small) -> list[str]:
    """Command line of a run over `small` that takes about a second. 5 iterations, T_REx = 2."""
    return ["--model", str(small / "lm"), "--reward_model", str(small / "classifier"),
            "--dataset", str(small / "openings"), *SIZES]


@pytest.fixture
def real_data() -> Path:
    """A folder with the folders `imdb` and `gsm8k`, as on the Hub, that the environment names."""
    if "REAL_DATA" not in os.environ:
        pytest.skip("REAL_DATA names no folder with imdb/ and gsm8k/: reading them was not checked")
    return Path(os.environ["REAL_DATA"])
