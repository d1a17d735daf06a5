"""Memory of a run by phase, counted without loading anything, and the smallest card that holds it.

    python -m cory plan gpt2-large gpt2-xl --batch 256
    python -m cory plan llama2-7b --gpus 8 --shard --training full lora --gpu_memory 80

Counts are of the tensors that this code makes, without the reward model and what Python and CUDA take for
themselves. A model is one of the shapes below, a local folder with a config.json, or a Hub name. The second
form counts what one of several GPUs holds and sends.
"""
import argparse
import copy
import sys
from dataclasses import dataclass
from itertools import product
from math import ceil, inf

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from cory.commands.flags import OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.ppo.loading import model_config, model_errors
from cory.ppo.minibatches import LOGPROBS_AT_ONCE, TOKENS_AT_ONCE

GELU = dict(activation_function="gelu_pytorch_tanh")    # as `model_config` loads them
LLAMA2 = dict(vocab_size=32000, tie_word_embeddings=False)
SHAPES = {
    "gpt2": GPT2Config(**GELU),
    "gpt2-large": GPT2Config(n_layer=36, n_embd=1280, n_head=20, **GELU),
    "gpt2-xl": GPT2Config(n_layer=48, n_embd=1600, n_head=25, **GELU),
    "llama2-7b": LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                             num_attention_heads=32, **LLAMA2),
    "llama2-13b": LlamaConfig(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40,
                              num_attention_heads=40, **LLAMA2),
    "llama2-70b": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                              num_attention_heads=64, num_key_value_heads=8, **LLAMA2),
}
CARDS = [16, 24, 40, 48, 80, 96, 141, 180, 288]         # GB, as they are sold
GIB, GB = 2**30, 1e9
FLOAT, DOUBLE, HALF = 4, 8, 2                           # bytes
NF4 = 0.5 + 4 / 64                                      # with a float32 scale for each 64 weights


@dataclass
class Plan:
    """Bytes on one device. `mini_batch` rows run at once, of at most `TOKENS_AT_ONCE` tokens.

    `training` is of every weight (full), or of adapters of rank `rank` on every linear layer of a frozen base
    (lora), which 4bit keeps in 4 bits. Of `gpus`, each has its part of a batch and, with `shard`, of the
    layers' matrices; embeddings, head and norms it has whole.
    """
    config: PretrainedConfig
    agents: int
    batch: int
    mini_batch: int
    prompt: int                 # tokens of the longest prompt, an observer's
    response: int
    dtype: str                  # float32 or bfloat16; tf32 needs what float32 needs
    device: str
    training: str = "full"
    rank: int = 16
    gpus: int = 1
    shard: bool = False

    def __post_init__(self):
        small = [with_layers(self.config, n) for n in (1, 2)]
        (one, matrices), (two, more) = (weights(config) for config in small)
        layers = self.config.num_hidden_layers
        self.weights = one + (layers - 1) * (two - one)
        self.layer = more - matrices                            # of one, what `shard` divides
        self.layers = layers * self.layer
        one, two = (saved_per_token(config, self.dtype) for config in small)
        self.saved_per_token = one + (layers - 1) * (two - one)
        self.trained = self.weights if self.training == "full" else layers * adapter(small[0], self.rank)
        self.element = HALF if self.dtype == "bfloat16" else FLOAT

    @property
    def head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def casts(self) -> int:
        """Weights of the body in bfloat16, as autocast keeps them for a forward pass. A frozen base is in
        bfloat16 itself, and the weights of a shard are gathered in it.
        """
        casts = self.dtype == "bfloat16" and self.training == "full" and not self.shard
        return HALF * (self.weights - self.head) if casts else 0

    def gathered(self, models: int) -> int:
        """Layers of so many models, whole."""
        return models * self.element * self.layers if self.shard else 0

    @property
    def rows(self) -> int:
        return ceil(self.batch / self.gpus)

    @property
    def tokens(self) -> int:
        rows = min(self.mini_batch, self.rows) * (self.prompt + self.response)
        return min(rows, max(TOKENS_AT_ONCE[self.device], self.prompt + self.response))

    @property
    def logprobs(self) -> int:
        """One float32 tensor of (tokens, V), cut to what the head makes at once."""
        return FLOAT * min(LOGPROBS_AT_ONCE[self.device], self.tokens * self.config.vocab_size)

    def held(self, per_weight: float) -> int:
        """One copy of the model on one GPU."""
        return int(per_weight * (self.weights - self.layers + self.layers / (self.gpus if self.shard else 1)))

    def parts(self) -> dict[str, int]:
        """What lasts (the reference; weights and moments of agents), and the most of what comes and goes."""
        config, full = self.config, self.training == "full"
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * config.hidden_size // config.num_attention_heads
        length = self.prompt + self.response
        frozen = {"full": FLOAT, "lora": self.element, "4bit": HALF}[self.training]
        base = self.held(frozen) - (int((HALF - NF4) * self.layers) if self.training == "4bit" else 0)
        base += 0 if frozen == FLOAT else (FLOAT - frozen) * self.head          # which is in float32
        policy = self.held(FLOAT) if full else FLOAT * self.trained
        return {"reference": base, "policies": self.agents * policy, "moments": self.agents * 2 * policy,
                "gradient": policy, "activations": self.tokens * self.saved_per_token,
                "keys, values": self.element * self.rows * per_token * (length + max(32, length // 4))}

    def phases(self) -> dict[str, int]:
        """Bytes alive at the worst moment of each phase.

            load     whole models, of those that are divided then: the reference and one agent's
            state    the reference; of each agent its weights and Adam's two moments
            sample   keys and values of all rows, with room to grow; logits, softmax, float64 sums
            score    five tensors of (tokens, V): two distributions, and three that the exact KL takes
            update   a gradient, saved activations, three tensors of (tokens, V), the head's gradient anew; of
                     shards two layers, and the gradient of one; or a gradient twice, as GPUs sum it
        """
        parts, full = self.parts(), self.training == "full"
        state = parts["reference"] + parts["policies"] + parts["moments"]
        load = (FLOAT * 2 if full else self.element) * self.weights + parts["policies"] if self.shard else 0
        drawn = self.rows * self.config.vocab_size * (2 * FLOAT + DOUBLE)
        update = parts["gradient"] + parts["activations"] + 3 * self.logprobs + FLOAT * self.head * full
        whole = state + self.casts + self.gathered(2 if full else 1)
        layers = (3 * self.element + FLOAT) * self.layer * self.shard
        update = max(state + self.casts + layers + update, state + 2 * parts["gradient"] * (self.gpus > 1))
        return {"load": load, "state": state, "sample": whole + parts["keys, values"] + drawn,
                "score": whole + 5 * self.logprobs, "update": update}

    def sent(self, rows: int, epochs: int) -> int:
        """Bytes that each GPU sends in an iteration, for optimizer steps of so many rows, in rings: to sum
        gradients each byte twice, to gather or to divide weights once.
        """
        ring, layers = (self.gpus - 1) / self.gpus, self.layers if self.shard else 0
        whole = self.trained - (layers if self.training == "full" else 0)
        steps = epochs * ceil(self.batch / rows)
        passes = ceil(ceil(rows / self.gpus) * (self.prompt + self.response) / self.tokens)
        reduced = FLOAT if self.training == "full" else 0           # a gradient of the layers, too
        step = 2 * FLOAT * whole + passes * (2 * self.element + reduced) * layers
        rollout = self.element * layers * (2 if self.training == "full" else 1)
        return int(self.agents * ring * (steps * step + rollout))

    def card(self) -> str:
        """The smallest card with a tenth to spare, for the allocator's holes and the CUDA context."""
        need = 1.1 * max(self.phases().values())
        return next((f"{size} GB" for size in CARDS if size * GB >= need), "none")


def with_layers(config: PretrainedConfig, n: int) -> PretrainedConfig:
    config = copy.deepcopy(config)
    config.num_hidden_layers = n
    return config


def weights(config: PretrainedConfig) -> tuple[int, int]:
    """Numbers of all, and of the matrices among them."""
    with torch.device("meta"):
        parameters = [*AutoModelForCausalLM.from_config(config).parameters()]
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.dim() > 1)


def adapter(config: PretrainedConfig, rank: int) -> int:
    """Numbers of an adapter for the linear layers of a model of one layer."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    linear = [m.weight for m in lm.base_model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    return rank * sum(sum(weight.shape) for weight in linear)


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
    parser = OneLineParser(prog="python -m cory plan", description=__doc__,
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
    add("--training", choices=["full", "lora", "4bit"], nargs="+", default=["full"],
        help="every weight, adapters, adapters on a base in 4 bits")
    add("--rank", type=int, default=16, help="of adapters")
    add("--gpus", type=int, default=0, help="count what one of so many holds and sends")
    add("--shard", action="store_true", help="as with --shard true")
    add("--gpu_memory", type=float, default=0, help="GB; says what fits instead of the smallest card")
    add("--step_rows", type=int, default=0, help="rows of an optimizer step; 0 = the batch")
    add("--epochs", type=int, default=4, help="passes over a batch")
    add("--bandwidth", type=float, default=50, help="GB/s that each GPU sends")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    for name in ("batch", "minibatch", "prompt", "response", "rank", "epochs"):
        if getattr(args, name) < 1:
            raise UserError(name, getattr(args, name), "must be 1 or more")
    for name in ("gpus", "gpu_memory", "step_rows"):
        if not 0 <= getattr(args, name) < inf:
            raise UserError(name, getattr(args, name), "must be 0 or more")
    if not 0 < args.bandwidth < inf:
        raise UserError("bandwidth", args.bandwidth, "must be above 0")
    if args.shard and "4bit" in args.training:
        raise UserError("training", "4bit", "cannot be divided among GPUs; leave it out, or --shard")
    print_plans(args)


def print_plans(args: argparse.Namespace) -> None:
    phases, many = ["state", "sample", "score", "update"], args.gpus or args.training != ["full"]
    numbers = [*phases, f"{args.gpu_memory:g} GB" if args.gpu_memory else "card"]
    if many:
        parts = ["reference", "policies", "moments", "gradient", "activations", "keys, values"]
        phases, numbers = ["load", *phases], [*parts, "load", *numbers, "sent, GB", "s"]
    texts = ["GiB", "weights", "dtype", "training"][:4 if many else 3]
    print(f"| {' | '.join([*texts, *numbers])} |")
    print(f"|---|--:|{'---|' * (len(texts) - 2)}{'--:|' * len(numbers)}")
    for name, training, dtype in product(args.models, args.training, args.dtype):
        with model_errors("models", name):
            config = SHAPES.get(name) or model_config(name)
        plan = Plan(config, {"ppo": 1, "cory": 2}[args.method], args.batch, args.minibatch, args.prompt,
                    args.response, dtype, args.device, training, args.rank, max(1, args.gpus), args.shard)
        cells = [name, f"{plan.weights / 1e6:.0f}M", dtype]
        if many:
            cells += [training, *(f"{size / GIB:.1f}" for size in plan.parts().values())]
        cells += [f"{plan.phases()[phase] / GIB:.1f}" for phase in phases]
        fits = 1.1 * max(plan.phases().values()) <= args.gpu_memory * GB
        cells += [("fits" if fits else "too small") if args.gpu_memory else plan.card()]
        sent = plan.sent(args.step_rows or args.batch, args.epochs) / GB
        cells += [f"{sent:.1f}", f"{sent / args.bandwidth:.1f}"] if many else []
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
