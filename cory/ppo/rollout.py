"""The rollout buffer: one agent answers prompts, and its policy and reference say how likely the answers are.
"""
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.agent import Agent
from cory.ppo.minibatches import by_length, lengths, logit_chunk_size
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import decode, encode_prompts, sample
from cory.system.distributed import all_gather, local_rows, world_size
from cory.system.sharding import unsharded


@dataclass(frozen=True)
class Rollout:
    """Prompts and responses under the policy that sampled them, constant over PPO epochs.

    Padding is EOS in the two fields of token ids, 0 elsewhere. `all_gather_rollout` pads, and reads the names
    for it: `_BP` on the left, `_BT` on the right, `_B` is a number for each row. Other names are lists with
    an item for each row. A field may be None, in all processes.
    """
    prompt_BP: Tensor           # token ids, padded on the left
    prompt_mask_BP: Tensor      # 1 = real prompt token
    response_BT: Tensor         # sampled token ids, padded on the right
    mask_BT: Tensor             # 1 = real response token
    sampling_logp_BT: Tensor    # log q(a_t | s_t), q what was sampled from (`sampling_logprobs`), nats
    logp_BT: Tensor             # log pi_old(a_t | s_t), nats
    ref_logp_BT: Tensor         # log pi0(a_t | s_t), nats
    kl_BT: Tensor               # nats: KL(pi_old || pi0) at s_t (full), or log pi_old - log pi0 of a_t (k1)
    value_BT: Tensor | None     # V_old(s_t), units of reward; None without a critic
    text: list[str]             # decoded responses: all that tasks and the other agent's prompt see

    @property
    def kl_B(self) -> Tensor:
        """Sentence-level KL: summed over each response's tokens, nats."""
        return self.kl_BT.sum(1)

    @property
    def length_B(self) -> Tensor:
        """Tokens of each response, the one that ends it included, as floats."""
        return self.mask_BT.sum(1)

    @property
    def sampling_gap(self) -> float:
        """Mean |log q - log pi_old| of a token, nats: 0 up to rounding where q is pi_old."""
        gaps_BT = (self.sampling_logp_BT - self.logp_BT).abs() * self.mask_BT
        return (gaps_BT.sum() / self.mask_BT.sum()).item()


@torch.no_grad()
def collect_rollout(agent: Agent, prompts: list[str], max_new_tokens: int) -> Rollout:
    """`a ~ pi_agent(. | prompt)` for each prompt, with what policy, reference and critic make of it.

    The policy runs a second time over its responses, although sampling knew their log-probabilities: one
    pass over whole rows rounds as the update's does, so that the first ratio is 1 up to rounding, in bfloat16
    too.
    """
    with unsharded(agent.policy, agent.reference):
        prompts = prompts[local_rows(len(prompts))]
        rollout = local_rollout(agent, prompts, max_new_tokens)
    return all_gather_rollout(rollout, agent.policy.tokenizer.eos_token_id)


def local_rollout(agent: Agent, prompts: list[str], max_new_tokens: int) -> Rollout:
    """`collect_rollout` of this process's prompts.

    In passes like those of the update, so that the first ratio is 1 up to rounding.
    """
    policy, reference, cfg = agent.policy, agent.reference, agent.cfg
    encoded = encode_prompts(policy, prompts, max_new_tokens)
    sampled = sample(policy, encoded, max_new_tokens, agent.generator, is_local=True, cfg=cfg)
    mask_BT = sampled.mask_BT

    logp_BT, ref_logp_BT, kl_BT = (torch.zeros_like(mask_BT) for _ in range(3))
    value_BT = None if policy.value_head is None else torch.zeros_like(mask_BT)
    groups = by_length(encoded.mask_BP, mask_BT, cfg.mini_batch_size)
    for rows, (P, T, N) in zip(groups, pass_sizes(groups, encoded.mask_BP, mask_BT), strict=True):
        prompt, prompt_mask = encoded.ids_BP[rows, -P:], encoded.mask_BP[rows, -P:]
        response = sampled.response_BT[rows, :T]
        real = torch.nonzero_static(mask_BT[rows, :T], size=N).unbind(1)
        hidden_NH = policy.response_hidden(prompt, prompt_mask, response)[real]
        ref_hidden_NH = reference.response_hidden(prompt, prompt_mask, response)[real]
        logp_N, ref_logp_N, kl_N = logprobs_and_kl(policy, reference, hidden_NH, ref_hidden_NH,
                                                   response[real], cfg.kl_penalty)
        columns = [(logp_BT, logp_N), (ref_logp_BT, ref_logp_N), (kl_BT, kl_N)]
        if value_BT is not None:
            columns.append((value_BT, policy.values(hidden_NH)))
        for x_BT, x_N in columns:
            x_BT[rows[real[0]], real[1]] = x_N

    text = decode(policy, sampled.response_BT, mask_BT)
    return Rollout(prompt_BP=encoded.ids_BP, prompt_mask_BP=encoded.mask_BP, response_BT=sampled.response_BT,
                   mask_BT=mask_BT, sampling_logp_BT=sampled.sampling_logp_BT, logp_BT=logp_BT,
                   ref_logp_BT=ref_logp_BT, kl_BT=kl_BT, value_BT=value_BT, text=text)


def pass_sizes(groups: list[Tensor], prompt_mask_BP: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """P, T and N of each group of rows. A GPU is waited for once, and not in each forward pass."""
    length_B2 = lengths(prompt_mask_BP, mask_BT)
    sizes = [torch.cat([length_B2[rows].amax(0), length_B2[rows, 1:].sum(0)]) for rows in groups]
    return torch.stack(sizes).tolist()


def all_gather_rollout(rollout: Rollout, pad_id: int) -> Rollout:
    """The rollout of all rows, from each process's rows of it; token ids are padded with `pad_id`."""
    if world_size() == 1:
        return rollout
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in vars(rollout).items()}
    rollouts = all_gather([on_cpu])

    def joined(name: str):
        values = [local[name] for local in rollouts]
        if isinstance(values[0], list):
            return sum(values, [])
        if values[0] is None:
            return None
        if name.endswith("_B"):
            return torch.cat(values).to(rollout.mask_BT.device)
        rows, side = [row for x in values for row in x], "left" if name.endswith("BP") else "right"
        filler = pad_id if name in ("prompt_BP", "response_BT") else 0
        return pad_sequence(rows, True, filler, padding_side=side).to(rollout.mask_BT.device)

    return Rollout(**{name: joined(name) for name in on_cpu})


@torch.no_grad()
def logprobs_and_kl(policy: LanguageModel, reference: LanguageModel, hidden_NH: Tensor,
                    ref_hidden_NH: Tensor, token_N: Tensor, kl_penalty: str) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, reference log-probs, KL) of N tokens, each (N,) in nats, from both models' hidden states.

    Another KL is a branch here and a word of `kl_penalty` in `Config`. Held-out evaluation asks for "full".
    `python -m cory plan` counts the (N, V) tensors that are alive here.
    """
    # a few tokens at a time: nothing of size (B, T, V) is made
    size, parts = logit_chunk_size(policy), []
    columns = (x.split(size) for x in (hidden_NH, ref_hidden_NH, token_N))
    for hidden, ref_hidden, token in zip(*columns, strict=True):
        logp_NV, ref_logp_NV = policy.logprobs(hidden), reference.logprobs(ref_hidden)
        logp_N = formulas.token_logprobs(logp_NV, token)
        ref_logp_N = formulas.token_logprobs(ref_logp_NV, token)
        if kl_penalty == "full":
            kl_N = formulas.kl_full(logp_NV, ref_logp_NV)
        elif kl_penalty == "k1":
            kl_N = formulas.kl_k1(logp_N, ref_logp_N)
        else:
            raise UserError("kl_penalty", kl_penalty, "has no formula in logprobs_and_kl; add it there")
        parts.append(torch.stack([logp_N, ref_logp_N, kl_N]))
    return torch.cat(parts, dim=1).unbind()
