"""The update: what its gradient must not depend on, where it must be zero, and that it goes the right way."""
import copy
import math
from collections import defaultdict
from dataclasses import fields, replace

import pytest
import torch
from torch.distributions import Categorical
from torch.nn.functional import pad
from toys import agent_of, bigram, generator, settings, train_on

from cory.errors import UserError
from cory.ppo import formulas, minibatches, update
from cory.ppo.loading import load_language_model
from cory.ppo.minibatches import Experience, Tokens, by_length
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import add_gradient, losses, make_experience

PROMPTS = ["a film", "one long story of a man", "x", "the dog and the man", "so", "every scene of it", "good",
           "bad old"]
SCORE = torch.arange(8.0)


def gradient(agent, rollout, monkeypatch, **changes):
    """The gradient of the first optimizer step, which is not made."""
    seen = []

    def noted(agent, max_grad_norm):
        seen.append([p.grad.clone() for p in agent.policy.parameters()])
        agent.optimizer.zero_grad()
        return 1.0

    monkeypatch.setattr(update, "optimizer_step", noted)
    train_on(agent, rollout, SCORE, 1, settings(num_ppo_epochs=1, **changes))
    return seen[0]


def sums_of(agent, experience, cfg, step_tokens=None) -> dict[str, float]:
    """Adds the gradient and returns each metric summed over tokens."""
    seen = defaultdict(list)
    step_tokens = experience.mask_BT.sum() if step_tokens is None else step_tokens
    agent.cfg = cfg
    add_gradient(agent, experience, step_tokens, seen)
    return {name: torch.cat(parts).double().sum().item() for name, parts in seen.items()}


def same(gradients, expected, rtol=1e-5):
    torch.testing.assert_close(list(gradients), list(expected), atol=1e-6, rtol=rtol)


def hidden_of(agent, batch):
    """The hidden states from which the real response tokens are predicted."""
    hidden = agent.policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT)
    return hidden[batch.mask_BT.bool()]


def ragged_rollout(small, **changes):
    """A rollout whose responses end at different lengths (EOS is made likely)."""
    base = load_language_model(str(small / "lm"))
    base.lm.transformer.ln_f.bias.data += 0.5
    base.lm.transformer.wte.weight.data[256] = 0.25  # raises the EOS logit by 32 x 0.5 x 0.25 = 4
    agent = agent_of(base, **changes)
    torch.nn.init.normal_(agent.policy.value_head.weight, generator=generator(1))
    for p in agent.policy.lm.parameters():  # no longer the reference, so that there is a KL
        p.data += 0.02 * torch.randn(p.shape, generator=generator(2))
    return agent, collect_rollout(agent, PROMPTS, 12)


# --- what the gradient must not depend on ---
def test_mini_batches_accumulation_and_tokens_at_once_do_not_change_the_gradient(small, monkeypatch):
    agent, rollout = ragged_rollout(small)
    assert len(set(rollout.length_B.tolist())) > 2
    whole = gradient(agent, rollout, monkeypatch)
    for mini, steps, tokens in ((4, 2, 1000), (2, 4, 1000), (1, 8, 1000), (8, 1, 20), (8, 1, 60)):
        monkeypatch.setitem(minibatches.TOKENS_AT_ONCE, "cpu", tokens)
        sizes = dict(mini_batch_size=mini, gradient_accumulation_steps=steps)
        same(gradient(agent, rollout, monkeypatch, **sizes), whole)


def test_mini_batches_hold_each_row_once_and_rows_of_like_length_together(monkeypatch):
    monkeypatch.setitem(minibatches.TOKENS_AT_ONCE, "cpu", 30)
    P, T = torch.tensor([3, 1, 9, 2, 3, 8, 30, 1, 2]), torch.tensor([2, 1, 6, 3, 2, 7, 10, 1, 3])
    masks = (torch.arange(30) >= 30 - P[:, None]).long(), (torch.arange(10) < T[:, None]).float()
    groups = by_length(*masks, rows_at_once=3)
    assert sorted(torch.cat(groups).tolist()) == list(range(9))
    # 9 + 6 and 8 + 7 together are 2 x 16 with padding; 40 is too much alone
    assert [(P + T)[group].tolist() for group in groups] == [[2, 2, 5], [5, 5, 5], [15], [15], [40]]


def test_padding_does_not_change_the_gradient(small, monkeypatch):
    """More padding on either side, filled with anything, leaves the update as it is, also where
    mini-batches do not cut it off.
    """
    agent, rollout = ragged_rollout(small)
    uncut = lambda self, index: replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})
    monkeypatch.setattr(Experience, "take", uncut)
    fillers = {"response_BT": 9, "mask_BT": 0.0, "logp_BT": 5.0, "ref_logp_BT": 5.0, "kl_BT": 5.0,
               "value_BT": 5.0}
    right = {name: pad(getattr(rollout, name), (0, 2), value=filler) for name, filler in fillers.items()}
    left = {name: pad(getattr(rollout, name), (3, 0), value=filler)
            for name, filler in {"prompt_BP": 7, "prompt_mask_BP": 0}.items()}
    padded = replace(rollout, **left, **right)
    same(gradient(agent, padded, monkeypatch), gradient(agent, rollout, monkeypatch), rtol=1e-4)


@pytest.mark.parametrize("of_logp, of_entropy", [(1, 0), (0, 1), (1, 0.7)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias, frozen", [(False, False), (True, False), (True, True)])
def test_log_probability_entropy_and_gradient_are_those_of_autograd(of_logp, of_entropy, temperature, bias,
                                                                    frozen):
    rng = generator()
    head = torch.nn.Linear(7, 11, bias=bias)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng)
    head.requires_grad_(not frozen)
    model = bigram()
    model.lm.head, model.temperature = head, temperature
    hidden, weight = torch.randn(20, 7, generator=rng), torch.randn(20, generator=rng)
    token = torch.randint(11, (20,), generator=rng)

    def plain(leaf, token):
        logp_NV = (head(leaf) / temperature).log_softmax(-1)
        return formulas.token_logprobs(logp_NV, token), Categorical(logits=logp_NV).entropy()

    results = []
    for compute in (plain, model.logp_and_entropy):
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        logp, entropy = compute(leaf, token)
        terms = [(of_logp, logp * weight), (of_entropy, entropy * weight.flip(0))]
        sum(factor * term.sum() for factor, term in terms if factor).backward()
        gradients = [leaf.grad, *(p.grad for p in head.parameters() if not frozen)]
        results.append([logp.detach(), entropy.detach(), *gradients])
    for expected, x in zip(*results, strict=True):
        torch.testing.assert_close(x, expected, atol=1e-6 * expected.abs().max().item(), rtol=1e-5)


def test_running_the_head_in_chunks_does_not_change_gradient_or_sums(small, monkeypatch):
    """Against plain autograd through one loss over all tokens, the policy having moved since the rollout."""
    agent, rollout = ragged_rollout(small)
    cfg = settings()
    batch = make_experience(rollout, SCORE, 0.1, cfg)
    batch.logp_BT.add_(0.2 * torch.randn(batch.logp_BT.shape, generator=generator(3)))
    batch.value_BT.add_(0.3)
    hidden, old = hidden_of(agent, batch), Tokens.of(batch)
    logits = agent.policy.lm.get_output_embeddings()(hidden)
    logp = formulas.token_logprobs(logits.log_softmax(-1), old.response_N)
    policy_loss = formulas.policy_loss(logp, old.logp_N, old.advantage_N, cfg.cliprange)
    value = agent.policy.value_head(hidden).squeeze(-1)
    value_loss = formulas.value_loss(value, old.value_N, old.return_N, 0.2)
    loss = policy_loss.mean() + cfg.vf_coef * value_loss.mean()
    plain = torch.autograd.grad(loss, list(agent.policy.parameters()))
    sums = []
    for tokens in (1000, 7):
        monkeypatch.setattr(update, "logit_chunk_size", lambda model: tokens)
        agent.optimizer.zero_grad()
        sums.append(sums_of(agent, batch, cfg))
        same([p.grad for p in agent.policy.parameters()], plain)
    assert sums[0] == pytest.approx(sums[1], abs=1e-4, rel=1e-5) and len(sums[0]) == 6


# --- old and new policy, tokens and padding ---
def test_first_ratio_is_exactly_1(small):
    """The update's pass repeats the rollout's: same rows, same shapes, no dropout, so the same bits."""
    agent, rollout = ragged_rollout(small)
    batch = make_experience(rollout, torch.ones(8), 0.1, settings())
    sums = sums_of(agent, batch, settings())
    assert sums["approx_kl"] == 0 and sums["clip_fraction"] == 0
    assert sums["policy_loss"] == pytest.approx(0, abs=1e-4)        # minus the sum of whitened advantages
    for (mini_batch,) in batch.shuffled_mini_batches(2, 2, generator()):  # cut otherwise: same up to rounding
        sums = sums_of(agent, mini_batch, settings())
        assert sums["approx_kl"] < 1e-9 and sums["clip_fraction"] == 0


def test_clip_fraction_counts_tokens_whose_loss_is_clipped():
    """pi is uniform. Ratios 1.5 and 0.5 are clipped at 1.2 and 0.8 where that lowers the objective: for a
    positive and for a negative advantage.
    """
    agent, ratio = agent_of(bigram(torch.zeros(7, 7))), torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    zeros, logp = torch.zeros(5), torch.full((5,), -math.log(7))
    old = Tokens(response_N=torch.arange(5), logp_N=logp - ratio.log(), ref_logp_N=logp, value_N=zeros,
                 advantage_N=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), return_N=zeros)
    _, metrics = losses(agent.policy, torch.eye(7)[:5], old, 0.0, settings(cliprange=0.2))
    assert metrics["clip_fraction"].tolist() == [True, False, False, True, False]


def test_rollout_values_stay_constant_over_epochs(small, monkeypatch):
    agent, rollout = ragged_rollout(small, learning_rate=0.01)
    kept, clipped_around, value_loss = copy.deepcopy(rollout), [], formulas.value_loss

    def watched(value, old_value, *rest):
        clipped_around.append(old_value.sort().values)
        return value_loss(value, old_value, *rest)

    monkeypatch.setattr(formulas, "value_loss", watched)
    train_on(agent, rollout, SCORE, 1, settings(learning_rate=0.01))
    assert len(clipped_around) == 4 and all(torch.equal(x, clipped_around[0]) for x in clipped_around)
    for name in ("value_BT", "logp_BT", "kl_BT", "response_BT", "mask_BT"):
        assert torch.equal(getattr(kept, name), getattr(rollout, name)), name


def test_an_eos_gets_gradient_and_padding_behind_it_does_not():
    """Of two responses to "a" and "b" the first ended at once, and that was rewarded."""
    agent, zeros = agent_of(bigram(torch.zeros(7, 7))), torch.zeros(2, 3)
    uniform = torch.full((2, 3), -math.log(7))
    experience = Experience(
        prompt_BP=torch.tensor([[0], [1]]), prompt_mask_BP=torch.ones(2, 1).long(),
        response_BT=torch.tensor([[6, 6, 6], [2, 3, 4]]), mask_BT=torch.tensor([[1.0, 0, 0], [1, 1, 1]]),
        logp_BT=uniform, ref_logp_BT=uniform, advantage_BT=torch.tensor([[1.0, 9, 9], [-1, -1, -1]]),
        value_BT=zeros, return_BT=zeros)
    sums_of(agent, experience, settings())
    gradient_UV = agent.policy.lm.head.weight.grad.T     # row u: gradient of the logits after letter u
    assert gradient_UV[0, 6] < 0 and gradient_UV[0, 2] > 0
    assert (gradient_UV[6] == 0).all() and (gradient_UV[4] == 0).all()      # after EOS and the last token


# --- the step ---
def test_adaptive_controller_moves_once_per_update_with_that_iterations_kl(small):
    agent, rollout = ragged_rollout(small)
    kl = rollout.kl_BT.sum().item() / 8  # of whole responses, 8 of them
    cfg = settings(adap_kl_ctrl=True, kl_target=kl / 1.1, kl_horizon=100.0, num_ppo_epochs=3,
                   mini_batch_size=4)
    before = agent.kl_coef
    train_on(agent, rollout, torch.zeros(8), 1, cfg)
    moved = agent.kl_coef
    assert moved == pytest.approx(before * (1 + 0.1 * 8 / 100), rel=1e-6)
    train_on(agent, rollout, torch.zeros(8), 1, settings())
    assert agent.kl_coef == moved


def test_max_grad_norm_bounds_the_step_and_zero_leaves_it(small):
    agent, rollout = ragged_rollout(small)
    sums_of(agent, make_experience(rollout, SCORE, 0.1, settings()), settings(), torch.tensor(1e-4))
    parameters, stepped = list(agent.policy.parameters()), []
    gradients = [p.grad.clone() for p in parameters]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    assert norm > 0.5
    agent.optimizer.step = lambda: stepped.append(
        torch.nn.utils.get_total_norm([p.grad for p in parameters]).item())
    for max_grad_norm in (0.0, 0.5):
        for p, x in zip(parameters, gradients):
            p.grad = x.clone()
        assert update.optimizer_step(agent, max_grad_norm) == pytest.approx(norm)
        assert all(p.grad is None for p in parameters)
    assert stepped == pytest.approx([norm, 0.5], rel=1e-3)


def test_a_gradient_that_is_not_finite_stops_before_any_parameter_changes(small):
    agent, rollout = ragged_rollout(small)
    before = [p.clone() for p in agent.policy.parameters()]
    with pytest.raises(UserError, match="llm1 has diverged: the gradient was not applied"):
        train_on(agent, rollout, torch.tensor([float("inf")] + [0.0] * 7), 1, settings())
    assert all(torch.equal(p, q) for p, q in zip(before, agent.policy.parameters()))


def test_the_learning_rate_is_that_of_the_schedule(small):
    agent, rollout = ragged_rollout(small)
    cfg = settings(learning_rate=0.1, lr_schedule="linear", warmup_iterations=1, iterations=5,
                   num_ppo_epochs=1)
    # warm-up: 0.1 x 1/2; then 4 iterations at progress 0, 1/4, 2/4, 3/4
    for iteration, rate in zip((1, 2, 3, 4, 5), (0.05, 0.1, 0.075, 0.05, 0.025)):
        metrics = train_on(agent, rollout, SCORE, iteration, cfg)
        assert metrics["learning_rate"] == pytest.approx(rate) == agent.optimizer.param_groups[0]["lr"]


# --- metrics, and what a user edits in `losses` ---
STILL = dict(learning_rate=1e-9)


def edited(monkeypatch, edit):
    """`losses` with a change behind it, as a user would write it there."""
    losses = update.losses
    monkeypatch.setattr(update, "losses", lambda *args: edit(*losses(*args)))


def test_reported_means_are_over_tokens_of_the_whole_update(small, monkeypatch):
    """Also that of a metric which a user adds, and whatever the mini-batches and the head's chunks. With
    gamma = lam = 1 a return is the rewards to go, charged by the agent's own KL coefficient.
    """
    agent, rollout = ragged_rollout(small, **STILL)
    agent.kl_coef = 0.5
    edited(monkeypatch, lambda loss_N, metrics: (loss_N, metrics | {"twice": 2 * metrics["entropy"]}))
    monkeypatch.setattr(update, "logit_chunk_size", lambda model: 7)
    cfg = settings(mini_batch_size=2, gradient_accumulation_steps=2, gamma=1.0, lam=1.0, **STILL)
    metrics = train_on(agent, rollout, SCORE, 1, cfg)
    reward_BT = formulas.token_rewards(SCORE, rollout.kl_BT, rollout.mask_BT, 0.5)
    real = rollout.mask_BT.bool()
    returns = reward_BT.flip(1).cumsum(1).flip(1)[real]
    error = rollout.value_BT[real] - returns
    squared = (error**2).mean().item()
    entropy = Categorical(logits=agent.policy.logprobs(hidden_of(agent, rollout))).entropy().mean().item()
    explained = 1 - (error.var(correction=0) / returns.var(correction=0)).item()
    expected = {"value_error": squared, "value_loss": squared / 2, "entropy": entropy, "twice": 2 * entropy,
                "explained_variance": explained}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)


def test_an_entropy_bonus_written_into_the_loss_has_its_gradient(small, monkeypatch):
    """The obvious line gives what the flag gives; and it changes the gradient."""
    agent, rollout = ragged_rollout(small)
    plain = gradient(agent, rollout, monkeypatch)
    flag = gradient(agent, rollout, monkeypatch, ent_coef=0.5)
    edited(monkeypatch, lambda loss_N, metrics: (loss_N - 0.5 * metrics["entropy"], metrics))
    line = gradient(agent, rollout, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(flag, line))
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(plain, flag))


@pytest.mark.parametrize("edit, says", [
    (lambda loss_N, metrics: (loss_N.mean(), metrics), "loss is 'a tensor of shape"),
    (lambda loss_N, metrics: (loss_N, metrics | {"kl2": loss_N.sum()}), "kl2 is 'a tensor of shape"),
    (lambda loss_N, metrics: (loss_N, metrics | {"kl2": loss_N.detach().numpy()}), "kl2 is 'a ndarray'"),
    (lambda loss_N, metrics: (loss_N, metrics | {"kl_coef": loss_N}), "'kl_coef': is one of the update's")])
def test_a_mean_taken_too_early_or_a_name_that_is_taken_is_refused(edit, says, small, monkeypatch):
    """It would be divided by the tokens again, or weigh each group of tokens alike; it would hide another."""
    agent, rollout = ragged_rollout(small)
    edited(monkeypatch, edit)
    with pytest.raises(UserError, match=says):
        train_on(agent, rollout, SCORE, 1, settings(**STILL))


def test_an_in_place_edit_of_the_loss_leaves_the_logged_policy_loss(small):
    """With a critic, whose term makes a new tensor, and without one, where the loss is the policy's alone."""
    agent, rollout = ragged_rollout(small)
    batch = make_experience(rollout, SCORE, 0.1, settings())
    for value_head in (agent.policy.value_head, None):
        agent.policy.value_head = value_head
        hidden_NH = hidden_of(agent, batch).detach()
        loss_N, metrics = update.losses(agent.policy, hidden_NH, Tokens.of(batch), 0.1, settings())
        before = metrics["policy_loss"].detach().clone()
        loss_N.data -= 10
        assert torch.equal(metrics["policy_loss"], before)
