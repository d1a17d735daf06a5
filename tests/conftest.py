import json
import os
from copy import deepcopy
from functools import cache
from pathlib import Path

# The libraries read these when imported, and CUDA_VISIBLE_DEVICES at the first use of a GPU.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models gain nothing by threads; `-n 2` uses both cores
if "TEST_GPU" not in os.environ:                # one test needs a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import float64
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from cory import loading
from cory.tasks import imdb

END = "<|endoftext|>"
SIZES = (
    "--batch_size 4 --mini_batch_size 2 --gradient_accumulation_steps 2 --num_ppo_epochs 1 --eval_queries 3 "
    "--eval_samples 1 --eval_every 3 --save_every 1 --iterations 5 --max_response_length 6 --lora_rank 0 "
    "--learning_rate 1e-3 --critic_learning_rate 0 --lr_schedule constant --kl_target 0.1 --kl_horizon 20 "
    "--role_exchange_every 2 --wandb disabled --device cpu"
).split()


BYTES = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))         # 256 characters: every string has ids


def byte_tokenizer(characters: str = BYTES, **special) -> PreTrainedTokenizerFast:
    """A token for each character, and one for the end of a text."""
    vocab = {token: i for i, token in enumerate([*characters, END])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END])
    special = special or {"eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def save_model(kind: str, folder: Path, tokenizer=None, **changes) -> Path:
    """A random model of two layers, of any architecture: configs take the names that they know."""
    sizes = dict(
        vocab_size=257, hidden_size=32, intermediate_size=64, d_model=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        decoder_layers=2, decoder_attention_heads=4, is_decoder=True,
        ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=1024,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        pad_token_id=0, bos_token_id=256, eos_token_id=256)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | changes))
    for p in lm.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.2)                      # so that every part of it is felt
    lm.save_pretrained(folder)
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def in_float64():
    with float64():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_plots():
    """Runs draw no plot, which would take as long as three iterations; they write everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cory.run.finish.draw_run", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A GPT-2 over bytes, with dropout in its config."""
    return save_model("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def small_flags(small, tmp_path_factory) -> list[str]:
    """Command line of a run over `small` that takes about a second, with few texts and a small classifier.
    5 iterations, T_REx = 2.
    """
    folder = tmp_path_factory.mktemp("imdb")
    rows = [json.dumps({"text": f"{i} films of {i * i} men"}) for i in range(400)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    torch.manual_seed(0)
    config = CONFIG_MAPPING["distilbert"](
        vocab_size=257, dim=32, hidden_dim=64, n_layers=1, n_heads=2,
        initializer_range=0.5, id2label={0: "NEGATIVE", 1: "POSITIVE"})
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(folder / "classifier")
    byte_tokenizer().save_pretrained(folder / "classifier")
    return ["--model", str(small), "--dataset", f"{folder}/texts.jsonl",
            "--reward_model", f"{folder}/classifier", *SIZES]


@pytest.fixture(scope="session")
def problem_flags(tmp_path_factory) -> list[str]:
    """The same for GSM8K, with a Llama."""
    folder = save_model("llama", tmp_path_factory.mktemp("llama"))
    return ["--model", str(folder), *SIZES]


@pytest.fixture(scope="module")
def read_once():
    """Reads each model once for a file's tests: reading takes as long as training."""
    load = cache(loading.load_pretrained)

    def load_copy(auto_class, name, **kwargs):
        if Path(name).exists():
            name = str(Path(name).resolve())            # tests may have folders of the same name
        return deepcopy(load(auto_class, name, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_pretrained", load_copy)
        patch.setattr(imdb, "load_pretrained", load_copy)
        yield
