"""The update: against plain autograd, one row at a time; what it must not depend on; edits of `losses`."""
import copy
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import PROMPTS, agent_of, bigram, float64, generator, moved, same_tensors, tiny_gpt2

from cory.errors import UserError
from cory.ppo import formulas, update
from cory.ppo import rollout as rollouts
from cory.ppo.advantages import estimator, gae, reinforce
from cory.ppo.agent import Agent
from cory.ppo.rollout import micro_batches, take
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import losses, ppo_update

SCORE = torch.arange(8.0)


def ragged(**changes):
    """A small GPT-2 whose responses end at different lengths, and a rollout."""
    agent = moved(agent_of(tiny_gpt2(), **changes))
    return agent, collect_rollout(agent, PROMPTS, PROMPTS, 12)


def plain_update(agent, rollout, score_B, bonus: float) -> tuple[dict, dict]:
    """The update of a copy of the agent, one row at a time and without padding: (weights, metrics)."""
    agent = copy.deepcopy(agent)
    cfg, lm, critic = agent.cfg, agent.policy.lm, agent.critic
    eta, mask_BT, value_BT = agent.kl_coef * (cfg.kl_in == "reward"), rollout.mask_BT, rollout.value_BT
    reward_BT = formulas.token_rewards(score_B, rollout.kl_BT, mask_BT, eta)
    advantage_BT, _ = reinforce(reward_BT, mask_BT, cfg.gamma)
    if critic:
        advantage_BT, _ = gae(reward_BT, value_BT, mask_BT, cfg.gamma, cfg.lam)
    rollout = replace(rollout, advantage_BT=formulas.whiten(advantage_BT, mask_BT),
                      return_BT=advantage_BT + value_BT if critic else None)
    low, high = 1 - cfg.cliprange, 1 + cfg.cliprange
    weights = {"policy_loss": 1, "kl_loss": agent.kl_coef, "value_loss": cfg.vf_coef, "entropy": -bonus}
    parameters = agent.trainable_parameters()
    optimizer = torch.optim.Adam(parameters.values(), lr=cfg.learning_rate)
    agent.policy.activate()
    sums, norms, rng, every = defaultdict(float), [], agent.generator(), rollout.mask_BT.sum().item()
    for _ in range(cfg.num_ppo_epochs):
        for step in np.split(rng.permutation(8), 8 // cfg.rows_per_optimizer_step):
            for b in step:
                row = take(rollout, torch.tensor([b]))
                P, ids = row.prompt_BP.shape[1], torch.cat([row.prompt_BP, row.response_BT], 1)
                logp_1TV = (lm(ids).logits[:, P - 1:-1] / cfg.temperature).log_softmax(-1)
                logp, A = logp_1TV.gather(2, row.response_BT[:, :, None])[:, :, 0], row.advantage_BT
                log_ratio = logp - row.logp_BT
                ratio = log_ratio.exp()
                parts = {"policy_loss": -A * ratio.clamp(max=high).where(A > 0, ratio.clamp(min=low)),
                         "entropy": -(logp_1TV.exp() * logp_1TV).sum(2), "approx_kl": ratio - 1 - log_ratio,
                         "clip_fraction": (ratio > high).where(A > 0, ratio < low)}
                if cfg.kl_in == "loss":
                    parts["kl_loss"] = formulas.kl_k3(logp, row.ref_logp_BT)
                if critic is not None:
                    value = critic.linear(lm.base_model(ids).last_hidden_state[:, P - 1:-1])[:, :, 0]
                    parts["value_loss"] = formulas.value_loss(value, row.value_BT, row.return_BT,
                                                              cfg.cliprange_value)
                loss = sum(weight * parts[name].sum() for name, weight in weights.items() if name in parts)
                divisor = {"tokens": rollout.mask_BT[step].sum(),
                           "responses": len(step) * rollout.mask_BT[b].sum(),
                           "constant": len(step) * cfg.max_response_length}[cfg.loss_mean]
                (loss / divisor).backward()
                for name, x in parts.items():
                    sums[name] += x.sum().item() / (cfg.num_ppo_epochs * every)
            norms.append(torch.cat([p.grad.flatten() for p in parameters.values()]).norm().item())
            for p in parameters.values():
                p.grad *= min(1.0, (cfg.max_grad_norm or 1e9) / norms[-1])
            optimizer.step()
            optimizer.zero_grad()
    return parameters, sums | {"grad_norm": np.mean(norms), "kl_coef": agent.kl_coef, "score": 3.5}


@pytest.fixture
def in_float64():
    with float64():
        yield


CASES = {
    "whole": dict(), "accumulated": dict(mini_batch_size=2, gradient_accumulation_steps=4),
    "clipped": dict(mini_batch_size=1, gradient_accumulation_steps=4, max_grad_norm=0.05),
    "kl_in_loss": dict(mini_batch_size=4, kl_in="loss", gamma=0.9, cliprange_value=0.05),
    "temperature": dict(mini_batch_size=4, temperature=0.6),
    "entropy_bonus": dict(mini_batch_size=2, advantage="reinforce", kl_penalty="k1", cliprange=0.1),
    "of_responses": dict(mini_batch_size=2, gradient_accumulation_steps=2, loss_mean="responses"),
    "of_constant_lengths": dict(mini_batch_size=4, loss_mean="constant"),
    "lora": dict(mini_batch_size=2, gradient_accumulation_steps=2, lora_rank=2)}


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_plain_autograd_whatever_the_mini_batches(case, in_float64, monkeypatch):
    """Over two epochs, on ragged rows whose padding holds anything. The policy has moved since, so
    that ratios and values are clipped. Inside the losses other models are asked: with LoRA they share the
    agent's layers, whose backward pass is still to come.
    """
    base, bonus = tiny_gpt2(), 0.1 * (case == "entropy_bonus")
    base.temperature = CASES[case].get("temperature", 1.0)
    agent = agent_of(base, num_ppo_epochs=2, learning_rate=0.01, **CASES[case])
    other = moved(Agent("llm2", base, agent.cfg, 1))
    idle = copy.deepcopy(other.trainable_parameters())
    rollout = collect_rollout(moved(agent), PROMPTS, PROMPTS, 12)
    assert len(set(rollout.mask_BT.sum(1).tolist())) > 3 and rollout.sampling_gap < 1e-9
    junk = {"prompt_BP": rollout.prompt_BP.where(rollout.prompt_mask_BP == 1, 3),
            "response_BT": rollout.response_BT.where(rollout.mask_BT == 1, 2)}
    for name in {"logp_BT", "ref_logp_BT", "kl_BT", "value_BT"} & rollout.present().keys():
        x_BT = getattr(rollout, name)
        noise_BT = 0.2 * torch.randn(x_BT.shape, generator=generator(len(name)))
        rollout = replace(rollout, **{name: x_BT + noise_BT * rollout.mask_BT})
        junk[name] = getattr(rollout, name).where(rollout.mask_BT == 1, 5.0)
    padded = replace(rollout, **junk)
    kept = copy.deepcopy(padded)
    expected, metrics = plain_update(agent, rollout, SCORE.double(), bonus)

    def with_bonus(agent, rows, logp_BT, entropy_BT, value_BT):
        for model in (base, other.policy):
            model.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
        loss_BT, metrics = losses(agent, rows, logp_BT, entropy_BT, value_BT)
        return loss_BT - bonus * entropy_BT, metrics

    monkeypatch.setattr(update, "losses", with_bonus)
    if case != "whole":                                     # a few rows in a pass
        monkeypatch.setitem(rollouts.MAX_LOGITS_PER_PASS, "cpu", 30 * 7)
    found = ppo_update(agent, padded, SCORE.double())
    for name, p in agent.trainable_parameters().items():
        torch.testing.assert_close(p, expected[name], atol=1e-9, rtol=1e-9)
    assert same_tensors(idle, other.trainable_parameters())
    assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-8, abs=1e-10)
    for name, x in padded.present().items():
        assert isinstance(x, list) or torch.equal(x, getattr(kept, name)), name
    assert metrics["clip_fraction"] > 0.1


@pytest.mark.parametrize("limit, most, expected", [
    # 9 + 6 and 8 + 7 together are 2 x 16 with padding; 40 is too much alone
    (rollouts.MAX_TOKENS_PER_PASS, 30, [[40], [15], [15], [5, 5, 5], [2, 2, 5]]),
    # 7 logits of each response token: three responses of up to 3 tokens
    (rollouts.MAX_LOGITS_PER_PASS, 9 * 7, [[40], [15], [15], [5, 5, 5], [2, 2, 5]])])
def test_passes_hold_rows_of_like_length_few_tokens_and_few_logits(limit, most, expected, monkeypatch):
    monkeypatch.setitem(limit, "cpu", most)
    P, T = torch.tensor([3, 1, 9, 2, 3, 8, 30, 1, 2]), torch.tensor([2, 1, 6, 3, 2, 7, 10, 1, 3])
    masks = SimpleNamespace(prompt_mask_BP=(torch.arange(30) >= 30 - P[:, None]).long(),
                            mask_BT=(torch.arange(10) < T[:, None]).float())
    assert [(P + T)[group].tolist() for group in micro_batches(masks, bigram(), 3)] == expected


def test_in_bfloat16_the_first_ratio_is_1_but_for_rounding():
    """In other mini-batches than the rollout's, too: k3 is below 0.01^2 / 2."""
    base = tiny_gpt2()
    base.dtype, base.temperature = "bfloat16", 0.5
    agent = moved(agent_of(base, num_ppo_epochs=1, temperature=0.5))
    rollout = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    agent.cfg = replace(agent.cfg, mini_batch_size=2, gradient_accumulation_steps=4)
    metrics = ppo_update(agent, rollout, SCORE)
    assert abs(metrics["approx_kl"]) < 5e-5 and metrics["clip_fraction"] == 0


class Deaf(torch.nn.Linear):
    """A critic whose values do not depend on its weights."""

    def __init__(self, base):
        super().__init__(1, 1)

    def forward(self, rows, hidden):
        return hidden.mean(-1).detach().requires_grad_()


def test_a_critic_or_a_policy_without_a_gradient_is_named():
    agent, rollout = ragged(critic="test_update:Deaf")
    with pytest.warns(UserWarning, match="no weight of llm1's critic has a gradient"):
        ppo_update(agent, rollout, SCORE)
    agent, rollout = ragged()
    agent.policy.lm.requires_grad_(False)          # with LoRA, of all agents at once
    with pytest.warns(UserWarning, match="no weight of llm1's policy has a gradient"):
        ppo_update(agent, rollout, SCORE)


def test_a_rate_below_0_is_refused():
    with pytest.raises(UserError, match="falling': gives llm1 -1.0 times its learning rate"):
        ragged(lr_schedule="test_update:falling")


falling = lambda progress: -1.0


def test_a_gradient_that_is_not_finite_stops_before_any_parameter_changes():
    agent, rollout = ragged()
    before = copy.deepcopy(agent.trainable_parameters())
    with pytest.raises(UserError, match="llm1 has diverged; the gradient was not applied"):
        ppo_update(agent, rollout, SCORE.log())
    assert same_tensors(before, agent.trainable_parameters())


@pytest.mark.parametrize("name, factors", [
    # progress 0, 1/4, 2/4, 3/4
    ("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25])])
def test_learning_rates_are_those_of_the_schedule(name, factors):
    agent = agent_of(bigram(), learning_rate=0.1, critic_learning_rate=0.2, lr_schedule=name, iterations=4)
    for iteration, factor in enumerate(factors, start=1):
        agent.begin(iteration)
        rates = {group["is_critic"]: group["lr"] for group in agent.optimizer.param_groups}
        assert rates == pytest.approx({False: 0.1 * factor, True: 0.2 * factor}, rel=1e-5)
        agent.reset()
        assert rates == {group["is_critic"]: group["lr"] for group in agent.optimizer.param_groups}


@pytest.mark.parametrize("edit, error", [
    (lambda loss, metrics: (loss.mean(), metrics), IndexError),
    (lambda loss, metrics: (loss, metrics | {"k2": loss.sum()}), IndexError),
    (lambda loss, metrics: (loss, metrics | {"score": loss}), TypeError)])
def test_a_mean_taken_too_early_or_a_name_that_is_taken_is_an_error(edit, error, monkeypatch):
    """It would be divided by the tokens again; it would hide another metric."""
    agent, rollout = ragged()
    monkeypatch.setattr(update, "losses", lambda *args: edit(*losses(*args)))
    with pytest.raises(error):
        ppo_update(agent, rollout, SCORE)


@estimator(critic=True, whiten=False)
def of_two(reward_BT, value_BT, mask_BT, rollout, **_):
    """An advantage by whether the limit has cut a response, and a target of its own for the critic."""
    return mask_BT * rollout.truncated_B[:, None], 3 * mask_BT


def test_an_estimator_sees_the_rollout_and_may_give_the_critics_target():
    agent, rollout = ragged(advantage="test_update:of_two")
    found = update.add_advantages(rollout, SCORE, agent)
    assert 0 < rollout.truncated_B.sum() < 8 and agent.critic is not None
    assert torch.equal(found.advantage_BT, rollout.mask_BT * rollout.truncated_B[:, None])
    assert torch.equal(found.return_BT, 3 * rollout.mask_BT)


def test_scores_of_tokens_are_rewards_of_tokens():
    agent, rollout = ragged(advantage="reinforce", init_kl_coef=0.0, gamma=0.0)
    score_BT = torch.arange(8.0)[:, None] + torch.arange(12.0)
    metrics = ppo_update(agent, rollout, score_BT)
    assert metrics["score"] == pytest.approx((score_BT * rollout.mask_BT).sum().item() / 8)
    for shape in ((4,), (16,), (8, 11), (8, 12, 1)):
        with pytest.raises(UserError, match="llm1's scores are"):
            ppo_update(agent, rollout, torch.ones(shape))
