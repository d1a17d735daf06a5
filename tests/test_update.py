"""The update against plain autograd, one row at a time; what it must not depend on; edits of `losses`."""
import copy
import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import get_total_norm
from toys import PROMPTS, agent_of, bigram, generator, moved, same_tensors, tiny_gpt2

from cory.errors import UserError
from cory.ppo import formulas, update
from cory.ppo import rollout as rollouts
from cory.ppo.advantages import estimator, gae, reinforce
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, micro_batches, take
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import losses, ppo_update

SCORE = torch.arange(8.0)


def ragged(**changes) -> tuple[Agent, Rollout]:
    """A small GPT-2 and a rollout whose responses end at different lengths."""
    agent = moved(agent_of(tiny_gpt2(), **changes))
    return agent, collect_rollout(agent, PROMPTS, PROMPTS, 12)


def plain_losses(agent, row: Rollout, bonus: float) -> tuple[torch.Tensor, dict]:
    """The losses and metrics of the tokens of one row, which has no padding."""
    cfg = agent.cfg
    lm = agent.policy.lm
    ids = torch.cat([row.prompt_BP, row.response_BT], 1)
    states = slice(row.prompt_BP.shape[1] - 1, -1)
    logits_1TV = lm(ids).logits[:, states] / cfg.temperature
    logp_1TV = logits_1TV.log_softmax(-1)
    logp_1T1 = logp_1TV.gather(2, row.response_BT[:, :, None])
    logp = logp_1T1[:, :, 0]
    log_ratio = logp - row.logp_BT
    ratio = log_ratio.exp()
    A = row.advantage_BT
    capped = ratio.clamp(max=1 + cfg.cliprange)
    raised = ratio.clamp(min=1 - cfg.cliprange)
    clipped = capped.where(A > 0, raised)
    metrics = {
        "policy_loss": -A * clipped,
        "clip_fraction": clipped != ratio,
        "approx_kl": ratio - 1 - log_ratio,
        "entropy": -(logp_1TV.exp() * logp_1TV).sum(2)}
    loss = metrics["policy_loss"] - bonus * metrics["entropy"]
    if cfg.kl_in == "loss":
        metrics["kl_loss"] = formulas.kl_k3(logp, row.ref_logp_BT)
        loss = loss + agent.kl_coef * metrics["kl_loss"]
    if agent.critic:
        hidden = lm.base_model(ids).last_hidden_state[:, states]
        value = agent.critic.linear(hidden)[:, :, 0]
        metrics["value_loss"] = formulas.value_loss(value, row.value_BT, row.return_BT, cfg.cliprange_value)
        loss = loss + cfg.vf_coef * metrics["value_loss"]
    return loss, metrics


def plain_update(agent, rollout: Rollout, score_B, bonus: float) -> tuple[dict, dict]:
    """The update of a copy of the agent, one row at a time and without padding: (weights, metrics)."""
    agent = copy.deepcopy(agent)
    cfg = agent.cfg
    mask_BT = rollout.mask_BT
    eta = agent.kl_coef if cfg.kl_in == "reward" else 0
    reward_BT = formulas.token_rewards(score_B, rollout.kl_BT, mask_BT, eta)
    if agent.critic:
        advantage_BT, return_BT = gae(reward_BT, rollout.value_BT, mask_BT, cfg.gamma, cfg.lam)
    else:
        advantage_BT, return_BT = reinforce(reward_BT, mask_BT, cfg.gamma)
    whitened_BT = formulas.whiten(advantage_BT, mask_BT)
    rollout = replace(rollout, advantage_BT=whitened_BT, return_BT=return_BT)
    parameters = agent.trainable_parameters()
    optimizer = torch.optim.Adam(parameters.values(), lr=cfg.learning_rate)
    agent.policy.activate()
    rng = agent.generator()
    values = defaultdict(list)
    norms = []
    for _ in range(cfg.num_ppo_epochs):
        for rows in rng.permutation(8).reshape(-1, cfg.rows_per_optimizer_step):
            for b in rows:
                row = take(rollout, torch.tensor([b]))
                loss, metrics = plain_losses(agent, row, bonus)
                divisors = {
                    "tokens": mask_BT[rows].sum(),
                    "responses": len(rows) * loss.numel(),
                    "constant": len(rows) * cfg.max_response_length}
                (loss.sum() / divisors[cfg.loss_mean]).backward()
                for name, x in metrics.items():
                    values[name] += x.flatten().tolist()
            norm = get_total_norm([p.grad for p in parameters.values()]).item()
            norms.append(norm)
            limit = cfg.max_grad_norm or math.inf
            for p in parameters.values():
                p.grad *= min(1, limit / norm)
            optimizer.step()
            optimizer.zero_grad()
    means = {name: fmean(numbers) for name, numbers in values.items()}
    return parameters, means | {"grad_norm": fmean(norms), "kl_coef": agent.kl_coef, "score": 3.5}


NOISY = ("logp_BT", "ref_logp_BT", "kl_BT", "value_BT")
CASES = {
    "one_pass": dict(),
    "clipped_gradients": dict(mini_batch_size=1, gradient_accumulation_steps=4, max_grad_norm=0.05),
    "kl_in_loss": dict(mini_batch_size=4, kl_in="loss", gamma=0.9, cliprange_value=0.05),
    "entropy_bonus": dict(mini_batch_size=2, advantage="reinforce", kl_penalty="k1", cliprange=0.1),
    "mean_of_responses": dict(mini_batch_size=2, gradient_accumulation_steps=2, loss_mean="responses"),
    "constant_divisor": dict(mini_batch_size=4, loss_mean="constant", temperature=0.6),
    "lora": dict(mini_batch_size=2, gradient_accumulation_steps=2, lora_rank=2)}


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_plain_autograd_whatever_the_mini_batches(case, in_float64, monkeypatch):
    """Over two epochs, on ragged rows whose padding holds anything. The loss runs two other models before the
    backward pass; with LoRA they share the agent's layers.
    """
    base = tiny_gpt2()
    base.temperature = CASES[case].get("temperature", 1.0)
    bonus = 0.1 if case == "entropy_bonus" else 0
    agent = agent_of(base, num_ppo_epochs=2, learning_rate=0.01, **CASES[case])
    other = moved(Agent("llm2", base, agent.cfg, 1))
    other_before = copy.deepcopy(other.trainable_parameters())
    rollout = collect_rollout(moved(agent), PROMPTS, PROMPTS, 12)
    assert len(rollout.mask_BT.sum(1).unique()) > 2
    assert rollout.sampling_gap < 1e-9

    def add_noise(name, x):
        """As if the models had moved since, so that ratios and values are clipped."""
        if name not in NOISY:
            return x
        noise_BT = torch.randn(x.shape, generator=generator(len(name)))
        return x + 0.2 * noise_BT * rollout.mask_BT

    def fill_padding(name, x):
        if name == "prompt_BP":
            return x.where(rollout.prompt_mask_BP == 1, 3)
        if name in ("response_BT", *NOISY):
            return x.where(rollout.mask_BT == 1, 5)
        return x

    def with_bonus(agent, rows, logp_BT, entropy_BT, value_BT):
        for model in (base, other.policy):
            model.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
        loss_BT, metrics = losses(agent, rows, logp_BT, entropy_BT, value_BT)
        return loss_BT - bonus * entropy_BT, metrics

    rollout = rollout.map_fields(add_noise)
    padded = rollout.map_fields(fill_padding)
    padded_before = copy.deepcopy(padded)
    expected_weights, expected = plain_update(agent, rollout, SCORE.double(), bonus)
    monkeypatch.setattr(update, "losses", with_bonus)
    if case != "one_pass":
        monkeypatch.setitem(rollouts.MAX_LOGITS_PER_PASS, "cpu", 30 * 7)
    metrics = ppo_update(agent, padded, SCORE.double())
    for name, p in agent.trainable_parameters().items():
        torch.testing.assert_close(p, expected_weights[name], atol=1e-9, rtol=1e-9)
    assert same_tensors(other_before, other.trainable_parameters())
    compared = {name: metrics[name] for name in expected}
    assert compared == pytest.approx(expected, rel=1e-8, abs=1e-10)
    assert expected["clip_fraction"] > 0.1
    for name, x in vars(padded).items():
        unchanged = getattr(padded_before, name)
        assert not isinstance(x, torch.Tensor) or torch.equal(x, unchanged), name


@pytest.mark.parametrize("limit, most", [
    # 13 + 2 and 8 + 7 together are 2 x 20 with padding; 40 is too much alone
    (rollouts.MAX_TOKENS_PER_PASS, 30),
    # 7 logits of each response token: three responses of up to 3 tokens
    (rollouts.MAX_LOGITS_PER_PASS, 9 * 7)])
def test_passes_hold_rows_of_like_length_few_tokens_and_few_logits(limit, most, monkeypatch):
    monkeypatch.setitem(limit, "cpu", most)
    prompt_B = torch.tensor([3, 1, 13, 2, 3, 8, 7, 1, 2])
    response_B = torch.tensor([2, 1, 2, 3, 2, 7, 33, 1, 3])
    position = torch.arange(40)
    rows = SimpleNamespace(
        prompt_mask_BP=position < prompt_B[:, None],
        mask_BT=position < response_B[:, None])
    length_B = prompt_B + response_B
    lengths = [length_B[group].tolist() for group in micro_batches(rows, bigram(), 3)]
    assert lengths == [[40], [15], [15], [5, 5, 5], [2, 2, 5]]


def test_in_bfloat16_the_first_ratio_is_1_but_for_rounding():
    """In other mini-batches than the rollout's, too: k3 is below 0.01^2 / 2."""
    base = tiny_gpt2()
    base.dtype = "bfloat16"
    base.temperature = 0.5
    agent = moved(agent_of(base, num_ppo_epochs=1, temperature=0.5))
    rollout = collect_rollout(agent, PROMPTS, PROMPTS, 12)
    agent.cfg = replace(agent.cfg, mini_batch_size=2, gradient_accumulation_steps=4)
    assert ppo_update(agent, rollout, SCORE)["approx_kl"] < 5e-5


def test_a_warning_names_a_custom_parameter_that_no_optimizer_has():
    """Here the policy's logits have a bias that was added after the agent was made."""
    agent, rollout = ragged()
    policy = agent.policy
    policy.bias = torch.nn.Parameter(torch.zeros(7))
    policy.logits = lambda hidden_NH: policy.head(hidden_NH) + policy.bias
    with pytest.warns(UserWarning, match="llm1's bias has a gradient, but no optimizer"):
        ppo_update(agent, rollout, SCORE)


def falling(progress):
    return -1.0


def test_a_negative_learning_rate_is_refused():
    with pytest.raises(UserError, match="falling': gives llm1 -1.0 times its learning rate"):
        agent_of(bigram(), lr_schedule="test_update:falling")


def test_a_gradient_that_is_not_finite_stops_before_any_parameter_changes():
    agent, rollout = ragged()
    before = copy.deepcopy(agent.trainable_parameters())
    with pytest.raises(UserError, match="llm1 has diverged; the gradient was not applied"):
        ppo_update(agent, rollout, SCORE.log())
    assert same_tensors(before, agent.trainable_parameters())


def learning_rates(agent) -> dict:
    return {group["is_critic"]: group["lr"] for group in agent.optimizer.param_groups}


@pytest.mark.parametrize("name, factors", [
    # progress 0, 1/4, 2/4, 3/4
    ("constant", [1, 1, 1, 1]),
    ("linear", [1, 0.75, 0.5, 0.25])])
def test_learning_rates_are_those_of_the_schedule(name, factors):
    agent = agent_of(bigram(), learning_rate=0.1, critic_learning_rate=0.2, lr_schedule=name, iterations=4)
    for iteration, factor in enumerate(factors, start=1):
        agent.begin(iteration)
        rates = learning_rates(agent)
        assert rates == pytest.approx({False: 0.1 * factor, True: 0.2 * factor}, rel=1e-5)
        agent.reset()
        assert learning_rates(agent) == rates


@pytest.mark.parametrize("edit, error", [
    (lambda loss, metrics: (loss.mean(), metrics), IndexError),
    (lambda loss, metrics: (loss, metrics | {"k2": loss.sum()}), IndexError),
    (lambda loss, metrics: (loss, metrics | {"score": loss}), TypeError)])
def test_a_loss_or_metric_averaged_too_early_or_a_duplicate_metric_is_an_error(edit, error, monkeypatch):
    """A mean would be divided by the tokens again, and a duplicate would hide the other metric."""
    agent, rollout = ragged()
    monkeypatch.setattr(update, "losses", lambda *args: edit(*losses(*args)))
    with pytest.raises(error):
        ppo_update(agent, rollout, SCORE)


@estimator(critic=True, whiten=False)
def token_ids(mask_BT, rollout, **_):
    """Advantages that only the rollout holds, and a target of its own for the critic."""
    return rollout.response_BT, 3 * mask_BT


def test_an_estimator_sees_the_rollout_and_may_give_the_critics_target():
    agent, rollout = ragged(advantage="test_update:token_ids")
    estimated = update.add_advantages(rollout, SCORE, agent)
    assert torch.equal(estimated.advantage_BT, rollout.response_BT)
    assert torch.equal(estimated.return_BT, 3 * rollout.mask_BT)
    assert agent.critic is not None


def test_loss_weights_of_a_method_multiply_those_of_the_mean():
    agent, rollout = ragged(loss_mean="responses")
    computed = update.add_advantages(rollout, SCORE, agent)
    torch.testing.assert_close(computed.weight_BT.sum(1), torch.ones(8))
    own = replace(rollout, weight_BT=rollout.mask_BT / 4)
    weighted = update.add_advantages(own, SCORE, agent)
    assert torch.equal(weighted.weight_BT, computed.weight_BT / 4)
    assert torch.equal(weighted.divisor_B, computed.divisor_B)


def test_token_scores_are_summed_over_responses_and_other_shapes_are_refused():
    agent, rollout = ragged()
    score_BT = torch.rand(rollout.mask_BT.shape, generator=generator())
    metrics = ppo_update(agent, rollout, score_BT)
    total = (score_BT * rollout.mask_BT).sum().item()
    assert metrics["score"] == pytest.approx(total / 8)
    for shape in ((4,), (8, 1), (8, 12, 1)):
        with pytest.raises(UserError, match="llm1's scores are"):
            ppo_update(agent, rollout, torch.ones(shape))
