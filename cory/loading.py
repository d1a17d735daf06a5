"""Language models and classifiers from a local folder or the Hub, and why one cannot be used.

Weights are read from safetensors alone, and code of a model's own is never run.
"""
import importlib.util
import os
import re
import warnings
from contextlib import contextmanager

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from cory.config import Config
from cory.errors import UserError
from cory.ppo.cache import empty_cache
from cory.ppo.model import LanguageModel, positions


def load_language_model(name: str, cfg: Config, device: torch.device) -> LanguageModel:
    """A frozen base in `cfg.dtype`, with its head in float32. Raises `UserError`.

    Its weights are stored in 4 bits if asked for, in bfloat16 where LoRA trains beside them in bfloat16, else
    in float32. A head that is tied to the embedding is then a copy of its own.
    """
    with model_errors("model", name):
        if os.path.exists(f"{name}/adapter_config.json"):
            raise ValueError("it is a LoRA adapter; merge it into its base by peft's merge_and_unload")
        low = cfg.lora_rank > 0 and cfg.dtype == "bfloat16" or cfg.load_in_4bit
        lm, tokenizer = load_pretrained(
            AutoModelForCausalLM, name, dtype=torch.bfloat16 if low else torch.float32,
            quantization_config=four_bits() if cfg.load_in_4bit else None,
            device_map={"": device} if device.type == "cuda" else None)
        model = LanguageModel(lm, tokenizer, cfg.dtype, cfg.chat_template)
        # What the model's authors sample with is not the policy. `final/` then also generates as evaluated.
        lm.generation_config = GenerationConfig(
            eos_token_id=model.end_ids if tokenizer.eos_token_id is not None else None,
            bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.eos_token_id)
        require_usable_tokenizer(model)
        model.requires_grad_(False)
        for layer in lm.modules():      # bitsandbytes packs weights on some processors: no gradient then
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
        if low:
            head = lm.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)       # no longer tied
            head.float()
        require_usable_model(model)
    return model


def load_pretrained(auto_class, name: str, **kwargs) -> tuple:
    """Model and tokenizer of a folder or `NAME@REVISION`. Refuses weights that leave a part of the model
    random, or of which a part would be left out.
    """
    place, _, revision = name.rpartition("@") if "@" in name and not os.path.exists(name) else (name, "", "")
    where = {"pretrained_model_name_or_path": place, "revision": revision or "main",
             "trust_remote_code": False}
    config = AutoConfig.from_pretrained(**where)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"        # the same, in one operation instead of eight
    tokenizer, text = AutoTokenizer.from_pretrained(**where), "a good film"
    if text not in tokenizer.decode(tokenizer(text)["input_ids"]).lower():      # a missing one is made up
        raise ValueError("it has no tokenizer, or one that does not give back the text that it has read")
    model, info = auto_class.from_pretrained(config=config, use_safetensors=True, output_loading_info=True,
                                             **where, **kwargs)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its weights lack {len(missing)} tensors of a {type(model).__name__} "
                         f"({missing[0]}, ...)")
    known = {numberless(path) for path in model.state_dict()}
    dropped = [key for key in info["unexpected_keys"]
               if any(path.endswith(numberless(key)) for path in known)]
    if dropped:
        raise ValueError(f"its config.json leaves out {len(dropped)} tensors of its weights "
                         f"({min(dropped)}, ...)")
    return model, tokenizer


def numberless(path: str) -> str:
    """The path of a tensor with # for each number, so that those of all layers are alike."""
    return re.sub(r"\d+", "#", path)


def four_bits() -> BitsAndBytesConfig:
    """NF4, by bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("load_in_4bit", True, "needs `pip install 'bitsandbytes>=0.50'`; or give "
                        "--load_in_4bit false")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_compute_dtype=torch.bfloat16)


def require_usable_tokenizer(model: LanguageModel) -> None:
    """Raises `ValueError` unless a prompt's tokens are those of its text, perhaps behind a BOS."""
    tokenizer, text = model.tokenizer, "a good film"
    if tokenizer.eos_token_id is None:
        raise ValueError("its tokenizer has no EOS token; set eos_token in tokenizer_config.json")
    if model.chat_template and not tokenizer.chat_template:
        raise ValueError("its tokenizer has no chat template; use --chat_template false, or a chat model")
    plain, ids = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    if ids[-len(plain):] != plain:
        raise ValueError("its tokenizer puts a token behind each text, as add_eos_token does; a prompt must "
                         "end where its text ends")


@torch.no_grad()
def require_usable_model(model: LanguageModel) -> None:
    """The one property that sampling and scoring rest on: the tokens of a row that is padded on the left, the
    last of them after cached keys, have the log-probabilities that the model itself gives to that row alone.
    Raises `ValueError`.

    Models whose attention, positions or head work otherwise do not have it: their log-probabilities would
    depend on the batch.
    """
    lm, eos = model.lm, model.tokenizer.eos_token_id
    ids_1L = torch.tensor([model.tokenizer("a good film that I saw")["input_ids"]], device=model.device)
    padded = nn.functional.pad(ids_1L, (3, 0), value=eos)
    mask = nn.functional.pad(torch.ones_like(ids_1L), (3, 0))
    position_ids = positions(mask)
    ours = LanguageModel(lm, model.tokenizer)               # in the precision of its weights
    start, cache = ours.body(padded[:, :-1], mask[:, :-1], position_ids[:, :-1], empty_cache())
    end, _ = ours.body(padded[:, -1:], mask, position_ids[:, -1:], cache)
    logp_LV = ours.logprobs(torch.cat([start, end], dim=1)[0, 3:])
    # its own head multiplies in float32, too
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].float(),))
    own_logp_LV = lm(input_ids=ids_1L).logits[0].log_softmax(-1)
    hook.remove()
    p_LV = (logp_LV.exp() + own_logp_LV.exp()) / 2
    gap = (p_LV * (logp_LV - own_logp_LV).abs()).sum(1).mean().item()       # rounding hardly moves this mean
    limit = 0.1 if lm.dtype != torch.float32 else 1e-3 if model.dtype == "float32" else 0.01
    if not gap < limit:
        raise ValueError(f"its log-probabilities differ by {gap:.2g} nats beside padding and cached keys, or "
                         "are not those of a linear head alone: this kind of model cannot be sampled here")


@contextmanager
def model_errors(field: str, name: str):
    """Turns what goes wrong while a model is loaded into a line, without the libraries' own reports."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(100)             # above CRITICAL: nothing
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except UserError:
        raise
    except Exception as error:                          # the loaders raise kinds of their own
        hint = "pass a folder that save_pretrained has written, or a name of the Hub"
        raise UserError(field, name, f"cannot be used ({str(error)[:300]}); {hint}") from error
    finally:
        transformers_logging.set_verbosity(level)
