"""LoRA (Hu et al., arXiv:2106.09685), with peft: one frozen base, an adapter for each agent. With all
adapters off, the model is the reference.

An adapted layer computes `W x + 2 B A x` with W frozen (lora_alpha is twice the rank). B starts at 0, so that
every agent starts as the base. To use another kind of adapter, change this file alone.
"""
import re
import warnings
from pathlib import Path

from torch import nn

from cory.config import Config


def add_adapter(lm: nn.Module, name: str, cfg: Config) -> None:
    """Puts a new adapter on the model's linear layers, in place, in float32; A is random."""
    # here: the import takes 2 s and 100 MiB
    from peft import LoraConfig

    settings = LoraConfig(task_type="CAUSAL_LM", r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank,
                          target_modules="all-linear", lora_dropout=0.0)
    with warnings.catch_warnings(action="ignore"):
        lm.add_adapter(settings, name)
    for parameter in adapter_weights(lm, name).values():
        parameter.data = parameter.data.float()
    rules = lm.peft_config[name]
    if Path(lm.name_or_path).exists():                  # to be found from any folder
        rules.base_model_name_or_path = str(Path(lm.name_or_path).resolve())
    else:
        rules.revision = cfg.model.partition("@")[2] or None
    switch_to(lm, None)


def load_adapter(lm: nn.Module, name: str, folder: Path) -> None:
    """Adds a saved adapter. Raises `ValueError` where its files lack a part."""
    info = lm.load_adapter(str(folder), adapter_name=name, use_safetensors=True)
    if missing := [path for path in info.missing_keys if f".{name}." in path]:
        raise ValueError(f"{folder} lacks {missing[0]}")
    switch_to(lm, None)


def adapter_weights(lm: nn.Module, name: str) -> dict[str, nn.Parameter]:
    return {path: p for path, p in lm.named_parameters() if re.search(rf"\.lora_[AB]\.{name}\.", path)}


def switch_to(lm: nn.Module, name: str | None) -> None:
    """Makes a model with adapters compute with one of them, or with none."""
    if name is None:
        lm.disable_adapters()
    else:
        lm.enable_adapters()
        lm.set_adapter(name)
    # peft freezes inactive adapters, but a pending backward pass may still need them
    for path, parameter in lm.named_parameters():
        if ".lora_" in path:
            parameter.requires_grad_(True)
    lm.adapter_in_use = name
