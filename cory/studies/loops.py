"""Loops that only studies need: a control of the paper's idea, and habits of the released code, one by one.

Each is `train_cory` or `train_ppo` with one thing changed for as long as the loop runs, so that what differs
can be read here in full.
"""
import math
from unittest.mock import patch

import torch
from torch import Tensor, nn

import cory.ppo.rollout
import cory.train
from cory.errors import UserError
from cory.experiment.run import Run
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import STEPS_BETWEEN_LOOKS, Prompts, Sample, sample
from cory.ppo.update import ppo_update
from cory.train import score, train_cory, train_ppo, trains


def require_from_start(run: Run) -> None:
    """Refuses to resume: what the loop remembers is in no checkpoint."""
    way_out = "remembers what no checkpoint holds; delete this run and start it anew"
    run.cfg.require("method", run.start == 0, way_out)


@trains("llm1")
def train_noisy_ppo(run: Run) -> None:
    """PPO whose score has a partner's noise and nothing of a partner: the reward of another response of the
    batch, which has the spread of r(s0, a2) and does not depend on the agent's own response.
    """
    def noisy(rollout, reward_B, partner_reward_B, cfg) -> Tensor:
        return score(rollout, reward_B, reward_B.roll(1), cfg)              # the neighbour's, never its own

    with patch.object(cory.train, "score", noisy):
        train_ppo(run)


@trains("llm1", "llm2")
def train_normalised_cory(run: Run) -> None:
    """Scores less their running mean, over their running standard deviation, as the released code has
    them for CORY and not for PPO. Of all scores of the run so far; the released code forgets them at each
    exchange.
    """
    require_from_start(run)
    seen = []

    def normalised(rollout, reward_B, partner_reward_B, cfg) -> Tensor:
        score_B = score(rollout, reward_B, partner_reward_B, cfg)
        seen.append(score_B)
        so_far = torch.cat(seen)
        return (score_B - so_far.mean()) / (so_far.std(correction=0) + 1e-6)

    with patch.object(cory.train, "score", normalised):
        train_cory(run)


@trains("llm1", "llm2")
def train_dropout_cory(run: Run) -> None:
    """Dropout of 0.1 from an agent's first update on, in sampling, scoring and updates, as the released code
    has it with GPT-2. Held-out evaluation stays without. Raises `UserError` for a model without dropout.
    """
    require_from_start(run)
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

    updated, run.evaluate_agents = set(), evaluate_without
    with patch.object(cory.train, "ppo_update", update):
        train_cory(run)
    switch(False)


@trains("llm1", "llm2")
def train_penalised_cory(run: Run) -> None:
    """Sampling with a repetition penalty of 1.1 that scoring and update know nothing of, as in the released
    code: `sampling_gap` shows how far behaviour and policy are apart.
    """
    with patch.object(cory.ppo.rollout, "sample", penalised_sample):
        train_cory(run)


def penalised_sample(model: LanguageModel, prompts: Prompts, max_new_tokens: int, generator,
                     penalty: float = 1.1) -> Sample:
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
        return sample(model, prompts, max_new_tokens, generator)
