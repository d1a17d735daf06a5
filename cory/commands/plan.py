"""Memory of a run by phase, counted without loading anything, and the smallest card that holds it.

    python -m cory plan imdb --preset gpt2-large
    python -m cory plan gsm8k --preset llama2-7b --load_in_4bit false --shard true --gpus 8 --prompt 700

The flags are those of the training script, and two of the plan's own. Counts are of the tensors that this
code makes on one GPU, without the reward model and what Python and CUDA take for themselves. Adapters are
taken to be on every linear layer. The paper's models are known; others are a folder or a Hub name, of which
config.json is read.
"""
import argparse
import copy
import sys
from math import ceil

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from cory.config import EXPERIMENTS, Config
from cory.errors import UserError, exit_on_user_error
from cory.experiment.flags import OneLineParser, parse
from cory.ppo.loading import model_config, model_errors
from cory.ppo.minibatches import LOGPROBS_AT_ONCE, TOKENS_AT_ONCE

GELU = dict(activation_function="gelu_pytorch_tanh")    # as `model_config` loads them
SHAPES = {
    "gpt2": GPT2Config(**GELU),
    "gpt2-large": GPT2Config(n_layer=36, n_embd=1280, n_head=20, **GELU),
    "gpt2-xl": GPT2Config(n_layer=48, n_embd=1600, n_head=25, **GELU),
    "meta-llama/Llama-2-7b-chat-hf": LlamaConfig(),
    "meta-llama/Llama-2-13b-chat-hf": LlamaConfig(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40),
    "meta-llama/Llama-2-70b-chat-hf": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8),
}
CARDS = [16, 24, 40, 48, 80, 96, 141, 180, 288]         # GB, as they are sold
FLOAT, DOUBLE, HALF = 4, 8, 2                           # bytes
NF4 = 0.5 + 4 / 64                                      # with a float32 scale for each 64 weights


class Plan:
    """Bytes on one of `gpus`. Each has its share of the batch and, with `shard`, of the layers' matrices;
    embeddings, head and norms are whole. `prompt` is the tokens of the longest prompt, an observer's.
    """

    def __init__(self, cfg: Config, config: PretrainedConfig, prompt: int, gpus: int = 1):
        self.cfg, self.config, self.gpus = cfg, config, gpus
        self.length = prompt + cfg.max_response_length
        self.agents = 1 if cfg.method == "ppo" or cfg.share_weights else 2
        self.element = HALF if cfg.dtype == "bfloat16" else FLOAT

        small = [with_layers(config, n) for n in (1, 2)]
        (one, matrices), (two, more) = (weights(config) for config in small)
        layers = config.num_hidden_layers
        self.weights = one + (layers - 1) * (two - one)
        self.layer = more - matrices                            # of one, what `shard` divides
        self.layers = layers * self.layer
        self.trained = layers * adapter(small[0], cfg.lora_rank) if cfg.lora else self.weights
        one, two = (saved_per_token(config, cfg.dtype) for config in small)
        self.saved_per_token = one + (layers - 1) * (two - one)

        self.rows = ceil(cfg.batch_size / gpus)
        device = "cpu" if cfg.device == "cpu" else "cuda"
        tokens = min(cfg.mini_batch_size, self.rows) * self.length
        self.tokens = min(tokens, max(TOKENS_AT_ONCE[device], self.length))
        # one float32 tensor of (tokens, V), cut to what the head makes at once
        self.logprobs = FLOAT * min(LOGPROBS_AT_ONCE[device], self.tokens * config.vocab_size)

    def held(self, per_weight: float) -> int:
        """One copy of the model on one GPU."""
        share = 1 / self.gpus if self.cfg.shard else 1
        return int(per_weight * (self.weights - self.layers + self.layers * share))

    def parts(self) -> dict[str, int]:
        """What lasts (the reference; weights and moments of agents), and the most of what comes and goes."""
        cfg, config, head = self.cfg, self.config, self.config.vocab_size * self.config.hidden_size
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * config.hidden_size // config.num_attention_heads
        if cfg.storage == "float32":
            base = self.held(FLOAT)
        else:
            base = self.held(HALF) + (FLOAT - HALF) * head          # which is in float32
        if cfg.storage == "4bit":
            base -= int((HALF - NF4) * self.layers)
        policy = FLOAT * self.trained if cfg.lora else self.held(FLOAT)
        # Autocast keeps weights of the body in bfloat16 for a forward pass, where they are not so already.
        casts = cfg.dtype == "bfloat16" and not cfg.lora and not cfg.shard
        room = self.length + max(32, self.length // 4)              # of a cache that grows
        return {"reference": base, "policies": self.agents * policy, "moments": self.agents * 2 * policy,
                "gradient": policy, "activations": self.tokens * self.saved_per_token,
                "keys, values": self.element * self.rows * per_token * room,
                "casts": HALF * (self.weights - head) if casts else 0}

    def phases(self) -> dict[str, int]:
        """Bytes alive at the worst moment of each phase.

            load     whole models, of those that are divided then: the reference and one agent's
            state    the reference; of each agent its weights and Adam's two moments
            sample   keys and values of all rows, with room to grow; logits, softmax, float64 sums
            score    five tensors of (tokens, V): two distributions, and three that the exact KL takes
            update   a gradient, saved activations, three tensors of (tokens, V), the head's gradient anew; of
                     shards two layers, and the gradient of one; or a gradient twice, as GPUs sum it
        """
        parts, shard, models = self.parts(), self.cfg.shard, 1 if self.cfg.lora else 2
        state = parts["reference"] + parts["policies"] + parts["moments"]
        loaded = models * self.element if self.cfg.lora else models * FLOAT
        load = loaded * self.weights + parts["policies"] if shard else 0
        rollout = state + parts["casts"] + models * self.element * self.layers * shard      # layers gathered
        drawn = self.rows * self.config.vocab_size * (2 * FLOAT + DOUBLE)
        head = 0 if self.cfg.lora else FLOAT * self.config.vocab_size * self.config.hidden_size
        layers = (3 * self.element + FLOAT) * self.layer * shard
        update = parts["casts"] + layers + parts["gradient"] + parts["activations"] + 3 * self.logprobs + head
        summed = 2 * parts["gradient"] if self.gpus > 1 else 0
        return {"load": load, "state": state, "sample": rollout + parts["keys, values"] + drawn,
                "score": rollout + 5 * self.logprobs, "update": state + max(update, summed)}

    def card(self) -> str:
        """The smallest card with a tenth to spare, for the allocator's holes and the CUDA context."""
        need = 1.1 * max(self.phases().values())
        return next((f"{size} GB" for size in CARDS if size * 1e9 >= need), "none")


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
    parser = OneLineParser(prog="python -m cory plan", description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=EXPERIMENTS)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of the longest prompt")
    parser.add_argument("--gpus", type=int, default=1, help="count what one of so many holds")
    args, flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    for name in ("prompt", "gpus"):
        if getattr(args, name) < 1:
            raise UserError(name, getattr(args, name), "must be 1 or more")
    cfg = parse(*EXPERIMENTS[args.task], flags)
    if cfg.dtype == "auto":
        cfg.dtype = "float32" if cfg.device == "cpu" else "bfloat16"
    with model_errors("model", cfg.model):
        plan = Plan(cfg, SHAPES.get(cfg.model) or model_config(cfg.model), args.prompt, args.gpus)
    phases = plan.phases()
    print(f"| {cfg.model}, {plan.weights / 1e6:.0f}M, {cfg.dtype} | {' | '.join(phases)} | card |")
    print("|---" + "|--:" * (len(phases) + 1) + "|")
    print(f"| GiB | {' | '.join(f'{size / 2**30:.1f}' for size in phases.values())} | {plan.card()} |")


if __name__ == "__main__":
    main()
