"""Memory of a run by phase, counted without loading anything, and the smallest card that holds it.

    python -m cory plan imdb --preset gpt2-large
    python -m cory plan gsm8k --preset llama2-7b --load_in_4bit false --shard true --gpus 8 --prompt 700

The flags are those of the training script, and two of the plan's own. Counts are of the tensors that this
code makes on one GPU, without the reward model and what Python and CUDA take for themselves. Adapters are
taken to be on every linear layer. The paper's models are known; others are a folder or a Hub name, of which
config.json is read.
"""
import argparse
from math import ceil

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from cory.config import EXPERIMENTS, Config
from cory.errors import UserError, exit_on_user_error
from cory.experiment.flags import OneLineParser, parse
from cory.experiment.tables import table
from cory.ppo.cache import with_room
from cory.ppo.loading import model_config, model_errors
from cory.ppo.lora import linear_layers
from cory.ppo.minibatches import LOGPROBS_AT_ONCE, TOKENS_AT_ONCE
from cory.system.hub import with_revision

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
        way_out = "plan counts agents of one base and one setting; leave it out"
        cfg.require("agent_settings", not cfg.agent_settings, way_out)
        self.cfg, self.config, self.gpus = cfg, config, gpus
        self.length = prompt + cfg.max_response_length
        self.agents = 1 if cfg.method == "ppo" or cfg.share_weights else 2
        self.element = HALF if cfg.dtype == "bfloat16" else FLOAT

        with FakeTensorMode():                                  # shapes alone: nothing is kept or computed
            lm = AutoModelForCausalLM.from_config(config).eval()
            few, many = (saved_bytes(lm, cfg.dtype, tokens) for tokens in (32, 64))
        self.saved_per_token = (many - few) // 32
        linear = [layer.weight for layer in linear_layers(lm).values()]
        self.weights = sum(p.numel() for p in lm.parameters())
        self.layers = sum(weight.numel() for weight in linear)                  # what `shard` divides
        adapter = cfg.lora_rank * sum(sum(weight.shape) for weight in linear)
        self.trained = adapter if cfg.lora else self.weights

        self.head = config.vocab_size * config.hidden_size
        self.policy = FLOAT * self.trained if cfg.lora else self.held(FLOAT)    # bytes of one agent's weights

        self.rows = ceil(cfg.batch_size / gpus)
        at_once, device = min(cfg.mini_batch_size, self.rows), "cpu" if cfg.device == "cpu" else "cuda"
        self.tokens = min(at_once * self.length, max(TOKENS_AT_ONCE[device], self.length))
        # one float32 tensor of (response tokens, V), cut to what the head makes at once
        responses = min(at_once * cfg.max_response_length, self.tokens)
        self.logprobs = FLOAT * min(LOGPROBS_AT_ONCE[device], responses * config.vocab_size)

    def held(self, per_weight: float) -> int:
        """One copy of the model on one GPU."""
        share = 1 / self.gpus if self.cfg.shard else 1
        return int(per_weight * (self.weights - self.layers + self.layers * share))

    def parts(self) -> dict[str, int]:
        """What lasts: the reference, and of all agents the weights and Adam's two moments."""
        cfg = self.cfg
        base = self.held(FLOAT)
        if cfg.lora and (cfg.dtype == "bfloat16" or cfg.load_in_4bit):
            base = self.held(HALF) + (FLOAT - HALF) * self.head     # which is in float32
            base += HALF * self.head if self.config.tie_word_embeddings else 0      # beside the embedding
        if cfg.load_in_4bit:
            base -= int((HALF - NF4) * self.layers)
        policies = self.agents * self.policy
        return {"reference": base, "policies": policies, "moments": 2 * policies}

    def phases(self) -> dict[str, int]:
        """Bytes alive at the worst moment of each phase.

            load     whole models, of those that are divided then: the reference and one agent's
            state    what `parts` counts, which is there in all phases below
            sample   keys and values of all rows, with room to grow; logits, softmax, float64 sums
            score    five tensors of (response tokens, V): two distributions, and three of the exact KL
            update   a gradient, saved activations, three tensors of (response tokens, V), the head's gradient
                     anew; or a gradient thrice, as GPUs sum it

        A forward pass also needs weights in the dtype of its products. Of shards sampling and scoring gather
        all layers, an update two layers, with the gradient of one.
        """
        cfg, config, models = self.cfg, self.config, 1 if self.cfg.lora else 2
        load, rolled, updated = 0, 0, 0
        if cfg.shard:
            load = self.weights * (self.element if cfg.lora else 2 * FLOAT) + self.agents * self.policy
            rolled = models * self.element * self.layers
            updated = (3 * self.element + FLOAT) * self.layers // config.num_hidden_layers
        elif cfg.dtype == "bfloat16" and not cfg.lora:
            rolled = updated = HALF * (self.weights - self.head)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * config.hidden_size // config.num_attention_heads
        cache = self.element * self.rows * per_token * with_room(self.length)
        drawn = self.rows * config.vocab_size * (2 * FLOAT + DOUBLE)
        backward = updated + self.policy + self.tokens * self.saved_per_token + 3 * self.logprobs
        backward += 0 if cfg.lora else FLOAT * self.head
        summed = 3 * self.policy if self.gpus > 1 and not cfg.shard else 0
        state = sum(self.parts().values())
        return {"load": load, "state": state, "sample": state + rolled + cache + drawn,
                "score": state + rolled + 5 * self.logprobs, "update": state + max(backward, summed)}

    def card(self) -> str:
        """The smallest card with a tenth to spare, for the allocator's holes and the CUDA context."""
        need = 1.1 * max(self.phases().values())
        return next((f"{size} GB" for size in CARDS if size * 1e9 >= need), "none")


def saved_bytes(lm: PreTrainedModel, dtype: str, tokens: int) -> int:
    """Bytes that the body's forward pass over a row keeps for its backward pass, with what autocast has made
    of the weights, but without the weights themselves.
    """
    kept = {}

    def note(x):
        if not isinstance(x, nn.Parameter):
            kept[x.untyped_storage()._cdata] = x.untyped_storage()      # held, so that no address comes twice
        return x

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with (torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
          torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)):
        lm.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory plan", description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=EXPERIMENTS)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of the longest prompt")
    parser.add_argument("--gpus", type=int, default=1, help="count what one of so many holds")
    args, flags = parser.parse_known_args(argv)
    for name in ("prompt", "gpus"):
        if getattr(args, name) < 1:
            raise UserError(name, getattr(args, name), "must be 1 or more")
    cfg = parse(*EXPERIMENTS[args.task], flags)
    if cfg.dtype == "auto":
        cfg.dtype = "float32" if cfg.device == "cpu" else "bfloat16"
    with model_errors("model", cfg.model):
        shape = SHAPES.get(with_revision(cfg.model)[0]) or model_config(cfg.model)
        plan = Plan(cfg, shape, args.prompt, args.gpus)
    phases = plan.phases()
    sizes = [f"{size / 2**30:.1f}" for size in phases.values()]
    print(table([[f"{cfg.model}, {plan.weights / 1e6:.0f}M, {cfg.dtype}", *phases, "card"],
                 ["GiB", *sizes, plan.card()]]))
