"""LoRA (Hu et al., arXiv:2106.09685), by peft: one frozen base in memory, one adapter per agent, and with adapters off the reference.

An adapted layer computes `W x + (lora_alpha / lora_rank) B A x` with W frozen. B starts at 0, so that every agent starts as the base.
"""
import re
import warnings

import torch
from peft import LoraConfig
from torch import nn

from cory.config import Config
from cory.errors import UserError


def add_adapter(lm: nn.Module, name: str, cfg: Config, seed: int) -> str:
    """Puts a new adapter into the model's layers, in place, in float32. `seed` draws its A. Returns the name. Raises `UserError`."""
    targets = cfg.lora_targets if cfg.lora_targets == "all-linear" else cfg.lora_targets.replace(" ", "").split(",")
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            torch.manual_seed(seed)
            lm.add_adapter(LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"), name)
    except ValueError as error:
        layers = {path.rpartition(".")[2] for path, module in lm.named_modules() if getattr(module, "weight", torch.zeros(0)).ndim == 2}
        raise UserError("lora_targets", cfg.lora_targets, f"match no layer that can be adapted; layers found: {', '.join(sorted(layers))}") from error
    for parameter in adapter_parameters(lm, name).values():
        parameter.data = parameter.data.float()
    lm.selected = "unknown"
    select(lm, None)
    return name


def select(lm: nn.Module, name: str | None) -> None:
    """Makes the model compute with one adapter, or with none. Nothing to do for a model without adapters."""
    if getattr(lm, "selected", None) == name:
        return
    if name is None:
        lm.disable_adapters()
    else:
        lm.enable_adapters()
        lm.set_adapter(name)
    lm.selected = name


def adapter_parameters(lm: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The A and B of one agent, by their names in the model."""
    return {path: p for path, p in lm.named_parameters() if re.search(rf"\.lora_[AB]\.{name}\.", path)}
