"""A causal language model seen as a policy, with a linear value head for the agents.

Shapes: B rows, P prompt tokens (padded on the left), T response tokens (padded on the right), H hidden size, V vocabulary,
N response tokens gathered from many rows.
"""
import copy
import importlib.util
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from cory.ppo import formulas
from cory.ppo.cache import GrowingLayer
from cory.errors import UserError
from cory.ppo.lora import adapter_parameters, select


class LanguageModel(nn.Module):
    """Any Hugging Face causal LM, its tokenizer, and the softmax temperature its distribution is meant at.

    Body and head are called separately, so that the (tokens, V) logits exist only where a response token is predicted.
    Dropout is off for good: what sampling, scoring and the update call pi is then one function of the weights. DIFFERS: the
    released code samples and trains with it after its first update.
    """

    def __init__(self, lm: nn.Module, tokenizer, temperature: float = 1.0, dtype: str = "float32", adapter: str | None = None):
        super().__init__()
        self.lm, self.tokenizer, self.temperature, self.dtype, self.adapter = lm.eval(), tokenizer, temperature, dtype, adapter

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
        """Tokens that end a response: EOS, and what else the model's generation_config ends on (chat models may end a turn otherwise)."""
        more = getattr(getattr(self.lm, "generation_config", None), "eos_token_id", None)
        more = more if isinstance(more, list) else [] if more is None else [more]       # 0 is a token too
        return sorted({self.tokenizer.eos_token_id, *more})

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.dtype == "bfloat16" else nullcontext()

    def response_hidden(self, prompt_BP: Tensor, prompt_mask_BP: Tensor, response_BT: Tensor) -> Tensor:
        """The (B, T, H) last hidden states from which each response token is predicted.

        Position ids count real tokens from 0, so that a row does not depend on its padding. The last response token is never
        an input: nothing is predicted from it. Padding behind a response is causally invisible to it.
        """
        response_in = response_BT[:, :-1]
        mask = torch.cat([prompt_mask_BP, torch.ones_like(response_in)], dim=1)
        hidden = self.body(torch.cat([prompt_BP, response_in], dim=1), mask, positions(mask))[0]
        return hidden[:, prompt_BP.shape[1] - 1:]

    def body(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache=None) -> tuple[Tensor, object]:
        """Runs the transformer without its head, with this model's own adapter: (last hidden states, key/value cache or None)."""
        select(self.lm, self.adapter)
        with self.autocast():
            out = self.lm.base_model(input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache,
                                     use_cache=cache is not None)
        return out.last_hidden_state, out.past_key_values

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """(N, V) logits of the next token over the temperature: pi of sampling and scoring; `LogpAndEntropy` is the same pi to be trained.

        The head is computed in float32 also when the body runs in bfloat16: GPT-2's logits lie near -100, where neighbouring
        bfloat16 numbers are 0.5 apart.
        """
        logits_NV = self.lm.get_output_embeddings()(hidden_NH.float())
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature

    def logprobs(self, hidden_NH: Tensor) -> Tensor:
        """(N, V) log-probabilities of the next token, `log softmax(logits)`."""
        logits_NV = self.logits(hidden_NH)
        if logits_NV.requires_grad:
            return logits_NV.log_softmax(-1)
        return torch.log_softmax(logits_NV, -1, out=logits_NV)      # in their place: no second (N, V)

    def logp_and_entropy(self, hidden_NH: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log pi(token), entropy of pi), each (N,) in nats, to be trained through: only the first has a gradient."""
        head = self.lm.get_output_embeddings()
        backward_dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        return LogpAndEntropy.apply(hidden_NH.float(), head.weight, head.bias, token_N, self.temperature, backward_dtype)


class LogpAndEntropy(torch.autograd.Function):
    """`log pi(a)` with its gradient in closed form, `d log pi(a) / d logits = onehot(a) - pi`, which is written over pi.

    Plain autograd keeps three tensors of (N, V) for it and makes two more; this keeps one. The products of the backward pass are in
    bfloat16 where the body's are.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, token_N, temperature, backward_dtype):
        logits_NV = nn.functional.linear(hidden_NH, weight_VH, bias_V)
        logits_NV = logits_NV if temperature == 1.0 else logits_NV.div_(temperature)
        p_NV = logits_NV.softmax(-1)
        logp_NV = torch.log_softmax(logits_NV, -1, out=logits_NV)
        entropy_N = formulas.entropy(p_NV, logp_NV)
        ctx.save_for_backward(hidden_NH, weight_VH, token_N, p_NV)
        ctx.temperature, ctx.backward_dtype = temperature, backward_dtype
        ctx.mark_non_differentiable(entropy_N)
        return formulas.token_logprobs(logp_NV, token_N), entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_N, _):
        hidden_NH, weight_VH, token_N, p_NV = ctx.saved_tensors
        gradient_N1, of_hidden, of_weight, of_bias = gradient_N[:, None] / ctx.temperature, None, None, None
        of_logits_NV = p_NV.mul_(-gradient_N1).scatter_add_(1, token_N[:, None], gradient_N1).to(ctx.backward_dtype)
        if ctx.needs_input_grad[0]:
            of_hidden = (of_logits_NV @ weight_VH.to(ctx.backward_dtype)).float()
        if ctx.needs_input_grad[1]:
            of_weight = (of_logits_NV.t() @ hidden_NH.to(ctx.backward_dtype)).float()
        if ctx.needs_input_grad[2]:
            of_bias = of_logits_NV.sum(0, dtype=torch.float32)
        return of_hidden, of_weight, of_bias, None, None, None


class PolicyWithValue(LanguageModel):
    """The policy and its critic: a linear layer on the last hidden state (paper, sec. 3), in float32.

    The policy is a copy of the base, or the base itself with an adapter of that name. DIFFERS: the value head starts at zero, so
    that V = 0 before the first update, whatever the model and the seed; the paper does not say.
    """

    def __init__(self, base: LanguageModel, adapter: str | None = None):
        super().__init__(base.lm if adapter else copy.deepcopy(base.lm), base.tokenizer, base.temperature, base.dtype, adapter)
        self.value_head = nn.Linear(self.lm.get_output_embeddings().in_features, 1, device=base.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        for parameter in self.trained().values():
            parameter.requires_grad_(True)

    def trained(self) -> dict[str, nn.Parameter]:
        """What this agent owns, trains and saves: all weights or its adapter's, and the value head, by name."""
        lm = adapter_parameters(self.lm, self.adapter) if self.adapter else dict(self.lm.named_parameters())
        return {f"lm.{name}": p for name, p in lm.items()} | {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}

    def values(self, hidden: Tensor) -> Tensor:
        """V(s) in units of reward for each hidden state (..., H) -> (...)."""
        return self.value_head(hidden.float()).squeeze(-1)


def positions(mask: Tensor) -> Tensor:
    """Position ids (B, L) of a left-padded batch: real tokens count 0, 1, 2, ...; padding gets 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def load_language_model(name: str, temperature: float = 1.0, dtype: str = "float32", device: str = "cpu", storage: str = "float32") -> LanguageModel:
    """Loads a local folder or a Hub name by the same calls: safetensors only, remote code never. Raises `UserError`.

    `storage` is what the frozen weights are kept in: float32, bfloat16 or 4bit; the head is float32 always.
    """
    with model_errors("model", name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if getattr(config, "activation_function", None) == "gelu_new":
            config.activation_function = "gelu_pytorch_tanh"     # the same function, as one operation instead of eight
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        lm = load_weights(AutoModelForCausalLM, name, config=config, **storage_options(storage, device))
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UserError("model", name, "holds no tokenizer that can encode text; save the model's own beside its weights")
    if tokenizer.eos_token_id is None:
        raise UserError("model", name, "its tokenizer has no EOS token, so a response could not end; set eos_token in "
                        "tokenizer_config.json")
    if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
        raise UserError("model", name, "its tokenizer ends every text with EOS, so a prompt could not be continued; set add_eos_token "
                        "to false in tokenizer_config.json")
    rows = lm.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError("model", name, f"its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; use the "
                        "tokenizer that the model was trained with")
    model = LanguageModel(lm if storage == "4bit" else lm.to(device), tokenizer, temperature, dtype)
    model.requires_grad_(False)
    check_head(model, name)
    lm.get_output_embeddings().float()
    return model


def storage_options(storage: str, device) -> dict:
    """Arguments of `from_pretrained` for float32, bfloat16 or 4bit weights. 4 bits are NF4, by bitsandbytes, on CUDA."""
    if storage != "4bit":
        return {"dtype": getattr(torch, storage)}
    if torch.device(device).type != "cuda":
        raise UserError("load_in_4bit", True, f"needs a CUDA GPU and this run is on {device}; use --load_in_4bit false")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("load_in_4bit", True, "needs the package bitsandbytes (pip install bitsandbytes); or use --load_in_4bit false")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return {"dtype": torch.bfloat16, "quantization_config": quantization, "device_map": {"": device}}


def load_weights(auto_class, name: str, dtype: torch.dtype = torch.float32, **kwargs) -> nn.Module:
    """`from_pretrained` from safetensors; refuses weights that would leave a part of the model at random values."""
    transformers_logging.disable_progress_bar()
    model, info = auto_class.from_pretrained(name, dtype=dtype, use_safetensors=True, trust_remote_code=False,
                                             output_loading_info=True, **kwargs)
    if info["missing_keys"]:
        raise ValueError(f"its weights lack {len(info['missing_keys'])} tensors of a {type(model).__name__} "
                         f"({', '.join(sorted(info['missing_keys'])[:3])}, ...); pass a model saved with this head and this config.json")
    return model


@torch.no_grad()
def check_head(model: LanguageModel, name: str) -> None:
    """Refuses architectures that do more to their logits than the head (soft-capping, scaling): we would train another policy; and
    those that need another cache than keys and values."""
    ids = torch.arange(4, device=model.device)[None] % model.lm.get_input_embeddings().weight.shape[0]
    mask = torch.ones_like(ids)
    ours = model.lm.get_output_embeddings()(model.lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state)
    linear = isinstance(model.lm.get_output_embeddings(), nn.Linear)
    if not linear or not torch.allclose(ours, model.lm(input_ids=ids, attention_mask=mask).logits, atol=1e-4, rtol=1e-4):
        raise UserError("model", name, f"{type(model.lm).__name__} does more to its logits than a linear head; "
                        "LanguageModel.logits and LogpAndEntropy would both need that step")
    try:
        model.body(ids, mask, positions(mask), Cache(layer_class_to_replicate=GrowingLayer))
    except Exception as error:                                      # each architecture misses something else
        raise UserError("model", name, f"{type(model.lm).__name__} cannot be sampled from with a cache of keys and values alone "
                        f"({type(error).__name__}); pass a model whose layers are all attention") from error


class model_errors:
    """Turns what `from_pretrained` raises into a `UserError` with the way out."""

    def __init__(self, field: str, name: str):
        self.field, self.name = field, name

    def __enter__(self):
        if (Path(self.name) / "adapter_config.json").exists():
            raise UserError(self.field, self.name, "is a LoRA adapter, no model; merge it into its base (peft: merge_and_unload) and pass that")
        if Path(self.name).is_dir() and not (Path(self.name) / "config.json").exists():
            raise UserError(self.field, self.name, "this folder has no config.json; pass a folder written by save_pretrained")

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return                                                  # the loaders raise kinds of their own for each fault
        text, cause = str(error), repr(error) + repr(error.__cause__) + repr(error.__context__)
        if "trust_remote_code" in text or "custom code" in text:
            why = "needs code from its repository, which is never run here; pass a model whose architecture transformers has"
        elif "gated" in text or "GatedRepo" in cause:
            why = "is gated: accept its licence on the Hub and log in with `hf auth login`"
        elif "model.safetensors" in text and ("no file named" in text or "does not appear to have" in text):
            why = "has no safetensors weights, and pickled ones are never loaded; convert it with save_pretrained"
        elif "Unrecognized configuration class" in text or "Unrecognized model" in text:
            why = "is not of the kind asked for here (a causal language model for --model, a sequence classifier for --reward_model)"
        elif Path(self.name).is_dir() or not isinstance(error, OSError):
            why = f"could not be loaded: {text[:300]}"
        else:
            why = ("is neither a local folder nor to be had from the Hub now; with a network run "
                   f"`hf download {self.name} --local-dir DIR`, then pass DIR")
        raise UserError(self.field, self.name, why) from error
