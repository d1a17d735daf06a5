"""LoRA (Hu et al., arXiv:2106.09685), with peft: one frozen base, an adapter for each agent. With all
adapters off, the model is the reference.

An adapted layer computes `W x + 2 B A x` with W frozen (lora_alpha is twice the rank). B starts at 0, so that
every agent starts as the base. To use another of peft's adapters (DoRA, IA3, ...), change `settings`.
"""
import warnings
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from cory.config import Config


def add_adapter(lm: nn.Module, name: str, cfg: Config) -> dict:
    """Puts a new adapter on the model's linear layers, in float32. Returns its weights by name."""
    # imported here because the import takes 2 s and 100 MiB
    from peft import LoraConfig

    settings = LoraConfig(task_type="CAUSAL_LM", r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank,
                          target_modules="all-linear", lora_dropout=0.0)
    before = {*lm.parameters()}
    with warnings.catch_warnings(action="ignore"), keep_requires_grad(lm):
        lm.add_adapter(settings, name)
    saved = lm.peft_config[name]                        # what adapter_config.json will say
    saved.target_modules = sorted(saved.target_modules)             # peft's set has no fixed order
    base = Path(lm.name_or_path)
    if base.exists():
        saved.base_model_name_or_path = str(base.resolve())         # to be found from any folder
    else:
        saved.revision = cfg.model.partition("@")[2] or None
    weights = {path: p for path, p in lm.named_parameters() if p not in before}
    for p in weights.values():
        p.data = p.data.float()
    lm.adapter_in_use = name                            # peft has switched it on
    switch_to(lm, None)
    return weights


def load_adapter(lm: nn.Module, name: str, folder: Path) -> None:
    """Gives an adapter its saved weights; transformers' own loading would leave out DoRA's magnitudes."""
    from peft import load_peft_weights, set_peft_model_state_dict

    set_peft_model_state_dict(lm, load_peft_weights(folder, device="cpu"), name)


def switch_to(lm: nn.Module, name: str | None) -> None:
    """From here on the model computes with this adapter, or with none. Which one is noted on the model, since
    the policies and bases of all agents share it.
    """
    if name == getattr(lm, "adapter_in_use", None):
        return
    with keep_requires_grad(lm):
        if name is None:
            lm.disable_adapters()
        else:
            lm.enable_adapters()
            lm.set_adapter(name)
    lm.adapter_in_use = name


@contextmanager
def keep_requires_grad(lm: nn.Module):
    """A block that leaves each requires_grad as it was: peft changes them at every switch, though a pending
    backward pass may still need those of another adapter, and some may be frozen on purpose.
    """
    before = {p: p.requires_grad for p in lm.parameters()}
    yield
    for p, was in before.items():
        p.requires_grad_(was)
