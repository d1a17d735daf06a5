"""python -m cory plan against what real models hold and save."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig

from cory.commands import plan
from cory.config import Gsm8kConfig
from cory.ppo.loading import load_language_model, model_config
from cory.ppo.lora import adapter_parameters, add_adapter


def test_counts_are_those_of_a_real_model(small):
    config, lm = model_config(str(small / "lm")), load_language_model(str(small / "lm")).lm
    counted = plan.Plan(config, 1, 8, 8, 20, 10, "float32", "cpu")
    assert counted.weights == sum(p.numel() for p in lm.parameters())
    kept = {}

    def note(x):
        if not isinstance(x, nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    sizes = {}
    lm.requires_grad_(True)
    for tokens in (32, 64):
        kept.clear()
        ids = torch.zeros(1, tokens, dtype=torch.long)
        mask = (torch.arange(tokens) > 0).long()[None]          # with padding, as a batch of rows has it
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        sizes[tokens] = sum(storage.nbytes() for storage in kept.values())
    assert counted.saved_per_token == pytest.approx((sizes[64] - sizes[32]) / 32, rel=0.01)


def test_phases_by_hand():
    config = GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=10, n_positions=64)
    p = plan.Plan(config, 2, 4, 2, 5, 3, "float32", "cuda")
    # a layer: norms 4 x 8, attention 8 x 24 + 24 + 8 x 8 + 8, MLP 8 x 32 + 32 + 32 x 8 + 8; then
    # embeddings 10 x 8 and 64 x 8, and the last norm 2 x 8
    assert p.weights == 3 * (32 + 192 + 24 + 64 + 8 + 256 + 32 + 256 + 8) + 80 + 512 + 16 and p.head == 80
    assert p.tokens == 2 * 8 and p.logprobs == 4 * 16 * 10
    phases = p.phases()
    assert phases["state"] == 4 * p.weights * 7                 # the reference; two of weights and moments
    cache = 4 * 4 * (2 * 3 * 8) * (8 + 32)
    assert phases["sample"] == phases["state"] + cache + 4 * 10 * 16
    assert phases["score"] == phases["state"] + 5 * p.logprobs
    assert phases["update"] == phases["state"] + 4 * p.weights + 16 * p.saved_per_token + 3 * p.logprobs + 320


def test_bfloat16_halves_what_it_may_and_adds_casts():
    shape = dict(num_hidden_layers=3, hidden_size=64, intermediate_size=128, vocab_size=100,
                 num_attention_heads=4, num_key_value_heads=2)
    single, half = (plan.Plan(LlamaConfig(**shape), 1, 4, 2, 5, 3, dtype, "cuda")
                    for dtype in ("float32", "bfloat16"))
    assert single.weights == half.weights and single.casts == 0
    assert half.casts == 2 * (half.weights - 6400)
    assert 0.4 < half.saved_per_token / single.saved_per_token < 0.8
    cache = 4 * 4 * (2 * 3 * 2 * 16) * 40                       # 2 heads of 16 for keys and for values
    assert single.phases()["sample"] - single.phases()["state"] == cache + 4 * 100 * 16


def test_the_table_and_its_card(capsys):
    plan.main(["gpt2", "--dtype", "float32", "--method", "ppo"])
    row = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert row[0] == "| gpt2" and row[1] == "124M" and row[-1] == "16 GB |"
    state, sample, score, update = map(float, row[3:7])
    assert state == pytest.approx(4 * 4 * 0.1244e9 / 2**30, abs=0.1) and update > sample > state < score
    with pytest.raises(SystemExit):
        plan.main(["no/model"])
    assert "models is 'no/model': is neither a local folder" in capsys.readouterr().err


def test_gpus_by_hand(problems):
    config = model_config(str(problems / "lm"))
    lm = load_language_model(str(problems / "lm")).lm
    alone, parts = (plan.Plan(config, 2, 8, 2, 5, 3, "bfloat16", "cuda", gpus=4, shard=shard)
                    for shard in (False, True))
    layers = sum(p.numel() for p in lm.model.layers.parameters() if p.dim() > 1)
    assert parts.layers == layers and parts.weights == sum(p.numel() for p in lm.parameters())
    held = parts.weights - layers + layers / 4
    assert parts.parts()["moments"] == 2 * 2 * 4 * held and alone.parts()["moments"] == 16 * alone.weights
    assert parts.rows == 2 and parts.tokens == 2 * 8
    # each step: the whole weights' gradients twice; layers gathered twice in 2 bytes, their gradients divided
    step = 2 * 4 * (parts.weights - layers) + (2 * 2 + 4) * layers
    assert parts.sent(8, 3) == int(2 * 3 / 4 * (3 * step + 2 * 2 * layers))
    assert alone.sent(4, 3) == int(2 * 3 / 4 * 6 * 2 * 4 * alone.weights)       # two steps an epoch
    assert parts.phases()["load"] == 2 * 4 * parts.weights + parts.parts()["policies"]


def test_adapters_are_as_large_as_peft_makes_them(problems):
    cfg = Gsm8kConfig(lora=True, lora_rank=3)
    lm = load_language_model(str(problems / "lm")).lm
    counted = plan.Plan(lm.config, 2, 8, 2, 5, 3, "bfloat16", "cuda", training="lora", rank=3)
    add_adapter(lm, "llm1", cfg, 0)
    assert counted.trained == sum(p.numel() for p in adapter_parameters(lm, "llm1").values())
    quarter = plan.Plan(lm.config, 2, 8, 2, 5, 3, "bfloat16", "cuda", training="4bit", rank=3)
    assert counted.parts()["reference"] == 2 * counted.weights + 2 * counted.head       # the head in float32
    saved = counted.parts()["reference"] - quarter.parts()["reference"]
    assert saved == pytest.approx((2 - 0.5 - 4 / 64) * counted.layers, abs=1)
    assert quarter.parts()["policies"] == 2 * 4 * counted.trained


def test_the_table_of_gpus(capsys):
    flags = "--gpus 2 --shard --training full lora --dtype float32 --gpu_memory 1 --bandwidth 2"
    plan.main(["gpt2", *flags.split()])
    head, _, full, lora = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert head[-3:] == ["1 GB", "sent, GB", "s |"] and full[-3] == lora[-3] == "too small"
    assert float(full[-1][:-2]) == pytest.approx(float(full[-2]) / 2, abs=0.1) and lora[3] == "lora"
    with pytest.raises(SystemExit):
        plan.main("gpt2 --gpus 2 --shard --training 4bit".split())
    assert "training is '4bit': cannot be divided" in capsys.readouterr().err
