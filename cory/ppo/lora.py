"""LoRA (Hu et al., arXiv:2106.09685), by peft: one frozen base, an adapter per agent; off is the reference.

An adapted layer computes `W x + (lora_alpha / lora_rank) B A x` with W frozen. B starts at 0, so that
every agent starts as the base.
"""
import json
import re
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cory.config import Config
from cory.errors import UserError
from cory.system.hub import quiet, said


def add_adapter(lm: nn.Module, name: str, cfg: Config, seed: int) -> str:
    """Puts a new adapter into the model's layers, in place, in float32. `seed` draws its A. Returns the name.

    Raises `UserError` for targets that name no layer, and for a rank that no update of a layer can have.
    """
    most = largest_rank(lm)
    if cfg.lora_rank > most:
        raise UserError("lora_rank", cfg.lora_rank, f"no layer of this model is wider than {most}, and no "
                        f"update of one has a higher rank; use at most {most}")
    # here: it takes 2 s and 100 MiB, which most runs need not spend
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer
    everything = cfg.lora_targets == "all-linear"
    targets = cfg.lora_targets if everything else cfg.lora_targets.replace(" ", "").split(",")
    settings = LoraConfig(task_type="CAUSAL_LM", r=cfg.lora_rank, lora_alpha=cfg.lora_alpha,
                          target_modules=targets, lora_dropout=0.0)
    failure = None
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            torch.default_generator.manual_seed(seed)
            lm.add_adapter(settings, name)
    except ValueError as error:         # most likely nothing matched: said below, with what would
        failure = error

    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    inner = [(path, module) for path, module in lm.named_modules() if module not in ends]
    adapted = {last_part(path) for path, module in inner if isinstance(module, BaseTunerLayer)}
    wrong = [] if everything else [target for target in targets if last_part(target) not in adapted]
    if wrong or not adapted:
        layers = {last_part(path) for path, module in inner
                  if isinstance(module, (nn.Linear, Conv1D, BaseTunerLayer)) and ".lora_" not in path
                  and not path.endswith("base_layer")}
        way_out = (f"{', '.join(wrong or targets)} names no layer that can be adapted; those of this model: "
                   f"{', '.join(sorted(layers))}")
        raise UserError("lora_targets", cfg.lora_targets, way_out) from failure
    if failure:
        raise failure

    for parameter in adapter_parameters(lm, name).values():
        parameter.data = parameter.data.float()
    base = Path(lm.name_or_path)
    if base.exists():                                   # to be found from any folder
        lm.peft_config[name].base_model_name_or_path = str(base.resolve())
    lm.selected = "unknown"
    select(lm, None)
    return name


def last_part(path: str) -> str:
    return path.rpartition(".")[2]


def largest_rank(lm: nn.Module) -> int:
    """The most that min(inputs, outputs) is in a layer between embedding and head."""
    head = lm.get_output_embeddings()
    linear = [layer for layer in lm.modules() if isinstance(layer, nn.Linear) and layer is not head]
    sizes = [(layer.in_features, layer.out_features) for layer in linear]       # in 4 bits, too
    sizes += [layer.weight.shape for layer in lm.modules() if isinstance(layer, Conv1D)]
    return max(map(min, sizes))


def load_adapter(lm: nn.Module, name: str, folder: Path) -> str:
    """Puts an adapter that a run has saved into the model's layers, in place. Returns the name. Raises
    `UserError` for files that are not what a run with this base has saved.
    """
    settings, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    try:
        for file in (settings, weights):                # a pickle would be loaded in place of the weights
            if not file.is_file():
                raise ValueError(f"there is no file {file.name}")
        rank, most = json.loads(settings.read_bytes())["r"], largest_rank(lm)
        if type(rank) is not int or not 1 <= rank <= most:
            raise ValueError(f"its rank is {repr(rank)[:60]}, not 1 to {most}")
        with quiet():
            info = lm.load_adapter(str(folder), adapter_name=name)
        own = [key for key in info.missing_keys if key in adapter_parameters(lm, name)]     # not of others
        wrong = sorted({*own, *info.unexpected_keys})
        wrong += [path for path, p in adapter_parameters(lm, name).items() if not p.isfinite().all()]
        if wrong:
            raise ValueError(f"its {wrong[0]} is missing, of another model, or not finite")
    except Exception as error:                          # the loaders raise kinds of their own for each fault
        way_out = f"cannot be loaded ({said(error)}); put back what the run has saved, or train again"
        raise UserError("adapter", str(folder), way_out) from error
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
