"""What each agent did in an iteration, and what is logged of it."""
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from cory.errors import disjoint_union
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout
from cory.run.evaluate import response_metrics, to_floats
from cory.tasks.task import Task

SAMPLES = 4                         # queries per iteration whose texts samples.jsonl keeps


@dataclass
class Turn:
    """What one agent did in one role in one iteration."""
    role: str                       # pioneer, observer, ...
    agent: Agent
    rollout: Rollout
    reward_B: Tensor                # the task reward of its own responses, whatever it was trained on
    parts: dict[str, float]         # of which this reward consists, if the task says so
    update: dict[str, float] = field(default_factory=dict)          # metrics of its update

    def metrics(self, task: Task) -> dict[str, float]:
        responses = response_metrics(self.rollout, self.reward_B, self.parts, task, self.agent.cfg)
        std = self.reward_B.std(correction=0).item()
        return disjoint_union(responses, self.update, {"task_reward_std": std})


def training_metrics(turns: list[Turn], task: Task, team: dict) -> dict[str, float]:
    """Each metric of an agent as NAME/AGENT, the mean over the roles that it played; `role/AGENT`, its first
    role by number; and the metrics of the team.
    """
    roles = {}
    values = defaultdict(list)
    for role, turn in enumerate(turns):
        agent = turn.agent.name
        roles.setdefault(f"role/{agent}", role)
        for name, x in turn.metrics(task).items():
            values[f"{name}/{agent}"].append(x)
    means = {key: fmean(xs) for key, xs in values.items()}
    return disjoint_union(roles, means, to_floats(team))


def sample_rows(iteration: int, turns: list[Turn], responses_per_query: int) -> list[dict]:
    """A few queries, with each role's prompt, response, agent and reward."""
    rows = []
    queries = turns[0].rollout.query
    for i in range(0, len(queries), responses_per_query)[:SAMPLES]:
        row = {"iteration": iteration, "query": queries[i]}
        for turn in turns:
            rollout, role = turn.rollout, turn.role
            is_real_P = rollout.prompt_mask_BP[i].bool()
            prompt = rollout.prompt_BP[i][is_real_P].tolist()
            row[role] = rollout.text[i]
            row[f"{role}_agent"] = turn.agent.name
            row[f"{role}_reward"] = turn.reward_B[i].item()
            row[f"{role}_prompt"] = turn.agent.policy.tokenizer.decode(prompt)
        rows.append(row)
    return rows
