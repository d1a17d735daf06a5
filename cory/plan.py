"""Memory of a run by phase, counted without loading anything, and the smallest card that holds it.

    python -m cory.plan gpt2-large gpt2-xl --batch 256

Counts are of the tensors that this code makes, for full training of every weight, without the reward model
and what Python and CUDA take for themselves. A model is one of the shapes below, a local folder with a
config.json, or a Hub name.
"""
import argparse
import copy
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig

from cory.command_line import OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.loading import model_config, model_errors
from cory.ppo.minibatches import LOGPROBS_AT_ONCE, TOKENS_AT_ONCE

GELU = dict(activation_function="gelu_pytorch_tanh")    # as `model_config` loads them
SHAPES = {
    "gpt2": GPT2Config(**GELU),
    "gpt2-large": GPT2Config(n_layer=36, n_embd=1280, n_head=20, **GELU),
    "gpt2-xl": GPT2Config(n_layer=48, n_embd=1600, n_head=25, **GELU),
}
CARDS = [16, 24, 40, 48, 80, 96, 141, 180, 288]         # GB, as they are sold
GIB, GB = 2**30, 1e9
FLOAT, DOUBLE, HALF = 4, 8, 2                           # bytes


@dataclass
class Plan:
    """Bytes on one device. `mini_batch` rows run at once, of at most `TOKENS_AT_ONCE` tokens."""
    config: PretrainedConfig
    agents: int
    batch: int
    mini_batch: int
    prompt: int                 # tokens of the longest prompt, an observer's
    response: int
    dtype: str                  # float32 or bfloat16; tf32 needs what float32 needs
    device: str

    def __post_init__(self):
        small = [with_layers(self.config, n) for n in (1, 2)]
        one, two = (weights(config) for config in small)
        layers = self.config.num_hidden_layers
        self.weights = one + (layers - 1) * (two - one)
        one, two = (saved_per_token(config, self.dtype) for config in small)
        self.saved_per_token = one + (layers - 1) * (two - one)

    @property
    def head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def casts(self) -> int:
        """Weights of the body in bfloat16, as autocast keeps them for a forward pass."""
        return HALF * (self.weights - self.head) if self.dtype == "bfloat16" else 0

    @property
    def tokens(self) -> int:
        rows = self.mini_batch * (self.prompt + self.response)
        return min(rows, max(TOKENS_AT_ONCE[self.device], self.prompt + self.response))

    @property
    def logprobs(self) -> int:
        """One float32 tensor of (tokens, V), cut to what the head makes at once."""
        return FLOAT * min(LOGPROBS_AT_ONCE[self.device], self.tokens * self.config.vocab_size)

    def phases(self) -> dict[str, int]:
        """Bytes alive at the worst moment of each phase.

            state    the reference; of each agent its weights and Adam's two moments
            sample   keys and values of all rows, with room to grow; logits, softmax, float64 sums
            score    five tensors of (tokens, V): two distributions, and three that the exact KL takes
            update   a gradient, saved activations, three tensors of (tokens, V), the head's gradient anew
        """
        state = FLOAT * self.weights * (1 + 3 * self.agents)
        config, element = self.config, HALF if self.dtype == "bfloat16" else FLOAT
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * config.hidden_size // config.num_attention_heads
        length = self.prompt + self.response
        cache = element * self.batch * per_token * (length + max(32, length // 4))
        drawn = self.batch * config.vocab_size * (2 * FLOAT + DOUBLE)
        update = (FLOAT * self.weights + self.tokens * self.saved_per_token + 3 * self.logprobs
                  + FLOAT * self.head)
        return {"state": state, "sample": state + self.casts + cache + drawn,
                "score": state + self.casts + 5 * self.logprobs, "update": state + self.casts + update}

    def card(self) -> str:
        """The smallest card with a tenth to spare, for the allocator's holes and the CUDA context."""
        need = 1.1 * max(self.phases().values())
        return next((f"{size} GB" for size in CARDS if size * GB >= need), "none")


def with_layers(config: PretrainedConfig, n: int) -> PretrainedConfig:
    config = copy.deepcopy(config)
    config.num_hidden_layers = n
    return config


def weights(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def saved_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Bytes per token that the body's forward pass keeps for its backward pass, weights not counted."""
    few, many = (saved_bytes(config, dtype, tokens) for tokens in (32, 64))
    return (many - few) // 32


def saved_bytes(config: PretrainedConfig, dtype: str, tokens: int) -> int:
    """The same for a row of so many tokens, with the weights that autocast has made: nothing is computed."""
    kept = {}

    def note(x):
        if not isinstance(x, nn.Parameter):
            kept[x.untyped_storage()._cdata] = x.untyped_storage()      # held, so that no address comes twice
        return x

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        body = AutoModelForCausalLM.from_config(config).base_model.eval()
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory.plan", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", help=f"{', '.join(SHAPES)}, a folder, or a Hub name")
    add("--method", choices=["ppo", "cory"], default="cory")
    add("--batch", type=int, default=256, help="queries per iteration")
    add("--minibatch", type=int, default=256, help="most rows at once")
    add("--prompt", type=int, default=48, help="tokens of the longest prompt")
    add("--response", type=int, default=15, help="tokens per response")
    add("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    add("--device", choices=["cuda", "cpu"], default="cuda", help="whose sizes of what runs at once")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    for name in ("batch", "minibatch", "prompt", "response"):
        if getattr(args, name) < 1:
            raise UserError(name, getattr(args, name), "must be 1 or more")
    columns = ["GiB", "weights", "dtype", "state", "sample", "score", "update", "card"]
    print(f"| {' | '.join(columns)} |\n|---|--:|---|{'--:|' * 5}")
    for name in args.models:
        with model_errors("models", name):
            config = SHAPES.get(name) or model_config(name)
        for dtype in args.dtype:
            plan = Plan(config, {"ppo": 1, "cory": 2}[args.method], args.batch, args.minibatch, args.prompt,
                        args.response, dtype, args.device)
            phases = " | ".join(f"{size / GIB:.1f}" for size in plan.phases().values())
            print(f"| {name} | {plan.weights / 1e6:.0f}M | {dtype} | {phases} | {plan.card()} |")


if __name__ == "__main__":
    main()
