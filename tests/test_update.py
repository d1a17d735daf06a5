"""The update: what its gradient must not depend on, where it must be zero, and that it goes the right way."""

import copy
from collections import defaultdict
from dataclasses import fields

import pytest
import torch
from toys import agent_of, bigram, settings

import cory.ppo.minibatches
from cory.errors import UserError
from cory.ppo import update
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.minibatches import Experience, by_length
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import add_gradient, make_experience, ppo_update

PROMPTS = [
    "a film",
    "one long story of a man",
    "x",
    "the dog and the man",
    "so",
    "every scene of it",
    "good",
    "bad old",
]


def gradient(agent, rollout, score, monkeypatch, **changes):
    """The gradient of the first optimizer step."""
    seen = []
    monkeypatch.setattr(
        update,
        "optimizer_step",
        lambda a, _: (
            seen.append([p.grad.clone() for p in a.policy.parameters()]) or a.optimizer.zero_grad() or 1.0
        ),
    )
    ppo_update(agent, rollout, score, 1, settings(num_ppo_epochs=1, **changes))
    return seen[0]


def sums_of(agent, experience, step_tokens, cfg) -> dict[str, float]:
    """Adds the gradient and returns each metric summed over tokens."""
    seen = defaultdict(list)
    add_gradient(agent, experience, step_tokens, cfg, seen)
    return {name: torch.cat(parts).double().sum().item() for name, parts in seen.items()}


def ragged_rollout(small, **changes):
    """A rollout whose responses end at different lengths (EOS is made likely)."""
    base = load_language_model(str(small / "lm"))
    base.lm.transformer.ln_f.bias.data += 0.5
    base.lm.transformer.wte.weight.data[256] = 0.25  # raises the EOS logit by 32 x 0.5 x 0.25 = 4
    agent = Agent("llm1", base, settings(**changes), 0)
    torch.nn.init.normal_(agent.policy.value_head.weight, generator=torch.Generator().manual_seed(1))
    for p in agent.policy.lm.parameters():  # no longer the reference, so that there is a KL
        p.data += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    return agent, base, collect_rollout(agent, base, PROMPTS, 12, settings(**changes))


def test_mini_batches_and_accumulation_do_not_change_the_gradient(small, monkeypatch):
    agent, _, rollout = ragged_rollout(small)
    lengths = rollout.length_B
    assert len(set(lengths.tolist())) > 2, lengths
    score = torch.arange(8.0)
    whole = gradient(agent, rollout, score, monkeypatch, mini_batch_size=8)
    for mini, accumulation in ((4, 2), (2, 4), (1, 8)):
        split = gradient(
            agent, rollout, score, monkeypatch, mini_batch_size=mini, gradient_accumulation_steps=accumulation
        )
        for a, b in zip(whole, split):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("through", ["logp", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias, frozen", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 0.02)])
def test_log_probability_entropy_and_gradient_are_those_of_autograd(
    through, temperature, bias, frozen, dtype, tolerance
):
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(7, 11, bias=bias)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    head.requires_grad_(not frozen)
    model = bigram()
    model.lm.head, model.temperature, model.dtype = head, temperature, dtype
    hidden, token, weight = (
        torch.randn(20, 7, generator=generator),
        torch.randint(11, (20,), generator=generator),
        torch.randn(20, generator=generator),
    )
    results = []
    for plain in (True, False):
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        if plain:
            logp_NV = (head(leaf) / temperature).log_softmax(-1)
            logp, entropy = (
                logp_NV.gather(-1, token[:, None]).squeeze(-1),
                torch.distributions.Categorical(logits=logp_NV).entropy(),
            )
        else:
            logp, entropy = model.logp_and_entropy(leaf, token)
        of_logp, of_entropy = {"logp": (1, 0), "entropy": (0, 1), "both": (1, 0.7)}[through]
        loss = of_logp * (logp * weight).sum() if of_logp else 0.0
        if of_entropy:
            loss = loss + of_entropy * (entropy * weight.flip(0)).sum()
        loss.backward()
        results.append((logp.detach(), entropy.detach(), leaf.grad,
                        *(p.grad for p in head.parameters() if not frozen)))
    for i, (expected, got) in enumerate(zip(*results, strict=True)):
        exact = 1e-6 if i < 2 else tolerance  # forward in float32 always
        torch.testing.assert_close(got, expected, atol=exact * expected.abs().max().item(), rtol=1e-5)


def test_mini_batches_hold_each_row_once_and_rows_of_like_length_together(monkeypatch):
    monkeypatch.setitem(cory.ppo.minibatches.TOKENS_AT_ONCE, "cpu", 30)
    P, T = torch.tensor([3, 1, 9, 2, 3, 8, 30, 1, 2]), torch.tensor([2, 1, 6, 3, 2, 7, 10, 1, 3])
    masks = (torch.arange(30) >= 30 - P[:, None]).long(), (torch.arange(10) < T[:, None]).float()
    groups = by_length(*masks, rows_at_once=3)
    assert sorted(torch.cat(groups).tolist()) == list(range(9))
    lengths = [(P + T)[group].tolist() for group in groups]
    assert sum(lengths, []) == sorted((P + T).tolist())
    assert all(
        len(group) <= 3 and (len(group) == 1 or len(group) * (P[group].max() + T[group].max()) <= 30)
        for group in groups
    )
    assert lengths == [
        [2, 2, 5],
        [5, 5, 5],
        [15],
        [15],
        [40],
    ]  # 9 + 6 and 8 + 7 together are 2 x 16 with padding; 40 is too much alone


def test_tokens_at_once_do_not_change_the_gradient(small, monkeypatch):
    agent, _, rollout = ragged_rollout(small)
    whole = gradient(agent, rollout, torch.arange(8.0), monkeypatch)
    for tokens in (20, 60):
        monkeypatch.setitem(cory.ppo.minibatches.TOKENS_AT_ONCE, "cpu", tokens)
        for a, b in zip(whole, gradient(agent, rollout, torch.arange(8.0), monkeypatch)):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_running_the_head_in_chunks_does_not_change_gradient_or_sums(small, monkeypatch):
    """Against plain autograd through one loss over all tokens."""
    from cory.ppo import formulas

    agent, _, rollout = ragged_rollout(small)
    batch, cfg = make_experience(rollout, torch.arange(8.0), 0.1, settings()), settings()
    real = batch.mask_BT.bool()
    hidden = agent.policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT)[real]
    logp = formulas.token_logprobs(agent.policy.logprobs(hidden), batch.response_BT[real])
    loss = (
        formulas.policy_loss(logp, batch.logp_BT[real], batch.advantage_BT[real], cfg.cliprange).mean()
        + cfg.vf_coef
        * formulas.value_loss(
            agent.policy.values(hidden), batch.value_BT[real], batch.return_BT[real], 0.2
        ).mean()
    )
    plain = torch.autograd.grad(loss, list(agent.policy.parameters()))
    sums = []
    for tokens in (1000, 7):
        monkeypatch.setattr(update, "logit_chunk_size", lambda model: tokens)
        agent.optimizer.zero_grad()
        sums.append(sums_of(agent, batch, real.sum(), cfg))
        for p, expected in zip(agent.policy.parameters(), plain):
            torch.testing.assert_close(p.grad, expected, atol=1e-6, rtol=1e-5)
    assert sums[0] == pytest.approx(sums[1], abs=1e-4, rel=1e-5) and len(sums[0]) == 6


def test_padding_does_not_change_the_gradient(small, monkeypatch):
    """More padding on either side, filled with anything, leaves the update as it is, also where
    mini-batches do not cut it off.
    """
    from dataclasses import replace

    agent, _, rollout = ragged_rollout(small)
    monkeypatch.setattr(
        Experience,
        "rows",
        lambda self, index: replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)}),
    )
    wide = lambda x, value, left=0, right=0: torch.nn.functional.pad(x, (left, right), value=value)
    padded = replace(
        rollout,
        prompt_BP=wide(rollout.prompt_BP, 7, left=3),
        prompt_mask_BP=wide(rollout.prompt_mask_BP, 0, left=3),
        response_BT=wide(rollout.response_BT, 9, right=2),
        mask_BT=wide(rollout.mask_BT, 0.0, right=2),
        **{
            name: wide(getattr(rollout, name), 5.0, right=2)
            for name in ("logp_BT", "ref_logp_BT", "kl_BT", "value_BT")
        },
    )
    score = torch.arange(8.0)
    for a, b in zip(*(gradient(agent, t, score, monkeypatch) for t in (rollout, padded))):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_first_ratio_is_exactly_1(small):
    """The loss pass repeats the scoring pass: same rows, same shapes, no dropout, so the same bits."""
    agent, _, rollout = ragged_rollout(small)
    batch = make_experience(rollout, torch.ones(8), 0.1, settings())
    parts = sums_of(agent, batch, batch.mask_BT.sum(), settings())
    assert parts["approx_kl"] == 0 and parts["clip_fraction"] == 0
    assert parts["policy_loss"] == pytest.approx(0, abs=1e-4)  # minus the sum of whitened advantages
    generator = torch.Generator().manual_seed(0)
    for (mini_batch,) in batch.shuffled_mini_batches(
        2, 2, generator
    ):  # cut and shuffled otherwise: the same up to rounding
        parts = sums_of(agent, mini_batch, mini_batch.mask_BT.sum(), settings())
        assert parts["approx_kl"] < 1e-9 and parts["clip_fraction"] == 0


def test_reported_means_are_over_tokens_of_the_whole_update(small):
    agent, _, rollout = ragged_rollout(small, learning_rate=1e-9)
    batch = make_experience(rollout, torch.arange(8.0), 0.3, settings())
    real = rollout.mask_BT.bool()
    stats = ppo_update(
        agent,
        rollout,
        torch.arange(8.0),
        1,
        settings(mini_batch_size=2, gradient_accumulation_steps=2, init_kl_coef=0.3, learning_rate=1e-9),
    )
    error = (rollout.value_BT - batch.return_BT)[real]
    assert stats["value_error"] == pytest.approx((error**2).mean().item(), rel=1e-4)
    assert stats["value_loss"] == pytest.approx((error**2).mean().item() / 2, rel=1e-4)
    assert stats["explained_variance"] == pytest.approx(
        1 - (error.var(correction=0) / batch.return_BT[real].var(correction=0)).item(), rel=1e-3
    )
    logits = agent.policy.logprobs(
        agent.policy.response_hidden(rollout.prompt_BP, rollout.prompt_mask_BP, rollout.response_BT)
    )[real]
    assert stats["entropy"] == pytest.approx(
        torch.distributions.Categorical(logits=logits).entropy().mean().item(), rel=1e-4
    )


def test_rollout_values_stay_constant_over_epochs(small, monkeypatch):
    agent, _, rollout = ragged_rollout(small, learning_rate=0.01)
    kept, old, loss = copy.deepcopy(rollout), [], update.formulas.value_loss
    monkeypatch.setattr(
        update.formulas, "value_loss", lambda v, old_v, *rest: old.append(old_v) or loss(v, old_v, *rest)
    )
    ppo_update(agent, rollout, torch.arange(8.0), 1, settings(learning_rate=0.01))
    assert len(old) == 4 and all(
        torch.equal(v.sort().values, old[0].sort().values) for v in old
    )  # clipped around these
    for name in ("value_BT", "logp_BT", "kl_BT", "response_BT", "mask_BT"):
        assert torch.equal(getattr(kept, name), getattr(rollout, name)), name


def test_an_eos_gets_gradient_and_padding_behind_it_does_not():
    """A bigram that was sampled ending at once: only the row of the EOS learns."""
    logits = torch.zeros(7, 7)
    model = bigram(logits)
    agent = agent_of(model)
    rollout = collect_rollout(agent, model, ["a", "b"] * 4, 3, settings())
    response, mask = torch.tensor([[6, 6, 6], [2, 3, 4]] * 4), torch.tensor([[1.0, 0, 0], [1, 1, 1]] * 4)
    from dataclasses import replace

    rollout = replace(
        rollout,
        response_BT=response,
        mask_BT=mask,
        logp_BT=torch.full((8, 3), -torch.tensor(7.0).log().item()) * mask,
        kl_BT=torch.zeros(8, 3),
        value_BT=torch.zeros(8, 3),
    )
    experience = make_experience(rollout, torch.tensor([1.0, -1.0] * 4), 0.0, settings(lam=1.0))
    sums_of(agent, experience, mask.sum(), settings())
    after = agent.policy.lm.head.weight.grad.T  # row u: gradient of the logits after letter u
    assert after[0, 6] < 0 and after[0, 2] > 0  # after "a", EOS was rewarded
    assert (after[6] == 0).all() and (
        after[4] == 0
    ).all()  # nothing is predicted from EOS, or behind the last token


def test_adaptive_controller_moves_once_per_update_with_that_iterations_kl(small):
    agent, _, rollout = ragged_rollout(small)
    kl = rollout.kl_BT.sum().item() / 8  # of whole responses, 8 of them
    cfg = settings(
        adap_kl_ctrl=True, kl_target=kl / 1.1, kl_horizon=100.0, num_ppo_epochs=3, mini_batch_size=4
    )
    before = agent.kl_coef
    ppo_update(agent, rollout, torch.zeros(8), 1, cfg)
    assert agent.kl_coef == pytest.approx(before * (1 + 0.1 * 8 / 100), rel=1e-6)
    fixed = agent.kl_coef
    ppo_update(agent, rollout, torch.zeros(8), 1, settings())
    assert agent.kl_coef == fixed


def test_max_grad_norm_bounds_the_step_and_zero_leaves_it(small):
    agent, _, rollout = ragged_rollout(small)
    experience = make_experience(rollout, torch.arange(8.0), 0.1, settings())
    sums_of(agent, experience, torch.tensor(1e-4), settings())
    grads = [p.grad for p in agent.policy.parameters()]
    norm = torch.nn.utils.get_total_norm(grads).item()
    agent.optimizer.step = lambda: seen.append(torch.nn.utils.get_total_norm(grads).item())
    seen = []
    copies = [g.clone() for g in grads]
    assert update.optimizer_step(agent, 0.0) == pytest.approx(norm) and seen == [pytest.approx(norm)]
    for p, g in zip(agent.policy.parameters(), copies):
        p.grad = g
    grads = copies
    assert (
        update.optimizer_step(agent, 0.5) == pytest.approx(norm)
        and seen[1] == pytest.approx(0.5, rel=1e-3)
        and norm > 0.5
    )


def test_a_gradient_that_is_not_finite_stops_before_any_parameter_changes(small):
    agent, _, rollout = ragged_rollout(small)
    before = [p.clone() for p in agent.policy.parameters()]
    with pytest.raises(UserError, match="llm1 has diverged: the gradient was not applied"):
        ppo_update(agent, rollout, torch.tensor([float("inf")] + [0.0] * 7), 1, settings())
    assert all(torch.equal(p, q) for p, q in zip(before, agent.policy.parameters()))


# --- what a user edits in `losses` ---
def edited(monkeypatch, edit):
    """`losses` with a change behind it, as a user would write it there."""
    kept = update.losses

    def losses(policy, hidden_NH, old, kl_coef, cfg):
        return edit(*kept(policy, hidden_NH, old, kl_coef, cfg))

    monkeypatch.setattr(update, "losses", losses)


def test_an_entropy_bonus_written_into_the_loss_has_its_gradient(small, monkeypatch):
    """The obvious line gives what the flag gives; and it changes the gradient."""
    agent, _, rollout = ragged_rollout(small)
    score = torch.arange(8.0)
    plain = gradient(agent, rollout, score, monkeypatch)
    flag = gradient(agent, rollout, score, monkeypatch, ent_coef=0.5)
    edited(monkeypatch, lambda loss_N, metrics: (loss_N - 0.5 * metrics["entropy"], metrics))
    line = gradient(agent, rollout, score, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(flag, line))
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(plain, flag))


def test_entropy_costs_nothing_where_the_loss_does_not_use_it(monkeypatch):
    model, calls = bigram(), []
    kept = torch.xlogy
    monkeypatch.setattr(torch, "xlogy", lambda *a: calls.append(1) or kept(*a))
    hidden = torch.randn(5, 7, requires_grad=True)
    logp, entropy = model.logp_and_entropy(hidden, torch.arange(5))
    logp.sum().backward()
    assert not calls
    logp, entropy = model.logp_and_entropy(hidden, torch.arange(5))
    (logp.sum() + entropy.sum()).backward()
    assert calls == [1]


def test_a_metric_written_into_losses_is_logged_as_its_mean_over_tokens(small, monkeypatch):
    agent, _, rollout = ragged_rollout(small, learning_rate=1e-9)
    monkeypatch.setattr(update, "logit_chunk_size", lambda model: 7)
    edited(monkeypatch, lambda loss_N, metrics: (loss_N, metrics | {"twice": 2 * metrics["entropy"]}))
    metrics = ppo_update(agent, rollout, torch.arange(8.0), 1, settings(learning_rate=1e-9))
    assert metrics["twice"] == pytest.approx(2 * metrics["entropy"], rel=1e-6)


@pytest.mark.parametrize("edit, says", [
    (lambda loss_N, metrics: (loss_N.mean(), metrics), "loss is 'a tensor of shape"),
    (lambda loss_N, metrics: (loss_N, metrics | {"kl2": loss_N.sum()}), "kl2 is 'a tensor of shape"),
])
def test_a_mean_taken_too_early_is_refused(edit, says, small, monkeypatch):
    """It would be divided by the tokens again, or weigh each group of tokens alike."""
    agent, _, rollout = ragged_rollout(small)
    edited(monkeypatch, edit)
    with pytest.raises(UserError, match=says):
        ppo_update(agent, rollout, torch.arange(8.0), 1, settings(learning_rate=1e-9))


def test_the_learning_rate_is_that_of_the_schedule(small):
    agent, _, rollout = ragged_rollout(small)
    cfg = settings(learning_rate=0.1, lr_schedule="linear", warmup_iterations=1, iterations=5,
                   num_ppo_epochs=1)
    # warm-up: 0.1 x 1/2; then 4 iterations at progress 0, 1/4, 2/4, 3/4
    for iteration, rate in zip((1, 2, 3, 4, 5), (0.05, 0.1, 0.075, 0.05, 0.025)):
        metrics = ppo_update(agent, rollout, torch.arange(8.0), iteration, cfg)
        assert metrics["learning_rate"] == pytest.approx(rate) == agent.optimizer.param_groups[0]["lr"]


def test_an_in_place_edit_of_the_loss_leaves_the_logged_policy_loss(small):
    """With a critic, whose term makes a new tensor, and without one, where the loss is the policy's alone."""
    from cory.ppo.minibatches import Tokens

    agent, _, rollout = ragged_rollout(small)
    experience = make_experience(rollout, torch.arange(8.0), 0.1, settings())
    hidden = agent.policy.response_hidden(rollout.prompt_BP, rollout.prompt_mask_BP, rollout.response_BT)
    hidden_NH = hidden[rollout.mask_BT.bool()].detach()
    for value_head in (agent.policy.value_head, None):
        agent.policy.value_head = value_head
        loss_N, metrics = update.losses(agent.policy, hidden_NH, Tokens.of(experience), 0.1, settings())
        before = metrics["policy_loss"].detach().clone()
        loss_N.data -= 10
        assert torch.equal(metrics["policy_loss"], before)
