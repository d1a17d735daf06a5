"""The training loops, side by side: what PPO does, and what CORY adds to it."""
from dataclasses import asdict
from statistics import fmean
from typing import Callable

from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.experiment.evaluation import answers
from cory.experiment.run import Run, Turn
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, collect_rollout
from cory.ppo.update import ppo_update
from cory.system.distributed import launched


def trains(*agents: str, evaluate: Callable | None = None) -> Callable:
    """Decorator that names the agents a loop trains. The run makes one for each name, in this order (with
    `--share_weights true` one for all).

    `evaluate(run, roles)`, if given, measures the agents as a team at each held-out evaluation: `roles` are
    those of the iteration that has just ended. It returns numbers by name, which are logged as
    `eval/team/NAME`.
    """
    def decorator(loop):
        loop.agents, loop.evaluate = agents, evaluate
        return loop
    return decorator


def score(rollout: Rollout, reward_B: Tensor, partner_reward_B: Tensor | None, cfg: Config) -> Tensor:
    """Returns what an agent's responses are trained on, (B,): `r_CORY = r(own) + partner_reward r(partner)`.
    `cfg` are the agent's settings.

    Edit it to shape what both methods train on: `- 0.01 * rollout.length_B` is a length penalty. An agent
    without a partner, and an observer unless `--partner_term sampled`, gets None as its partner's reward, and
    not 0: a product or a minimum with 0 would silently train on nothing.
    """
    partner_B = 0.0 if partner_reward_B is None else cfg.partner_reward * partner_reward_B
    return reward_B + partner_B


def partner_terms(r1: Tensor, r2: Tensor, a2: Rollout, cfg: Config) -> tuple[Tensor, Tensor | None]:
    """The partner's reward in the pioneer's score, and that in the observer's, each (B,) or None:
    `--partner_term`.

        sampled             pioneer: r(s0, a2)      observer: r(s0, a1)      (paper)
        sampled_to_pioneer  pioneer: r(s0, a2)      observer: nothing
        critic              pioneer: V(s0, a1)      observer: nothing

    r(s0, a1) does not depend on the observer's action: it adds variance to its gradient, and no signal. For
    the pioneer only the mean of r(s0, a2) matters. One sampled a2 gives the same expected gradient, with more
    noise. V is the observer's critic at the end of its prompt. It lacks that noise, and is biased: with
    `--kl_in reward` it holds the observer's KL penalty, too, and gamma below 1 discounts it.
    """
    if cfg.partner_term == "sampled":
        return r2, r1
    if cfg.partner_term == "sampled_to_pioneer":
        return r2, None
    if a2.value_BT is None:
        way_out = "needs a critic; use an advantage that asks for value_BT"
        raise UserError("partner_term", cfg.partner_term, way_out)
    # column 0: the state at the end of the prompt
    return a2.value_BT[:, 0].to(r2), None


@trains("llm1")
def train_ppo(run: Run, score: Callable = score) -> None:
    """One agent in the pioneer's role: it answers the bare query and is trained on its own reward."""
    task = run.task
    (agent,) = run.roles
    for iteration in run.iterations():
        queries, max_new_tokens = task.batch(iteration)

        # a ~ pi(. | s0)
        a = collect_rollout(agent, task.pioneer_prompts(queries), max_new_tokens)
        r = task.reward(queries, a.text)

        update = ppo_update(agent, a, score(a, r, None, agent.cfg), iteration)

        turns = [Turn("pioneer", agent, a, r, update)]
        run.finish_iteration(iteration, queries, max_new_tokens, turns, roles=[agent])


def prompts_for_observer(run: Run, queries: list[str], texts: list[str]) -> list[str]:
    """What the observer reads: each query, and with knowledge transfer the pioneer's answer to it.

    To show more, append it after `cut`, and leave room for it in the context. To show the pioneer's reward,
    compute it here; the phases of `python -m cory benchmark`, which reads them off calls of the reward, are
    then wrong.
    """
    task = run.task
    if run.cfg.knowledge_transfer:
        return task.observer_prompts(queries, [task.cut(text) for text in texts])
    return task.pioneer_prompts(queries)


def evaluate_transfer(run: Run, roles: list[Agent]) -> dict[str, float]:
    """What the observer makes of the pioneer's answers to the held-out queries.

    observer_copies: share of its answers that are the pioneer's. observer_after_better, observer_after_worse:
    its mean reward where the pioneer's was above its own mean, and where it was not; both are left out where
    the pioneer's rewards are all equal. With rewards of 0 and 1 these are P(second right | first right) and
    P(second right | first wrong).
    """
    pioneer, observer = roles
    queries = run.task.held_out_queries
    first = answers(pioneer.policy, run.task.pioneer_prompts(queries), run.cfg, seed=0)
    # another seed: with the same random numbers two like agents would agree by chance
    second = answers(observer.policy, prompts_for_observer(run, queries, first), run.cfg, seed=1)
    r1, r2 = run.task.reward(queries, first), run.task.reward(queries, second)
    better = r1 > r1.mean()
    copies = [a1.strip() == a2.strip() for a1, a2 in zip(first, second, strict=True)]
    metrics = {"observer_copies": fmean(copies)}
    for name, rows in (("better", better), ("worse", ~better)):
        if better.any() and not better.all():
            metrics[f"observer_after_{name}"] = r2[rows].mean().item()
    return metrics


@trains("llm1", "llm2", evaluate=evaluate_transfer)
def train_cory(run: Run, score: Callable = score) -> None:
    """Algorithm 1 of the paper: pioneer and observer, who sees its answer; one reward; roles exchanged.

    `score` may be another: recipes and studies pass their own. Both rewards come between rollouts and
    updates: `python -m cory benchmark` takes them for the border. With `--share_weights true` both roles are
    one agent. The pioneer's update comes first, so that its rollout is exactly on-policy. The observer's
    rollout is older than that update: its first ratio is not 1.
    """
    cfg, task = run.cfg, run.task
    pioneer, observer = run.roles
    for iteration in run.iterations():
        queries, max_new_tokens = task.batch(iteration)

        # a1 ~ pi_pio(. | s0)
        a1 = collect_rollout(pioneer, task.pioneer_prompts(queries), max_new_tokens)

        # knowledge transfer: a2 ~ pi_obs(. | s0, a1)
        prompts = prompts_for_observer(run, queries, a1.text)
        a2 = collect_rollout(observer, prompts, max_new_tokens)

        r1 = task.reward(queries, a1.text)
        r2 = task.reward(queries, a2.text)
        for_pioneer, for_observer = partner_terms(r1, r2, a2, cfg)
        score1 = score(a1, r1, for_pioneer, pioneer.cfg)
        score2 = score(a2, r2, for_observer, observer.cfg)

        update1 = ppo_update(pioneer, a1, score1, iteration)
        update2 = ppo_update(observer, a2, score2, iteration)
        turns = [Turn("pioneer", pioneer, a1, r1, update1), Turn("observer", observer, a2, r2, update2)]

        # role exchange: roles move, all state stays with its agent
        if cfg.role_exchange_every and iteration % cfg.role_exchange_every == 0:
            pioneer, observer = observer, pioneer
            if cfg.reset_on_exchange:                   # DIFFERS: the released code always does
                pioneer.reset()
                observer.reset()
        run.finish_iteration(iteration, queries, max_new_tokens, turns, roles=[pioneer, observer])


def train(cfg: Config) -> Run:
    """Runs the loop that `cfg.method` names, from the start or the last checkpoint to the end."""
    with launched(asdict(cfg)), Run(cfg) as run:
        run.loop(run)
        run.finish()
    return run
