"""The rollout buffer: an agent's responses to prompts, with log-probabilities, KL and values."""
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.agent import Agent
from cory.ppo.batches import by_length, lm_head_tokens, max_length
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import Prompts, Sample, decode, encode_prompts, sample
from cory.system.device import timed
from cory.system.distributed import processes
from cory.system.sharding import unsharded


@dataclass(frozen=True)
class Rollout:
    """Prompts and responses under the policy that sampled them, constant over PPO epochs.

    A tensor's name says how it is padded: `_BP` on the left, `_BT` on the right, `_B` not at all; with EOS
    where it holds token ids, else with 0. `take` and `join` read the names. A field may be None.
    """
    text: list[str]             # decoded responses: all that tasks and the other agent's prompt see
    prompt_BP: Tensor           # token ids
    prompt_mask_BP: Tensor      # 1 = real prompt token
    response_BT: Tensor         # sampled token ids
    mask_BT: Tensor             # 1 = real response token
    sampling_logp_BT: Tensor    # log-probability with which a_t was drawn, nats
    logp_BT: Tensor | None = None       # log pi_old(a_t | s_t), nats; None without a reference
    ref_logp_BT: Tensor | None = None   # log pi0(a_t | s_t), nats
    kl_BT: Tensor | None = None         # nats: KL(pi_old || pi0) at s_t (full), or log pi_old / pi0 (k1)
    value_BT: Tensor | None = None      # V_old(s_t), units of reward; None without a critic
    advantage_BT: Tensor | None = None  # as used by the update: whitened unless group-relative
    return_BT: Tensor | None = None     # what the critic learns: advantage before whitening + V_old

    @property
    def kl_B(self) -> Tensor:
        """Sentence-level KL: summed over each response's tokens, nats."""
        return self.kl_BT.sum(1)

    @property
    def sampling_gap(self) -> float:
        """Mean |sampling log-prob - log pi_old| per token, nats: more than rounding error means that the
        trained policy is not the one sampled from.
        """
        return ((self.sampling_logp_BT - self.logp_BT).abs().sum() / self.mask_BT.sum()).item()

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}


def take(rollout: Rollout, rows: Tensor) -> Rollout:
    """The rows with these indices, trimmed to the longest prompt and the longest response among them."""
    P, T = max_length(rollout.prompt_mask_BP[rows]), max_length(rollout.mask_BT[rows])
    columns = {"BP": (slice(-P, None),), "BT": (slice(0, T),), "B": ()}
    cut = {name: x[(rows, *columns[name.rpartition("_")[2]])] for name, x in rollout.tensors().items()}
    return replace(rollout, text=[rollout.text[i] for i in rows.tolist()], **cut)


def join(rollouts: list[Rollout], pad_id: int) -> Rollout:
    """The rows of several rollouts, padded to the longest; token ids are padded with `pad_id`."""
    def joined(name: str) -> Tensor:
        xs = [rollout.tensors()[name] for rollout in rollouts]
        if name.endswith("_B"):
            return torch.cat(xs)
        rows, side = [row for x in xs for row in x], "left" if name.endswith("BP") else "right"
        return pad_sequence(rows, True, pad_id if name in ("prompt_BP", "response_BT") else 0, side)

    text = [text for rollout in rollouts for text in rollout.text]
    return replace(rollouts[0], text=text, **{name: joined(name) for name in rollouts[0].tensors()})


def collect_rollout(agent: Agent, prompts: list[str], max_new_tokens: int) -> Rollout:
    """`a ~ pi_agent(. | prompt)` for each prompt, with log-probabilities, KL and values. Each
    process generates its rows; all then receive the whole rollout.
    """
    policy, reference, cfg, B = agent.policy, agent.reference, agent.cfg, len(prompts)
    if B % processes().size:
        raise UserError("prompts", B, f"cannot be divided among {processes().size} processes; make their "
                        "number a multiple")
    uniform_TB = torch.from_numpy(agent.generator().random((max_new_tokens, B)))

    def generate_mine(mine: slice) -> list[Rollout]:
        rollout = sample_rollout(policy, reference, prompts[mine], max_new_tokens, uniform_TB[:, mine],
                                 cfg.kl_penalty, cfg.mini_batch_size, policy.value_head)
        return [rollout if processes().size == 1 else moved(rollout, "cpu")]

    with unsharded(policy, reference):
        rollouts = processes().gather_parts(B, generate_mine)
    if len(rollouts) == 1:
        return rollouts[0]
    return moved(join(rollouts, policy.tokenizer.eos_token_id), policy.device)


def moved(rollout: Rollout, device: torch.device | str) -> Rollout:
    return replace(rollout, **{name: x.to(device) for name, x in rollout.tensors().items()})


@torch.no_grad()
def sample_rollout(policy: LanguageModel, reference: LanguageModel | None, prompts: list[str],
                   max_new_tokens: int, uniform_TB: Tensor | None, kl_penalty: str, max_rows: int,
                   value_head: nn.Module | None = None) -> Rollout:
    """A response to each prompt, sampled with uniform_TB, or greedy without it. With a reference, also with
    what `logprobs_and_values` returns, at most `max_rows` at a time.
    """
    encoded = encode_prompts(policy, prompts, max_new_tokens)
    with timed("sampling", policy.device):
        sampled = sample(policy, encoded, max_new_tokens, uniform_TB)
    computed = {}
    if reference is not None:
        with timed("logprob", policy.device):
            computed = logprobs_and_values(policy, reference, encoded, sampled, kl_penalty, max_rows,
                                           value_head)
    return Rollout(text=decode(policy, encoded, sampled), prompt_BP=encoded.ids_BP,
                   prompt_mask_BP=encoded.mask_BP, response_BT=sampled.response_BT, mask_BT=sampled.mask_BT,
                   sampling_logp_BT=sampled.logp_BT, **computed)


def logprobs_and_values(policy: LanguageModel, reference: LanguageModel, prompts: Prompts, sampled: Sample,
                        kl_penalty: str, max_rows: int,
                        value_head: nn.Module | None = None) -> dict[str, Tensor]:
    """logp_BT, ref_logp_BT, kl_BT and, with a value head, value_BT of the responses.

    The policy's log-probabilities are recomputed, in passes over whole rows, whose rounding matches that
    of the update: initial ratios are nearly 1 even in bfloat16.
    """
    mask_BT = sampled.mask_BT
    names = ["logp_BT", "ref_logp_BT", "kl_BT"] + ["value_BT"] * (value_head is not None)
    computed = {name: torch.zeros_like(mask_BT) for name in names}
    for rows in by_length(prompts.mask_BP, mask_BT, max_rows):
        P, T = max_length(prompts.mask_BP[rows]), max_length(mask_BT[rows])
        prompt, prompt_mask = prompts.ids_BP[rows, -P:], prompts.mask_BP[rows, -P:]
        response, real = sampled.response_BT[rows, :T], mask_BT[rows, :T].nonzero(as_tuple=True)
        hidden_NH = ref_hidden_NH = policy.response_hidden(prompt, prompt_mask, response)[real]
        if reference is not policy:
            ref_hidden_NH = reference.response_hidden(prompt, prompt_mask, response)[real]
        columns = [*logprobs_and_kl(policy, reference, hidden_NH, ref_hidden_NH, response[real], kl_penalty)]
        if "value_BT" in names:
            columns.append(policy.values(hidden_NH))
        for name, x_N in zip(names, columns, strict=True):
            computed[name][rows[real[0]], real[1]] = x_N
    return computed


@torch.no_grad()
def logprobs_and_kl(policy: LanguageModel, reference: LanguageModel, hidden_NH: Tensor,
                    ref_hidden_NH: Tensor, token_N: Tensor, kl_penalty: str) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, reference log-probs, KL) of N tokens, each (N,) in nats, from the models' hidden states."""
    # a few tokens at a time, so that no (B, T, V) tensor exists
    size, parts = lm_head_tokens(policy), []
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
