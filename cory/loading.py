"""Language models and classifiers from a local folder or the Hub, and why one cannot be used."""
import math
import os
import re
import warnings
from contextlib import contextmanager
from datetime import date
from hashlib import sha256
from pickle import UnpicklingError
from typing import Iterable

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerFast
from transformers.utils import cached_file, logging

from cory.config import Config, located
from cory.errors import UserError
from cory.ppo.model import LanguageModel, positions
from cory.sharding import full_tensor

TEXT = "a good film"            # what models are tested on
# In a file, but used by no forward pass: value heads, poolers, constants that older versions stored.
UNUSED = re.compile(
    r"v_head|value_head|pooler|masked_bias|causal_mask|\b(attn|attention)\.bias$|position_ids|inv_freq")
NF4 = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)

TODAY = date(2024, 10, 8)       # of CORY's first version
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"

# else transformers asks the Hub to convert the repository of each model in pytorch_model.bin
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
logging.set_verbosity_error()
logging.disable_progress_bar()


def load_language_model(name: str, cfg: Config, device: torch.device) -> LanguageModel:
    """A frozen base in `cfg.dtype`. Raises `UserError`.

    Its weights are stored in 4 bits if asked for, in bfloat16 where LoRA trains on top of them in bfloat16,
    else in float32; its head is always in float32, a copy where it was tied to the embedding.
    """
    low = cfg.load_in_4bit or cfg.lora_rank > 0 and cfg.dtype == "bfloat16"
    with model_errors("model", name):
        lm, tokenizer = load_pretrained(
            transformers.AutoModelForCausalLM, name, dtype=torch.bfloat16 if low else torch.float32,
            quantization_config=NF4 if cfg.load_in_4bit else None,
            device_map={"": device} if device.type == "cuda" else None)
        model = LanguageModel(lm, tokenizer, cfg.dtype, cfg.chat_template, cfg.temperature)
        model.requires_grad_(False)
        if tokenizer.eos_token_id is None:
            raise ValueError("its tokenizer has no EOS token; set eos_token in tokenizer_config.json")
        if tokenizer(TEXT)["input_ids"][-1] in tokenizer.all_special_ids:
            raise ValueError("its tokenizer appends a token to each prompt, as add_eos_token does")
        if cfg.chat_template:
            tokenizer.chat_template = dated(tokenizer)
        ends = model.end_ids | ({end_of_message(tokenizer)} if model.chat_template else set())
        # The authors' sampling settings are not the policy's. With these `final/` generates as evaluated; a
        # final adapter's base has those of its authors until it is given these.
        lm.generation_config = transformers.GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(ends),
            pad_token_id=tokenizer.eos_token_id, do_sample=True, temperature=cfg.temperature, top_k=0)
        if low:
            head = lm.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)       # no longer tied
            head.float()
        require_usable_model(model)
        require_text_stays_text(model, ends)
    return model


def load_pretrained(auto_class, name: str, **kwargs) -> tuple:
    """(model, tokenizer) of a folder or `NAME@REVISION`, with no weights missing or unused."""
    name = located(name)
    place, _, revision = (name, "", "") if os.path.exists(name) else name.partition("@")
    where = {"revision": revision or "main", "trust_remote_code": False}
    require_model_folder(place)
    config = transformers.AutoConfig.from_pretrained(place, **where)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"        # the same, in one operation instead of eight
    tokenizer = AutoTokenizer.from_pretrained(place, **where)
    if cached_file(place, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **where):
        # its own class may take the vocabulary alone from that file, and split, say, numbers otherwise
        tokenizer = PreTrainedTokenizerFast.from_pretrained(place, **tokenizer.special_tokens_map, **where)
    if TEXT not in tokenizer.decode(tokenizer(TEXT)["input_ids"]).lower():      # a missing one is made up
        raise ValueError("it has no tokenizer, or one that does not decode to the text that it encoded")
    try:
        model, info = auto_class.from_pretrained(place, config=config, output_loading_info=True, **where,
                                                 **kwargs)
    except UnpicklingError as error:                        # which advises to run the code
        raise ValueError("its pytorch_model.bin is damaged, or contains code; use safetensors") from error
    if missing := info["missing_keys"]:
        raise ValueError(f"its weights lack {min(missing)} of a {type(model).__name__}")
    if unused := [key for key in info["unexpected_keys"] if not UNUSED.search(key)]:
        raise ValueError(f"its weights contain {min(unused)}, which its config.json does not use")
    return model, tokenizer


def require_model_folder(place: str) -> None:
    """Raises `ValueError` where a path, as opposed to a Hub name, leads to no model."""
    if os.path.exists(f"{place}/adapter_config.json"):
        raise ValueError("it is an adapter; merge it into its base with peft's merge_and_unload")
    if os.path.exists(place) and not os.path.exists(f"{place}/config.json"):
        raise ValueError("it has no config.json; pass a folder written by save_pretrained, or a Hub name")
    is_path = not re.fullmatch(HUB_NAME, place) or os.path.isdir(os.path.dirname(place))
    if is_path and not os.path.exists(place):
        raise ValueError("there is no such folder; pass one written by save_pretrained, or a Hub name")


def dated(tokenizer) -> str:
    """The chat template with `TODAY` for today's date: a run's prompts do not depend on the day."""
    if not tokenizer.chat_template:
        raise ValueError("its tokenizer has no chat template; use --chat_template false")
    call = r"""strftime_now\(\s*(["'])(.*?)\1\s*\)"""
    template = re.sub(call, lambda found: repr(TODAY.strftime(found[2])), tokenizer.get_chat_template())
    if "strftime_now(" in template:
        raise ValueError("its chat template prints today's date; put a date in place of strftime_now there")
    return template


def end_of_message(tokenizer) -> int:
    """The special token that the chat template puts after an assistant's message. Where that ends the chat,
    it may be another than before a further message, or none.
    """
    chat = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "ANSWER"}]
    for messages in chat, [*chat, chat[0]]:
        before, _, after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition("ANSWER")
        if TEXT not in before:
            raise ValueError("its chat template leaves out a message")
        for token in tokenizer(after, add_special_tokens=False)["input_ids"]:
            if str(tokenizer.added_tokens_decoder.get(token, "")).strip():      # some are of white space
                return token
    raise ValueError("its chat template puts no special token after an assistant's message, to end it")


def require_text_stays_text(model: LanguageModel, ends: set[int]) -> None:
    """Raises `ValueError` where a prompt that spells out a control token would contain that token."""
    added = model.tokenizer.added_tokens_decoder.items()
    control = {token: str(text) for token, text in added
               if (text.special or token in ends) and token != model.tokenizer.unk_token_id}
    plain, spelled = model.encode([TEXT, f"{TEXT} {' '.join(control.values())}"])
    if more := [token for token in spelled if token in control and spelled.count(token) > plain.count(token)]:
        raise ValueError(f"its tokenizer takes {control[more[0]]!r} in a text for that token")


@torch.no_grad()
def require_usable_model(model: LanguageModel) -> None:
    """Raises `ValueError` unless the model's logits are its head's product with its hidden states, and, for a
    left-padded row whose last token follows cached keys, the log-probabilities computed here match those that
    the model itself gives to that row alone.
    """
    lm, eos = model.lm, model.tokenizer.eos_token_id
    ids_1L = torch.tensor([model.tokenizer(f"{TEXT} that I saw")["input_ids"]], device=model.device)
    padded = nn.functional.pad(ids_1L, (3, 0), value=eos)
    mask = nn.functional.pad(torch.ones_like(ids_1L), (3, 0))
    position_ids = positions(mask)
    ours = LanguageModel(lm, model.tokenizer)               # in the precision of its weights
    own_LH = lm.base_model(input_ids=ids_1L).last_hidden_state[0].float()
    large = 1e4                                             # a cap hardly moves small logits
    hook = model.head.register_forward_pre_hook(lambda _, args: (large * args[0].float(),))
    logits_LV = lm(input_ids=ids_1L).logits[0]
    hook.remove()
    product_LV = model.head(large * own_LH)
    tolerance = 0.01 * product_LV.abs().max().item()
    if logits_LV.shape != product_LV.shape or (logits_LV - product_LV).abs().max() > tolerance:
        raise ValueError("its logits are not those of a linear head alone: a factor as logit_scale, a cap as "
                         "final_logit_softcapping, or another layer is not computed here")
    start, cache = ours.hidden_states(padded[:, :-1], mask[:, :-1], position_ids[:, :-1], DynamicCache())
    end, _ = ours.hidden_states(padded[:, -1:], mask, position_ids[:, -1:], cache)
    logp_LV = ours.logprobs(torch.cat([start, end], dim=1)[0, 3:])
    own_logp_LV = ours.logprobs(own_LH)
    p_LV = (logp_LV.exp() + own_logp_LV.exp()) / 2
    gap = (p_LV * (logp_LV - own_logp_LV).abs()).sum(1).mean().item()       # rounding hardly moves this mean
    if math.isnan(gap):
        raise ValueError("its logits are not finite (to mask a token in `logits` use -1e9, not -inf)")
    limit = 0.1 if lm.dtype != torch.float32 else 1e-3 if model.dtype == "float32" else 0.01
    if not gap < limit:
        raise ValueError(f"its log-probabilities differ by {gap:.2g} nats with padding and cached keys: this "
                         "kind of model cannot be sampled here")


def digest(weights: Iterable[Tensor], about, rounded: bool = False) -> str:
    """A digest that tells models apart: of a few numbers of each weight, rounded to bfloat16 if asked for,
    and of whatever else is given, such as the token ids of a text.
    """
    flat = (full_tensor(w.detach()).flatten() for w in weights)
    few = torch.cat([w[::max(1, len(w) // 8)].double().cpu() for w in flat])
    few = few.bfloat16().double() if rounded else few
    return sha256(few.numpy().tobytes() + repr(about).encode()).hexdigest()


@contextmanager
def model_errors(field: str, name: str):
    """Turns any error in loading a model into one line: each library raises errors of its own."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        nowhere = isinstance(error, OSError) and not os.path.exists(located(name))
        hint = "; no folder here has this name" if nowhere else ""
        raise UserError(field, name, f"cannot be used ({str(error)[:300]}){hint}") from error
