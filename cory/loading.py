"""Language models and classifiers from a local folder or the Hub, and what is said of one that is no use."""
import importlib.util
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from cory.config import FLOAT32, Precision
from cory.errors import UserError
from cory.ppo.cache import GrowingLayer
from cory.ppo.model import LanguageModel, positions


def load_language_model(name: str, temperature: float = 1.0, precision: Precision = FLOAT32,
                        device: str = "cpu", storage: str = "float32") -> LanguageModel:
    """Loads a local folder or a Hub name: safetensors only, remote code never. Raises `UserError`.

    `storage` is what the frozen weights are kept in: float32, bfloat16 or 4bit; the head is float32 always.
    """
    with model_errors("model", name):
        config = model_config(name)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        lm = load_weights(AutoModelForCausalLM, name, config=config, **storage_options(storage, device))
    refused = partial(UserError, "model", name)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise refused("holds no tokenizer that can encode text; save the model's own beside its weights")
    if tokenizer.eos_token_id is None:
        raise refused("its tokenizer has no EOS token to end a text; set eos_token in tokenizer_config.json")
    if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
        raise refused("its tokenizer ends every text with EOS; unset add_eos_token in tokenizer_config.json")
    rows = lm.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise refused(f"its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; use the "
                      "tokenizer that the model was trained with")
    model = LanguageModel(lm if storage == "4bit" else lm.to(device), tokenizer, temperature, precision)
    model.requires_grad_(False)
    check_head(model, name)
    lm.get_output_embeddings().float()
    return model


def model_config(name: str) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"        # the same, in one operation instead of eight
    return config


def storage_options(storage: str, device) -> dict:
    """Arguments of `from_pretrained` for weights in float32, bfloat16 or 4 bits: NF4, by bitsandbytes."""
    if storage != "4bit":
        return {"dtype": getattr(torch, storage)}
    if torch.device(device).type != "cuda":
        raise UserError("load_in_4bit", True, f"needs a CUDA GPU, not {device}; use --load_in_4bit false")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("load_in_4bit", True, "needs `pip install bitsandbytes`, or --load_in_4bit false")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                      bnb_4bit_compute_dtype=torch.bfloat16)
    return {"dtype": torch.bfloat16, "quantization_config": quantization, "device_map": {"": device}}


def load_weights(auto_class, name: str, dtype: torch.dtype = torch.float32, **kwargs) -> nn.Module:
    """`from_pretrained` from safetensors; refuses weights that would leave a part of the model random."""
    transformers_logging.disable_progress_bar()
    model, info = auto_class.from_pretrained(name, dtype=dtype, use_safetensors=True, trust_remote_code=False,
                                             output_loading_info=True, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"its weights lack {len(missing)} tensors of a {type(model).__name__} ("
                         f"{', '.join(missing[:3])}, ...); pass a model saved with this head and config.json")
    return model


@torch.no_grad()
def check_head(model: LanguageModel, name: str) -> None:
    """Refuses architectures that do more to their logits than the head (soft-capping, scaling), or that need
    another cache than keys and values: their policy would be another one here.
    """
    kind, head = type(model.lm).__name__, model.lm.get_output_embeddings()
    ids = torch.arange(4, device=model.device)[None] % model.lm.get_input_embeddings().weight.shape[0]
    mask = torch.ones_like(ids)
    ours = head(model.lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state)
    theirs = model.lm(input_ids=ids, attention_mask=mask).logits
    if not isinstance(head, nn.Linear) or not torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4):
        raise UserError("model", name, f"{kind} does more to its logits than a linear head; "
                        "LanguageModel.logits and LogpAndEntropy would both need that step")
    try:
        model.body(ids, mask, positions(mask), Cache(layer_class_to_replicate=GrowingLayer))
    except Exception as error:                                      # each architecture misses something else
        raise UserError("model", name, f"{kind} cannot be sampled from with a cache of keys and values alone "
                        f"({type(error).__name__}); pass a model of attention layers only") from error


@contextmanager
def model_errors(field: str, name: str):
    """Turns what `from_pretrained` raises into a `UserError` with the way out."""
    refused = partial(UserError, field, name)
    is_folder = Path(name).is_dir()
    if (Path(name) / "adapter_config.json").exists():
        raise refused("is a LoRA adapter, no model; merge it into its base (peft: merge_and_unload)")
    if is_folder and not (Path(name) / "config.json").exists():
        raise refused("this folder has no config.json; pass a folder written by save_pretrained")
    try:
        yield
    except UserError:
        raise
    except Exception as error:                          # the loaders raise kinds of their own for each fault
        text, cause = str(error), repr(error) + repr(error.__cause__) + repr(error.__context__)
        if "trust_remote_code" in text or "custom code" in text:
            why = "needs code of its own, which is never run here; pass an architecture that transformers has"
        elif "gated" in text or "GatedRepo" in cause:
            why = "is gated: accept its licence on the Hub and log in with `hf auth login`"
        elif "model.safetensors" in text and ("no file named" in text or "does not appear to have" in text):
            why = "has no safetensors weights, and pickles are never loaded; convert it with save_pretrained"
        elif "Unrecognized configuration class" in text or "Unrecognized model" in text:
            why = "is no causal language model (for --reward_model: sequence classifier); pass one that is"
        elif is_folder or not isinstance(error, OSError):
            why = f"could not be loaded: {text[:300]}"
        else:
            why = ("is neither a local folder nor to be had from the Hub now; with a network run "
                   f"`hf download {name} --local-dir DIR`, then pass DIR")
        raise refused(why) from error
