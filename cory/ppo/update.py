"""The update of one agent on one rollout: rewards, advantages, the objective, the optimizer steps.

    rollout -> token rewards -> advantages -> experience -> mini-batches -> losses -> gradient -> Adam
"""
import math
from collections import defaultdict

import torch
from torch import Tensor

from cory.config import LR_SCHEDULES, Config
from cory.errors import Diverged, UserError
from cory.names import find
from cory.ppo import formulas
from cory.ppo.advantages import estimator, parameter_names
from cory.ppo.agent import Agent
from cory.ppo.lora import activate
from cory.ppo.minibatches import Experience, Tokens, logit_chunk_size
from cory.ppo.model import PolicyWithValue
from cory.ppo.rollout import Rollout
from cory.system import distributed, sharding


def ppo_update(agent: Agent, rollout: Rollout, score_B: Tensor, iteration: int) -> dict[str, float]:
    """Token-level PPO on scores (B,): `num_ppo_epochs` shuffled passes, then with `adap_kl_ctrl` one step of
    the KL controller.

    Losses are token means over an optimizer step of `rows_per_optimizer_step` rows. A mini-batch here is one
    backward pass over some of them: how rows are divided into mini-batches changes rounding alone. Raises
    `Diverged` before a gradient that is not finite reaches a parameter. Returns metrics (docs/settings.md).
    Those of `losses` are means over the tokens of all passes, so under a policy and critic that move.

    To stop early, stop after a whole pass: `explained_variance` compares the critic's errors of all passes
    with the returns of all tokens. Stop in all processes alike: `metric_parts["approx_kl"]` has this
    process's tokens alone, of all passes so far (`all_reduce` sums).
    """
    cfg = agent.cfg
    experience = make_experience(rollout, score_B, agent.kl_coef, cfg)
    rate = set_learning_rate(agent, iteration)
    metric_parts, grad_norms = defaultdict(list), []
    sharded = sharding.is_sharded(agent.policy.lm)
    for _ in range(cfg.num_ppo_epochs):
        steps = experience.shuffled_mini_batches(cfg.rows_per_optimizer_step, cfg.mini_batch_size,
                                                 agent.generator, sharded)
        for mini_batches in steps:
            step_tokens = distributed.all_reduce(sum(mini_batch.mask_BT.sum() for mini_batch in mini_batches))
            for mini_batch in mini_batches:
                add_gradient(agent, mini_batch, step_tokens, metric_parts)
            grad_norms.append(optimizer_step(agent, cfg.max_grad_norm))
    metrics = {"score": score_B.mean().item(), "kl_coef": agent.kl_coef, "learning_rate": rate,
               "grad_norm": sum(grad_norms) / len(grad_norms)}
    if cfg.adap_kl_ctrl:
        kl, n = rollout.kl_B.mean().item(), len(score_B)
        agent.kl_coef = formulas.adapted_kl_coef(agent.kl_coef, kl, cfg.kl_target, cfg.kl_horizon, n)
    means = token_means(metric_parts, experience)
    for name in means.keys() & metrics.keys():
        raise UserError("metric of the loss", name, "is one of the update's own; give it another name")
    return means | metrics


def make_experience(rollout: Rollout, score_B: Tensor, kl_coef: float, cfg: Config) -> Experience:
    """Scores (B,) and the KL penalty become token rewards, advantages and critic targets."""
    mask_BT, value_BT = rollout.mask_BT, rollout.value_BT
    require_shape("score", score_B, mask_BT.shape[:1], "a number for each response")
    reward_kl_coef = kl_coef if cfg.kl_in == "reward" else 0.0
    reward_BT = formulas.token_rewards(score_B.to(mask_BT), rollout.kl_BT, mask_BT, reward_kl_coef)

    offered = {"reward_BT": reward_BT, "mask_BT": mask_BT, "value_BT": value_BT, "gamma": cfg.gamma,
               "lam": cfg.lam, "group_size": cfg.responses_per_query}
    estimate = estimator(cfg.advantage, cfg.responses_per_query)
    advantage_BT = estimate(**{name: offered[name] for name in parameter_names(estimate)})
    require_shape(f"advantage {cfg.advantage}", advantage_BT, mask_BT.shape, "like reward_BT")
    advantage_BT = advantage_BT.to(mask_BT)             # an estimator may return integers

    return_BT = None if value_BT is None else (advantage_BT + value_BT) * mask_BT
    if cfg.whitens:
        advantage_BT = formulas.whiten(advantage_BT, mask_BT)
    if cfg.importance_cap > 0:
        # Truncated importance sampling: min(pi_old / q, cap) weighs the policy loss, and no other term. After
        # whitening, because whitening cancels a weight that all tokens have in common.
        weight_BT = (rollout.logp_BT - rollout.sampling_logp_BT).exp().clamp(max=cfg.importance_cap)
        advantage_BT = advantage_BT * weight_BT
    return Experience(prompt_BP=rollout.prompt_BP, prompt_mask_BP=rollout.prompt_mask_BP,
                      response_BT=rollout.response_BT, mask_BT=mask_BT, logp_BT=rollout.logp_BT,
                      ref_logp_BT=rollout.ref_logp_BT, advantage_BT=advantage_BT, value_BT=value_BT,
                      return_BT=return_BT)


def losses(policy: PolicyWithValue, hidden_NH: Tensor, old: Tokens, kl_coef: float,
           cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole objective, token by token: (loss (N,) to be averaged and minimised, metrics (N,) by name).

        loss = policy_loss + kl_coef k3 [kl_in loss] - ent_coef entropy + vf_coef value_loss [with a critic]

    hidden_NH (N, H): the policy's last hidden states of N response tokens; `old`: what the rollout knows of
    them. A metric is logged as its mean over all tokens of the update: one more line here is one more curve.
    Return the same names at every call. Of `critic_error`, `token_means` makes `value_error` and
    `explained_variance`.

    The N tokens are of several responses, and may end within one. So a weight of each response belongs in
    `make_experience`: on the advantages, after whitening, it reaches the policy loss alone; for other terms
    let a `_BT` field of `Experience` carry it, and an `_N` field of `Tokens`. The sum over tokens is divided
    by the tokens of the optimizer step. For a mean over responses weigh each token by 1 / length, and divide
    by `rows_per_optimizer_step` in `add_gradient` instead. For a ratio of whole responses (GSPO) compute its
    value in `add_gradient`, before the chunks, by `logp_and_entropy` of all of `hidden_NH` without gradients;
    here `logp_N - logp_N.detach()` gives it its gradient. It needs a `clip_fraction` of its own.

    Processes call this unequally often: it may not wait for others, as `all_reduce` or a pass through a
    sharded model does, nor draw from `agent.generator`, which moves alike in all of them.
    """
    logp_N, entropy_N = policy.logp_and_entropy(hidden_NH, old.response_N)
    policy_loss_N = formulas.policy_loss(logp_N, old.logp_N, old.advantage_N, cfg.cliprange)
    loss_N = policy_loss_N.clone()          # a copy: `loss_N -= ...` leaves the metric as it is
    unclipped_N = -(logp_N - old.logp_N).exp() * old.advantage_N
    metrics = {"policy_loss": policy_loss_N, "entropy": entropy_N,
               # tokens whose loss is not exactly -ratio A: a policy loss of another form needs its own count
               "clip_fraction": policy_loss_N != unclipped_N,
               "approx_kl": formulas.kl_k3(old.logp_N, logp_N)}         # of KL(pi_old || pi), if q is pi_old
    if cfg.kl_in == "loss":
        kl_loss_N = formulas.kl_k3(logp_N, old.ref_logp_N)
        loss_N = loss_N + kl_coef * kl_loss_N
        metrics["kl_loss"] = kl_loss_N
    if cfg.ent_coef > 0:
        loss_N = loss_N - cfg.ent_coef * entropy_N
    if policy.value_head is not None:
        value_N = policy.values(hidden_NH)
        value_loss_N = formulas.value_loss(value_N, old.value_N, old.return_N, cfg.cliprange_value)
        loss_N = loss_N + cfg.vf_coef * value_loss_N
        metrics |= {"value_loss": value_loss_N, "critic_error": value_N.double() - old.return_N.double()}
    return loss_N, metrics


def add_gradient(agent: Agent, mini_batch: Experience, step_tokens: Tensor,
                 metric_parts: dict[str, list[Tensor]]) -> None:
    """Adds the gradient of `sum_t loss_t / step_tokens` over a mini-batch; appends its tokens' metrics.

    The LM head runs forward and backward for a few tokens at a time, down to the gradient of their hidden
    states; the transformer's backward pass follows once. So memory for (N, V) does not grow with N. A new
    term or metric of tokens belongs in `losses`, and nothing changes here.
    """
    policy, real = agent.policy, mini_batch.mask_BT.bool()
    prompt_BP, prompt_mask_BP = mini_batch.prompt_BP, mini_batch.prompt_mask_BP
    hidden_NH = policy.response_hidden(prompt_BP, prompt_mask_BP, mini_batch.response_BT)[real]
    leaf_NH = hidden_NH.detach().requires_grad_()
    size = logit_chunk_size(policy)
    for hidden, old in zip(leaf_NH.split(size), Tokens.of(mini_batch).split(size), strict=True):
        loss_N, metrics = losses(policy, hidden, old, agent.kl_coef, agent.cfg)
        require_shape("loss", loss_N, old.logp_N.shape, "one value per token; take no mean or sum")
        (loss_N.sum() / step_tokens).backward()
        for name, x_N in metrics.items():
            require_shape(name, x_N, loss_N.shape, "one value per token; take no mean or sum")
            metric_parts[name].append(x_N.detach())
    activate(policy.lm, policy.adapter)     # an edit of `losses` may have activated another adapter
    hidden_NH.backward(leaf_NH.grad)


def require_shape(name: str, x: Tensor, shape: torch.Size, what: str) -> None:
    """Raises `UserError` for what a user's own function has returned, unless it is a tensor of that shape."""
    actual = x.shape if isinstance(x, Tensor) else None
    if actual != shape:
        found = f"a {type(x).__name__}" if actual is None else f"a tensor of shape {tuple(actual)}"
        raise UserError(name, found, f"must be a tensor of shape {tuple(shape)}: {what}")


def optimizer_step(agent: Agent, max_grad_norm: float) -> float:
    """Clips if asked to, steps, clears. Returns the norm before clipping, of policy and critic together.

    Gradients are summed over processes: the loss was divided by the tokens of all.
    """
    trained = list(agent.policy.trained().values())
    replicated = [p for p in trained if not sharding.is_sharded(p)]     # `shard` has FSDP sum the others
    distributed.all_reduce_gradients(replicated)
    parameters = [p for p in trained if p.grad is not None]
    norm = sharding.gradient_norm(parameters)
    if not norm.isfinite():
        way_out = ("the gradient was not applied. Mend a score, advantage or loss of your own, or start "
                   "a new run with a lower --learning_rate or with --max_grad_norm 1")
        raise Diverged("grad_norm", norm.item(), agent.name, way_out)
    if max_grad_norm > 0:
        for group in sharding.by_placement(parameters):
            torch.nn.utils.clip_grads_with_norm_(group, max_grad_norm, norm)
    agent.optimizer.step()
    agent.optimizer.zero_grad(set_to_none=True)
    return norm.item()


def set_learning_rate(agent: Agent, iteration: int) -> float:
    """Sets this iteration's step sizes, of policy and critic, and returns the policy's."""
    cfg = agent.cfg
    schedule = find("lr_schedule", cfg.lr_schedule, LR_SCHEDULES)
    bases = cfg.learning_rate, cfg.critic_learning_rate or cfg.learning_rate
    way_out = "must be a function from progress (0 to 1) to a factor of 0 or more"
    try:
        rate, critic_rate = (float(formulas.learning_rate(base, iteration, cfg.iterations,
                                                          cfg.warmup_iterations, schedule)) for base in bases)
    except (TypeError, ValueError) as error:            # the schedule takes no number, or returns none
        raise UserError("lr_schedule", cfg.lr_schedule, f"{way_out} ({error})") from error
    if not 0 <= rate < math.inf:
        raise UserError("lr_schedule", cfg.lr_schedule, way_out)
    for group in agent.optimizer.param_groups:
        group["lr"] = critic_rate if group["is_critic"] else rate
    return rate


def token_means(metric_parts: dict[str, list[Tensor]], experience: Experience) -> dict[str, float]:
    """Token means of the metrics; of the critic's errors the mean square and the explained variance."""
    means = {}
    for name, parts in metric_parts.items():
        x_N = distributed.all_gather_rows(torch.cat(parts).double())
        if name == "critic_error":
            returns_N = experience.return_BT[experience.mask_BT.bool()]
            means["value_error"] = (x_N**2).mean().item()
            means["explained_variance"] = formulas.explained_variance(x_N, returns_N)
        else:
            means[name] = x_N.mean().item()
    return means
