"""Language models and classifiers from a local folder or the Hub, and why one cannot be used."""
import importlib.util
import json
import os
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from cory.config import FLOAT32, Precision
from cory.errors import UserError
from cory.ppo.cache import empty_cache
from cory.ppo.model import LanguageModel, positions
from cory.system import hub

# What an error of `from_pretrained` says (a regular expression), and the way out.
WAYS_OUT = {
    "trust_remote_code":
        "needs code of its own, which is never run here; pass an architecture that transformers has",
    "gated repo|GatedRepo": "is gated: accept its licence on the Hub and log in with `hf auth login`",
    r"file named (.*/)?model\.safetensors":
        "has no safetensors weights, and pickles are never loaded; convert it with save_pretrained",
    "ignore_mismatched_sizes":
        "could not be loaded: its weights have other shapes than its config.json says; use their own",
}


def load_language_model(name: str, temperature: float = 1.0, precision: Precision = FLOAT32,
                        device: str = "cpu", storage: str = "float32") -> LanguageModel:
    """Loads a local folder, or `NAME@REVISION` of the Hub: safetensors only, remote code never. Raises
    `UserError`.

    `storage` is what the frozen weights are kept in: float32, bfloat16 or 4bit; the head is float32 always.
    A head that is tied to the embedding is then a copy of its own, and the embedding stays as it is stored.
    """
    with model_errors("model", name) as refused:
        options = storage_options(storage, device)
        lm, tokenizer = load_pretrained(refused, AutoModelForCausalLM, name, **options)
        if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id or tokenizer.eos_token_id is None:
            raise refused("its tokenizer has no EOS token, or adds it to every text; set eos_token and unset "
                          "add_eos_token in tokenizer_config.json")
        if "good film" not in tokenizer.decode(tokenizer("a good film")["input_ids"]):
            raise refused("its tokenizer does not give back the text that it has read; mend its decoder")
        model = LanguageModel(lm if storage == "4bit" else lm.to(device), tokenizer, temperature, precision)
        model.requires_grad_(False)
        try_out(refused, model)
    # after `try_out`: `lm(...)` itself may fail once its head has another type; only body and head are called
    if storage != "float32":
        head = lm.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
        head.float()
    return model


def load_pretrained(refused: Callable, auto_class, name: str, dtype: torch.dtype = torch.float32,
                    **kwargs) -> tuple:
    """Model and tokenizer, as `from_pretrained` loads them from safetensors.

    Refuses weights that would leave a part of the model random, or of which a part would be left out; weights
    that are infinite or NaN; a tokenizer that encodes nothing, or more tokens than the embedding has.
    """
    config = model_config(name)
    place, revision = hub.with_revision(name)
    safely = {"revision": revision or "main", "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(place, **safely)
    transformers_logging.disable_progress_bar()
    model, info = auto_class.from_pretrained(place, config=config, dtype=dtype, use_safetensors=True,
                                             output_loading_info=True, **safely, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing:
        raise refused(f"its weights lack {len(missing)} tensors of a {type(model).__name__} ("
                      f"{', '.join(missing[:3])}, ...); pass a model saved with this head and config.json")
    patterns = {numberless(path) for path in model.state_dict()}
    dropped = [key for key in info["unexpected_keys"]
               if any(path.endswith(numberless(key)) for path in patterns)]
    if dropped:
        raise refused(f"its config.json makes a smaller model than its weights are of: {len(dropped)} "
                      f"tensors would be left out ({min(dropped)}, ...); use the weights' own config.json")
    for path, p in model.named_parameters():
        if p.is_floating_point() and not p.isfinite().all():
            raise refused(f"its weights are not all finite numbers (see {path}); load an earlier copy")
    good, bad = tokenizer(["good", "bad"], add_special_tokens=False)["input_ids"]
    if good == bad:                                     # as transformers makes one where there is none
        raise refused("holds no tokenizer that can encode text; save the model's own beside its weights")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise refused(f"its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; use the "
                      "tokenizer that the model was trained with")
    return model, tokenizer


def numberless(path: str) -> str:
    """The path of a tensor with # for each number, so that those of all layers are alike."""
    return re.sub(r"\d+", "#", path)


def model_config(name: str) -> PretrainedConfig:
    hub.reach(name)
    place, revision = hub.with_revision(name)
    config = AutoConfig.from_pretrained(place, revision=revision or "main", trust_remote_code=False)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"        # the same, in one operation instead of eight
    return config


def storage_options(storage: str, device) -> dict:
    """Arguments of `from_pretrained` for weights in float32, bfloat16 or 4 bits: NF4, by bitsandbytes."""
    if storage != "4bit":
        return {"dtype": getattr(torch, storage)}
    if importlib.util.find_spec("bitsandbytes") is None:            # which has a CPU's kernels from 0.50 on
        way_out = "needs `pip install 'bitsandbytes>=0.50'`, or --load_in_4bit false"
        raise UserError("load_in_4bit", True, way_out)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                      bnb_4bit_compute_dtype=torch.bfloat16)
    return {"dtype": torch.bfloat16, "quantization_config": quantization, "device_map": {"": device}}


@torch.no_grad()
def try_out(refused: Callable, model: LanguageModel) -> None:
    """What sampling will do, once. Refuses logits that are not the head's, such as soft-capped ones."""
    head = model.lm.get_output_embeddings()
    ids = torch.arange(4, device=model.device)[None]
    mask = torch.ones_like(ids)
    ours = head(model.lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state)
    theirs = model.lm(input_ids=ids, attention_mask=mask).logits
    if not isinstance(head, nn.Linear) or not torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4):
        raise refused("its logits are not finite, or not those of a linear head alone (soft-capping and "
                      "scaling are not supported); pass another model")
    model.body(ids, mask, positions(mask), empty_cache())
    torch.tensor(model.end_ids)                         # of generation_config.json, which may hold anything


@contextmanager
def model_errors(field: str, name: str):
    """Yields `refused(way_out)`, the `UserError` of this model, and turns what `from_pretrained` raises into
    one, without the libraries' own reports.
    """
    refused = partial(UserError, field, name)
    try:
        if os.path.exists(name):
            require_folder(refused, Path(name))
        else:
            hub.require_hub_name(field, name)
        with hub.quiet():
            yield refused
    except UserError:
        raise
    except Exception as error:                          # the loaders raise kinds of their own for each fault
        raise refused(why_not(error, name)) from error


def require_folder(refused: Callable, folder: Path) -> None:
    """A folder that holds a model. Its JSON files are whole: transformers passes over some that are not."""
    if (folder / "adapter_config.json").exists():
        raise refused("is a LoRA adapter, no model; merge it into its base (peft: merge_and_unload)")
    if not (folder / "config.json").exists():
        raise refused("is no folder with a config.json; pass one written by save_pretrained")
    for file in folder.glob("*.json"):
        try:
            json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            way_out = f"its {file.name} cannot be read ({hub.short_message(error)}); save or fetch it again"
            raise refused(way_out) from error


def why_not(error: Exception, name: str) -> str:
    """The way out for an error of `from_pretrained`."""
    report = f"{error!r} {error.__cause__!r} {error.__context__!r}"
    for says, way_out in WAYS_OUT.items():
        if re.search(says, report):
            return way_out
    if os.path.exists(name) or not isinstance(error, OSError):
        return f"could not be loaded ({hub.short_message(error)}); save or fetch it again, or pass another"
    return ("is neither a local folder nor to be had from the Hub now; with a network run "
            f"`hf download {name.replace('@', ' --revision ')} --local-dir DIR`, then pass DIR")
