"""The rollout: what policy, reference and critic make of responses; rows taken and joined."""
from dataclasses import dataclass, replace

import pytest
import torch
from toys import PROMPTS, agent_of, close, moved, tiny_gpt2

from cory.ppo import rollout, sampling
from cory.ppo.rollout import Rollout, join, take
from cory.ppo.sampling import add_logprobs, collect_rollout


def same_rows(a: Rollout, b: Rollout, tolerance=0.0) -> None:
    assert a.text == b.text and a.present().keys() == b.present().keys()
    for name, x in a.present().items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, getattr(b, name), atol=tolerance, rtol=tolerance, msg=name)


def test_the_sampling_gap_is_the_mean_difference_of_real_tokens():
    drawn = collect_rollout(agent_of(tiny_gpt2()), PROMPTS, PROMPTS, 12)
    apart = 0.5 * (-1) ** torch.arange(drawn.mask_BT.shape[1])          # though not in the mean
    sampled_BT = drawn.logp_BT + apart * drawn.mask_BT
    assert replace(drawn, sampling_logp_BT=sampled_BT).sampling_gap == pytest.approx(0.5)


def test_the_policy_that_is_scored_is_the_one_sampled_from_however_rows_are_divided(monkeypatch):
    agent = moved(agent_of(tiny_gpt2()))
    whole = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    assert len(set(whole.mask_BT.sum(1).tolist())) > 3 and whole.kl_B.min() > 1e-3
    assert whole.sampling_gap < 1e-5
    unmoved = add_logprobs(whole, agent_of(agent.base).policy, agent.base, "full", 8)
    close(unmoved.logp_BT, whole.ref_logp_BT, 1e-5)
    assert unmoved.kl_BT.abs().max() < 1e-6
    monkeypatch.setitem(rollout.MAX_TOKENS_PER_PASS, "cpu", 20)
    monkeypatch.setitem(rollout.MAX_LOGITS_PER_PASS, "cpu", 5 * 7)
    monkeypatch.setitem(sampling.MAX_SAMPLING_BYTES, "cpu", 8000)                # a few rows at a time
    agent.rng_count = 0                                         # the same random numbers again
    same_rows(whole, collect_rollout(agent, PROMPTS, PROMPTS, 12), 1e-5)
    assert collect_rollout(agent, PROMPTS, PROMPTS, 12).text != whole.text


def test_a_base_responds_in_place_of_its_agent_by_other_random_numbers():
    agent = moved(agent_of(tiny_gpt2()))
    one, two = [collect_rollout(agent, PROMPTS, PROMPTS, 12, policy=agent.base) for _ in range(2)]
    assert one.text != two.text and one.kl_BT.abs().max() == two.kl_BT.abs().max() == 0


@dataclass(frozen=True)
class Scored(Rollout):
    bonus_B: torch.Tensor | None = None                     # fields of one's own
    own_BT: torch.Tensor | None = None
    note: list[str] | None = None


@pytest.mark.parametrize("advantage", ["gae", "reinforce"])
def test_what_is_taken_apart_and_joined_is_as_it_was(advantage):
    """The parts hold no padding that they do not need."""
    drawn = collect_rollout(moved(agent_of(tiny_gpt2(), advantage=advantage)), PROMPTS, PROMPTS, 12)
    whole = Scored(**vars(drawn), bonus_B=torch.arange(8.0), own_BT=2 * drawn.mask_BT, note=[*"abcdefgh"])
    parts = [take(whole, torch.tensor(rows)) for rows in ([0, 1], [2], [3, 4, 5, 6, 7])]
    for part in parts:
        for mask in (part.prompt_mask_BP, part.mask_BT):
            assert mask.shape[1] == mask.sum(1).max()
    assert parts[1].note == ["c"] and join(parts).note == whole.note
    same_rows(join(parts), whole)
