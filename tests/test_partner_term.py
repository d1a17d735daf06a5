"""What an agent adds for its partner: a two-agent bandit, enumerated."""
from types import SimpleNamespace

import pytest
import torch
from toys import settings

from cory.errors import UserError
from cory.train import partner_terms, score


def exact_gradients(term, theta1=0.3, theta2=-0.2):
    """Of a two-agent bandit: each agent draws 0 or 1, r(a) is a table, the observer's reward depends on what
    it saw. Mean and variance of grad log pi(a) score over every (a1, a2), for pioneer and observer.
    """
    r_pioneer = torch.tensor([0.0, 1.0])
    r_observer = torch.tensor([[0.0, 3.0], [1.0, -1.0]])                    # by a1, a2
    p1 = torch.sigmoid(torch.tensor([-theta1, theta1]))                     # of a1 = 0, 1
    p2 = torch.sigmoid(torch.tensor([[-theta2, theta2], [theta2, -theta2]]))
    a1, a2 = (x.flatten() for x in torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij"))
    weight = p1[a1] * p2[a1, a2]
    r1, r2 = r_pioneer[a1], r_observer[a1, a2]
    cfg = settings(partner_term=term)
    value = (p2 * r_observer).sum(1)[a1]                                    # a critic that has learned all
    rollout = SimpleNamespace(value_BT=torch.stack([value, torch.zeros(4)], 1))
    for_pioneer, for_observer = partner_terms(r1, r2, rollout, cfg)
    score1, score2 = score(None, r1, for_pioneer, cfg), score(None, r2, for_observer, cfg)
    grad1 = (a1 - p1[1]).float()                                            # d log pi / d theta of a sigmoid
    grad2 = torch.where(a1 == 0, a2 - p2[0, 1], -(a2 - p2[1, 1])).float()
    found = []
    for sample in (grad1 * score1, grad2 * score2):
        mean = (weight * sample).sum()
        found.append((mean.item(), (weight * (sample - mean) ** 2).sum().item()))
    return found


def test_a_partners_term_without_noise_has_the_same_expected_gradient_and_less_variance():
    (mean1, variance1), (mean2, variance2) = exact_gradients("sampled")
    for term in ("sampled_to_pioneer", "critic"):
        (m1, v1), (m2, v2) = exact_gradients(term)
        assert m1 == pytest.approx(mean1, abs=1e-6) and m2 == pytest.approx(mean2, abs=1e-6), term
        assert v1 < 0.7 * variance1 if term == "critic" else v1 == pytest.approx(variance1)
        assert v2 < variance2               # r1 is no baseline that was chosen: elsewhere it might lower it


def test_a_critic_that_knows_nothing_leaves_the_pioneer_on_its_own():
    r1, r2, cfg = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0]), settings(partner_term="critic")
    for_pioneer, for_observer = partner_terms(r1, r2, SimpleNamespace(value_BT=torch.zeros(2, 3)), cfg)
    assert score(None, r1, for_pioneer, cfg).tolist() == [1.0, 2.0]
    assert score(None, r2, for_observer, cfg).tolist() == [5.0, 7.0]


def test_without_a_critic_there_is_no_value_to_take():
    with pytest.raises(UserError, match="partner_term is 'critic': needs a critic, which rloo has not"):
        settings(partner_term="critic", advantage="rloo", responses_per_query=4)
    with pytest.raises(UserError, match="use an advantage that asks for value_BT"):
        partner_terms(torch.ones(2), torch.ones(2), SimpleNamespace(value_BT=None),
                      settings(partner_term="critic"))
