"""What a run is on: its rows and its reference model, as short texts that change with any of their content,
and not with the place where they lie.
"""
import hashlib

import torch

from cory.config import Config
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.tasks.task import Data, Task


def of_data(data: Data) -> str:
    """Of every row, in order."""
    digest = hashlib.sha256()
    for rows in data:
        for row in rows:
            digest.update(repr(row).encode("utf-8", "surrogatepass") + b"\0")
        digest.update(b"\1")
    return digest.hexdigest()[:16]


@torch.no_grad()
def of_model(model: LanguageModel, task: Task) -> str:
    """Of every weight, by sums that are exact in any order, and of how the tokenizer reads some queries."""
    digest = hashlib.sha256(repr(model.tokenizer(task.held_out_queries[:16])["input_ids"]).encode())
    for name, x in model.lm.state_dict().items():
        flat = x.detach().contiguous().view(-1).view(torch.uint8)
        whole = flat[:len(flat) // 4 * 4].view(torch.int32).sum(dtype=torch.int64).item()
        places = flat[::max(1, len(flat) // 64)].tolist()
        digest.update(f"{name} {tuple(x.shape)} {x.dtype} {whole} {places}".encode())
    return digest.hexdigest()[:16]


def of_run(data: Data, bases: dict[str, LanguageModel], task: Task) -> dict[str, str]:
    """What config.json notes: of the rows as `data`, of the first base as `model`, of others as `base_llm2`.
    """
    names = {"base": "model"}
    return {"data": of_data(data)} | {names.get(column, column): of_model(base, task)
                                      for column, base in bases.items()}


def require_same(cfg: Config, saved: dict, name: str, now: str) -> None:
    """`data` or a base has the fingerprint that stands in the run's config.json. Raises `UserError`."""
    if saved["fingerprints"].get(name) != now:
        agent = saved["agents"][0] if name == "model" else name.removeprefix("base_")
        value = cfg.dataset if name == "data" else cfg.of_agent(agent).model
        way_out = f"the {name} of this run was another; put it back as it was, or start a new run"
        raise UserError("dataset" if name == "data" else "model", value, way_out)
