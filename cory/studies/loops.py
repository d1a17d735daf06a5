"""Loops that only studies need: PPO and CORY, trained on another score.

Each score takes the place of `cory.train.score`. The logged task_reward stays the task's own.
"""
from functools import partial
from typing import Callable

import torch
from torch import Tensor

from cory.config import Config
from cory.ppo.rollout import Rollout
from cory.train import score, train_cory, train_ppo, trains


def zero(rollout: Rollout, reward_B: Tensor, partner_reward_B: Tensor | None, cfg: Config) -> Tensor:
    """No reward: whatever moves the policy is noise, and the KL penalty."""
    return torch.zeros_like(reward_B)


def shuffled(rollout: Rollout, reward_B: Tensor, partner_reward_B: Tensor | None, cfg: Config) -> Tensor:
    """The score of the next row, a response to another query: as much reward, of which nothing is learned."""
    return next_row(score(rollout, reward_B, partner_reward_B, cfg), cfg)


def strangers(rollout: Rollout, reward_B: Tensor, partner_reward_B: Tensor, cfg: Config) -> Tensor:
    """The partner's reward is that of its response to another query: a partner's noise alone."""
    require_sampled(cfg)
    return score(rollout, reward_B, next_row(partner_reward_B, cfg), cfg)


def centred(rollout: Rollout, reward_B: Tensor, partner_reward_B: Tensor, cfg: Config) -> Tensor:
    """The partner's reward less its batch mean: the shared reward without what it adds to every response."""
    require_sampled(cfg)
    return score(rollout, reward_B, partner_reward_B - partner_reward_B.mean(), cfg)


def next_row(x_B: Tensor, cfg: Config) -> Tensor:
    """Each row's value from the row behind it; the last row's from the first."""
    way_out = "puts responses to one query beside each other, and this loop takes neighbours; use 1"
    cfg.require("responses_per_query", cfg.responses_per_query == 1, way_out)
    return x_B.roll(-1)


def require_sampled(cfg: Config) -> None:
    way_out = "this loop changes the sampled partner's reward; leave it out"
    cfg.require("partner_term", cfg.partner_term == "sampled", way_out)


def with_score(loop: Callable, score: Callable) -> Callable:
    """The loop, trained on another score."""
    return trains(*loop.agents, evaluate=loop.evaluate)(partial(loop, score=score))


train_zero_ppo = with_score(train_ppo, zero)
train_zero_cory = with_score(train_cory, zero)
train_shuffled_ppo = with_score(train_ppo, shuffled)
train_shuffled_cory = with_score(train_cory, shuffled)
train_strangers_cory = with_score(train_cory, strangers)
train_centred_cory = with_score(train_cory, centred)
