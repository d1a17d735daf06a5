"""One agent's turn: sample responses, score them under policy and reference in one sweep, keep the frozen record."""
from dataclasses import dataclass, fields, replace
from typing import Iterator

import torch
from torch import Tensor

from cory.ppo import formulas
from cory.ppo.agent import Agent
from cory.config import Config
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import decode, encode_prompts, sample

# What is computed together. It changes memory, speed and rounding, no result; by measurement on 2 CPU cores, larger on a GPU to fill it.
TOKENS_AT_ONCE = {"cpu": 3 * 2**9, "cuda": 2**14}                   # of prompts and responses with their padding, through the transformer
LOGPROBS_AT_ONCE = {"cpu": 25 * 2**20, "cuda": 2**27}               # elements of a (tokens, V) tensor: 100 and 512 MiB in float32


@dataclass(frozen=True)
class Rollout:
    """One batch of prompts and responses under the policy that sampled them; constant over all PPO epochs. 0 on padding."""
    prompt_BP: Tensor           # token ids, padded on the left
    prompt_mask_BP: Tensor      # 1 = real prompt token
    response_BT: Tensor         # sampled token ids, padded on the right
    mask_BT: Tensor             # 1 = real response token
    logp_BT: Tensor             # log pi_old(a_t | s_t), nats
    kl_BT: Tensor               # penalty per token, nats: KL(pi_old || pi0) at s_t (full), or log pi_old - log pi0 of a_t (k1)
    value_BT: Tensor            # V_old(s_t), units of reward
    text: list[str]             # decoded responses: all that crosses to rewards and to the other agent
    sampling_gap: float         # mean |log-prob while sampling - log-prob scored|, nats: 0 up to rounding

    @property
    def kl_B(self) -> Tensor:
        """Sentence-level KL: summed over each response's tokens, nats."""
        return self.kl_BT.sum(1)

    @property
    def length_B(self) -> Tensor:
        return self.mask_BT.sum(1)


@dataclass(frozen=True)
class Experience:
    """What PPO trains on: the tensors of a rollout with its rewards, advantages and returns. 0 on padding."""
    prompt_BP: Tensor
    prompt_mask_BP: Tensor
    response_BT: Tensor
    mask_BT: Tensor
    logp_BT: Tensor
    value_BT: Tensor
    reward_BT: Tensor           # -kl_coef * kl_t, plus the score on the last token
    advantage_BT: Tensor        # whitened over the whole batch
    return_BT: Tensor           # unwhitened advantage + V_old

    def rows(self, index: Tensor) -> "Experience":
        """The experience of some rows, cut to the longest prompt and the longest response among them."""
        P, T = longest(self.prompt_mask_BP[index]), longest(self.mask_BT[index])
        cut = {f.name: slice(-P, None) if f.name.endswith("_BP") else slice(0, T) for f in fields(self)}
        return replace(self, **{name: getattr(self, name)[index, columns] for name, columns in cut.items()})

    def optimizer_steps(self, rows_per_step: int, rows_at_once: int, generator: torch.Generator) -> Iterator[list["Experience"]]:
        """One shuffled pass: for each optimizer step, the mini-batches whose gradients add up: its rows, grouped by length."""
        order = torch.randperm(len(self.mask_BT), generator=generator).to(self.mask_BT.device)
        for step in order.split(rows_per_step):
            yield [self.rows(step[group]) for group in by_length(self.prompt_mask_BP[step], self.mask_BT[step], rows_at_once)]


def experience(rollout: Rollout, score_B: Tensor, kl_coef: float, gamma: float, lam: float) -> Experience:
    """Task scores (B,) and the KL penalty become token rewards, advantages and returns."""
    reward_BT = formulas.token_rewards(score_B.to(rollout.mask_BT), rollout.kl_BT, rollout.mask_BT, kl_coef)
    advantage_BT, return_BT = formulas.gae(reward_BT, rollout.value_BT, rollout.mask_BT, gamma, lam)
    return Experience(rollout.prompt_BP, rollout.prompt_mask_BP, rollout.response_BT, rollout.mask_BT, rollout.logp_BT,
                      rollout.value_BT, reward_BT, formulas.whiten(advantage_BT, rollout.mask_BT), return_BT)


@torch.no_grad()
def rollout(agent: Agent, reference: LanguageModel, prompts: list[str], max_new_tokens: int, cfg: Config) -> Rollout:
    """`a ~ pi_agent(. | prompt)` for each prompt, scored under policy and reference.

    The policy runs a second time over its responses although sampling knew their log-probabilities: one pass over whole rows
    rounds as the update's does, so that the first ratio is 1 (but for the rounding of differently cut mini-batches, in bfloat16
    too); and the exact KL needs the whole distribution, which is cheaper to make again (2 of about 30 parts of the arithmetic) than to
    keep as (B, T, V).
    """
    policy = agent.policy
    encoded = encode_prompts(policy, prompts, max_new_tokens)
    drawn = sample(policy, encoded, max_new_tokens, agent.generator)
    columns = (*encoded, drawn.response_BT, drawn.mask_BT)
    logp_BT, kl_BT, value_BT = (torch.zeros_like(drawn.mask_BT) for _ in range(3))
    for chunk in by_length(encoded.mask_BP, drawn.mask_BT, cfg.mini_batch_size):
        prompt, prompt_mask, response, mask = (x[chunk] for x in columns)
        P, T = longest(prompt_mask), longest(mask)
        rows, real = (prompt[:, -P:], prompt_mask[:, -P:], response[:, :T]), mask[:, :T].bool()
        hidden_NH, ref_hidden_NH = policy.response_hidden(*rows)[real], reference.response_hidden(*rows)[real]
        logp_N, _, kl_N = sweep(policy, reference, hidden_NH, ref_hidden_NH, rows[2][real], cfg.kl_penalty)
        for x_BT, x_N in ((logp_BT, logp_N), (kl_BT, kl_N), (value_BT, policy.values(hidden_NH))):
            x_BT[chunk] = x_BT[chunk].masked_scatter(mask.bool(), x_N)
    gap = formulas.masked_mean((drawn.logp_BT - logp_BT).abs(), drawn.mask_BT).item()
    return Rollout(*columns, logp_BT, kl_BT, value_BT, decode(policy, drawn.response_BT, drawn.mask_BT), gap)


def by_length(prompt_mask_BP: Tensor, mask_BT: Tensor, rows_at_once: int) -> list[Tensor]:
    """Indices of the rows in groups for one forward pass each, in order of length, so that little is padding: at most `rows_at_once`
    rows and `TOKENS_AT_ONCE` tokens, or a single row."""
    length_B = prompt_mask_BP.sum(1) + mask_BT.sum(1)
    order, groups, start, P, T = length_B.argsort(stable=True), [], 0, 0, 0
    prompts, responses = prompt_mask_BP.sum(1)[order].tolist(), mask_BT.sum(1).long()[order].tolist()
    for end, (prompt, response) in enumerate(zip(prompts, responses)):
        P, T = max(P, prompt), max(T, response)
        if end - start == rows_at_once or (end > start and (end + 1 - start) * (P + T) > TOKENS_AT_ONCE[mask_BT.device.type]):
            groups.append(order[start:end])
            start, P, T = end, prompt, response
    return [*groups, order[start:]]


def longest(mask: Tensor) -> int:
    """Most real tokens of any row."""
    return int(mask.sum(1).max())


def head_rows(model: LanguageModel) -> int:
    """Tokens whose logits are made together: a multiple of 64, which matrix products like."""
    return max(64, LOGPROBS_AT_ONCE[model.device.type] // model.vocab_size // 64 * 64)


@torch.no_grad()
def sweep(policy: LanguageModel, reference: LanguageModel, hidden_NH: Tensor, ref_hidden_NH: Tensor, token_N: Tensor,
          kl_penalty: str) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, reference log-probs, KL), each (N,), from both models' hidden states.

    The two distributions of a token exist at the same time, for a few tokens at a time: nothing of size (B, T, V) is made.
    """
    chunk = head_rows(policy)
    parts = []
    for hidden, ref_hidden, token in zip(hidden_NH.split(chunk), ref_hidden_NH.split(chunk), token_N.split(chunk)):
        logp_NV, ref_logp_NV = policy.logprobs(hidden), reference.logprobs(ref_hidden)
        logp, ref_logp = formulas.token_logprobs(logp_NV, token), formulas.token_logprobs(ref_logp_NV, token)
        kl = formulas.kl_full(logp_NV, ref_logp_NV) if kl_penalty == "full" else formulas.kl_k1(logp, ref_logp)
        parts.append((logp, ref_logp, kl))
    return tuple(torch.cat(column) for column in zip(*parts))
