"""Loops that only studies need: a control of the paper's idea, better critics, the released code's habits.

Each is `train_cory` or `train_ppo` inside the blocks that its name says. A block changes one thing for as
long as it lasts, so that what differs can be read here in full, and blocks add up.
"""
import math
from contextlib import contextmanager
from typing import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor, nn

import cory.ppo.rollout
import cory.train
from cory.config import Config
from cory.errors import UserError
from cory.experiment.run import Run
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel, PolicyWithValue
from cory.ppo.rollout import Rollout
from cory.ppo.sampling import STEPS_BETWEEN_LOOKS, Prompts, Sample, sample
from cory.ppo.update import make_experience, ppo_update
from cory.system.distributed import world_size
from cory.train import score, train_cory, train_ppo, trains


def from_start(loop: Callable) -> Callable:
    """Decorator of a loop that remembers what no checkpoint holds: it refuses to resume."""
    loop.from_start = True
    return loop


def require_from_start(run: Run) -> None:
    way_out = "remembers what no checkpoint holds; delete this run and start it anew"
    run.cfg.require("method", run.start == 0, way_out)


def require_one_process() -> None:
    """For what looks at the rows of its own process alone, or steps without the others' gradients."""
    if world_size() > 1:
        raise UserError("processes", world_size(), "this loop is for one; run it without torchrun")


# --- a control ---
@trains("llm1")
def train_noisy_ppo(run: Run) -> None:
    """PPO whose score has a partner's noise and nothing of a partner: the reward of the response to another
    query of the batch, which has the spread of r(s0, a2) and does not depend on the agent's own response. Nor
    on its query: a partner's reward is as high or low as the query is easy or hard, and so is one's own.
    """
    require_one_process()
    way_out = "makes a neighbour's reward one to the same query; take 1"
    run.cfg.require("responses_per_query", run.cfg.responses_per_query == 1, way_out)

    def noisy(rollout, reward_B, partner_reward_B, cfg) -> Tensor:
        return score(rollout, reward_B, reward_B.roll(1), cfg)              # the neighbour's, never its own

    with patch.object(cory.train, "score", noisy):
        train_ppo(run)


# --- better critics ---
@contextmanager
def fast_critic() -> Iterator[None]:
    """Value heads that learn at ten times the rate. Adam's steps are of one size whatever the gradient's, so
    a head that starts at 0 and is taken ten times is one of ten times the rate (but for Adam's epsilon).
    """
    values = PolicyWithValue.values
    with patch.object(PolicyWithValue, "values", lambda policy, hidden_NH: 10 * values(policy, hidden_NH)):
        yield


@contextmanager
def long_critic() -> Iterator[None]:
    """After each update, 16 passes of the value head alone over the same rollout, without a value clip."""
    def update(agent: Agent, rollout: Rollout, score_B: Tensor, iteration: int, cfg: Config) -> dict:
        experience = make_experience(rollout, score_B, agent.kl_coef, cfg)
        metrics = ppo_update(agent, rollout, score_B, iteration, cfg)
        policy, real = agent.policy, experience.mask_BT.bool()
        with torch.no_grad():
            prompt_BP, prompt_mask_BP = experience.prompt_BP, experience.prompt_mask_BP
            hidden_NH = policy.response_hidden(prompt_BP, prompt_mask_BP, experience.response_BT)[real]
        for _ in range(16):
            errors_N = policy.values(hidden_NH) - experience.return_BT[real]
            (cfg.vf_coef * 0.5 * errors_N.square().mean()).backward()
            agent.optimizer.step()                  # of the head alone: nothing else has a gradient
            agent.optimizer.zero_grad(set_to_none=True)
        return metrics

    with patch.object(cory.train, "ppo_update", update):
        yield


@trains("llm1", "llm2")
def train_fast_critic_cory(run: Run) -> None:
    with fast_critic():
        train_cory(run)


@trains("llm1")
def train_fast_critic_ppo(run: Run) -> None:
    with fast_critic():
        train_ppo(run)


@trains("llm1", "llm2")
def train_long_critic_cory(run: Run) -> None:
    require_one_process()
    with long_critic():
        train_cory(run)


@trains("llm1")
def train_long_critic_ppo(run: Run) -> None:
    require_one_process()
    with long_critic():
        train_ppo(run)


# --- habits of the released code ---
@contextmanager
def normalised_scores(run: Run) -> Iterator[None]:
    """Scores less their running mean, over their running standard deviation, as the released code has
    them for CORY and not for PPO. Of all scores of the run so far; the released code forgets them at each
    exchange.
    """
    require_from_start(run)
    require_one_process()
    seen = []

    def normalised(rollout, reward_B, partner_reward_B, cfg) -> Tensor:
        score_B = score(rollout, reward_B, partner_reward_B, cfg)
        seen.append(score_B)
        so_far = torch.cat(seen)
        return (score_B - so_far.mean()) / (so_far.std(correction=0) + 1e-6)

    with patch.object(cory.train, "score", normalised):
        yield


@contextmanager
def dropout(run: Run) -> Iterator[None]:
    """Dropout of 0.1 from an agent's first update on, in sampling, scoring and updates, as the released code
    has it with GPT-2. Held-out evaluation stays without. Raises `UserError` for a model without dropout.
    """
    run.cfg.require("lora", not run.cfg.lora, "shares its base with the reference, which has no dropout")
    evaluate_agents = run.evaluate_agents
    for agent in run.agents:
        layers = [module for module in agent.policy.lm.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise UserError("model", run.cfg.model, "has no dropout layers; this loop is for GPT-2")
        for layer in layers:
            layer.p = 0.1

    def switch(on: bool) -> None:
        for agent in run.agents:
            if agent.policy in updated:
                agent.policy.lm.train(on)

    def update(agent, *args):
        metrics = ppo_update(agent, *args)
        updated.add(agent.policy)
        agent.policy.lm.train()
        return metrics

    def evaluate_without() -> dict[str, float]:
        switch(False)
        found = evaluate_agents()
        switch(True)
        return found

    updated = {agent.policy for agent in run.agents} if run.start else set()    # each iteration updates all
    if not run.start:
        torch.manual_seed(run.cfg.seed)                 # dropout draws from the generator of the process
    run.evaluate_agents = evaluate_without
    switch(True)
    with patch.object(cory.train, "ppo_update", update):
        yield
    switch(False)


@contextmanager
def repetition_penalty(run: Run) -> Iterator[None]:
    """Sampling with a repetition penalty of 1.1 that scoring and update know nothing of, as in the released
    code: `sampling_gap` shows how far behaviour and policy are apart.
    """
    with patch.object(cory.ppo.rollout, "sample", penalised_sample):
        yield


@from_start
@trains("llm1", "llm2")
def train_normalised_cory(run: Run) -> None:
    with normalised_scores(run):
        train_cory(run)


@from_start
@trains("llm1")
def train_normalised_ppo(run: Run) -> None:
    """What the released code has for CORY alone, for PPO."""
    with normalised_scores(run):
        train_ppo(run)


@trains("llm1", "llm2")
def train_dropout_cory(run: Run) -> None:
    with dropout(run):
        train_cory(run)


@trains("llm1", "llm2")
def train_penalised_cory(run: Run) -> None:
    with repetition_penalty(run):
        train_cory(run)


@from_start
@trains("llm1", "llm2")
def train_released_cory(run: Run) -> None:
    """With every habit of the released code that is no flag."""
    with normalised_scores(run), dropout(run), repetition_penalty(run):
        train_cory(run)


@trains("llm1")
def train_released_ppo(run: Run) -> None:
    """PPO with the habits that the released code has for it, too."""
    with dropout(run), repetition_penalty(run):
        train_ppo(run)


def penalised_sample(model: LanguageModel, prompts: Prompts, max_new_tokens: int, generator,
                     is_local: bool = False, penalty: float = 1.1) -> Sample:
    """`sample` from logits where those of every token seen, prompts included, are over the penalty if
    above 0, else times it (Keskar et al., arXiv:1909.05858, as transformers has it).
    """
    body, seen = model.body, torch.zeros(len(prompts.ids_BP), model.vocab_size, dtype=torch.bool)
    seen = seen.to(model.device)

    def noting_body(ids, mask, *args):
        real = mask[:, -ids.shape[1]:].bool()
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        seen[rows[real], ids[real]] = True
        return body(ids, mask, *args)

    def penalised_logprobs(hidden_NH):
        logits_NV = model.logits(hidden_NH)
        less_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
        return torch.where(seen, less_NV, logits_NV).log_softmax(-1)

    never = {device: math.inf for device in STEPS_BETWEEN_LOOKS}            # no row is dropped on the way
    with (patch.object(model, "body", noting_body), patch.object(model, "logprobs", penalised_logprobs),
          patch.dict(STEPS_BETWEEN_LOOKS, never)):
        return sample(model, prompts, max_new_tokens, generator, is_local)
