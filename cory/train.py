"""The methods, side by side: what PPO does, and what CORY adds to it."""
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Callable

from torch import Tensor

from cory.checkpoint import claimed, signals_noted
from cory.config import Config
from cory.distributed import launched
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import ppo_update
from cory.run import RoleStep, Run, run_folder
from cory.tasks.task import Task


class Ppo:
    """One agent in the pioneer's role: it responds to the bare query and is trained on its own reward.

    A method of your own (`--method module:Name`) is a subclass that overrides what it changes. Whatever it
    must remember between iterations belongs in `memory`, as numbers, text, tensors and collections of these:
    checkpoints keep it, and no other attribute of a method.
    """
    agents = ("llm1",)
    roles = ("pioneer",)        # in the order in which they respond; if there are fewer agents, these repeat

    def __init__(self, cfg: Config, task: Task):
        self.cfg, self.task, self.memory = cfg, task, {}

    @staticmethod
    def agent_config(cfg: Config, name: str) -> Config:
        """The settings of one agent: override it to give agents different models, rates, ..."""
        return cfg

    def train(self, run: Run) -> None:
        """The training loop, of PPO with one agent and of CORY (the paper's algorithm 1) with two.

        `run.agents` never change; `run.roles` are the agents in the order of the roles they play. If an agent
        has several, as with `--share_weights true`, the later rollouts predate its first update: their ratios
        do not start at 1.
        """
        cfg, task = self.cfg, self.task
        if run.done == 0:
            run.evaluate(0)
        for iteration in range(run.done + 1, cfg.iterations + 1):
            run.begin(iteration)
            for agent in run.agents:
                agent.set_learning_rate(iteration)
            queries, max_new_tokens = task.batch(iteration)

            # PPO: a1 ~ pi(. | s0)        CORY: a1 ~ pi_pio(. | s0), a2 ~ pi_obs(. | s0, a1)
            sample = partial(collect_rollout, max_new_tokens=max_new_tokens)
            rollouts = self.respond(run.roles, queries, sample)

            # PPO: r(s0, a1)              CORY: r(s0, a1) + r(s0, a2), for both
            rewards = [task.reward(queries, a.text) for a in rollouts]
            scores = self.scores(queries, rollouts, rewards)

            turns = zip(self.roles, run.roles, rollouts, rewards, scores, strict=True)
            steps = [RoleStep(role, agent, rollout, reward, self.update(role, agent, rollout, score))
                     for role, agent, rollout, reward, score in turns]
            for agent in run.agents:
                agent.adapt_kl_coef([step.rollout.kl_B for step in steps if step.agent is agent])

            run.log(iteration, queries, steps, self.metrics(queries, rollouts, rewards))
            task.learn(queries, rewards)
            if self.evaluation_is_due(iteration):
                run.evaluate(iteration)

            # role exchange: roles move, all state stays with its agent
            exchange = len(run.roles) > 1 and cfg.role_exchange_every > 0
            if exchange and iteration % cfg.role_exchange_every == 0:
                run.roles.append(run.roles.pop(0))
                if cfg.reset_on_exchange:                   # DIFFERS: the released code always does
                    for agent in run.agents:
                        agent.reset()

            # after the first, every `save_every` and the last; after a signal, too, which ends the run
            run.save_if_due(iteration)

    def evaluation_is_due(self, iteration: int) -> bool:
        cfg = self.cfg
        return iteration == cfg.iterations or cfg.eval_every > 0 and iteration % cfg.eval_every == 0

    def respond(self, roles: list, queries: list[str], sample: Callable) -> list[Rollout]:
        """A response in each role. `sample(agent, prompts)` returns a `Rollout`. In held-out evaluation,
        policies play the roles, and a rollout has no log-probabilities.
        """
        (agent,) = roles
        return [sample(agent, self.task.pioneer_prompts(queries))]

    def scores(self, queries: list[str], rollouts: list[Rollout], rewards: list[Tensor]) -> list[Tensor]:
        """The scalar that each response is trained on, (B,) for each role; `rewards` are the task's own."""
        return [r.clone() for r in rewards]

    def update(self, role: str, agent: Agent, rollout: Rollout, score_B: Tensor) -> dict[str, float]:
        """Trains the agent that played a role on its scores (B,); returns metrics."""
        return ppo_update(agent, rollout, score_B)

    def metrics(self, queries: list[str], rollouts: list[Rollout], rewards: list[Tensor]) -> dict[str, float]:
        """What else is logged, by name: of an iteration, and of several roles' held-out responses, which have
        no log-probabilities.
        """
        return {}


class Cory(Ppo):
    """The observer sees the pioneer's response, both are trained on the sum of their rewards, and they
    exchange roles.
    """
    agents = ("llm1", "llm2")
    roles = ("pioneer", "observer")

    def respond(self, roles: list, queries: list[str], sample: Callable) -> list[Rollout]:
        """Knowledge transfer: the pioneer responds to the query, the observer to the query and that response;
        in a longer chain, each agent to the query and the response before its own.
        """
        pioneer, *observers = roles
        bare = self.task.pioneer_prompts(queries)
        rollouts = [sample(pioneer, bare)]
        for observer in observers:
            shown = self.task.observer_prompts(queries, rollouts[-1].text)
            rollouts.append(sample(observer, shown if self.cfg.knowledge_transfer else bare))
        return rollouts

    def scores(self, queries: list[str], rollouts: list[Rollout], rewards: list[Tensor]) -> list[Tensor]:
        """r_CORY = r(s0, a1) + r(s0, a2) for both; `--partner_reward` weights what is not an agent's own."""
        weight = self.cfg.partner_reward
        return [r + weight * sum(rewards[:i] + rewards[i + 1:]) for i, r in enumerate(rewards)]

    def metrics(self, queries: list[str], rollouts: list[Rollout], rewards: list[Tensor]) -> dict[str, float]:
        """How the last agent uses the response that it has seen: the share of its responses that repeat it;
        and their mean reward where the response seen earned more than the batch's mean, and elsewhere, both
        left out if all responses seen earned the same.
        """
        (*_, a1, a2), (*_, r1, r2) = rollouts, rewards
        copies = [first.strip() == second.strip() for first, second in zip(a1.text, a2.text, strict=True)]
        metrics = {"observer_copies": fmean(copies)}
        better = r1 > r1.mean()
        if better.any() and not better.all():
            metrics["observer_after_better"] = r2[better].mean().item()
            metrics["observer_after_worse"] = r2[~better].mean().item()
        return metrics


def train(cfg: Config) -> Run:
    """Runs the method that `cfg.method` names, from the start or the last checkpoint to the end."""
    with launched(asdict(cfg)), claimed(run_folder(cfg), cfg.resume) as run_dir:
        run = Run(cfg, run_dir)
        with run.logger:
            with signals_noted(run.signals):
                run.method.train(run)
            run.finish()
    return run


if __name__ == "__main__":
    raise SystemExit("this is no script: use `python train_imdb.py` or `python train_gsm8k.py`")
