"""A causal LM as a policy, and its critic.

Capitals at the end of a tensor's name are its shape: B rows, P prompt tokens (padded on the left), T response
tokens (padded on the right), L tokens of both, H hidden size, V vocabulary, N response tokens gathered from
many rows, R rows still being sampled; digits are sizes. Masks are 1 for real tokens and 0 for padding.
"""
import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.ppo import formulas
from cory.ppo.lora import add_adapter, switch_to


@dataclass(eq=False)
class LanguageModel:
    """A Hugging Face causal LM with its tokenizer, a temperature, and perhaps an adapter. Several of these
    may share one `lm`: call their methods, not `lm`. An agent's policy has its base's temperature. Dropout is
    off, so that sampling and updates use one pi.

    DIFFERS: the released code samples and trains with dropout after its first update.
    """
    lm: nn.Module
    tokenizer: PreTrainedTokenizerBase
    dtype: str = "float32"
    chat_template: bool = False
    temperature: float = 1.0
    name: str = "base"
    adapter: str | None = field(default=None, init=False)               # of a policy with LoRA: its name
    adapter_weights: dict = field(default_factory=dict, init=False)     # and its weights, by name
    response_cache: dict = field(default_factory=dict, init=False)      # of a base: its held-out responses

    def __post_init__(self):
        self.lm.eval()

    def new_policy(self, name: str, cfg: Config) -> "Policy":
        """A new adapter on this base, or a copy of it."""
        lm = self.lm if cfg.lora_rank else copy.deepcopy(self.lm)
        policy = Policy(lm, self.tokenizer, self.dtype, self.chat_template, self.temperature, name)
        if cfg.lora_rank:
            policy.adapter = name
            policy.adapter_weights = add_adapter(lm, name, cfg)
        return policy

    def activate(self) -> None:
        """From here on `lm` computes with this model's adapter, or with none."""
        switch_to(self.lm, self.adapter)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer's: the list that holds most of the parameters."""
        def size(layers):
            return sum(p.numel() for p in layers.parameters())

        modules = self.lm.base_model.modules()
        return max([x for x in modules if isinstance(x, nn.ModuleList)], key=size)

    @property
    def head(self) -> nn.Linear:
        return self.lm.get_output_embeddings()

    @property
    def end_ids(self) -> set[int]:
        """Tokens that end a response: EOS, and any others in generation_config, as for chat models."""
        more = self.lm.generation_config.eos_token_id
        if not isinstance(more, list):
            more = [more]
        return {self.tokenizer.eos_token_id, *more} - {None}

    def weights(self) -> dict[str, nn.Parameter]:
        """The adapter's weights by name, or all weights if there is no adapter."""
        return self.adapter_weights or dict(self.lm.named_parameters())

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def encode(self, prompts: list) -> list[list[int]]:
        """Token ids of each prompt. In the chat template a prompt is a user's message, or a list of messages.
        A special token that it spells out, as `<|im_end|>` in the other agent's response, is read as text.
        """
        if not self.chat_template:
            return self.tokenizer(prompts, split_special_tokens=True)["input_ids"]
        chats = []
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            chats.append(prompt)
        return self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False,
                                                  sanitize_control_tokens=True)

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache=None) -> tuple:
        """The transformer without its head, with this model's adapter: (last hidden states, cache)."""
        self.activate()
        with self.autocast():
            out = self.lm.base_model(input_ids=ids, attention_mask=mask, position_ids=position_ids,
                                     past_key_values=cache, use_cache=cache is not None)
        return out.last_hidden_state, out.past_key_values

    def response_hidden(self, prompt_BP, prompt_mask_BP, response_BT) -> Tensor:
        """The (B, T, H) last hidden states from which each response token is predicted. Position ids count
        real tokens from 0, so that a row does not depend on its padding.
        """
        response_in = response_BT[:, :-1]
        mask = torch.cat([prompt_mask_BP, torch.ones_like(response_in)], dim=1)
        ids = torch.cat([prompt_BP, response_in], dim=1)
        hidden, _ = self.hidden_states(ids, mask, positions(mask))
        return hidden[:, prompt_BP.shape[1] - 1:]

    def logits(self, hidden_NH) -> Tensor:
        """(N, V), divided by the temperature; in float32, because GPT-2's logits are near -100, where
        neighbouring bfloat16 numbers differ by 0.5. All must be finite: an override that rules a token out
        gives it -1e9.
        """
        with torch.autocast(self.device.type, enabled=False):
            logits_NV = self.head(hidden_NH.float())
        if self.temperature == 1:
            return logits_NV
        return logits_NV / self.temperature

    def logprobs(self, hidden_NH) -> Tensor:
        """(N, V) log-probabilities of the next token, in nats; differentiable."""
        logits_NV = self.logits(hidden_NH)
        in_place = None if logits_NV.requires_grad else logits_NV   # without a gradient: no second (N, V)
        return torch.log_softmax(logits_NV, -1, out=in_place)

    def logp_and_entropy(self, hidden_NH, token_N) -> tuple[Tensor, Tensor]:
        """(log pi(token), entropy of pi), each (N,) in nats, differentiable."""
        logp_NV = self.logprobs(hidden_NH)
        return formulas.token_logprobs(logp_NV, token_N), formulas.entropy(logp_NV.exp(), logp_NV)


class Policy(LanguageModel):
    """What an agent samples from and trains. To change it, but not the base, override `logits` here."""


class Critic(nn.Module):
    """V(s): a linear value head on the policy's last hidden state (paper, sec. 3), in float32. Its gradient
    also reaches the transformer. It is initialized to 0; the paper states no initialization. A custom critic
    (`--critic`) has these methods, and must not change `base`, which all agents share.
    """

    def __init__(self, base: LanguageModel):
        super().__init__()
        width = base.head.in_features
        self.linear = nn.Linear(width, 1, device=base.device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, batch, hidden: Tensor) -> Tensor:
        """Values (B, T), in units of reward, of the states in which `batch`, a `Rollout`, chose its tokens;
        hidden: the policy's hidden states in these, (B, T, H).
        """
        return self.linear(hidden.float()).squeeze(-1)


def positions(mask: Tensor) -> Tensor:
    """Position ids (B, L) of a left-padded batch: real tokens count 0, 1, 2, ...; padding gets 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)
