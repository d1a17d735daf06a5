"""The methods, side by side: what PPO does, and what CORY adds to it."""
import time
from copy import deepcopy
from functools import partial
from typing import Callable

from torch import Tensor
from transformers import set_seed

from cory.config import Config
from cory.machine.distributed import process_group
from cory.ppo.agent import Agent, seed_from
from cory.ppo.rollout import Rollout, require_queries
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import ppo_update
from cory.run.checkpoint import load_checkpoint, locked, run_folder, save_checkpoint
from cory.run.evaluate import held_out_metrics
from cory.run.experiment import Experiment
from cory.run.finish import finish
from cory.run.log import Logger, Metrics
from cory.run.turn import Turn, sample_rows, training_metrics
from cory.tasks.task import Task


class Ppo:
    """One agent in the pioneer's role: it responds to the bare query and is trained on its own reward.

    A custom method (`--method module:Name`) is a subclass that overrides what it changes. Whatever it
    must remember between iterations belongs in `memory`, as numbers, text, tensors and collections of these:
    checkpoints keep it, and no other attribute of a method.
    """
    agent_names = ("llm1",)
    roles = ("pioneer",)        # in the order in which they respond
    needs = {}                  # settings that the method requires, such as {"advantage": "rloo"}

    def __init__(self, cfg: Config, task: Task):
        self.cfg = cfg
        self.task = task
        self.memory = {}

    @property
    def iteration(self) -> int:
        """The present one, 1, 2, ..., or 0 before training."""
        return self.task.iteration

    @property
    def training(self) -> bool:
        """False in held-out evaluation."""
        return self.task.training

    @staticmethod
    def agent_config(cfg: Config, name: str) -> Config:
        """The settings of one agent: override it to let agents differ in those that `cory.config` marks by
        `agent_setting`. To change another is refused.
        """
        return cfg

    def train(self, agents: list[Agent], logger: Logger) -> None:
        """The training loop, of PPO with one agent and of CORY (the paper's algorithm 1) with two.

        An agent that plays several roles, as with `--share_weights true`, is updated on each rollout in turn.
        The later ones were sampled before its first update, so that their ratios do not start at 1.
        """
        cfg = self.cfg
        task = self.task
        if logger.done == 0:
            players = self.assign_roles(agents, 1)
            logger.log_evaluation(0, self.evaluate(agents, players))
        for iteration in range(logger.done + 1, cfg.iterations + 1):
            started = time.perf_counter()
            task.iteration = iteration
            task.training = True
            # for tasks and methods that draw; by spawn_key, no agent's weights have this seed
            set_seed(seed_from(cfg.seed, spawn_key=(iteration,)))
            for agent in agents:
                agent.begin(iteration)                          # sets its learning rates
            queries, max_new_tokens = task.batch(iteration)

            # PPO: a1 ~ pi(. | s0)        CORY: a1 ~ pi_pio(. | s0), a2 ~ pi_obs(. | s0, a1)
            # with log-probabilities, KL and values
            players = self.assign_roles(agents, iteration)
            sample = partial(collect_rollout, max_new_tokens=max_new_tokens)
            rollouts = self.respond(players, queries, sample)
            require_queries(rollouts, rollouts[0].query)        # chosen by `respond`, the same for all roles

            # PPO: r(s0, a1)              CORY: r(s0, a1) + r(s0, a2), for both
            turns = []
            for role, agent, rollout in zip(self.roles, players, rollouts, strict=True):
                reward_B, terms = task.reward_and_terms(rollout.query, rollout.text)
                turns.append(Turn(role, agent, rollout, reward_B, terms))
            rewards = [turn.reward_B for turn in turns]
            scores = self.scores(rollouts, deepcopy(rewards))   # a method may change its copies in place

            # PPO: token rewards (score - eta KL), advantages, Adam steps, and the agent's next eta
            for turn, score in zip(turns, scores, strict=True):
                turn.update_metrics = self.update(turn.role, turn.agent, turn.rollout, score)

            team_metrics = self.team_metrics(rollouts, deepcopy(rewards))
            metrics = training_metrics(agents, turns, task, team_metrics)
            samples = sample_rows(iteration, turns)
            seconds = time.perf_counter() - started
            logger.log_training(iteration, metrics, seconds, samples)
            task.on_iteration_end(rollouts, rewards)
            task.training = False
            if self.evaluation_is_due(iteration):
                logger.log_evaluation(iteration, self.evaluate(agents, players))
            if self.checkpoint_is_due(iteration):
                save_checkpoint(logger.run_dir, iteration, agents, self, logger.wandb_id)

    def assign_roles(self, agents: list, iteration: int) -> list:
        """The agent that plays each role in an iteration (1, 2, ...). At an exchange roles move to the next
        agent, and all state stays with its agent. With fewer agents than roles, agents take several in turn.
        """
        every = self.cfg.role_exchange_every
        exchanges = 0
        if every:
            exchanges = (iteration - 1) // every
        return [agents[(exchanges + i) % len(agents)] for i in range(len(self.roles))]

    def evaluate(self, agents: list[Agent], players: list[Agent]) -> Metrics:
        """Held-out metrics of the bases, of each agent alone, and of the team: the players in their roles."""
        return held_out_metrics(self, agents, players)

    def evaluation_is_due(self, iteration: int) -> bool:
        every = self.cfg.eval_every
        return iteration == self.cfg.iterations or every > 0 and iteration % every == 0

    def checkpoint_is_due(self, iteration: int) -> bool:
        every = self.cfg.save_every
        return every > 0 and (iteration in (1, self.cfg.iterations) or iteration % every == 0)

    def respond(self, players: list, queries: list, sample: Callable) -> list[Rollout]:
        """A rollout of each role: a response to each of the queries. In training, a query stands
        `responses_per_query` times in a row.

        `sample(player, prompts, queries)` returns a `Rollout`: responses to the prompts, which are rewarded
        as responses to the queries. `sample(..., policy=player.base)` has the base respond instead. If a
        prompt depends on a reward, `self.task.reward` computes it.

        In held-out evaluation players have a name, policy, base and cfg, and rollouts have no values.
        """
        (agent,) = players
        return [sample(agent, self.task.pioneer_prompts(queries), queries)]

    def scores(self, rollouts: list[Rollout], rewards: list[Tensor]) -> list[Tensor]:
        """What each role is trained on: a number for each response, (B,), or for each of its tokens, (B, T);
        `rewards`, (B,), are copies of the task's own. Held-out evaluation does not ask for scores.
        """
        return rewards

    def update(self, role: str, agent: Agent, rollout: Rollout, score: Tensor) -> dict:
        """Trains the agent that played a role on its scores, and adapts its eta. Returns metrics. To leave an
        agent as it is, return {}.
        """
        return ppo_update(agent, rollout, score)

    def team_metrics(self, rollouts: list[Rollout], rewards: list[Tensor]) -> dict:
        """Further metrics to log, by name: of each iteration and, with several roles, of the held-out
        responses.
        """
        return {}


class Cory(Ppo):
    """The observer sees the pioneer's response, both are trained on the sum of their rewards, and they
    exchange roles.
    """
    agent_names = ("llm1", "llm2")
    roles = ("pioneer", "observer")

    def respond(self, players, queries, sample):
        """Knowledge transfer: the pioneer responds to the query, and the observer to the query and the
        pioneer's response. With more roles, each further one reads the response before its own.
        """
        pioneer, *observers = players
        rollouts = [sample(pioneer, self.task.pioneer_prompts(queries), queries)]
        for observer in observers:
            prompts = self.task.observer_prompts(queries, rollouts[-1].text)
            rollouts.append(sample(observer, prompts, queries))
        return rollouts

    def scores(self, rollouts, rewards):
        """r_CORY = r(s0, a1) + r(s0, a2) for both; the partner's reward is weighted by `--partner_reward`."""
        scores = []
        for i, reward_B in enumerate(rewards):
            partners = rewards[:i] + rewards[i + 1:]
            scores.append(reward_B + self.cfg.partner_reward * sum(partners))
        return scores


def train(cfg: Config) -> None:
    """Runs the method that `cfg.method` names, from the start or the last checkpoint to the end."""
    with process_group(cfg.device):
        run_dir = run_folder(cfg)
        with locked(run_dir):
            run = Experiment(cfg, run_dir)
            agents = run.new_agents()
            done = 0
            wandb_id = ""
            if cfg.resume:
                done, wandb_id = load_checkpoint(run_dir, agents, run.method)
            with Logger(run.cfg, run.configs, run_dir, done, wandb_id) as logger:
                run.method.train(agents, logger)
                finish(run, agents, logger)
