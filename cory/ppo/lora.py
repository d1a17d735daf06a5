"""LoRA (Hu et al., arXiv:2106.09685), by peft: one frozen base, an adapter for each agent. With all adapters
off the model is the reference.

An adapted layer computes `W x + (lora_alpha / lora_rank) B A x` with W frozen. B starts at 0, so that
every agent starts as the base (other kinds of adapters may differ by rounding).
"""
import re
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cory.config import Config
from cory.errors import UserError
from cory.system.hub import quiet, short_message, with_revision


def add_adapter(lm: nn.Module, name: str, cfg: Config, seed: int) -> str:
    """Puts a new adapter into the model's layers, in place, in float32. `seed` draws its A. Returns the name.

    Dropout would do nothing: models stay in eval mode. Raises `UserError` for targets that name no layer
    between embedding and head.
    """
    # here: it takes 2 s and 100 MiB, which most runs need not spend
    from peft import LoraConfig

    targets = cfg.lora_targets
    if targets != "all-linear":
        targets, layers = targets.replace(" ", "").split(","), linear_layers(lm)
        unknown = [target for target in targets
                   if not any(f".{path}".endswith(f".{target}") for path in layers)]
        names = sorted({path.rpartition(".")[2] for path in layers})
        cfg.require("lora_targets", not unknown, f"{', '.join(unknown)} names no layer that can be adapted; "
                    f"those of this model: {', '.join(names)}")
    settings = LoraConfig(task_type="CAUSAL_LM", r=cfg.lora_rank, lora_alpha=cfg.lora_alpha,
                          target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.default_generator.manual_seed(seed)
        lm.add_adapter(settings, name)
    for parameter in adapter_parameters(lm, name).values():
        parameter.data = parameter.data.float()
    base = Path(lm.name_or_path)
    if base.exists():                                   # to be found from any folder
        lm.peft_config[name].base_model_name_or_path = str(base.resolve())
    lm.peft_config[name].revision = with_revision(cfg.model)[1]
    lm.adapter_in_use = name                            # peft has just put it in use
    activate(lm, None)
    return name


def linear_layers(lm: nn.Module) -> dict[str, nn.Module]:
    """The layers between embedding and LM head that an adapter can be put on, by path. Not the LM head:
    `head_logits` reads its weight directly, and would pass an adapter over.
    """
    head = lm.get_output_embeddings()
    return {path.removesuffix(".base_layer"): module for path, module in lm.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head and ".lora_" not in path}


def load_adapter(lm: nn.Module, name: str, folder: Path) -> str:
    """Puts an adapter that a run has saved into the model's layers, in place. Returns the name. Raises
    `UserError` for files that are not what a run with this base has saved.
    """
    try:
        if not (folder / "adapter_model.safetensors").is_file():        # a pickle would be loaded instead
            raise ValueError("there is no file adapter_model.safetensors")
        with quiet():
            info = lm.load_adapter(str(folder), adapter_name=name)
        parameters = adapter_parameters(lm, name)
        wrong = sorted({*info.unexpected_keys, *(path for path in info.missing_keys if path in parameters)})
        wrong += [path for path, p in parameters.items() if not p.isfinite().all()]
        if wrong:
            raise ValueError(f"its {wrong[0]} is missing, of another model, or not finite")
    except Exception as error:                          # the loaders raise kinds of their own for each fault
        why = f"cannot be loaded ({short_message(error)})"
        way_out = f"{why}; put back what the run has saved, or train again"
        raise UserError("adapter", str(folder), way_out) from error
    lm.adapter_in_use = name
    activate(lm, None)
    return name


def activate(lm: nn.Module, name: str | None) -> None:
    """Makes the model compute with one adapter, or with none. A model without adapters stays as it is.

    peft freezes all other adapters: a backward pass gives gradients to the one that is in use when it runs.
    `lm.adapter_in_use` is its name: set it after a call of peft's own `add_adapter`, `load_adapter` or
    `set_adapter`.
    """
    if getattr(lm, "adapter_in_use", None) == name:
        return
    if name is None:
        lm.disable_adapters()
    else:
        lm.enable_adapters()
        lm.set_adapter(name)
    lm.adapter_in_use = name


def adapter_parameters(lm: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The A and B of one agent, by their names in the model: what it trains and saves. Other parameters of an
    adapter, such as DoRA's magnitude, do not train unless they are added here.
    """
    return {path: p for path, p in lm.named_parameters() if re.search(rf"\.lora_[AB]\.{name}\.", path)}
