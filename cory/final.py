"""The models that a run leaves behind, for plain transformers."""
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cory.distributed import processes
from cory.errors import UserError
from cory.loading import TEXT
from cory.ppo.agent import Agent
from cory.ppo.lora import remove_adapter
from cory.ppo.model import LanguageModel
from cory.sharding import is_sharded, whole_on_cpu


def save_models(folder: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(folder/llm1)` loads the policy. With LoRA the folder holds only
    the adapter, and names its base; one of another kind than LoRA is for peft's `AutoPeftModelForCausalLM`.
    """
    for agent in agents:
        policy, whole = agent.policy, None
        if is_sharded(policy.lm) and not policy.adapter:
            once = {**dict(policy.lm.named_parameters()), **dict(policy.lm.named_buffers())}    # if tied
            whole = whole_on_cpu({name: x for name, x in policy.lm.state_dict().items() if name in once})
        if not processes().is_main:
            continue
        own = folder / agent.name
        policy.activate()
        policy.lm.save_pretrained(own, state_dict=whole)
        policy.tokenizer.save_pretrained(own)
        for path in own.glob("*.safetensors"):              # written with mode 0600
            shutil.copymode(own / "tokenizer_config.json", path)


@torch.no_grad()
def require_faithful(setup, agents: list[Agent]) -> None:
    """Raises `UserError` unless each policy, written as a final model and read again, has the same weights
    and gives the same log-probabilities. Sharded models are not read again.
    """
    if setup.cfg.shard or not processes().is_main:
        return
    with TemporaryDirectory(dir=setup.run_dir) as folder:
        save_models(Path(folder), agents)
        for agent in agents:
            policy, name = agent.policy, f"{agent.name}_saved"
            saved = setup.saved_model(agent.name, Path(folder, agent.name), adapter=name)
            pairs = zip(policy.weights().values(), saved.weights().values(), strict=True)
            same = all(torch.equal(p, q) for p, q in pairs)
            gap = (logprobs_of_text(policy) - logprobs_of_text(saved)).abs().mean().item()
            if policy.adapter:
                policy.activate()                           # peft warns if the removed one is in use
                remove_adapter(policy.lm, name)
            if not (same and gap < (1e-3 if policy.dtype == "float32" else 0.05)):
                raise UserError("agent", agent.name, "is not what its final model is: log-probabilities "
                                f"differ by {gap:.2g} nats. What you change in a model must be in its files")


def logprobs_of_text(model: LanguageModel) -> torch.Tensor:
    ids_1L = torch.tensor([model.tokenizer(TEXT)["input_ids"]], device=model.device)
    return model(ids_1L, torch.ones_like(ids_1L)).log_softmax(-1)
