"""The rollout: what policy, reference and critic make of responses; rows taken and joined."""
from dataclasses import dataclass, replace

import pytest
import torch
from toys import PROMPTS, agent_of, bigram, close, generator, moved, tiny_gpt2

from cory.ppo import rollout, sampling
from cory.ppo.rollout import Rollout, join, take
from cory.ppo.sampling import collect_rollout, score_rollout


def same_rows(a: Rollout, b: Rollout, tolerance=0.0) -> None:
    assert a.text == b.text and a.present().keys() == b.present().keys()
    for name, x in a.present().items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, getattr(b, name), atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("penalty", ["full", "k1"])
def test_scores_of_each_response_token_are_those_of_the_bigrams_by_hand(penalty):
    """Responses "ca." to "ab" and "f" to "d" follow b, c, a and d. The critic says 0.5 after a, b and c."""
    agent = agent_of(bigram(seed=1))
    agent.policy.lm.head.weight.data += torch.randn(7, 7, generator=generator(2))
    agent.critic.linear.weight.data[0, :3] = 0.5
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    drawn = Rollout(["ab", "d"], ["ca", "f"], torch.tensor([[0, 1], [6, 3]]), torch.tensor([[1, 1], [0, 1]]),
                    torch.tensor([[2, 0, 6], [5, 6, 6]]), mask, torch.zeros(2, 3), torch.zeros(2))
    scored = score_rollout(drawn, agent.policy, agent.base, penalty, 1, agent.critic)
    off = 0.5 * mask * torch.tensor([1.0, -1.0, 1.0])       # apart, though not in the mean
    assert replace(scored, sampling_logp_BT=scored.logp_BT + off).sampling_gap == pytest.approx(0.5)
    logp_UV, ref_UV = (model.lm.head.weight.T.log_softmax(-1) for model in (agent.policy, agent.base))
    # row, column, letter before, letter drawn
    for b, t, u, v in [(0, 0, 1, 2), (0, 1, 2, 0), (0, 2, 0, 6), (1, 0, 3, 5)]:
        close(scored.logp_BT[b, t], logp_UV[u, v])
        close(scored.ref_logp_BT[b, t], ref_UV[u, v])
        full = sum(logp_UV[u, w].exp() * (logp_UV[u, w] - ref_UV[u, w]) for w in range(7))
        close(scored.kl_BT[b, t], full if penalty == "full" else logp_UV[u, v] - ref_UV[u, v])
        assert scored.value_BT[b, t] == (0.5 if u < 3 else 0)
    for x_BT in (scored.logp_BT, scored.ref_logp_BT, scored.kl_BT, scored.value_BT):
        assert (x_BT[1, 1:] == 0).all()
    close(scored.kl_B, scored.kl_BT[:, 0] + scored.kl_BT[:, 1] + scored.kl_BT[:, 2])


def test_the_policy_that_is_scored_is_the_one_sampled_from_however_rows_are_divided(monkeypatch):
    agent = moved(agent_of(tiny_gpt2()))
    whole = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    assert len(set(whole.mask_BT.sum(1).tolist())) > 3 and whole.kl_B.min() > 1e-3
    assert whole.sampling_gap < 1e-5
    unmoved = score_rollout(whole, agent_of(agent.base).policy, agent.base, "full", 8)
    close(unmoved.logp_BT, whole.ref_logp_BT, 1e-5)
    assert unmoved.kl_BT.abs().max() < 1e-6
    monkeypatch.setitem(rollout.MAX_TOKENS_PER_PASS, "cpu", 20)
    monkeypatch.setitem(rollout.MAX_LOGITS_PER_PASS, "cpu", 5 * 7)
    monkeypatch.setitem(sampling.MAX_BYTES, "cpu", 8000)                # a few rows at a time
    agent.draws = 0                                         # the same random numbers again
    same_rows(whole, collect_rollout(agent, PROMPTS, PROMPTS, 12), 1e-5)
    assert collect_rollout(agent, PROMPTS, PROMPTS, 12).text != whole.text


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
