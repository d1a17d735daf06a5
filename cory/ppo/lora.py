"""LoRA (Hu et al., arXiv:2106.09685), with peft: one frozen base, an adapter for each agent. With all
adapters off, the model is the reference.

An adapted layer computes `W x + 2 B A x` with W frozen (lora_alpha is twice the rank). B starts at 0, so that
every agent starts as the base.
"""
import re
import warnings
from pathlib import Path

import torch
from torch import nn

from cory.config import Config


def add_adapter(lm: nn.Module, name: str, cfg: Config, seed: int) -> str:
    """Puts a new adapter on the model's linear layers, in place, in float32; A is drawn with `seed`. Returns
    its name.
    """
    # here: the import takes 2 s and 100 MiB
    from peft import LoraConfig

    settings = LoraConfig(task_type="CAUSAL_LM", r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank,
                          target_modules="all-linear", lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.default_generator.manual_seed(seed)
        lm.add_adapter(settings, name)
    for parameter in adapter_parameters(lm, name).values():
        parameter.data = parameter.data.float()
    rules = lm.peft_config[name]
    if Path(lm.name_or_path).exists():                  # to be found from any folder
        rules.base_model_name_or_path = str(Path(lm.name_or_path).resolve())
    else:
        rules.revision = cfg.model.partition("@")[2] or None
    switch_to(lm, None)
    return name


def load_adapter(lm: nn.Module, name: str, folder: Path) -> str:
    """Adds an adapter saved by a run to the model's layers, in place. Returns its name. Raises
    `ValueError` for files that lack a part of it.
    """
    info = lm.load_adapter(str(folder), adapter_name=name, use_safetensors=True)
    if missing := [path for path in info.missing_keys if f".{name}." in path]:
        raise ValueError(f"{folder} lacks {missing[0]}")
    switch_to(lm, None)
    return name


def activate(lm: nn.Module, name: str | None) -> None:
    """Makes the model compute with one adapter, or with none. A model without adapters stays as it is."""
    if getattr(lm, "adapter_in_use", None) != name:
        switch_to(lm, name)


def switch_to(lm: nn.Module, name: str | None) -> None:
    if name is None:
        lm.disable_adapters()
    else:
        lm.enable_adapters()
        lm.set_adapter(name)
    # peft freezes inactive adapters, but a pending backward pass may still need them
    for adapter in lm.peft_config:
        for parameter in adapter_parameters(lm, adapter).values():
            parameter.requires_grad_(True)
    lm.adapter_in_use = name


def adapter_parameters(lm: nn.Module, name: str) -> dict[str, nn.Parameter]:
    return {path: p for path, p in lm.named_parameters() if re.search(rf"\.lora_[AB]\.{name}\.", path)}


def adapted_share(layers: nn.Module) -> float:
    """The share of the layers' weights that are in a matrix with an adapter. "all-linear" passes over
    matrices that are no layers of their own, as the experts of some models.
    """
    sizes = {path: getattr(p, "quant_state", p).shape.numel() for path, p in layers.named_parameters()
             if p.dim() > 1 and ".lora_" not in path}
    adapted = sum(size for path, size in sizes.items() if ".base_layer." in path)
    return adapted / sum(sizes.values())
