"""The update: what its gradient must not depend on, where it must be zero, and that it goes the right way."""
import copy
from dataclasses import fields

import pytest
import torch
from toys import agent_of, bigram, settings

import cory.ppo.rollout
from cory.ppo import update as ppo
from cory.ppo.agent import Agent
from cory.errors import UserError
from cory.ppo.model import load_language_model
from cory.ppo.update import add_gradient, ppo_update
from cory.ppo.rollout import Experience, by_length, experience, rollout

PROMPTS = ["a film", "one long story of a man", "x", "the dog and the man", "so", "every scene of it", "good", "bad old"]


def gradient(agent, turn, score, monkeypatch, **changes):
    """The gradient of the first optimizer step."""
    seen = []
    monkeypatch.setattr(ppo, "optimizer_step", lambda a, _: seen.append([p.grad.clone() for p in a.policy.parameters()]) or
                        a.optimizer.zero_grad() or 1.0)
    ppo_update(agent, turn, score, settings(num_ppo_epochs=1, **changes))
    return seen[0]


def ragged_turn(small, **changes):
    """A rollout whose responses end at different lengths (EOS is made likely)."""
    base = load_language_model(str(small / "lm"))
    base.lm.transformer.ln_f.bias.data += 0.5
    base.lm.transformer.wte.weight.data[256] = 0.25                     # raises the EOS logit by 32 x 0.5 x 0.25 = 4
    agent = Agent("llm1", base, settings(**changes), 0)
    torch.nn.init.normal_(agent.policy.value_head.weight, generator=torch.Generator().manual_seed(1))
    for p in agent.policy.lm.parameters():                              # no longer the reference, so that there is a KL
        p.data += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    return agent, base, rollout(agent, base, PROMPTS, 12, settings(**changes))


def test_mini_batches_and_accumulation_do_not_change_the_gradient(small, monkeypatch):
    agent, _, turn = ragged_turn(small)
    lengths = turn.length_B
    assert len(set(lengths.tolist())) > 2, lengths
    score = torch.arange(8.0)
    whole = gradient(agent, turn, score, monkeypatch, mini_batch_size=8)
    for mini, accumulation in ((4, 2), (2, 4), (1, 8)):
        split = gradient(agent, turn, score, monkeypatch, mini_batch_size=mini, gradient_accumulation_steps=accumulation)
        for a, b in zip(whole, split):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias, frozen", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 0.02)])
def test_log_probability_entropy_and_gradient_are_those_of_autograd(temperature, bias, frozen, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(7, 11, bias=bias)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    head.requires_grad_(not frozen)
    model = bigram()
    model.lm.head, model.temperature, model.dtype = head, temperature, dtype
    hidden, token, weight = torch.randn(20, 7, generator=generator), torch.randint(11, (20,), generator=generator), torch.randn(20, generator=generator)
    results = []
    for plain in (True, False):
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        if plain:
            logp_NV = (head(leaf) / temperature).log_softmax(-1)
            logp, entropy = logp_NV.gather(-1, token[:, None]).squeeze(-1), torch.distributions.Categorical(logits=logp_NV).entropy()
        else:
            logp, entropy = model.logp_and_entropy(leaf, token)
        (logp * weight).sum().backward()
        results.append((logp, entropy, leaf.grad, *(p.grad for p in head.parameters() if not frozen)))
    for i, (expected, got) in enumerate(zip(*results, strict=True)):
        exact = 1e-6 if i < 2 else tolerance                            # forward in float32 always
        torch.testing.assert_close(got, expected, atol=exact * expected.abs().max().item(), rtol=1e-5)


def test_mini_batches_hold_each_row_once_and_rows_of_like_length_together(monkeypatch):
    monkeypatch.setitem(cory.ppo.rollout.TOKENS_AT_ONCE, "cpu", 30)
    P, T = torch.tensor([3, 1, 9, 2, 3, 8, 30, 1, 2]), torch.tensor([2, 1, 6, 3, 2, 7, 10, 1, 3])
    masks = (torch.arange(30) >= 30 - P[:, None]).long(), (torch.arange(10) < T[:, None]).float()
    groups = by_length(*masks, rows_at_once=3)
    assert sorted(torch.cat(groups).tolist()) == list(range(9))
    lengths = [(P + T)[group].tolist() for group in groups]
    assert sum(lengths, []) == sorted((P + T).tolist())
    assert all(len(group) <= 3 and (len(group) == 1 or len(group) * (P[group].max() + T[group].max()) <= 30) for group in groups)
    assert lengths == [[2, 2, 5], [5, 5, 5], [15], [15], [40]]         # 9 + 6 and 8 + 7 together are 2 x 16 with padding; 40 is too much alone


def test_tokens_at_once_do_not_change_the_gradient(small, monkeypatch):
    agent, _, turn = ragged_turn(small)
    whole = gradient(agent, turn, torch.arange(8.0), monkeypatch)
    for tokens in (20, 60):
        monkeypatch.setitem(cory.ppo.rollout.TOKENS_AT_ONCE, "cpu", tokens)
        for a, b in zip(whole, gradient(agent, turn, torch.arange(8.0), monkeypatch)):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_running_the_head_in_chunks_does_not_change_gradient_or_sums(small, monkeypatch):
    """Against plain autograd through one loss over all tokens."""
    from cory.ppo import formulas
    agent, _, turn = ragged_turn(small)
    batch, cfg = experience(turn, torch.arange(8.0), 0.1, 1.0, 0.95), settings()
    real = batch.mask_BT.bool()
    hidden = agent.policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT)[real]
    logp = formulas.token_logprobs(agent.policy.logprobs(hidden), batch.response_BT[real])
    loss = (formulas.policy_loss(logp, batch.logp_BT[real], batch.advantage_BT[real], cfg.cliprange).mean()
            + cfg.vf_coef * formulas.value_loss(agent.policy.values(hidden), batch.value_BT[real], batch.return_BT[real], 0.2).mean())
    plain = torch.autograd.grad(loss, list(agent.policy.parameters()))
    sums = []
    for tokens in (1000, 7):
        monkeypatch.setattr(ppo, "head_rows", lambda model: tokens)
        agent.optimizer.zero_grad()
        sums.append(add_gradient(agent, batch, real.sum(), cfg))
        for p, expected in zip(agent.policy.parameters(), plain):
            torch.testing.assert_close(p.grad, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-5)


def test_padding_does_not_change_the_gradient(small, monkeypatch):
    """More padding on either side, filled with anything, leaves the update as it is, also where mini-batches do not cut it off."""
    from dataclasses import replace
    agent, _, turn = ragged_turn(small)
    monkeypatch.setattr(Experience, "rows", lambda self, index: replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)}))
    wide = lambda x, value, left=0, right=0: torch.nn.functional.pad(x, (left, right), value=value)
    padded = replace(turn, prompt_BP=wide(turn.prompt_BP, 7, left=3), prompt_mask_BP=wide(turn.prompt_mask_BP, 0, left=3),
                     response_BT=wide(turn.response_BT, 9, right=2), mask_BT=wide(turn.mask_BT, 0.0, right=2),
                     **{name: wide(getattr(turn, name), 5.0, right=2) for name in ("logp_BT", "kl_BT", "value_BT")})
    score = torch.arange(8.0)
    for a, b in zip(*(gradient(agent, t, score, monkeypatch) for t in (turn, padded))):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_first_ratio_is_exactly_1(small):
    """The loss pass repeats the scoring pass: same rows, same shapes, no dropout, so the same bits."""
    agent, _, turn = ragged_turn(small)
    batch = experience(turn, torch.ones(8), 0.1, 1.0, 0.95)
    parts = dict(zip(ppo.SUMS, add_gradient(agent, batch, batch.mask_BT.sum(), settings()).tolist()))
    assert parts["approx_kl"] == 0 and parts["clip_fraction"] == 0
    assert parts["policy_loss"] == pytest.approx(0, abs=1e-4)           # minus the sum of whitened advantages
    generator = torch.Generator().manual_seed(0)
    for (mini_batch,) in batch.optimizer_steps(2, 2, generator):        # cut and shuffled otherwise: the same up to rounding
        parts = dict(zip(ppo.SUMS, add_gradient(agent, mini_batch, mini_batch.mask_BT.sum(), settings()).tolist()))
        assert parts["approx_kl"] < 1e-9 and parts["clip_fraction"] == 0


def test_reported_means_are_over_tokens_of_the_whole_update(small):
    agent, _, turn = ragged_turn(small, learning_rate=1e-9)
    batch = experience(turn, torch.arange(8.0), 0.3, 1.0, 0.95)
    real = turn.mask_BT.bool()
    stats = ppo_update(agent, turn, torch.arange(8.0), settings(mini_batch_size=2, gradient_accumulation_steps=2, init_kl_coef=0.3))
    error = (turn.value_BT - batch.return_BT)[real]
    assert stats["value_error"] == pytest.approx((error**2).mean().item(), rel=1e-4)
    assert stats["value_loss"] == pytest.approx((error**2).mean().item() / 2, rel=1e-4)
    assert stats["explained_variance"] == pytest.approx(1 - (error.var(correction=0) / batch.return_BT[real].var(correction=0)).item(), rel=1e-3)
    logits = agent.policy.logprobs(agent.policy.response_hidden(turn.prompt_BP, turn.prompt_mask_BP, turn.response_BT))[real]
    assert stats["entropy"] == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().mean().item(), rel=1e-4)


def test_rollout_values_stay_constant_over_epochs(small, monkeypatch):
    agent, _, turn = ragged_turn(small, learning_rate=0.01)
    kept, old, loss = copy.deepcopy(turn), [], ppo.formulas.value_loss
    monkeypatch.setattr(ppo.formulas, "value_loss", lambda v, old_v, *rest: old.append(old_v) or loss(v, old_v, *rest))
    ppo_update(agent, turn, torch.arange(8.0), settings(learning_rate=0.01))
    assert len(old) == 4 and all(torch.equal(v.sort().values, old[0].sort().values) for v in old)       # clipped around these
    for name in ("value_BT", "logp_BT", "kl_BT", "response_BT", "mask_BT"):
        assert torch.equal(getattr(kept, name), getattr(turn, name)), name


def test_an_eos_gets_gradient_and_padding_behind_it_does_not():
    """A bigram that was sampled ending at once: only the row of the EOS learns."""
    logits = torch.zeros(7, 7)
    model = bigram(logits)
    agent = agent_of(model)
    turn = rollout(agent, model, ["a", "b"] * 4, 3, settings())
    response, mask = torch.tensor([[6, 6, 6], [2, 3, 4]] * 4), torch.tensor([[1.0, 0, 0], [1, 1, 1]] * 4)
    from dataclasses import replace
    turn = replace(turn, response_BT=response, mask_BT=mask, logp_BT=torch.full((8, 3), -torch.tensor(7.0).log().item()) * mask,
                   kl_BT=torch.zeros(8, 3), value_BT=torch.zeros(8, 3))
    add_gradient(agent, experience(turn, torch.tensor([1.0, -1.0] * 4), 0.0, 1.0, 1.0), mask.sum(), settings())
    after = agent.policy.lm.head.weight.grad.T                         # row u: gradient of the logits after letter u
    assert after[0, 6] < 0 and after[0, 2] > 0                         # after "a", EOS was rewarded
    assert (after[6] == 0).all() and (after[4] == 0).all()             # nothing is predicted from EOS, or behind the last token


def test_reward_rises_on_a_one_step_bandit():
    model = bigram(torch.zeros(7, 7))
    cfg = settings(batch_size=64, mini_batch_size=64, init_kl_coef=0.0, learning_rate=0.05)
    agent, rewards = Agent("llm1", model, cfg, 0), []
    for _ in range(15):
        turn = rollout(agent, model, ["a"] * 64, 1, cfg)
        score = (turn.response_BT[:, 0] == 2).float()
        rewards.append(score.mean().item())
        ppo_update(agent, turn, score, cfg)
    assert rewards[0] < 0.35 and rewards[-1] > 0.9, rewards


def test_without_reward_and_with_a_large_eta_the_policy_returns_to_the_reference():
    model = bigram(torch.zeros(7, 7))
    cfg = settings(batch_size=64, mini_batch_size=64, init_kl_coef=5.0, kl_penalty="k1", learning_rate=0.03)
    agent = Agent("llm1", model, cfg, 0)
    agent.policy.lm.head.weight.data += torch.randn(7, 7, generator=torch.Generator().manual_seed(3))
    kl = []
    for _ in range(25):
        turn = rollout(agent, model, ["a"] * 64, 1, cfg)
        p = agent.policy.lm.head.weight[:, 0].log_softmax(0)
        kl.append((p.exp() * (p + torch.tensor(7.0).log())).sum().item())
        ppo_update(agent, turn, torch.zeros(64), cfg)
    assert kl[0] > 0.2 and kl[-1] < 0.1 * kl[0], kl


def test_adaptive_controller_moves_once_per_update_with_that_iterations_kl(small):
    agent, _, turn = ragged_turn(small)
    kl = turn.kl_BT.sum().item() / 8                                    # of whole responses, 8 of them
    cfg = settings(adap_kl_ctrl=True, kl_target=kl / 1.1, kl_horizon=100.0, num_ppo_epochs=3, mini_batch_size=4)
    before = agent.kl_coef
    ppo_update(agent, turn, torch.zeros(8), cfg)
    assert agent.kl_coef == pytest.approx(before * (1 + 0.1 * 8 / 100), rel=1e-6)
    fixed = agent.kl_coef
    ppo_update(agent, turn, torch.zeros(8), settings())
    assert agent.kl_coef == fixed


def test_max_grad_norm_bounds_the_step_and_zero_leaves_it(small):
    agent, _, turn = ragged_turn(small)
    add_gradient(agent, experience(turn, torch.arange(8.0), 0.1, 1.0, 0.95), torch.tensor(1e-4), settings())
    grads = [p.grad for p in agent.policy.parameters()]
    norm = torch.nn.utils.get_total_norm(grads).item()
    agent.optimizer.step = lambda: seen.append(torch.nn.utils.get_total_norm(grads).item())
    seen = []
    copies = [g.clone() for g in grads]
    assert ppo.optimizer_step(agent, 0.0) == pytest.approx(norm) and seen == [pytest.approx(norm)]
    for p, g in zip(agent.policy.parameters(), copies):
        p.grad = g
    grads = copies
    assert ppo.optimizer_step(agent, 0.5) == pytest.approx(norm) and seen[1] == pytest.approx(0.5, rel=1e-3) and norm > 0.5


def test_a_gradient_that_is_not_finite_stops_before_any_parameter_changes(small):
    agent, _, turn = ragged_turn(small)
    before = [p.clone() for p in agent.policy.parameters()]
    with pytest.raises(UserError, match="gradient of llm1 is not finite"):
        ppo_update(agent, turn, torch.tensor([float("inf")] + [0.0] * 7), settings())
    assert all(torch.equal(p, q) for p, q in zip(before, agent.policy.parameters()))
