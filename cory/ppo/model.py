"""A causal language model seen as a policy, with a linear value head for the agents.

Where a tensor's name ends in capitals they are its shape: B rows, P prompt tokens (padded on the left), T
response tokens (padded on the right), L tokens of both, H hidden size, V vocabulary, N response tokens
gathered from many rows, R rows that are still computed, G queries with k responses each; digits are sizes.
"""
import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cory.config import FLOAT32, Precision
from cory.ppo import formulas
from cory.ppo.lora import activate, adapter_parameters
from cory.ppo.precision import multiply


class LanguageModel(nn.Module):
    """Any Hugging Face causal LM, its tokenizer, and the softmax temperature its distribution is meant at.

    Body and head are called separately, so that logits are made only where a response token is predicted.
    Dropout is off: sampling, the rollout and the update then see the same pi. DIFFERS: the released code
    samples and trains with dropout after its first update.
    """

    def __init__(self, lm: nn.Module, tokenizer, temperature: float = 1.0,
                 precision: Precision = FLOAT32, adapter: str | None = None):
        super().__init__()
        self.lm, self.tokenizer, self.adapter = lm.eval(), tokenizer, adapter
        self.temperature, self.precision = temperature, precision

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def context_length(self) -> int:
        return getattr(self.lm.config, "max_position_embeddings", 10**9)

    @property
    def vocab_size(self) -> int:
        return self.lm.get_output_embeddings().weight.shape[0]

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a response: EOS, and what else generation_config ends on, as chat models do."""
        more = getattr(getattr(self.lm, "generation_config", None), "eos_token_id", None)
        more = more if isinstance(more, list) else [] if more is None else [more]       # 0 is a token too
        return sorted({self.tokenizer.eos_token_id, *more})

    def autocast(self):
        in_bfloat16 = self.precision.body == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if in_bfloat16 else nullcontext()

    def response_hidden(self, prompt_BP: Tensor, prompt_mask_BP: Tensor, response_BT: Tensor) -> Tensor:
        """The (B, T, H) last hidden states from which each response token is predicted.

        Position ids count real tokens from 0, so that a row does not depend on its padding. Padding on the
        right is not masked: no real token sees it. The last response token is never an input.
        """
        response_in = response_BT[:, :-1]
        mask = torch.cat([prompt_mask_BP, torch.ones_like(response_in)], dim=1)
        hidden = self.body(torch.cat([prompt_BP, response_in], dim=1), mask, positions(mask))[0]
        return hidden[:, prompt_BP.shape[1] - 1:]

    def body(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache=None) -> tuple[Tensor, object]:
        """The transformer without its head, with this model's adapter: (last hidden states, cache)."""
        activate(self.lm, self.adapter)
        with self.autocast():
            out = self.lm.base_model(input_ids=ids, attention_mask=mask, position_ids=position_ids,
                                     past_key_values=cache, use_cache=cache is not None)
        return out.last_hidden_state, out.past_key_values

    def logprobs(self, hidden_NH: Tensor) -> Tensor:
        """(N, V) log-probabilities of the next token, in float32, without gradients. To train, use
        `logp_and_entropy`, whose gradients are in the LM head's precision.
        """
        head = self.lm.get_output_embeddings()
        logits_NV = head_logits(hidden_NH.float(), head.weight, head.bias, self.temperature,
                                self.precision.head)
        return torch.log_softmax(logits_NV, -1, out=logits_NV)      # in place: no second (N, V)

    def logp_and_entropy(self, hidden_NH: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log pi(token), entropy of pi), each (N,) in nats, to be trained through."""
        head = self.lm.get_output_embeddings()
        return LogpAndEntropy.apply(hidden_NH.float(), head.weight, head.bias, token_N, self.temperature,
                                    self.precision.head)


def head_logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float,
                precision: str) -> Tensor:
    """`(hidden weight^T + bias) / temperature`, (N, V). Its gradient stands in `LogpAndEntropy.backward`."""
    logits_NV = multiply(hidden_NH, weight_VH.t(), precision)
    if bias_V is not None:
        logits_NV = logits_NV.add_(bias_V)
    return logits_NV if temperature == 1.0 else logits_NV.div_(temperature)


class LogpAndEntropy(torch.autograd.Function):
    """`log pi(a)` and the entropy H of pi with their gradients in closed form:

        d log pi(a) / d logits = onehot(a) - pi        d H / d logits = -pi (log pi + H)

    `tests/test_update.py` compares it with plain autograd, which keeps three tensors of (N, V). This keeps
    one, pi. `backward` computes in its memory, so that it runs once. `python -m cory plan` counts these
    tensors. All three products are in the LM head's precision. A loss that needs more of pi than log pi(a)
    and H (top-k, the exact KL) needs its gradient here.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, token_N, temperature, precision):
        logits_NV = head_logits(hidden_NH, weight_VH, bias_V, temperature, precision)
        p_NV = logits_NV.softmax(-1)
        logp_NV = torch.log_softmax(logits_NV, -1, out=logits_NV)
        entropy_N = formulas.entropy(p_NV, logp_NV)
        ctx.save_for_backward(hidden_NH, weight_VH, token_N, p_NV, entropy_N)
        ctx.temperature, ctx.precision = temperature, precision
        ctx.set_materialize_grads(False)                # None for what the loss does not use
        return formulas.token_logprobs(logp_NV, token_N), entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_N, grad_entropy_N):
        hidden_NH, weight_VH, token_N, p_NV, entropy_N = ctx.saved_tensors
        through_entropy_NV = None
        if grad_entropy_N is not None:                          # first: p is overwritten below
            scale_N1 = -grad_entropy_N[:, None] / ctx.temperature
            # p log p + p H
            through_entropy_NV = torch.xlogy(p_NV, p_NV).addcmul_(p_NV, entropy_N[:, None]).mul_(scale_N1)
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(entropy_N)
        scale_N1 = grad_logp_N[:, None] / ctx.temperature
        # onehot(a) - p, in the memory of p
        grad_logits_NV = p_NV.mul_(-scale_N1).scatter_add_(1, token_N[:, None], scale_N1)
        if through_entropy_NV is not None:
            grad_logits_NV.add_(through_entropy_NV)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = multiply(grad_logits_NV, weight_VH, ctx.precision)
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(grad_logits_NV.t(), hidden_NH, ctx.precision)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_logits_NV.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class PolicyWithValue(LanguageModel):
    """The policy and, where the advantage needs one, its critic: a linear value head.

    The policy is a copy of the base, or with `adapter` the base itself and its adapter of that name. The
    value head (paper, sec. 3) reads the last hidden state, in float32, and trains the transformer too. It
    starts at zero (the paper does not say). Of a deeper one only the last layer can start at zero: draw the
    others under `torch.random.fork_rng`, by the agent's seed, which `Agent` must then pass, so that no other
    random number moves. A critic with a transformer of its own needs hidden states of its own
    wherever `values` is called, and must be sharded by `Agent`.
    """

    def __init__(self, base: LanguageModel, adapter: str | None = None, critic: bool = True):
        lm = base.lm if adapter else copy.deepcopy(base.lm)
        super().__init__(lm, base.tokenizer, base.temperature, base.precision, adapter)
        self.value_head = None
        if critic:
            width = self.lm.get_output_embeddings().in_features
            self.value_head = nn.utils.skip_init(nn.Linear, width, 1, device=base.device, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        for parameter in self.trained().values():
            parameter.requires_grad_(True)

    def trained(self) -> dict[str, nn.Parameter]:
        """What this agent trains, and checkpoints keep, by name: all weights or its adapter's, and the value
        head. What is added has the policy's rate, unless `reset` in agent.py says otherwise, and is in no
        final model, unless `save_final` in checkpoint.py writes it.
        """
        lm = adapter_parameters(self.lm, self.adapter) if self.adapter else dict(self.lm.named_parameters())
        head = {} if self.value_head is None else dict(self.value_head.named_parameters())
        trained = {f"lm.{name}": p for name, p in lm.items()}
        return trained | {f"value_head.{name}": p for name, p in head.items()}

    def values(self, hidden: Tensor) -> Tensor:
        """V(s) in units of reward for each hidden state (..., H) -> (...)."""
        return self.value_head(hidden.float()).squeeze(-1)


def positions(mask: Tensor) -> Tensor:
    """Position ids (B, L) of a left-padded batch: real tokens count 0, 1, 2, ...; padding gets 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)
