"""The rollout buffer: an agent's responses to prompts, with log-probabilities, KL and values."""
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cory.device import timed
from cory.distributed import processes, unsharded
from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.agent import Agent
from cory.ppo.model import Critic, LanguageModel
from cory.ppo.sampling import decode, encode_prompts, max_length, sample

# How rows are divided into forward passes and calls of the LM head affects results only by rounding.
# Tokens of a pass through the transformer, padding included: on a CPU the fastest measured on 2 cores.
MAX_TOKENS_PER_PASS = {"cpu": 3 * 2**9, "cuda": 2**12}
# Logits computed at once, of which an update keeps up to five tensors: 32 and 512 MiB each.
MAX_LOGITS_PER_PASS = {"cpu": 2**23, "cuda": 2**27}


@dataclass(frozen=True)
class Rollout:
    """Prompts and responses under the policy that sampled them, constant over PPO epochs.

    Prompts are padded on the left, all else on the right, token ids with EOS and numbers with 0. A field that
    you add has one value for each row, (B,), or for each response token, (B, T), or is None.
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
    advantage_BT: Tensor | None = None  # as used by the update: whitened, if the estimator asks for it
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

    def to(self, device: torch.device | str) -> "Rollout":
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})


PROMPT = ("prompt_BP", "prompt_mask_BP")        # the fields that are padded on the left
IDS = ("prompt_BP", "response_BT")              # those of token ids


def take(rollout: Rollout, rows: Tensor) -> Rollout:
    """The rows with these indices, trimmed to the longest prompt and the longest response among them."""
    P, T = max_length(rollout.prompt_mask_BP[rows]), max_length(rollout.mask_BT[rows])

    def part(name: str, x: Tensor) -> Tensor:
        if name in PROMPT:
            return x[rows, -P:]
        return x[rows] if x.dim() == 1 else x[rows, :T]

    parts = {name: part(name, x) for name, x in rollout.tensors().items()}
    return replace(rollout, text=[rollout.text[i] for i in rows.tolist()], **parts)


def join(rollouts: list[Rollout], pad_id: int) -> Rollout:
    """The rows of several rollouts, padded to the longest; token ids are padded with `pad_id`. Raises
    `UserError` where one has a field that another lacks.
    """
    names = [{*rollout.tensors()} for rollout in rollouts]
    for name in set.union(*names) - set.intersection(*names):
        raise UserError(f"rollout.{name} is in some of the rollouts to join; give it to all of them")

    def joined(name: str) -> Tensor:
        xs = [getattr(rollout, name) for rollout in rollouts]
        if xs[0].dim() == 1:
            return torch.cat(xs)
        rows, side = [row for x in xs for row in x], "left" if name in PROMPT else "right"
        return pad_sequence(rows, True, pad_id if name in IDS else 0, side)

    text = [text for rollout in rollouts for text in rollout.text]
    return replace(rollouts[0], text=text, **{name: joined(name) for name in names[0]})


def collect_rollout(agent: Agent, prompts: list[str], max_new_tokens: int) -> Rollout:
    """`a ~ pi_agent(. | prompt)` for each prompt, with log-probabilities, KL and values. Each process
    generates its rows; all then receive the whole rollout.
    """
    policy, reference, mine = agent.policy, agent.base, processes().rows(len(prompts))
    uniform_TB = torch.from_numpy(agent.generator().random((max_new_tokens, len(prompts))))
    with unsharded(policy, reference):
        rollout = sample_rollout(policy, prompts[mine], max_new_tokens, uniform_TB[:, mine])
        rollout = score_rollout(rollout, policy, reference, agent.cfg.kl_penalty, agent.cfg.mini_batch_size,
                                agent.critic)
    if processes().size == 1:
        return rollout
    rollouts = processes().gather([rollout.to("cpu")])
    return join(rollouts, policy.tokenizer.eos_token_id).to(policy.device)


@torch.no_grad()
def sample_rollout(policy: LanguageModel, prompts: list[str], max_new_tokens: int,
                   uniform_TB: Tensor | None) -> Rollout:
    """A response to each prompt, sampled with uniform_TB, or greedy without it."""
    encoded = encode_prompts(policy, prompts, max_new_tokens)
    with timed("sampling", policy.device):
        sampled = sample(policy, encoded, max_new_tokens, uniform_TB)
    return Rollout(text=decode(policy, encoded, sampled), prompt_BP=encoded.ids_BP,
                   prompt_mask_BP=encoded.mask_BP, response_BT=sampled.response_BT, mask_BT=sampled.mask_BT,
                   sampling_logp_BT=sampled.logp_BT)


@torch.no_grad()
def score_rollout(rollout: Rollout, policy: LanguageModel, reference: LanguageModel, kl_penalty: str,
                  max_rows: int, critic: Critic | None = None) -> Rollout:
    """Adds logp_BT, ref_logp_BT, kl_BT and, with a critic, value_BT, in passes over at most `max_rows` rows.

    The policy's log-probabilities are recomputed, in passes over whole rows, whose rounding matches that
    of the update: initial ratios are nearly 1 even in bfloat16.
    """
    names = ["logp_BT", "ref_logp_BT", "kl_BT"] + ["value_BT"] * (critic is not None)
    scored = {name: torch.zeros_like(rollout.mask_BT) for name in names}
    with timed("logprob", policy.device):
        for index in by_length(rollout, max_rows):
            rows = take(rollout, index)
            real = rows.mask_BT.nonzero(as_tuple=True)
            model_inputs = rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT
            hidden_NH = ref_hidden_NH = policy.response_hidden(*model_inputs)[real]
            if reference is not policy:
                ref_hidden_NH = reference.response_hidden(*model_inputs)[real]
            columns = [*logprobs_and_kl(policy, reference, hidden_NH, ref_hidden_NH, rows.response_BT[real],
                                        kl_penalty)]
            if critic is not None:
                columns.append(critic(rows, hidden_NH))
            for name, x_N in zip(names, columns, strict=True):
                scored[name][index[real[0]], real[1]] = x_N
    return replace(rollout, **scored)


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
        else:
            kl_N = formulas.kl_k1(logp_N, ref_logp_N)
        parts.append(torch.stack([logp_N, ref_logp_N, kl_N]))
    return torch.cat(parts, dim=1).unbind()


def by_length(rollout: Rollout, max_rows: int) -> list[Tensor]:
    """Indices of the rows in groups for one pass each, in order of length, to keep padding low: at most
    `max_rows` rows and `MAX_TOKENS_PER_PASS` tokens, or one row.
    """
    max_tokens = MAX_TOKENS_PER_PASS[rollout.mask_BT.device.type]
    length_B2 = torch.stack([rollout.prompt_mask_BP.sum(1), rollout.mask_BT.sum(1).long()], 1)
    order = length_B2.sum(1).argsort(stable=True)
    groups, start, P, T = [], 0, 0, 0
    for row, (prompt, response) in enumerate(length_B2[order].tolist()):
        P, T = max(P, prompt), max(T, response)
        count = row - start                                 # rows of the open group, without this one
        if count and (count == max_rows or (count + 1) * (P + T) > max_tokens):
            groups.append(order[start:row])
            start, P, T = row, prompt, response
    return [*groups, order[start:]]


def lm_head_tokens(model: LanguageModel) -> int:
    """How many tokens' logits are computed together: a multiple of 64, for efficient matrix products."""
    return max(64, MAX_LOGITS_PER_PASS[model.device.type] // model.head.out_features // 64 * 64)
