"""python -m cory plan against what real models hold and save."""
import pytest
import torch
from torch import nn
from toys import error_line
from transformers import GPT2Config, LlamaConfig

from cory.commands import plan
from cory.config import ImdbConfig
from cory.ppo.loading import load_language_model, model_config
from cory.ppo.lora import adapter_parameters, add_adapter
from cory.system import onednn


def planned(config, dtype: str = "float32", gpus: int = 1, **changes) -> plan.Plan:
    """Of batches of 4 and mini-batches of 2, prompts of 5 tokens and responses of 3."""
    sizes = dict(batch_size=4, mini_batch_size=2, min_response_length=0, max_response_length=3, dtype=dtype)
    return plan.Plan(ImdbConfig(**sizes, adap_kl_ctrl=False, **changes), config, 5, gpus)


def test_counts_are_those_of_a_real_model(small):
    config, lm = model_config(str(small / "lm")), load_language_model(str(small / "lm")).lm
    counted = planned(config, method="ppo")
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
    p = planned(GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=10, n_positions=64))
    # a layer: norms 4 x 8, attention 8 x 24 + 24 + 8 x 8 + 8, MLP 8 x 32 + 32 + 32 x 8 + 8; then
    # embeddings 10 x 8 and 64 x 8, and the last norm 2 x 8
    assert p.weights == 3 * (32 + 192 + 24 + 64 + 8 + 256 + 32 + 256 + 8) + 80 + 512 + 16
    assert p.tokens == 2 * 8 and p.logprobs == 4 * 6 * 10
    phases = p.phases()
    assert phases["state"] == 4 * p.weights * 7                 # the reference; two of weights and moments
    cache = 4 * 4 * (2 * 3 * 8) * (8 + 32)
    assert phases["sample"] == phases["state"] + cache + 4 * 10 * 16
    assert phases["score"] == phases["state"] + 5 * p.logprobs
    assert phases["update"] == phases["state"] + 4 * p.weights + 16 * p.saved_per_token + 3 * p.logprobs + 320


def test_bfloat16_halves_what_it_may_and_adds_casts():
    onednn.remove()                         # of other tests: with it attention may stay in float32
    shape = LlamaConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=128, vocab_size=100,
                        num_attention_heads=4, num_key_value_heads=2)
    single, half = (planned(shape, dtype, method="ppo") for dtype in ("float32", "bfloat16"))
    assert single.weights == half.weights
    assert 0.4 < half.saved_per_token / single.saved_per_token < 0.8
    cache = 4 * 4 * (2 * 3 * 2 * 16) * 40                       # 2 heads of 16 for keys and for values
    drawn, casts = 4 * 100 * 16, 2 * (half.weights - 6400)
    assert single.phases()["sample"] - single.phases()["state"] == cache + drawn
    assert half.phases()["sample"] - half.phases()["state"] == cache // 2 + drawn + casts


def test_gpus_by_hand(problems):
    lm = load_language_model(str(problems / "lm")).lm
    alone, sharded = (planned(lm.config, "bfloat16", 4, shard=shard) for shard in (False, True))
    layers = sum(p.numel() for p in lm.model.layers.parameters() if p.dim() > 1)
    assert sharded.layers == layers and sharded.weights == sum(p.numel() for p in lm.parameters())
    held = sharded.weights - layers + layers / 4
    assert sharded.parts()["moments"] == 2 * 2 * 4 * held
    assert alone.parts()["moments"] == 16 * alone.weights and (alone.rows, alone.tokens) == (1, 8)
    phases = alone.phases()
    assert phases["update"] == phases["state"] + 3 * 4 * alone.weights      # a gradient, two copies to sum it
    assert sharded.phases()["load"] == 2 * 4 * sharded.weights + sharded.parts()["policies"]


def test_adapters_are_as_large_as_peft_makes_them(problems):
    lm = load_language_model(str(problems / "lm")).lm
    half = planned(lm.config, "bfloat16", lora=True, lora_rank=3)
    add_adapter(lm, "llm1", half.cfg, 0)
    assert half.trained == sum(p.numel() for p in adapter_parameters(lm, "llm1").values())
    head = half.config.vocab_size * half.config.hidden_size
    assert half.parts()["reference"] == 2 * half.weights + 2 * head                 # the head in float32
    quarter = planned(lm.config, "bfloat16", lora=True, lora_rank=3, load_in_4bit=True)
    saved = half.parts()["reference"] - quarter.parts()["reference"]
    assert saved == pytest.approx((2 - 0.5 - 4 / 64) * half.layers, abs=1)
    assert quarter.parts()["policies"] == 2 * 4 * half.trained


def test_the_table_and_its_card(capsys):
    plan.main("imdb --preset gpt2 --dtype float32 --method ppo".split())
    head, _, row = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert head[0] == "gpt2, 124M, float32" and row[-1] == "16 GB"
    state, sample, score, update = map(float, row[2:6])
    assert state == pytest.approx(4 * 4 * 0.1244e9 / 2**30, abs=0.1) and update > sample > state < score


@pytest.mark.parametrize("argv, says", [
    ("imdb --preset gpt2 --model no/model", "model is 'no/model': is neither a local folder nor"),
    ("gsm8k --preset llama2-7b --shard true", "shard is True: 4 bits cannot be divided"),
    ("gsm8k --gpus 0", "gpus is 0: must be 1 or more"), ("chess", "invalid choice: 'chess'")])
def test_bad_requests_exit_2_with_one_line(argv, says, capsys):
    assert says in error_line(plan.main, argv.split(), capsys)
