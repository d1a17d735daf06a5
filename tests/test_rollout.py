"""The rollout: what policy, reference and critic compute for responses; rows taken and joined."""
from dataclasses import dataclass, replace

import pytest
import torch
from toys import PROMPTS, agent_of, close, moved, tiny_gpt2

from cory.ppo import rollout, sampling
from cory.ppo.rollout import Rollout, join, take
from cory.ppo.sampling import add_logprobs, collect_rollout


def require_same_rows(a: Rollout, b: Rollout, tolerance=0.0) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if x is None or isinstance(x, list):
            assert x == y
        else:
            torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance, msg=name)


def test_the_sampling_gap_is_the_mean_absolute_difference_over_real_tokens():
    drawn = collect_rollout(agent_of(tiny_gpt2()), PROMPTS, PROMPTS, 12)
    signs_BT = torch.ones_like(drawn.mask_BT)
    signs_BT[:, ::2] = -1
    sampling_logp_BT = drawn.logp_BT + 0.5 * signs_BT * drawn.mask_BT
    shifted = replace(drawn, sampling_logp_BT=sampling_logp_BT)
    assert shifted.sampling_gap == pytest.approx(0.5)


def test_the_policy_that_is_scored_is_the_one_sampled_from_however_rows_are_divided(in_float64, monkeypatch):
    agent = moved(agent_of(tiny_gpt2()))
    whole = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    assert len(whole.mask_BT.sum(1).unique()) > 2
    assert whole.kl_B.min() > 1e-3
    assert whole.sampling_gap < 1e-5
    unmoved = add_logprobs(whole, agent_of(agent.base).policy, agent.base, "full", 8)
    close(unmoved.logp_BT, whole.ref_logp_BT, 1e-5)
    assert unmoved.kl_BT.abs().max() < 1e-6
    monkeypatch.setitem(rollout.MAX_TOKENS_PER_PASS, "cpu", 20)
    monkeypatch.setitem(rollout.MAX_LOGITS_PER_PASS, "cpu", 5 * 7)
    monkeypatch.setitem(sampling.MAX_SAMPLING_BYTES, "cpu", 8000)                # a few rows at a time
    agent.rng_count = 0                                         # the same random numbers again
    require_same_rows(whole, collect_rollout(agent, PROMPTS, PROMPTS, 12), 1e-5)
    assert collect_rollout(agent, PROMPTS, PROMPTS, 12).text != whole.text


@pytest.mark.parametrize("module, name", [
    (sampling, "MAX_SAMPLING_BYTES"), (rollout, "MAX_TOKENS_PER_PASS"), (rollout, "MAX_LOGITS_PER_PASS")])
def test_each_limit_of_what_is_computed_at_once_goes_with_the_memory(module, name, monkeypatch):
    agent = agent_of(tiny_gpt2())
    drawn = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    scarce = getattr(module, name)
    monkeypatch.setattr(module, "scaled_to_memory", lambda limits, device: 1 if limits is scarce else 2**40)
    rows = [sampling.rows_at_once(agent.policy, 12)]
    rows += [len(index) for index in rollout.micro_batches(drawn, agent.policy, 8)]
    assert min(rows) == 1


def test_a_base_responds_in_place_of_its_agent_by_new_random_numbers_each_time():
    agent = moved(agent_of(tiny_gpt2()))
    first = collect_rollout(agent, PROMPTS, PROMPTS, 12, policy=agent.base)
    second = collect_rollout(agent, PROMPTS, PROMPTS, 12, policy=agent.base)
    assert first.text != second.text
    assert first.kl_BT.abs().max() == 0


def test_an_agent_counts_all_tokens_that_it_samples_in_an_iteration():
    """Also those that nobody is trained on."""
    agent = agent_of(tiny_gpt2())
    agent.begin(2)
    first = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    second = collect_rollout(agent, PROMPTS[:3], PROMPTS[:3], 5, policy=agent.base)
    assert agent.sampled_tokens == first.mask_BT.sum() + second.mask_BT.sum()
    agent.begin(3)
    assert agent.sampled_tokens == 0


@dataclass(frozen=True)
class CustomRollout(Rollout):
    bonus_B: torch.Tensor | None = None
    double_BT: torch.Tensor | None = None
    note: list[str] | None = None


@pytest.mark.parametrize("advantage", ["gae", "reinforce"])
def test_taking_rows_and_joining_them_again_restores_the_rollout(advantage):
    """Custom fields included. The parts hold no padding that they do not need."""
    agent = moved(agent_of(tiny_gpt2(), advantage=advantage))
    drawn = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    whole = CustomRollout(
        **vars(drawn),
        bonus_B=torch.arange(8.0),
        double_BT=2 * drawn.mask_BT,
        note=[*"abcdefgh"])
    groups = torch.arange(8).split([2, 1, 5])
    parts = [take(whole, rows) for rows in groups]
    for part in parts:
        for mask in (part.prompt_mask_BP, part.mask_BT):
            assert mask.shape[1] == mask.sum(1).max()
    assert parts[1].note == ["c"]
    require_same_rows(join(parts), whole)
