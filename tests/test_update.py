"""The update: against plain autograd, one row at a time; what it must not depend on; edits of `losses`."""
import copy
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from toys import PROMPTS, agent_of, bigram, generator, moved, same_tensors, settings, tiny_gpt2

from cory.errors import UserError
from cory.ppo import formulas, update
from cory.ppo import rollout as rollouts
from cory.ppo.agent import Agent
from cory.ppo.lora import activate
from cory.ppo.rollout import by_length, collect_rollout
from cory.ppo.update import losses, ppo_update
from cory.train import Cory, Ppo

SCORE = torch.arange(8.0)


def ragged(**changes):
    """A small GPT-2 whose responses end at different lengths, and a rollout."""
    agent = moved(agent_of(tiny_gpt2(), **changes))
    return agent, collect_rollout(agent, PROMPTS, 12)


# --- the whole update ---
def plain_update(agent, rollout, score_B, of_sequence) -> tuple[dict, dict]:
    """The update of a copy of the agent, one row at a time and without padding: (weights, metrics)."""
    cfg, eta, agent = agent.cfg, agent.kl_coef, copy.deepcopy(agent)
    lm, critic, parameters = agent.policy.lm, agent.critic, agent.trainable_parameters()
    high = 1 + (cfg.cliprange_high or cfg.cliprange)
    optimizer = torch.optim.Adam(parameters.values(), lr=cfg.learning_rate)
    activate(lm, agent.policy.adapter)
    rows = []
    for b, score in enumerate(score_B.tolist()):
        P, n = int(rollout.prompt_mask_BP[b].sum()), int(rollout.mask_BT[b].sum())
        ids = torch.cat([rollout.prompt_BP[b, -P:], rollout.response_BT[b, :n]])[None]
        old, ref, kl = (x[b, :n] for x in (rollout.logp_BT, rollout.ref_logp_BT, rollout.kl_BT))
        value = torch.zeros(n) if critic is None else rollout.value_BT[b, :n]
        reward = -eta * kl if cfg.kl_in == "reward" else 0 * kl
        reward[-1] += score
        advantage, lam = torch.zeros(n + 1), 1.0 if critic is None else cfg.lam
        for t in reversed(range(n)):
            next_value = value[t + 1] if t + 1 < n else 0.0
            advantage[t] = reward[t] + cfg.gamma * next_value - value[t] + cfg.gamma * lam * advantage[t + 1]
        rows.append((ids, P, old, ref, value, advantage[:n], advantage[:n] + value))
    every, values, returns = (torch.cat([row[i] for row in rows]) for i in (5, 4, 6))
    sums, norms, rng = defaultdict(float), [], agent.generator()
    for _ in range(cfg.num_ppo_epochs):
        for step in np.split(rng.permutation(8), 8 // cfg.rows_per_optimizer_step):
            loss, tokens = 0.0, sum(len(rows[b][2]) for b in step)
            for ids, P, old, ref, old_value, advantage, target in (rows[b] for b in step):
                logp_TV = (lm(ids).logits[0, P - 1:-1] / cfg.temperature).log_softmax(-1)
                logp = logp_TV.gather(1, ids[0, P:, None])[:, 0]
                entropy = -(logp_TV.exp() * logp_TV).sum(1)
                log_ratio = (logp - old).mean().expand_as(old) if of_sequence else logp - old
                A = (advantage - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()
                ratio = log_ratio.exp()
                better, worse = A * ratio.clamp(max=high), A * ratio.clamp(min=1 - cfg.cliprange)
                k3 = (ref - logp).exp() - 1 - (ref - logp)
                parts = {"policy_loss": -torch.where(A > 0, better, worse), "entropy": entropy,
                         "approx_kl": ratio - 1 - log_ratio,
                         "clip_fraction": torch.where(A > 0, ratio > high, ratio < 1 - cfg.cliprange)}
                loss = loss + (parts["policy_loss"] - 0.1 * of_sequence * entropy).sum() / tokens
                if cfg.kl_in == "loss":
                    parts["kl_loss"] = k3
                    loss = loss + eta * k3.sum() / tokens
                if critic is not None:
                    value = critic.linear(lm.base_model(ids).last_hidden_state[0, P - 1:-1])[:, 0]
                    near = old_value + (value - old_value).clamp(-cfg.cliprange_value, cfg.cliprange_value)
                    parts["value_loss"] = torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
                    loss = loss + cfg.vf_coef * parts["value_loss"].sum() / tokens
                for name, x in parts.items():
                    sums[name] += x.sum().item() / (cfg.num_ppo_epochs * len(every))
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.cat([p.grad.flatten() for p in parameters.values()]).norm().item())
            for p in parameters.values():
                p.grad *= min(1.0, (cfg.max_grad_norm or 1e9) / norms[-1])
            optimizer.step()
    if critic is not None:
        sums["value_mse"] = ((values - returns) ** 2).mean().item()
        sums["explained_variance"] = 1 - ((returns - values).var() / returns.var()).item()
    return parameters, sums | {"grad_norm": np.mean(norms), "kl_coef": eta, "score": 3.5}


def gspo(agent, rows, logp_BT, entropy_BT, value_BT):
    """`losses` with GSPO's ratio (Zheng et al., arXiv:2507.18071, eq. 7), the response's geometric mean, and
    an entropy bonus.
    """
    log_ratio_B1 = (logp_BT - rows.logp_BT).sum(1, keepdim=True) / rows.mask_BT.sum(1)[:, None]
    log_ratio_BT = log_ratio_B1.expand_as(logp_BT)
    policy_loss_BT = formulas.policy_loss(log_ratio_BT, rows.advantage_BT, 0.2, 0.2)
    metrics = {"entropy": entropy_BT, "approx_kl": formulas.kl_k3(0.0, log_ratio_BT)}
    return policy_loss_BT - 0.1 * entropy_BT, metrics | {"policy_loss": policy_loss_BT}


@pytest.fixture
def float64(monkeypatch):
    """Also where the package asks for float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CASES = {
    "whole": dict(), "accumulated": dict(mini_batch_size=2, gradient_accumulation_steps=4),
    "clipped": dict(mini_batch_size=1, gradient_accumulation_steps=4, max_grad_norm=0.05),
    "kl_in_loss": dict(mini_batch_size=4, kl_in="loss", gamma=0.9, cliprange_value=0.05),
    "temperature": dict(mini_batch_size=4, temperature=0.6, cliprange_high=0.5),
    "no_critic": dict(mini_batch_size=2, advantage="reinforce", kl_penalty="k1"),
    "lora": dict(mini_batch_size=2, gradient_accumulation_steps=2, lora_rank=2),
    "checkpointed": dict(lora_rank=2, gradient_checkpointing=True),
    "gspo": dict(mini_batch_size=2, gradient_accumulation_steps=2, advantage="reinforce")}


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_plain_autograd_whatever_the_mini_batches(case, float64, monkeypatch):
    """Over two epochs, on ragged rows whose padding holds anything. The policy has moved since, so
    that ratios and values are clipped.
    """
    base = tiny_gpt2().double()
    base.temperature = CASES[case].get("temperature", 1.0)
    agent = agent_of(base, num_ppo_epochs=2, learning_rate=0.01, **CASES[case])
    for p in agent.trainable_parameters().values():
        p.data = p.data.double()
    rollout = collect_rollout(moved(agent), PROMPTS, 12)
    assert len(set(rollout.mask_BT.sum(1).tolist())) > 3
    junk = {"prompt_BP": rollout.prompt_BP.where(rollout.prompt_mask_BP == 1, 3),
            "response_BT": rollout.response_BT.where(rollout.mask_BT == 1, 2)}
    for name in {"logp_BT", "ref_logp_BT", "kl_BT", "value_BT"} & rollout.tensors().keys():
        x_BT = rollout.tensors()[name]
        noise_BT = 0.2 * torch.randn(x_BT.shape, generator=generator(len(name)))
        junk[name] = (x_BT + noise_BT).where(rollout.mask_BT == 1, 5.0)
    rollout = replace(rollout, **junk)
    kept = copy.deepcopy(rollout)
    expected, metrics = plain_update(agent, rollout, SCORE.double(), of_sequence=case == "gspo")
    if case == "gspo":
        monkeypatch.setattr(update, "losses", gspo)
        del metrics["clip_fraction"]
    if case != "whole":                                     # a few rows at a time through the LM head
        monkeypatch.setattr(update, "lm_head_tokens", lambda model: 30)
    found = ppo_update(agent, rollout, SCORE.double())
    for name, p in agent.trainable_parameters().items():
        torch.testing.assert_close(p, expected[name], atol=1e-9, rtol=1e-9)
    assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-8, abs=1e-10)
    assert all(torch.equal(x, kept.tensors()[name]) for name, x in rollout.tensors().items())
    assert metrics.get("clip_fraction", 1) > 0.1


def test_mini_batches_hold_each_row_once_and_rows_of_like_length_together(monkeypatch):
    monkeypatch.setitem(rollouts.MAX_TOKENS_PER_PASS, "cpu", 30)
    P, T = torch.tensor([3, 1, 9, 2, 3, 8, 30, 1, 2]), torch.tensor([2, 1, 6, 3, 2, 7, 10, 1, 3])
    masks = SimpleNamespace(prompt_mask_BP=(torch.arange(30) >= 30 - P[:, None]).long(),
                            mask_BT=(torch.arange(10) < T[:, None]).float())
    groups = by_length(masks, max_rows=3)
    assert sorted(torch.cat(groups).tolist()) == list(range(9))
    # 9 + 6 and 8 + 7 together are 2 x 16 with padding; 40 is too much alone
    assert [(P + T)[group].tolist() for group in groups] == [[2, 2, 5], [5, 5, 5], [15], [15], [40]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_is_1(dtype):
    """Exactly, though the config has dropout. In bfloat16 and other mini-batches k3 is below 0.01^2 / 2."""
    base = tiny_gpt2()
    base.dtype = dtype
    agent = moved(agent_of(base, num_ppo_epochs=1))
    rollout = collect_rollout(agent, PROMPTS, 12)
    if dtype == "bfloat16":
        agent.cfg = replace(agent.cfg, mini_batch_size=2, gradient_accumulation_steps=4)
    metrics = ppo_update(agent, rollout, SCORE)
    assert metrics["approx_kl"] == 0 if dtype == "float32" else 0 < metrics["approx_kl"] < 5e-5
    assert metrics["clip_fraction"] == 0


# --- the step ---
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_any_parameter_changes(value):
    agent, rollout = ragged()
    before = copy.deepcopy(agent.trainable_parameters())
    with pytest.raises(UserError, match="llm1 has diverged; the gradient was not applied"):
        ppo_update(agent, rollout, torch.tensor([value] + [0.0] * 7))
    assert same_tensors(before, agent.trainable_parameters())


@pytest.mark.parametrize("name, factors", [
    # progress 0, 1/4, 2/4, 3/4; cos(pi/4) = 0.70711
    ("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.853553, 0.5, 0.146447])])
def test_learning_rates_are_those_of_the_schedule(name, factors):
    agent = agent_of(bigram(), learning_rate=0.1, critic_learning_rate=0.2, lr_schedule=name, iterations=4)
    for iteration, factor in enumerate(factors, start=1):
        agent.set_learning_rate(iteration)
        rates = {group["is_critic"]: group["lr"] for group in agent.optimizer.param_groups}
        assert rates == pytest.approx({False: 0.1 * factor, True: 0.2 * factor}, rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_lora_another_models_pass_before_the_backward_pass_loses_no_gradient(checkpointing, monkeypatch):
    """The base, another agent and the moved reference are asked inside the losses."""
    found = []
    for asks in (False, True):
        cfg, base = settings(lora_rank=2, gradient_checkpointing=checkpointing), tiny_gpt2()
        agent, other = (moved(Agent(name, base, cfg, i)) for i, name in enumerate(("llm1", "llm2")))
        agent.move_reference()
        rollout = collect_rollout(moved(agent), PROMPTS, 6)
        rows = rollout.prompt_BP, rollout.prompt_mask_BP, rollout.response_BT

        def asking(agent, rows, *of_policy):
            for model in (base, agent.reference, other.policy):
                model.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
            return losses(agent, rows, *of_policy)

        monkeypatch.setattr(update, "losses", asking if asks else losses)
        idle = copy.deepcopy(other.trainable_parameters())
        found.append((ppo_update(agent, rollout, SCORE), agent.trainable_parameters()))
        assert same_tensors(idle, other.trainable_parameters())
    (metrics, one), (again, two) = found
    assert metrics == again and metrics["grad_norm"] > 0 and same_tensors(one, two)
    if not checkpointing:                                   # in a step of one's own, too
        hidden_BTH, _ = agent.policy.response_hidden(*rows), other.policy.response_hidden(*rows)
        hidden_BTH.sum().backward()
        assert all(p.grad is not None for name, p in two.items() if "lora_" in name)


@pytest.mark.parametrize("edit, says", [
    (lambda loss, metrics: (loss.mean(), metrics), r"loss is \(\): must be a tensor of shape \(8, "),
    (lambda loss, metrics: (loss, metrics | {"k2": loss.sum()}), r"k2 is \(\): must be a tensor of shape"),
    (lambda loss, metrics: (loss, metrics | {"k2": loss.detach().numpy()}), "k2 is 'ndarray'"),
    (lambda loss, metrics: (loss, metrics | {"score": loss}), "metric is 'score': .* another one")])
def test_a_mean_taken_too_early_or_a_name_that_is_taken_is_one_line(edit, says, monkeypatch):
    """It would be divided by the tokens again; it would hide another metric."""
    agent, rollout = ragged()
    monkeypatch.setattr(update, "losses", lambda *args: edit(*losses(*args)))
    with pytest.raises(UserError, match=says):
        ppo_update(agent, rollout, SCORE)


def test_a_metric_with_a_mask_is_the_mean_over_its_real_tokens(monkeypatch):
    """From the fifth token on, which some responses do not have; two rows at a time."""
    def with_pair(agent, rows, *of_policy):
        loss_BT, metrics = losses(agent, rows, *of_policy)
        late_BT = torch.zeros_like(rows.mask_BT)
        late_BT[:, 4:] = 1
        return loss_BT, metrics | {"late_kl": (1 + rows.kl_BT, late_BT)}

    monkeypatch.setattr(update, "losses", with_pair)
    agent, rollout = ragged(mini_batch_size=2)
    real = rollout.mask_BT[:, 4:] == 1
    assert 0 < real[:, 0].sum() < 8
    kl = rollout.kl_BT[:, 4:][real].mean().item()
    assert ppo_update(agent, rollout, SCORE)["late_kl"] == pytest.approx(1 + kl)


# --- what an agent is trained on ---
def played(method_class, **changes) -> list:
    """The two agents' steps of two iterations on a task whose reward is the length of a response."""
    cfg = settings(**changes)
    agents = [moved(Agent(name, bigram(), cfg, i)) for i, name in enumerate(method_class.agents)]
    task = Mock(pioneer_prompts=list)
    task.batch.return_value = ["a", "b"] * 4, 3
    task.observer_prompts.side_effect = lambda queries, shown: [q + s for q, s in zip(queries, shown)]
    task.reward.side_effect = lambda queries, texts: torch.tensor([float(len(text)) for text in texts])
    if cfg.share_weights:
        agents = agents[:1] * 2
    run = Mock(done=0, agents=[*dict.fromkeys(agents)], roles=agents)
    method_class(cfg, task).train(run)
    return [step for call in run.log.call_args_list for step in call.args[2]]


def test_an_agent_trains_on_its_own_reward_and_its_share_of_its_partners():
    first, second = played(Cory, partner_reward=0.5, iterations=1)
    r1, r2 = (step.reward_B.mean().item() for step in (first, second))
    assert r1 != r2
    assert first.update["score"] == pytest.approx(r1 + r2 / 2)
    assert second.update["score"] == pytest.approx(r2 + r1 / 2)
    (alone,) = played(Ppo, iterations=1)
    assert alone.update["score"] == pytest.approx(alone.reward_B.mean().item())


CONTROLLED = []                                             # (agent, its KL) of each call


def one_more(agent, kl_N):
    CONTROLLED.append((agent.name, kl_N))
    return agent.kl_coef + 1


@pytest.mark.parametrize("share_weights", [False, True])
def test_a_controller_of_ones_own_is_called_once_an_agent_and_iteration(share_weights):
    """On the KL of all responses, of both roles where one agent plays them; after both updates."""
    CONTROLLED.clear()
    steps = played(Cory, kl_controller="test_update:one_more", iterations=2, share_weights=share_weights,
                   role_exchange_every=0)
    assert [step.update["kl_coef"] for step in steps] == [0.3, 0.3, 1.3, 1.3]
    kl = [step.rollout.kl_B for step in steps]
    if share_weights:
        names, kl = ["llm1"] * 2, [torch.cat(kl[:2]), torch.cat(kl[2:])]
    else:
        names = ["llm1", "llm2"] * 2
    assert [name for name, _ in CONTROLLED] == names
    assert all(torch.equal(seen, expected) for (_, seen), expected in zip(CONTROLLED, kl, strict=True))
