"""What each agent did in an iteration, and what is logged of it."""
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from cory.errors import merge_metrics
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout
from cory.run.evaluate import response_metrics
from cory.run.log import Metrics
from cory.tasks.task import Task

SAMPLES = 4                         # queries per iteration whose texts samples.jsonl keeps


@dataclass
class Turn:
    """What one agent did in one role in one iteration."""
    role: str                       # pioneer, observer, ...
    agent: Agent
    rollout: Rollout
    reward_B: Tensor                # the task reward of its own responses, whatever it was trained on
    terms: dict[str, float]         # the mean of each term of this reward, if the task gives them
    update_metrics: dict[str, float] = field(default_factory=dict)

    def metrics(self, task: Task) -> dict[str, float]:
        responses = response_metrics(self.rollout, self.reward_B, self.terms, task, self.agent.cfg)
        return merge_metrics(responses, self.update_metrics)


def training_metrics(agents: list[Agent], turns: list[Turn], task: Task, team: dict) -> Metrics:
    """The metrics of each agent, as means over the roles that it played; `role` is the number of its first
    role. Those of the team are the method's.
    """
    metrics = {}
    values = defaultdict(lambda: defaultdict(list))
    for i, turn in enumerate(turns):
        agent = turn.agent.name
        metrics.setdefault(agent, {"role": i})
        for name, x in turn.metrics(task).items():
            values[agent][name].append(x)
    for agent, by_name in values.items():
        means = {name: fmean(xs) for name, xs in by_name.items()}
        metrics[agent] = merge_metrics(metrics[agent], means)
    for agent in agents:
        metrics.setdefault(agent.name, {})["sampled_tokens"] = agent.sampled_tokens
    return metrics | {"team": merge_metrics(team)}


def sample_rows(iteration: int, turns: list[Turn]) -> list[dict]:
    """For each of a few queries, a response of the last role and, going back, the responses that prompts show
    (`read_B`), each with its prompt, agent and reward.
    """
    rows = []
    queries = turns[0].rollout.query
    k = turns[0].agent.cfg.responses_per_query
    for first in range(0, len(queries), k)[:SAMPLES]:
        row = {"iteration": iteration, "query": queries[first]}
        i = first
        for turn in reversed(turns):
            role = turn.role
            rollout = turn.rollout
            is_real_P = rollout.prompt_mask_BP[i].bool()
            row[role] = rollout.text[i]
            row[f"{role}_agent"] = turn.agent.name
            row[f"{role}_reward"] = turn.reward_B[i].item()
            row[f"{role}_prompt"] = turn.agent.policy.tokenizer.decode(rollout.prompt_BP[i][is_real_P])
            if rollout.read_B is not None:
                i = rollout.read_B[i].item()
        rows.append(row)
    return rows
