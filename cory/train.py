"""The methods, side by side: what PPO does, and what CORY adds to it."""
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Callable, Sequence

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.machine.distributed import launched, processes
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, require_queries
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import ppo_update
from cory.run.experiment import Experiment
from cory.run.record import Record, Turn, locked, run_folder
from cory.tasks.task import Task


class Ppo:
    """One agent in the pioneer's role: it responds to the bare query and is trained on its own reward.

    A method of your own (`--method module:Name`) is a subclass that overrides what it changes. Whatever it
    must remember between iterations belongs in `memory`, as numbers, text, tensors and collections of these:
    checkpoints keep it, and no other attribute of a method.

    iteration: the present one, 1, 2, ..., or 0 before training. training: false in held-out evaluation.
    """
    agent_names = ("llm1",)
    frozen = ()                 # names of agents that are never trained; means over agents leave them out
    roles = ("pioneer",)        # in the order in which they respond
    iteration, training = 0, False

    def __init__(self, cfg: Config, task: Task):
        self.cfg, self.task, self.memory = cfg, task, {}

    @staticmethod
    def agent_config(cfg: Config, name: str) -> Config:
        """The settings of one agent: override it to let agents differ in those that `cory.config` marks by
        `each`. To change another is refused.
        """
        return cfg

    def train(self, agents: list[Agent], record: Record) -> None:
        """The training loop, of PPO with one agent and of CORY (the paper's algorithm 1) with two.

        An agent that plays several roles, as with `--share_weights true`, is updated on each rollout in turn.
        The later ones were sampled before its first update, so that their ratios do not start at 1.
        """
        cfg, task = self.cfg, self.task
        if record.done == 0:
            record.evaluate(0)
        for iteration in range(record.done + 1, cfg.iterations + 1):
            record.begin(iteration)
            for agent in agents:
                agent.set_learning_rate(iteration)
            queries, max_new_tokens = task.batch(iteration)

            # PPO: a1 ~ pi(. | s0)        CORY: a1 ~ pi_pio(. | s0), a2 ~ pi_obs(. | s0, a1)
            cast = self.cast(agents, iteration)
            sample = partial(collect_rollout, max_new_tokens=max_new_tokens)
            rollouts = self.respond(cast, queries, sample)
            require_queries(rollouts, rollouts[0].query)      # or others that it chose, alike in all roles

            # PPO: r(s0, a1)              CORY: r(s0, a1) + r(s0, a2), for both
            rewarded = [task.reward_and_parts(rollout.query, rollout.text) for rollout in rollouts]
            rewards, parts = map(list, zip(*rewarded, strict=True))
            scores = self.scores(rollouts, [*map(Tensor.clone, rewards)])

            turns = []
            of_roles = zip(self.roles, cast, rollouts, rewards, parts, scores, strict=True)
            for role, agent, rollout, reward_B, of_reward, score in of_roles:
                update = {} if agent.name in self.frozen else self.update(role, agent, rollout, score)
                turns.append(Turn(role, agent, rollout, reward_B, of_reward, update))
            for agent in agents:
                of_agent = [turn for turn in turns if turn.agent is agent]
                if any(turn.update for turn in of_agent):
                    kl_N = torch.cat([turn.rollout.kl_B for turn in of_agent])
                    agent.kl_coef = float(agent.cfg.find("kl_controller")(agent, kl_N))

            record.log(iteration, turns, self.metrics(rollouts, [*map(Tensor.clone, rewards)]))
            task.learn(rollouts, rewards)
            if self.cast(agents, iteration) != cast:
                raise UserError(f"cast, asked again for iteration {iteration}, gives agents other roles")
            if self.evaluation_is_due(iteration):
                record.evaluate(iteration)
            record.save_if_due(iteration)

    def cast(self, agents: Sequence, iteration: int) -> list:
        """The agent that plays each role in an iteration (1, 2, ...). At an exchange roles move to the next
        agent, and all state stays with its agent. With fewer agents than roles, agents take several in turn.
        It must not depend on when it is called: it is asked for other iterations, too, and for agents' names.
        """
        every = self.cfg.role_exchange_every
        exchanges = (iteration - 1) // every if every else 0
        return [agents[(exchanges + role) % len(agents)] for role in range(len(self.roles))]

    def evaluation_is_due(self, iteration: int) -> bool:
        cfg = self.cfg
        return iteration == cfg.iterations or (cfg.eval_every > 0 and iteration % cfg.eval_every == 0)

    def respond(self, cast: list, queries: list[str], sample: Callable) -> list[Rollout]:
        """A response in each role to each of the queries; in training, a query stands `responses_per_query`
        times in a row. `sample(agent, prompts, queries)` returns a `Rollout`: responses to the prompts, which
        are rewarded as responses to the queries afterwards; a prompt that depends on a reward asks for it by
        `self.task.reward`. In training, `sample(..., policy=agent.base)` has the base respond instead. In
        held-out evaluation policies are cast, and a rollout has no log-probabilities.
        """
        (agent,) = cast
        return [sample(agent, self.task.pioneer_prompts(queries), queries)]

    def scores(self, rollouts: list[Rollout], rewards: list[Tensor]) -> list[Tensor]:
        """What each role is trained on: a number for each response, (B,), or for each of its tokens, (B, T);
        `rewards`, (B,), are copies of the task's own. Held-out evaluation does not ask for scores.
        """
        return rewards

    def update(self, role: str, agent: Agent, rollout: Rollout, score: Tensor) -> dict[str, float]:
        """Trains the agent that played a role on its scores. Returns metrics, or none if it has not been
        trained; an agent that is trained in no role keeps its eta.
        """
        return ppo_update(agent, rollout, score)

    def metrics(self, rollouts: list[Rollout], rewards: list[Tensor]) -> dict[str, float]:
        """Further metrics to log, by name: in each iteration and, with several roles, in held-out evaluation,
        where rollouts have no log-probabilities.
        """
        return {}


class Cory(Ppo):
    """The observer sees the pioneer's response, both are trained on the sum of their rewards, and they
    exchange roles.
    """
    agent_names = ("llm1", "llm2")
    roles = ("pioneer", "observer")

    def respond(self, cast: list, queries: list[str], sample: Callable) -> list[Rollout]:
        """Knowledge transfer: the pioneer responds to the query, and the observer, or each of several, to the
        query and the response before its own.
        """
        pioneer, *observers = cast
        bare = self.task.pioneer_prompts(queries)
        rollouts = [sample(pioneer, bare, queries)]
        for observer in observers:
            shown = self.task.observer_prompts(queries, rollouts[-1].text)
            rollouts.append(sample(observer, shown if self.cfg.knowledge_transfer else bare, queries))
        return rollouts

    def scores(self, rollouts: list[Rollout], rewards: list[Tensor]) -> list[Tensor]:
        """r_CORY = r(s0, a1) + r(s0, a2) for both; the partner's reward is weighted by `--partner_reward`."""
        weight = self.cfg.partner_reward
        return [r + weight * sum(rewards[:i] + rewards[i + 1:]) for i, r in enumerate(rewards)]

    def metrics(self, rollouts: list[Rollout], rewards: list[Tensor]) -> dict[str, float]:
        """How the last role, the observer, uses the response before its own: how often it repeats it, and its
        mean reward after responses that earned more than their mean, and after the others. These two are left
        out if all responses before its own earned the same.
        """
        observer = self.roles[-1]
        *_, a1, a2 = [rollout.text for rollout in rollouts]
        *_, r1, r2 = rewards
        copies = [first.strip() == second.strip() for first, second in zip(a1, a2, strict=True)]
        metrics = {f"{observer}_copies": fmean(copies)}
        better = r1 > r1.mean()
        if better.any() and not better.all():
            metrics[f"{observer}_after_better"] = r2[better].mean().item()
            metrics[f"{observer}_after_worse"] = r2[~better].mean().item()
        return metrics


def train(cfg: Config) -> Record:
    """Runs the method that `cfg.method` names, from the start or the last checkpoint to the end."""
    with launched(asdict(cfg)):
        run_dir = run_folder(cfg)
        with locked(run_dir) if processes().is_main else nullcontext():
            run = Experiment(cfg, run_dir)
            agents = run.new_agents()
            record = Record(run, agents)
            with record.logger:
                run.method.train(agents, record)
                record.finish()
    return record
