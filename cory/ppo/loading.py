"""Language models and classifiers from a local folder or the Hub, and what is said of one that is no use."""
import importlib.util
import json
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from cory.config import FLOAT32, Precision
from cory.errors import UserError
from cory.ppo.cache import GrowingLayer
from cory.ppo.model import LanguageModel, positions
from cory.system import hub
from cory.system.hub import short_message

# What is read of a model's folder beside its weights, where it is there.
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "model.safetensors.index.json")


def load_language_model(name: str, temperature: float = 1.0, precision: Precision = FLOAT32,
                        device: str = "cpu", storage: str = "float32") -> LanguageModel:
    """Loads a local folder or a Hub name: safetensors only, remote code never. Raises `UserError`.

    `storage` is what the frozen weights are kept in: float32, bfloat16 or 4bit; the head is float32 always.
    """
    with model_errors("model", name) as refused:
        options = storage_options(storage, device)
        lm, tokenizer = load_pretrained(refused, AutoModelForCausalLM, name, **options)
        if tokenizer.eos_token_id is None:
            raise refused("its tokenizer has no EOS token to end a text; set eos_token in "
                          "tokenizer_config.json")
        if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
            raise refused("its tokenizer ends every text with EOS; unset add_eos_token in "
                          "tokenizer_config.json")
        require_end_ids(refused, lm)
        model = LanguageModel(lm if storage == "4bit" else lm.to(device), tokenizer, temperature, precision)
        model.requires_grad_(False)
        check_head(refused, model)
    lm.get_output_embeddings().float()
    return model


def load_pretrained(refused: Callable, auto_class, name: str, dtype: torch.dtype = torch.float32,
                    **kwargs) -> tuple:
    """Model and tokenizer, as `from_pretrained` loads them from safetensors, and as they fit together.

    Refuses weights that would leave a part of the model random, or make one infinite or NaN.
    """
    config = model_config(name)
    require_layers(refused, name, config)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    transformers_logging.disable_progress_bar()
    model, info = auto_class.from_pretrained(name, config=config, dtype=dtype, use_safetensors=True,
                                             trust_remote_code=False, output_loading_info=True, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing:
        raise refused(f"its weights lack {len(missing)} tensors of a {type(model).__name__} ("
                      f"{', '.join(missing[:3])}, ...); pass a model saved with this head and config.json")
    for path, p in model.named_parameters():
        if p.is_floating_point() and p.numel() and not torch.stack(p.aminmax()).isfinite().all():
            raise refused(f"its weights are not all finite numbers (see {path}); load an earlier copy")
    require_tokenizer(refused, tokenizer, model)
    return model, tokenizer


def model_config(name: str) -> PretrainedConfig:
    hub.reach(name)
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


def require_layers(refused: Callable, name: str, config: PretrainedConfig) -> None:
    """A local model has some layers and a tensor for each: only to build those of a billion takes hours."""
    tensors = 0
    for file in Path(name).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            tensors += len(weights.keys())
    layers = getattr(config, "num_hidden_layers", 1)
    if tensors and not 1 <= layers <= tensors:
        raise refused(f"its config.json says {layers} layers and its weights have {tensors} tensors; use the "
                      "config.json that was saved with them")


def require_tokenizer(refused: Callable, tokenizer, model: nn.Module) -> None:
    """The tokenizer tells texts apart, and the model has an embedding for each of its tokens."""
    one, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("good", "bad"))
    if not one or one == other:
        raise refused("holds no tokenizer that can encode text; save the model's own beside its weights")
    tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    rows = model.get_input_embeddings().weight.shape[0]
    if tokens > rows:
        raise refused(f"its tokenizer has {tokens} tokens and its embedding {rows} rows; use the tokenizer "
                      "that the model was trained with")


def require_end_ids(refused: Callable, lm: nn.Module) -> None:
    """What generation_config ends a response on, as `LanguageModel.end_ids` reads it, are token ids."""
    ends = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    rows = lm.get_input_embeddings().weight.shape[0]
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    for end in ends:
        if type(end) is not int or not 0 <= end < rows:
            raise refused(f"its eos_token_id is {repr(end)[:60]}, no token from 0 to {rows - 1}; mend "
                          "generation_config.json (or config.json, where that is missing)")


@torch.no_grad()
def check_head(refused: Callable, model: LanguageModel) -> None:
    """Refuses architectures that do more to their logits than the head (soft-capping, scaling), or that need
    another cache than keys and values: their policy would be another one here.
    """
    kind, head = type(model.lm).__name__, model.lm.get_output_embeddings()
    ids = torch.arange(4, device=model.device)[None] % model.lm.get_input_embeddings().weight.shape[0]
    mask = torch.ones_like(ids)
    ours = head(model.lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state)
    theirs = model.lm(input_ids=ids, attention_mask=mask).logits
    if not theirs.isfinite().all():
        raise refused("its logits are not finite numbers; mend its config.json, or load other weights")
    if not isinstance(head, nn.Linear) or not torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4):
        raise refused(f"{kind} does more to its logits than a linear head; "
                      "LanguageModel.logits and LogpAndEntropy would both need that step")
    try:
        model.body(ids, mask, positions(mask), Cache(layer_class_to_replicate=GrowingLayer))
    except Exception as error:                                      # each architecture misses something else
        raise refused(f"{kind} cannot be sampled from with a cache of keys and values alone "
                      f"({type(error).__name__}); pass a model of attention layers only") from error


@contextmanager
def model_errors(field: str, name: str):
    """Yields `refused(way_out)`, the `UserError` of this model, and turns what `from_pretrained` raises into
    one, without the libraries' own reports. A folder is looked at before, and a mistyped path is said.
    """
    refused = partial(UserError, field, name)
    try:
        if os.path.isdir(name):
            require_folder(refused, Path(name))
        elif os.path.exists(name):
            raise refused("is a file; pass the folder that it lies in")
        else:
            hub.require_hub_name(field, name)
        with hub.quiet():
            yield refused
    except UserError:
        raise
    except Exception as error:                          # the loaders raise kinds of their own for each fault
        raise refused(why_not(error, name)) from error


def require_folder(refused: Callable, folder: Path) -> None:
    """A folder that holds a model, none of its files such as no reader comes back from."""
    if (folder / "adapter_config.json").exists():
        raise refused("is a LoRA adapter, no model; merge it into its base (peft: merge_and_unload)")
    if not (folder / "config.json").exists():
        raise refused("this folder has no config.json; pass a folder written by save_pretrained")
    for file in folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise refused(f"its {file.name} is no regular file; put the file itself there")
    for file in (folder / name for name in JSON_FILES):
        try:
            content = json.loads(file.read_bytes()) if file.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            way_out = f"its {file.name} cannot be read ({short_message(error)}); save or fetch it again"
            raise refused(way_out) from error
        if not isinstance(content, dict):
            raise refused(f"its {file.name} holds no JSON object; save or fetch it again")
        labels = content.get("num_labels")              # each gets a name, before any weight is looked at
        if isinstance(labels, int) and labels > 10_000:
            raise refused(f"its {file.name} says num_labels {labels}; use the one saved with its weights")


def why_not(error: Exception, name: str) -> str:
    """The way out for an error of `from_pretrained`."""
    text, cause = str(error), repr(error) + repr(error.__cause__) + repr(error.__context__)
    if "trust_remote_code" in text or "custom code" in text:
        return "needs code of its own, which is never run here; pass an architecture that transformers has"
    if "gated" in text or "GatedRepo" in cause:
        return "is gated: accept its licence on the Hub and log in with `hf auth login`"
    if "model.safetensors" in text and ("no file named" in text or "does not appear to have" in text):
        return "has no safetensors weights, and pickles are never loaded; convert it with save_pretrained"
    if "Unrecognized configuration class" in text or "Unrecognized model" in text:
        return "is no causal language model (for --reward_model: sequence classifier); pass one that is"
    if "ignore_mismatched_sizes" in text:
        return "could not be loaded: its weights have other shapes than its config.json says; use their own"
    if os.path.isdir(name) or not isinstance(error, OSError):
        return f"could not be loaded ({short_message(error)}); save or fetch it again"
    return ("is neither a local folder nor to be had from the Hub now; with a network run "
            f"`hf download {name} --local-dir DIR`, then pass DIR")
