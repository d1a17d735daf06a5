"""The sampling loop: prompts and masks, what is drawn, rows that have ended, what crosses as text."""
from unittest.mock import Mock

import pytest
import torch
from toys import LETTERS, agent_of, bigram, close, generator, tiny_gpt2
from transformers import GenerationConfig

from cory.errors import UserError
from cory.ppo import sampling
from cory.ppo.sampling import collect_rollout, draw, encode_prompts, sample_tokens

RAGGED = ["a", "abcdefabc", "dd", "fedcba", "e"] * 4


def path_model(*letters: str) -> torch.Tensor:
    """Logits of a bigram that surely walks along the letters; "." is EOS."""
    logits = torch.full((7, 7), -200.0)
    logits[:, 6] = -100.0
    for a, b in zip(letters, letters[1:]):
        logits[LETTERS.index(a), LETTERS.index(b)] = 200.0
    return logits


def numbers(limit: int, rows: int) -> torch.Tensor:
    return torch.rand(limit, rows, generator=generator(), dtype=torch.float64)


def sampled(model, prompts: list[str], limit: int, greedy=False):
    return sample_tokens(model, prompts, prompts, limit, None if greedy else numbers(limit, len(prompts)))


@pytest.mark.parametrize("prompt, limit, ids, text", [
    ("a", 5, [1, 2, 6], "bc"),          # the first EOS is a real token of the response, not of its text
    ("aba", 2, [1, 2], "bc"),           # cut by the limit before EOS
    (".a", 4, [1, 2, 6], "bc"),         # an EOS inside a prompt survives and stops nothing
    ("c", 3, [6], "")])                 # a response that is nothing but EOS still has one token
def test_mask_and_text_of_responses(prompt, limit, ids, text):
    drawn = sampled(bigram(path_model(*"abc.")), [prompt], limit)
    assert drawn.prompt_BP.tolist() == [[LETTERS.index(letter) for letter in prompt]]
    assert drawn.prompt_mask_BP.min() == 1 and drawn.text == [text]
    assert drawn.response_BT.tolist() == [ids] and drawn.mask_BT.tolist() == [[1] * len(ids)]
    assert drawn.truncated_B.tolist() == [ids[-1] != 6] and drawn.query == [prompt]


def test_a_prompt_must_leave_the_response_room():
    model = tiny_gpt2(n_positions=40)
    encode_prompts(model, ["a" * 34], 6)
    with pytest.raises(UserError, match="35 tokens .* 6 of response exceed the model's context of 40"):
        encode_prompts(model, ["a", "a" * 35], 6)


@pytest.mark.parametrize("listed, ends", [(None, {6}), (0, {0, 6}), ([6, 2], {2, 6})])
def test_every_end_of_turn_that_the_model_knows_ends_a_response(listed, ends):
    """A chat model may end its turn with another token than its tokenizer's EOS."""
    model = bigram(path_model(*"fedcba."))
    model.lm.generation_config = GenerationConfig(eos_token_id=listed)
    assert model.end_ids == ends
    assert sampled(model, ["f"], 9).text == [{6: "edcba", 0: "edcba", 2: "edc"}[min(ends)]]


def test_draw_follows_the_distribution_and_never_takes_what_has_probability_zero():
    p = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    n = 100_000
    token, logp = draw(p.log().expand(n, 6), torch.rand(n, generator=generator(), dtype=torch.float64))
    share = torch.bincount(token, minlength=6) / n
    assert ((share - p).abs() <= 3 * (p * (1 - p) / n).sqrt()).all() and share[p == 0].sum() == 0
    extremes = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)    # even one that rounds to 1
    assert draw(p.log().expand(3, 6), extremes)[0].tolist() == [1, 4, 4]
    close(logp, p.log()[token])


def test_an_edit_of_draw_has_the_log_probability_of_what_it_drew_from(monkeypatch):
    """Here the least likely token is ruled out, as by top-p: 0.3 and 0.5 become 3/8 and 5/8."""
    p, softmax = torch.tensor([0.3, 0.5, 0.2]), torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: softmax(x, dim) * (p > 0.25))
    token, logp = draw(p.log().expand(3, 3), torch.tensor([0.0, 0.374, 0.376], dtype=torch.float64))
    assert token.tolist() == [0, 0, 1] and logp.dtype == torch.float32
    close(logp.exp(), [3 / 8, 3 / 8, 5 / 8])


def test_tokens_of_very_small_probability_are_drawn_as_often_as_they_should():
    """24 bits would never draw them: p = 3e-9 each for 100 tokens, beside one that takes the rest."""
    p = torch.full((101,), 3e-9, dtype=torch.float64)
    p[0] = 1 - 100 * 3e-9
    uniform = 1 - 3e-9 * (torch.arange(100, dtype=torch.float64) + 0.5)     # the middle of each share
    tokens = draw(p.log().float().expand(100, 101), uniform)[0].tolist()
    assert len(set(tokens)) > 80 and 0 not in tokens[:80]


@pytest.mark.parametrize("every", [1, 7, 100])
def test_a_row_is_sampled_as_if_it_were_alone(every, monkeypatch):
    """By its own random numbers, whoever stands beside it or has been dropped."""
    model, limit = tiny_gpt2(), 10
    uniform_TB, interval = numbers(limit, len(RAGGED)), sampling.EOS_CHECK_INTERVAL
    monkeypatch.setitem(interval, "cpu", every)
    drawn = sampled(model, RAGGED, limit)
    lengths = drawn.mask_BT.sum(1).int().tolist()
    assert min(lengths) == 1 and max(lengths) == limit and len(set(lengths)) > 5
    assert drawn.sampling_logp_BT.min() < -2                    # it is not sure of all
    assert (drawn.response_BT[drawn.mask_BT == 0] == 0).all()
    monkeypatch.setitem(interval, "cpu", 1)
    for row, length in enumerate(lengths):
        alone = sample_tokens(model, RAGGED[row:row + 1], ["q"], limit, uniform_TB[:, row:row + 1])
        assert torch.equal(alone.response_BT[0], drawn.response_BT[row, :length])
        close(alone.sampling_logp_BT[0], drawn.sampling_logp_BT[row, :length], 1e-5)


def test_rows_that_have_ended_are_dropped():
    model = tiny_gpt2()
    model.hidden_states = Mock(wraps=model.hidden_states)
    lengths = sampled(model, RAGGED, 20).mask_BT.sum(1)
    masks = [ids_and_mask[1] for ids_and_mask, _ in model.hidden_states.call_args_list]
    assert len(masks) == lengths.max()
    for step, mask_RL in enumerate(masks):                      # at most a quarter of its rows has ended
        running = int((lengths > step).sum())
        assert running <= len(mask_RL) <= max(running / 0.75, running + 1)


def test_prompts_that_are_no_list_of_one_for_each_query_are_refused():
    for prompts in ("ab", ["a", "b", "c"]):
        with pytest.raises(UserError, match="there must be a list of 2 prompts"):
            collect_rollout(agent_of(bigram()), prompts, ["a", "b"], 3)
