"""The methods, side by side: what PPO does, and what CORY adds to it."""
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Callable

from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, collect_rollout
from cory.ppo.update import ppo_update
from cory.run.held_out import sample_responses
from cory.run.run import Run, Turn
from cory.system.distributed import launched


class Ppo:
    """One agent in the pioneer's role: it responds to the bare query and is trained on its own reward.

    A method of your own (`--method module:Name`) is a subclass that overrides what it changes.
    """
    agents = ("llm1",)

    def train(self, run: Run) -> None:
        """The training loop."""
        task, (agent,) = run.task, run.roles
        for iteration in run.iterations():
            queries, max_new_tokens = task.batch(iteration)

            # a ~ pi(. | s0)
            a = collect_rollout(agent, task.pioneer_prompts(queries), max_new_tokens)
            r = task.reward(queries, a.text)

            update = ppo_update(agent, a, self.score(agent, a, r, None))
            agent.adapt_kl_coef(a.kl_B)
            run.finish_iteration(iteration, queries, [Turn("pioneer", agent, a, r, update)], roles=[agent])

    def score(self, agent: Agent, rollout: Rollout, reward_B: Tensor, partner_B: Tensor | None) -> Tensor:
        """The scalar that each response is trained on, (B,): `r_CORY = r(own) + partner_reward r(partner)`;
        partner_B is None, not zeros, if the partner contributes nothing. `rollout` is there for overrides.
        """
        return reward_B if partner_B is None else reward_B + agent.cfg.partner_reward * partner_B

    def team_metrics(self, run: Run) -> dict[str, float]:
        """What the agents do together, measured at each held-out evaluation, logged as `eval/team/NAME`."""
        return {}


class Cory(Ppo):
    """Algorithm 1 of the paper: the observer sees the pioneer's response, both are trained on the sum of
    their rewards, and they exchange roles.
    """
    agents = ("llm1", "llm2")

    def train(self, run: Run) -> None:
        """The training loop. With `--share_weights true` both roles are one agent: the observer's rollout
        predates the pioneer's update, so its ratios do not start at 1.
        """
        cfg, task = run.cfg, run.task
        if len(run.roles) != 2:
            raise UserError("agents", self.agents, "must be two, or `train` must be overridden, too")
        pioneer, observer = run.roles
        for iteration in run.iterations():
            queries, max_new_tokens = task.batch(iteration)

            # a1 ~ pi_pio(. | s0), a2 ~ pi_obs(. | s0, a1)
            a1, a2 = self.respond(run, queries, pioneer, observer,
                                  partial(collect_rollout, max_new_tokens=max_new_tokens))

            r1 = task.reward(queries, a1.text)
            r2 = task.reward(queries, a2.text)
            for_pioneer, for_observer = self.partner_rewards(r1, r2, a2, cfg)

            update1 = ppo_update(pioneer, a1, self.score(pioneer, a1, r1, for_pioneer))
            update2 = ppo_update(observer, a2, self.score(observer, a2, r2, for_observer))
            turns = [Turn("pioneer", pioneer, a1, r1, update1), Turn("observer", observer, a2, r2, update2)]
            for agent in {pioneer, observer}:
                agent.adapt_kl_coef(*(turn.rollout.kl_B for turn in turns if turn.agent is agent))

            # role exchange: roles move, all state stays with its agent
            if cfg.role_exchange_every and iteration % cfg.role_exchange_every == 0:
                pioneer, observer = observer, pioneer
                if cfg.reset_on_exchange:                   # DIFFERS: the released code always does
                    pioneer.reset()
                    observer.reset()
            run.finish_iteration(iteration, queries, turns, roles=[pioneer, observer])

    def respond(self, run: Run, queries: list[str], pioneer: Agent, observer: Agent,
                sample: Callable) -> tuple:
        """Knowledge transfer: the pioneer responds to the query, the observer to the query and that response.

        `sample(agent, prompts)` returns a `Rollout` (without log-probabilities in held-out evaluation).
        """
        task, bare = run.task, run.task.pioneer_prompts(queries)
        a1 = sample(pioneer, bare)
        shown = task.observer_prompts(queries, [task.cut(text) for text in a1.text])
        a2 = sample(observer, shown if run.cfg.knowledge_transfer else bare)
        return a1, a2

    def partner_rewards(self, r1: Tensor, r2: Tensor, a2: Rollout, cfg: Config) -> tuple:
        """What each agent's partner adds to its score, (B,) or None (`--partner_term`):

            sampled             pioneer: r(s0, a2)      observer: r(s0, a1)      (paper)
            sampled_to_pioneer  pioneer: r(s0, a2)      observer: nothing
            critic              pioneer: V(s0, a1)      observer: nothing

        r(s0, a1) does not depend on the observer's action: it adds variance to its gradient, but no signal.
        V is the observer's critic at the end of its prompt. It estimates the mean of r(s0, a2) without one
        sample's noise, but is biased, since with `--kl_in reward` it also includes the observer's KL penalty.
        """
        if cfg.partner_term == "sampled":
            return r2, r1
        if cfg.partner_term == "sampled_to_pioneer":
            return r2, None
        return a2.value_BT[:, 0].to(r2), None           # column 0: the state at the end of the prompt

    def team_metrics(self, run: Run) -> dict[str, float]:
        """How the observer uses the pioneer's responses to the held-out queries; metrics: docs/settings.md.

        observer_after_*: omitted if the pioneer's rewards are all equal. For rewards of 0 and 1 they are
        P(second right | first right) and P(second right | first wrong).
        """
        pioneer, observer = run.roles
        queries, calls = run.task.held_out_queries, []

        def sample(agent: Agent, prompts: list[str]):
            calls.append(agent)         # with equal seeds, identical agents would respond identically
            return sample_responses(agent.policy, prompts, run.cfg.max_response_length, seed=len(calls))

        a1, a2 = self.respond(run, queries, pioneer, observer, sample)
        r1, r2 = run.task.reward(queries, a1.text), run.task.reward(queries, a2.text)
        better = r1 > r1.mean()
        copies = [first.strip() == second.strip() for first, second in zip(a1.text, a2.text, strict=True)]
        metrics = {"observer_copies": fmean(copies)}
        for name, rows in (("better", better), ("worse", ~better)):
            if better.any() and not better.all():
                metrics[f"observer_after_{name}"] = r2[rows].mean().item()
        return metrics


def train(cfg: Config) -> Run:
    """Runs the method that `cfg.method` names, from the start or the last checkpoint to the end."""
    with launched(asdict(cfg)), Run(cfg) as run:
        run.method.train(run)
        run.finish()
    return run
