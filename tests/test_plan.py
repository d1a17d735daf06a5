"""python -m cory.plan against what real models hold and save."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig

from cory import plan
from cory.loading import load_language_model, model_config


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
