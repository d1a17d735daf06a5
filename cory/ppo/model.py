"""A causal LM used as a policy; agents add a value head.

Capitals at the end of a tensor's name are its shape: B rows, P prompt tokens (padded on the left), T response
tokens (padded on the right), L tokens of both, H hidden size, V vocabulary, N response tokens gathered from
many rows, R rows still being sampled, G queries with k responses each; digits are sizes. Masks are 1 for real
tokens and 0 for padding.
"""
import copy
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from cory.ppo import formulas
from cory.ppo.lora import activate, adapter_parameters


class LanguageModel(nn.Module):
    """Any Hugging Face causal LM with its tokenizer; logits only where a response token is predicted.

    Dropout is off: sampling, the rollout and the update see the same pi. DIFFERS: the released code samples
    and trains with dropout after its first update.
    """

    def __init__(self, lm: nn.Module, tokenizer, dtype: str = "float32", chat_template: bool = False,
                 adapter: str | None = None):
        super().__init__()
        self.lm, self.tokenizer, self.dtype = lm.eval(), tokenizer, dtype
        self.chat_template, self.adapter, self.value_head = chat_template, adapter, None

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens; None where the config does not say. "longrope" and "dynamic" RoPE rescale
        all positions beyond the original context, which is then the limit.
        """
        config = self.lm.config.get_text_config()
        lengths = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("longrope", "dynamic"):
            lengths += [rope.get("original_max_position_embeddings"),
                        getattr(config, "original_max_position_embeddings", None)]
        return min((length for length in lengths if length), default=None)

    def weights(self) -> dict[str, nn.Parameter]:
        """The adapter's weights by name, or all weights if there is no adapter."""
        return adapter_parameters(self.lm, self.adapter) if self.adapter else dict(self.lm.named_parameters())

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer's layers: the list that holds most of the parameters."""
        lists = [module for module in self.lm.base_model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a response: EOS, and any others in generation_config, as for chat models.
        `load_language_model` adds the chat template's.
        """
        more = getattr(getattr(self.lm, "generation_config", None), "eos_token_id", None)
        more = more if isinstance(more, list) else [] if more is None else [more]
        return sorted({self.tokenizer.eos_token_id, *more})

    def autocast(self):
        """Matrix products in bfloat16 where `dtype` says so."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.dtype == "bfloat16" else nullcontext()

    def encode(self, prompts: list[str]) -> list[list[int]]:
        """Token ids of each prompt: with the tokenizer's BOS if any, or as a message in its chat template."""
        if not self.chat_template:
            return self.tokenizer(prompts)["input_ids"]
        return [self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], return_dict=False,
                                                   add_generation_prompt=True) for prompt in prompts]

    def response_hidden(self, prompt_BP: Tensor, prompt_mask_BP: Tensor, response_BT: Tensor) -> Tensor:
        """The (B, T, H) last hidden states from which each response token is predicted.

        Position ids count real tokens from 0, so that a row does not depend on its padding. No real token
        sees the padding on the right.
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

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """(N, V), in float32: GPT-2's lie near -100, where bfloat16 numbers are 0.5 apart."""
        head = self.lm.get_output_embeddings()
        with torch.autocast(self.device.type, enabled=False):
            return nn.functional.linear(hidden_NH.float(), head.weight, head.bias)

    @torch.no_grad()
    def logprobs(self, hidden_NH: Tensor) -> Tensor:
        """(N, V) log-probabilities of the next token, in nats."""
        logits_NV = self.logits(hidden_NH)
        return torch.log_softmax(logits_NV, -1, out=logits_NV)      # in place: no second (N, V)

    def logp_and_entropy(self, hidden_NH: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log pi(token), entropy of pi), each (N,) in nats, differentiable."""
        logp_NV = self.logits(hidden_NH).log_softmax(-1)
        return formulas.token_logprobs(logp_NV, token_N), formulas.entropy(logp_NV.exp(), logp_NV)

    def cast_once(self) -> None:
        """With bfloat16, casts a frozen model's matrices once; autocast would recast them at each call."""
        head = self.lm.get_output_embeddings()
        for layer in self.lm.modules() if self.dtype == "bfloat16" else ():
            if isinstance(layer, (nn.Linear, Conv1D)) and layer is not head:
                layer.weight.data = layer.weight.data.bfloat16()


class PolicyWithValue(LanguageModel):
    """The policy, a copy of the base or an adapter on it, and, where the advantage needs one, its critic: a
    linear value head on the last hidden state (paper, sec. 3), in float32, whose gradient also reaches the
    transformer. It starts at 0 (the paper does not say).
    """

    def __init__(self, base: LanguageModel, adapter: str | None = None, critic: bool = True,
                 gradient_checkpointing: bool = False):
        lm = base.lm if adapter else copy.deepcopy(base.lm)
        super().__init__(lm, base.tokenizer, base.dtype, base.chat_template, adapter)
        if critic:
            width = self.lm.get_output_embeddings().in_features
            self.value_head = nn.utils.skip_init(nn.Linear, width, 1, device=base.device, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if gradient_checkpointing:
            self.recompute_layers()
        for parameter in self.trainable_parameters().values():
            parameter.requires_grad_(True)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """By name: all weights or the adapter's, as `lm.NAME`, and those of the value head."""
        head = {} if self.value_head is None else dict(self.value_head.named_parameters())
        trained = {f"lm.{name}": p for name, p in self.weights().items()}
        return trained | {f"value_head.{name}": p for name, p in head.items()}

    def recompute_layers(self) -> None:
        """Gradient checkpointing by layer; transformers' own needs training mode, which enables dropout."""
        for layer in self.layers:
            if not isinstance(layer.forward, partial):      # with LoRA, agents share their layers
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False,
                                        preserve_rng_state=False)

    def values(self, hidden: Tensor) -> Tensor:
        """V(s) in units of reward for each hidden state (..., H) -> (...)."""
        return self.value_head(hidden.float()).squeeze(-1)


def positions(mask: Tensor) -> Tensor:
    """Position ids (B, L) of a left-padded batch: real tokens count 0, 1, 2, ...; padding gets 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)
