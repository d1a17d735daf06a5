"""The model as a policy: padding, alignment, dropout, precision."""
import pytest
import torch
from toys import bigram, read, settings
from transformers import AutoModelForCausalLM

from cory.config import Precision
from cory.ppo.agent import Agent
from cory.ppo.formulas import token_logprobs
from cory.ppo.loading import load_language_model
from cory.ppo.model import PolicyWithValue
from cory.ppo.precision import multiply
from cory.ppo.rollout import collect_rollout
from cory.ppo.sampling import encode_prompts


def test_a_row_alone_equals_the_same_row_in_a_padded_batch(small):
    """Prompts are padded on the left, responses on the right; neither may be felt."""
    model = load_language_model(str(small / "lm"))
    prompts, response = ["a", "a much longer prompt than that", "xyz"], torch.randint(0, 256, (3, 6))
    together = model.response_hidden(*encode_prompts(model, prompts, 6), response)
    for row, (prompt, length) in enumerate(zip(prompts, (6, 3, 1))):
        alone = model.response_hidden(*encode_prompts(model, [prompt], 6), response[row : row + 1, :length])
        torch.testing.assert_close(together[row, :length], alone[0], atol=1e-5, rtol=1e-5)


def test_logprob_t_belongs_to_response_token_t():
    """Against log-probabilities read off the bigram table by hand."""
    model = bigram()
    table = model.lm.head.weight.T.log_softmax(-1)
    response = torch.tensor([[2, 5, 0], [1, 1, 3]])  # after the prompts "ab" and "d": last letters b, d
    logp = model.logprobs(model.response_hidden(*encode_prompts(model, ["ab", "d"], 3), response))
    logp = token_logprobs(logp.flatten(0, 1), response.flatten()).view(2, 3)
    torch.testing.assert_close(logp, table[[[1, 2, 5], [3, 1, 1]], response])


def test_matches_transformers_own_forward_and_applies_the_temperature(small):
    """Also where gelu_new is computed as the same function by another name."""
    assert read(small / "lm" / "config.json")["activation_function"] == "gelu_new"
    model, hot = (load_language_model(str(small / "lm"), temperature) for temperature in (1.0, 2.0))
    prompts = encode_prompts(model, ["hello there"], 4)
    response = torch.tensor([[10, 20, 30, 40]])
    plain = AutoModelForCausalLM.from_pretrained(small / "lm").eval()
    theirs = plain(torch.cat([prompts.ids_BP, response], 1)).logits[:, -5:-1]
    for ours, logits in ((model, theirs), (hot, theirs / 2)):
        logp = ours.logprobs(ours.response_hidden(*prompts, response))
        torch.testing.assert_close(logp, logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_dropout_is_off_while_gradients_flow(small):
    assert read(small / "lm" / "config.json")["resid_pdrop"] == 0.1
    policy = PolicyWithValue(load_language_model(str(small / "lm"))).requires_grad_(True)
    prompts, response = encode_prompts(policy, ["abc"], 4), torch.tensor([[1, 2, 3, 4]])
    first, second = (policy.response_hidden(*prompts, response) for _ in range(2))
    assert first.requires_grad and torch.equal(first, second)


def test_value_head_starts_at_zero_in_float32_and_agents_start_as_copies(small):
    base = load_language_model(str(small / "lm"))
    one, two = (Agent(name, base, settings(), i) for i, name in enumerate(("llm1", "llm2")))
    for (name, p), (_, q) in zip(one.policy.named_parameters(), two.policy.named_parameters()):
        assert torch.equal(p, q) and p.data_ptr() != q.data_ptr() and p.requires_grad, name
    hidden = torch.randn(2, 3, 32)
    assert one.policy.value_head.weight.dtype == torch.float32 and (one.policy.values(hidden) == 0).all()
    one.policy.value_head.weight.data[0, 5] = 2.0
    torch.testing.assert_close(one.policy.values(hidden), 2 * hidden[..., 5])
    assert not any(p.requires_grad for p in base.parameters())


@pytest.fixture
def rounded(monkeypatch):
    """The head's inputs rounded as the precision says, on processors too that leave them as they are."""

    def rounding(a_MK, b_KN, precision):
        if precision == "bfloat16":
            a_MK, b_KN = a_MK.bfloat16().float(), b_KN.bfloat16().float()
        return multiply(a_MK, b_KN, "float32")

    monkeypatch.setattr("cory.ppo.model.multiply", rounding)


@pytest.mark.parametrize("head", ["float32", "bfloat16"])
def test_bfloat16_keeps_the_ratio_of_an_untouched_policy_near_1(small, rounded, head):
    base = load_language_model(str(small / "lm"), precision=Precision("bfloat16", head))
    cfg = settings(dtype="bfloat16")
    agent = Agent("llm1", base, cfg, 0)
    turn = collect_rollout(agent, ["a film", "one story of a man"] * 4, 6)
    logp = agent.policy.logprobs(
        agent.policy.response_hidden(turn.prompt_BP, turn.prompt_mask_BP, turn.response_BT).flatten(0, 1))
    assert logp.dtype == torch.float32
    logp = token_logprobs(logp, turn.response_BT.flatten()).view_as(turn.logp_BT)
    assert ((logp - turn.logp_BT) * turn.mask_BT).exp().sub(1).abs().max() < 1e-2
    assert turn.sampling_gap < 2e-2 and turn.kl_BT.abs().max() == 0
    assert all(p.dtype == torch.float32 for p in agent.policy.parameters())


@pytest.mark.parametrize("offset", ["one unit", "spread"])
@pytest.mark.parametrize("head, tolerance", [("float32", 0.1), ("bfloat16", 0.5)])
def test_low_precision_keeps_log_probabilities_where_all_logits_lie_near_minus_100(
    small, rounded, head, tolerance, offset):
    """As GPT-2's do; neighbouring bfloat16 numbers are 0.5 apart there, so that a product rounded to them
    would be lost, while rounded inputs are not. The offset comes from one large hidden unit, or from many.
    """
    logps = {}
    for precision in (Precision(), Precision("bfloat16", head)):
        model = load_language_model(str(small / "lm"), precision=precision)
        units = slice(0, 1) if offset == "one unit" else slice(0, 32)
        count = 32 if offset == "spread" else 1
        model.lm.transformer.ln_f.bias.data[units] += 100 / count**0.5
        model.lm.transformer.wte.weight.data[:, units] -= 1 / count**0.5
        prompts = encode_prompts(model, ["a film of"], 5)
        hidden = model.response_hidden(*prompts, torch.tensor([[1, 2, 3, 4, 5]])).flatten(0, 1)
        logps[precision] = model.logprobs(hidden)
        assert model.lm.get_output_embeddings()(hidden.float()).mean() < -80
    exact, low = logps.values()
    assert 0 < (low - exact).abs().max() < tolerance


def test_products_of_the_head_are_float32_and_the_setting_lasts_no_longer(small):
    """Also within autocast, which would round the result."""
    a, b = torch.randn(20, 30), torch.randn(30, 40)
    before = torch.backends.mkldnn.matmul.fp32_precision
    for precision in ("float32", "bfloat16"):
        with torch.autocast("cpu", torch.bfloat16):
            y = multiply(a, b, precision)
        assert y.dtype == torch.float32
        close = {"float32": dict(atol=1e-5, rtol=1e-5), "bfloat16": dict(atol=0.1, rtol=0.05)}[precision]
        torch.testing.assert_close(y, a @ b, **close)
        assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_the_head_is_told_its_precision_in_sampling_and_in_the_update(small, monkeypatch):
    asked = []
    monkeypatch.setattr("cory.ppo.model.multiply", lambda a, b, precision: asked.append(precision) or a @ b)
    model = load_language_model(str(small / "lm"), precision=Precision("float32", "bfloat16"))
    model.requires_grad_(True)
    model.logprobs(torch.randn(3, 32))
    hidden = torch.randn(3, 32, requires_grad=True)
    model.logp_and_entropy(hidden, torch.tensor([1, 2, 3]))[0].sum().backward()
    assert asked == ["bfloat16"] * 4


def test_a_value_head_draws_no_random_number_and_log_probabilities_no_gradient(small):
    base = load_language_model(str(small / "lm"))
    before = torch.get_rng_state()
    policy = PolicyWithValue(base)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(RuntimeError, match="derivative|autograd|automatic differentiation"):
        policy.logprobs(torch.randn(2, 32)).sum().backward()
