"""Language models and classifiers from a local folder or the Hub."""
import json
import os
from functools import partial

import torch
import transformers
from jinja2.meta import find_undeclared_variables
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file, logging
from transformers.utils.chat_template_utils import _compile_jinja_template

from cory.config import Config, expand_bundled
from cory.errors import UserError, as_user_error
from cory.ppo.model import LanguageModel, positions

PROBE_TEXT = "a good film"
END_OF_SETTINGS = "{# end of settings #}"
NF4 = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)

logging.set_verbosity_error()
logging.disable_progress_bar()


def load_language_model(name: str, cfg: Config, device: torch.device) -> LanguageModel:
    """A frozen base in `cfg.dtype`.

    Its weights are stored in 4 bits if asked for, in bfloat16 where LoRA trains on top of them in bfloat16,
    else in float32; its head is always in float32, a copy where it was tied to the embedding.
    """
    has_adapters = cfg.lora_rank > 0
    low = cfg.load_in_4bit or (has_adapters and cfg.dtype == "bfloat16")
    stored = torch.bfloat16 if low else torch.float32
    device_map = {"": device} if device.type == "cuda" else None
    lm, tokenizer = load_pretrained(
        transformers.AutoModelForCausalLM, name, dtype=stored, device_map=device_map,
        quantization_config=NF4 if cfg.load_in_4bit else None)
    lm.requires_grad_(False)
    model = LanguageModel(lm, tokenizer, cfg.dtype, cfg.chat_template, cfg.temperature)
    ends = model.end_ids                # a copy: `end_ids` will read the new generation_config
    if cfg.chat_template:
        tokenizer.chat_template = with_settings(tokenizer.get_chat_template(), cfg)
        prompt = tokenizer.decode(model.encode([PROBE_TEXT])[0])
        cfg.require("system_prompt", cfg.system_prompt.strip() in prompt, "the chat template leaves it out")
        message_end = end_of_message(tokenizer)
        # as a special token, it is left out of a response's text
        tokenizer.add_tokens(tokenizer.convert_ids_to_tokens(message_end), special_tokens=True)
        ends.update(message_end)
    # In place of its authors' sampling settings. With these `final/` generates as it was evaluated.
    lm.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.eos_token_id, do_sample=True, top_k=0)
    require_usable(model, name)
    if low:
        head = lm.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)       # no longer tied
        head.float()
    return model


def load_pretrained(auto_class, name: str, **kwargs) -> tuple:
    """(model, tokenizer) of a folder or `NAME@REVISION`, with no weights missing."""
    place = expand_bundled(name)
    revision = ""
    if not os.path.exists(place):
        place, _, revision = place.partition("@")
    where = {"revision": revision or "main", "trust_remote_code": False}
    found = partial(cached_file, place, _raise_exceptions_for_missing_entries=False, **where)
    with as_user_error(f"model {name}"):
        if found("adapter_config.json") and not found("config.json"):
            raise UserError("model", name, "an adapter; merge it with its base, as in docs/settings.md")
        config = transformers.AutoConfig.from_pretrained(place, **where)
        if getattr(config, "activation_function", None) == "gelu_new":
            config.activation_function = "gelu_pytorch_tanh"    # the same, in one operation instead of eight
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
        if found("tokenizer.json"):
            # its own class may take only the vocabulary from that file, and split numbers in another way
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                place, **tokenizer.special_tokens_map, model_input_names=tokenizer.model_input_names, **where)
        logging.set_verbosity_warning()             # for its report of weights that the model does not use
        model, info = auto_class.from_pretrained(place, config=config, output_loading_info=True, **where,
                                                 **kwargs)
        logging.set_verbosity_error()
    missing = info["missing_keys"]                              # they would be random
    if missing:
        raise UserError(f"the weights of {name} lack {min(missing)} of a {type(model).__name__}")
    return model, tokenizer


def with_settings(template: str, cfg: Config) -> str:
    """A chat template, also that of `final/`, after what is set for it: its arguments, the system message,
    and a fixed date, so that prompts do not depend on the day.
    """
    _, _, own = template.rpartition(END_OF_SETTINGS)
    # the macro hides transformers' function of that name
    settings = "{% macro strftime_now(format) %}08 Oct 2024{% endmacro %}"
    with as_user_error("chat_template_kwargs"):
        values = dict(json.loads(cfg.chat_template_kwargs))
    arguments = find_undeclared_variables(_compile_jinja_template("").environment.parse(own))
    for name, value in values.items():
        cfg.require("chat_template_kwargs", name in arguments and value not in ("true", "false"),
                    f"the template of {cfg.model} does not read {name} as {value!r}; pass others, or {{}}")
        settings += f"{{% set {name} = {value!r} %}}"
    if cfg.system_prompt:
        system = {"role": "system", "content": cfg.system_prompt}
        settings += "{% if messages[0].role != 'system' %}"             # else the prompt has its own
        settings += f"{{% set messages = [{system}] + messages %}}{{% endif %}}"
    return settings + END_OF_SETTINGS + own


def end_of_message(tokenizer) -> list[int]:
    """The first added token that the chat template puts after an assistant's message, if any."""
    chat = [{"role": "user", "content": PROBE_TEXT}, {"role": "assistant", "content": "ANSWER"}]
    _, _, after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return [token for token in ids if token in tokenizer.added_tokens_decoder][:1]


@torch.no_grad()
def require_usable(model: LanguageModel, name: str) -> None:
    """Raises `UserError` if this code would compute something other than the model does: unless, for example,
    the head's product with the hidden states of a left-padded text are the logits that the model itself gives
    to the text alone.
    """
    config = model.lm.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if model.lm._is_stateful or {*kinds} - {"full_attention", "sliding_attention"}:
        raise UserError("model", name, "layers other than full or sliding attention are not supported")
    if config.model_type == "gpt_oss":
        raise UserError("model", name, "responses in channels, as those of gpt-oss, are not supported")
    ids = model.tokenizer(PROBE_TEXT)["input_ids"]
    if ids[-1] in model.end_ids:
        raise UserError("model", name, "its tokenizer puts an end token after each text")
    ids_1L = torch.tensor([ids], device=model.device)
    padded = nn.functional.pad(ids_1L, (3, 0))
    mask = nn.functional.pad(torch.ones_like(ids_1L), (3, 0))
    out = model.lm.base_model(input_ids=padded, attention_mask=mask, position_ids=positions(mask))
    logits = model.head(out.last_hidden_state[:, 3:])
    expected = model.lm(input_ids=ids_1L).logits
    if not expected.isfinite().all():
        raise UserError("model", name, "its logits are not finite")
    limit = 0.005 if expected.dtype == torch.float32 else 0.02          # by rounding, also in TF32
    largest_error = (logits - expected).abs().max()
    if not largest_error < limit * logits.abs().max():
        raise UserError("model", name, "its logits are not a linear head's alone (a factor or cap, as by "
                        "logit_scale or final_logit_softcapping, is not computed here), or depend on padding")
