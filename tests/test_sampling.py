"""The sampling loop: what is masked, what distribution is drawn from, what crosses as text."""
import pytest
import torch
from toys import LetterTokenizer, agent_of, bigram, settings

from cory.errors import UserError
from cory.model import load_language_model
from cory.rollout import rollout
from cory.sampling import decode, draw, encode_prompts, sample


def path_model(*letters) -> torch.Tensor:
    """Logits of a bigram that surely walks along the letters; "." is EOS."""
    logits = torch.full((7, 7), -200.0)
    logits[:, 6] = -100.0
    for a, b in zip(letters, letters[1:]):
        logits["abcdef.".index(a), "abcdef.".index(b)] = 200.0
    return logits


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("prompt, limit, ids, mask, text", [
    ("a", 5, [1, 2, 6], [1, 1, 1], "bc"),               # the first EOS is a real token of the response, not of its text
    ("aba", 2, [1, 2], [1, 1], "bc"),                   # cut by the limit before EOS
    (".a", 4, [1, 2, 6], [1, 1, 1], "bc"),              # an EOS inside a prompt survives and stops nothing
    ("c", 3, [6], [1], ""),                             # a response that is nothing but EOS still has one token
])
def test_mask_and_text_of_responses(prompt, limit, ids, mask, text):
    model = bigram(path_model(*"abc."))
    prompts = encode_prompts(model, [prompt], limit)
    assert prompts.ids_BP.tolist() == [LetterTokenizer()([prompt])["input_ids"][0]] and prompts.mask_BP.min() == 1
    drawn = sample(model, prompts, limit, generator())
    assert drawn.response_BT.tolist() == [ids] and drawn.mask_BT.tolist() == [mask]
    assert decode(model, drawn.response_BT, drawn.mask_BT) == [text]


def test_rows_that_end_early_are_padded_behind_their_eos_and_the_pad_is_masked():
    model = bigram(path_model(*"abcdef."))
    drawn = sample(model, encode_prompts(model, ["f", "d", "a"], 4), 4, generator())
    assert drawn.response_BT.tolist() == [[6, 6, 6, 6], [4, 5, 6, 6], [1, 2, 3, 4]]
    assert drawn.mask_BT.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert (drawn.logp_BT[drawn.mask_BT == 0] == 0).all()


def test_draw_follows_the_distribution_and_never_takes_what_has_probability_zero():
    p = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    n = 100_000
    token = draw(p.log().expand(n, 6), torch.rand(n, generator=generator()))
    share = torch.bincount(token, minlength=6) / n
    assert ((share - p).abs() <= 3 * (p * (1 - p) / n).sqrt()).all() and share[p == 0].sum() == 0
    extremes = torch.tensor([0.0, 1 - 2**-24, 1.0])                     # even a uniform number that rounds to 1
    assert draw(p.log().expand(3, 6), extremes).tolist() == [1, 4, 4]


def test_logprobs_kept_while_sampling_equal_those_recomputed(small):
    for temperature in (1.0, 0.7):
        base = load_language_model(str(small / "lm"), temperature)
        agent = agent_of(base, temperature=temperature)
        turn = rollout(agent, base, ["a", "some longer prompt", "xy", "z" * 30] * 2, 12, settings())
        drawn = sample(agent.policy, encode_prompts(agent.policy, ["a", "some longer prompt"], 12), 12, generator())
        assert turn.sampling_gap < 1e-5 and drawn.logp_BT.min() < -1     # the random model is not sure of anything
        hidden = base.response_hidden(*encode_prompts(base, ["a", "some longer prompt"], 12), drawn.response_BT)
        again = base.logprobs(hidden).gather(-1, drawn.response_BT[..., None]).squeeze(-1)
        torch.testing.assert_close(drawn.logp_BT, again * drawn.mask_BT, atol=1e-4, rtol=1e-4)


def test_sampling_is_a_function_of_the_generator_alone(small):
    model = load_language_model(str(small / "lm"))
    prompts = encode_prompts(model, ["one", "another"], 8)
    torch.manual_seed(1)
    first = sample(model, prompts, 8, generator(5))
    torch.manual_seed(2)
    assert torch.equal(first.response_BT, sample(model, prompts, 8, generator(5)).response_BT)
    assert not torch.equal(first.response_BT, sample(model, prompts, 8, generator(6)).response_BT)


def test_only_text_crosses_and_ids_are_never_made_again_from_it(small):
    """Sampled bytes that are no UTF-8, and EOS, change the text; the ids trained on stay those sampled."""
    base = load_language_model(str(small / "lm"))
    ids = torch.tensor([[0xC3, 256, 256]])
    text = decode(base, ids, torch.tensor([[1.0, 1.0, 0.0]]))[0]
    assert "<|endoftext|>" not in text
    agent = agent_of(base)
    turn = rollout(agent, base, ["ab"] * 8, 8, settings())
    again = sample(agent_of(base).policy, encode_prompts(base, ["ab"] * 8, 8), 8, agent_of(base).generator)
    assert torch.equal(turn.response_BT, again.response_BT)
    assert any("\ufffd" in t for t in turn.text)                         # random bytes: the text alone could not give them back


def test_prompts_beyond_the_context_or_empty_are_refused_with_numbers(small):
    model = load_language_model(str(small / "lm"))
    with pytest.raises(UserError, match="155 tokens \\+ 6 of response exceed the model's context of 160"):
        encode_prompts(model, ["x" * 155], 6)
    encode_prompts(model, ["x" * 154], 6)
    with pytest.raises(UserError, match="no tokens"):
        encode_prompts(model, ["a", ""], 6)
