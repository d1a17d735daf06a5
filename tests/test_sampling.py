"""The sampling loop: prompts and masks, what is drawn, rows that have ended, what crosses as text."""
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import LETTERS, agent_of, bigram, close, generator, tiny_gpt2
from transformers import DynamicLayer, GenerationConfig

from cory.errors import UserError
from cory.ppo import sampling
from cory.ppo.sampling import collect_rollout, draw, encode_prompts, sample_tokens

RAGGED = ["a", "abcdefabc", "dd", "fedcba", "e"] * 4


def path_model(path: str):
    """A bigram that surely walks along the letters of the path; "." is EOS."""
    logits = torch.full((7, 7), -200.0)
    logits[:, 6] = -100.0
    ids = [LETTERS.index(letter) for letter in path]
    logits[ids[:-1], ids[1:]] = 200.0
    return bigram(logits)


def uniform_numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator(), dtype=torch.float64)


def sampled(model, prompts: list[str], limit: int):
    uniform_TB = uniform_numbers(limit, len(prompts))
    return sample_tokens(model, prompts, ["q"] * len(prompts), limit, uniform_TB)


@pytest.mark.parametrize("prompt, limit, ids, text", [
    ("a", 5, [1, 2, 6], "bc"),          # the first EOS is a real token of the response, not of its text
    ("aba", 2, [1, 2], "bc"),           # cut by the limit before EOS
    (".a", 4, [1, 2, 6], "bc"),         # an EOS inside a prompt survives and stops nothing
    ("c", 3, [6], "")])                 # a response that is nothing but EOS still has one token
def test_mask_and_text_of_responses(prompt, limit, ids, text):
    drawn = sampled(path_model("abc."), [prompt], limit)
    assert drawn.query == ["q"]
    prompt_ids = [LETTERS.index(letter) for letter in prompt]
    assert drawn.prompt_BP.tolist() == [prompt_ids]
    assert drawn.prompt_mask_BP.all()
    assert drawn.response_BT.tolist() == [ids]
    assert drawn.mask_BT.sum() == len(ids)
    assert drawn.text == [text]
    assert drawn.truncated_B.tolist() == [ids[-1] != 6]


def test_a_prompt_must_leave_the_response_room():
    model = tiny_gpt2(n_positions=40)
    encode_prompts(model, ["a" * 34], 6)
    with pytest.raises(UserError, match="prompt is '': has 0 tokens, and must have 1 to 34"):
        encode_prompts(model, ["a", ""], 6)
    with pytest.raises(UserError, match="has 35 tokens, and must have 1 to 34"):
        encode_prompts(model, ["a", "a" * 35], 6)


@pytest.mark.parametrize("eos_token_id, end_ids, text", [
    (None, {6}, "ecabd"),
    (0, {0, 6}, "eca"),
    ([6, 2], {2, 6}, "ec")])
def test_a_response_ends_at_each_end_token_that_the_model_lists(eos_token_id, end_ids, text):
    """A chat model may end its turn with another token than its tokenizer's EOS."""
    model = path_model("fecabd.")
    model.lm.generation_config = GenerationConfig(eos_token_id=eos_token_id)
    assert model.end_ids == end_ids
    assert sampled(model, ["f"], 9).text == [text]


def draw_with(uniform, p):
    """(token, log-probability) that `draw` makes of each of the uniform numbers."""
    uniform_B = torch.as_tensor(uniform, dtype=torch.float64)
    logp_V = p.log().float()
    logp_BV = logp_V.expand(len(uniform_B), -1)
    return draw(logp_BV, uniform_B)


def test_draw_follows_the_distribution_and_never_draws_what_has_probability_zero():
    p = torch.tensor([0, 0.2, 0, 0.5, 0.3, 0])
    n = 100_000
    token, logp = draw_with(uniform_numbers(n), p)
    share = torch.bincount(token, minlength=6) / n
    deviation = (p * (1 - p) / n).sqrt()            # 0 where p is 0
    error = (share - p).abs()
    assert (error <= 3 * deviation).all()
    close(logp, p.log()[token])
    largest = 1 - 2**-53
    token, _ = draw_with([0, largest, 1], p)                    # even one that has been rounded to 1
    assert token.tolist() == [1, 4, 4]


def test_an_edit_of_draw_has_the_log_probability_of_what_it_drew_from(monkeypatch):
    """Here the least likely token is ruled out, as by top-p: 0.3 and 0.5 become 3/8 and 5/8."""
    p = torch.tensor([0.3, 0.5, 0.2])
    softmax = torch.Tensor.softmax

    def edited(logp_BV, dim):
        return softmax(logp_BV, dim) * (p > 0.25)

    monkeypatch.setattr(torch.Tensor, "softmax", edited)
    token, logp = draw_with([0, 0.374, 0.376], p)
    assert token.tolist() == [0, 0, 1]
    assert logp.dtype == torch.float32
    close(logp.exp(), [0.375, 0.375, 0.625])


def test_tokens_of_very_small_probability_are_drawn_as_often_as_they_should():
    """24 bits would never draw them: p = 3e-9 each for 100 tokens, beside one that takes the rest."""
    p = torch.full((101,), 3e-9, dtype=torch.float64)
    p[0] = 1 - 100 * 3e-9
    middle = torch.arange(100, dtype=torch.float64) + 0.5       # of the share of each token
    token, _ = draw_with(1 - 3e-9 * middle, p)
    assert len(token.unique()) > 80
    assert (token[:80] != 0).all()


@pytest.mark.parametrize("interval", [1, 7, 100])
def test_a_row_is_sampled_as_if_it_were_alone(interval, in_float64, monkeypatch):
    """By its own random numbers, whichever rows stand beside it or have been dropped."""
    model = tiny_gpt2()
    limit = 10
    monkeypatch.setitem(sampling.EOS_CHECK_INTERVAL, "cpu", interval)
    drawn = sampled(model, RAGGED, limit)
    lengths = drawn.mask_BT.sum(1).int().tolist()
    assert {1, limit} < {*lengths}
    assert drawn.sampling_logp_BT.min() < -2                    # not all tokens are likely
    padding = drawn.response_BT[drawn.mask_BT == 0]
    assert (padding == 0).all()
    monkeypatch.setitem(sampling.EOS_CHECK_INTERVAL, "cpu", 1)
    uniform_TB = uniform_numbers(limit, len(RAGGED))
    for row, length in enumerate(lengths):
        prompt = [RAGGED[row]]
        real = row, slice(length)
        alone = sample_tokens(model, prompt, prompt, limit, uniform_TB[:, [row]])
        assert torch.equal(alone.response_BT[0], drawn.response_BT[real])
        close(alone.sampling_logp_BT[0], drawn.sampling_logp_BT[real], 1e-5)


def test_no_token_copies_the_keys_and_values_of_those_before_it(monkeypatch):
    class Concatenations(TorchDispatchMode):
        shapes = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            if function is torch.ops.aten.cat.default:
                self.shapes.append(tuple(result.shape))
            return result

    with Concatenations() as concatenations:
        sampled(tiny_gpt2(), ["ab", "a"], 5)
    assert all(len(shape) < 4 for shape in concatenations.shapes)
    monkeypatch.setattr(sampling, "RoomyLayer", lambda room: DynamicLayer())
    with Concatenations() as copies:                            # by transformers' own cache
        sampled(tiny_gpt2(), ["ab", "a"], 5)
    assert any(len(shape) == 4 for shape in copies.shapes)


def reversed_rows(model, prompts, queries, max_new_tokens, uniform_TB):
    return sample_tokens(model, prompts[::-1], queries[::-1], max_new_tokens, uniform_TB)


def test_a_sampler_must_return_the_rows_in_their_order():
    agent = agent_of(tiny_gpt2(), sampler="test_sampling:reversed_rows")
    with pytest.raises(UserError, match="a rollout has other queries than it was given"):
        collect_rollout(agent, ["a", "b"], ["1", "2"], 3)


def test_rows_that_have_ended_are_dropped():
    model = tiny_gpt2()
    model.hidden_states = Mock(wraps=model.hidden_states)
    lengths = sampled(model, RAGGED, 20).mask_BT.sum(1)
    calls = model.hidden_states.call_args_list
    assert len(calls) == lengths.max()
    for step, call in enumerate(calls):                         # at most a quarter of its rows has ended
        rows = len(call.args[0])
        running = (lengths > step).sum()
        assert running <= rows <= max(running / 0.75, running + 1)


@pytest.mark.parametrize("prompts", ["ab", [*"abc"]])
def test_prompts_that_are_no_list_of_one_for_each_query_are_refused(prompts):
    with pytest.raises(UserError, match="there must be a list of 2 prompts"):
        collect_rollout(agent_of(bigram()), prompts, ["a", "b"], 3)
