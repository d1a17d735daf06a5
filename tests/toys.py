"""Models small enough to know by hand, and what the tests of several files share."""
import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel

import train_gsm8k
import train_imdb
from cory.config import Gsm8kConfig, ImdbConfig
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel, positions
from cory.run.checkpoint import checkpoints_of

EXPERIMENTS = {"imdb": (ImdbConfig, train_imdb.PRESETS), "gsm8k": (Gsm8kConfig, train_gsm8k.PRESETS)}
LETTERS = "abcdef."                     # ids 0..6; "." is EOS


class LetterTokenizer:
    """One id per letter; "." is EOS, as a real tokenizer's EOS text would be."""
    eos_token_id = 6

    def __call__(self, texts, add_special_tokens=False, split_special_tokens=False):
        encode = lambda text: [max(0, LETTERS.find(letter)) for letter in text]
        return {"input_ids": encode(texts) if isinstance(texts, str) else [encode(text) for text in texts]}

    def batch_decode(self, rows, skip_special_tokens=True, **_):
        return ["".join(LETTERS[i] for i in row if i != 6 or not skip_special_tokens) for row in rows]


class Body(nn.Module):
    """Hidden state = one-hot of the current token, so that the head's column u holds the logits after u."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab = vocab
        self.zero = nn.Parameter(torch.zeros(1))            # without a parameter there would be no gradient

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                use_cache=None):
        hidden = nn.functional.one_hot(input_ids, self.vocab) + 0 * self.zero
        return SimpleNamespace(last_hidden_state=hidden, past_key_values=past_key_values)


class BigramLM(nn.Module):
    """log P(v | u) is row u of `logits`."""

    def __init__(self, logits_UV):
        super().__init__()
        self.base_model = Body(len(logits_UV))
        self.head = nn.Linear(len(logits_UV), len(logits_UV), bias=False)
        self.head.weight.data = logits_UV.float().T.contiguous()
        self.device, self.config = torch.device("cpu"), PretrainedConfig()
        self.generation_config = GenerationConfig()

    def get_output_embeddings(self):
        return self.head

    get_input_embeddings = get_output_embeddings            # it has a row for each letter


def bigram(logits_UV=None, seed=0) -> LanguageModel:
    if logits_UV is None:
        logits_UV = torch.randn(7, 7, generator=generator(seed))
    return LanguageModel(BigramLM(logits_UV).requires_grad_(False), LetterTokenizer())


def tiny_gpt2(seed=4, **changes) -> LanguageModel:
    """A frozen random GPT-2 over the letters, with dropout in its config. Responses end at all lengths."""
    sizes = dict(vocab_size=7, n_positions=40, n_embd=8, n_layer=2, n_head=2, bos_token_id=6, eos_token_id=6,
                 initializer_range=0.3)
    torch.manual_seed(seed)
    lm = GPT2LMHeadModel(GPT2Config(**sizes | changes))
    return LanguageModel(lm.requires_grad_(False), LetterTokenizer())


def all_logits(model: LanguageModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits (B, L, V) after each token of rows that are padded on the left."""
    mask = torch.ones_like(ids) if mask is None else mask
    hidden_BLH, _ = model.hidden_states(ids, mask, positions(mask))
    return model.logits(hidden_BLH.flatten(0, 1)).unflatten(0, ids.shape)


def generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def settings(**changes) -> ImdbConfig:
    small = dict(batch_size=8, mini_batch_size=8, learning_rate=0.05, kl_target=0.0, eval_queries=8)
    return ImdbConfig(**(small | changes))


def agent_of(model: LanguageModel, **changes) -> Agent:
    return Agent("llm1", model, settings(**changes), 0)


PROMPTS = ["a", "abcdef", "dd", "fedcba"] * 2           # of letters


def moved(agent: Agent) -> Agent:
    """The agent with a policy that is no longer its reference, and a critic that says something."""
    for p in agent.trainable_parameters().values():
        p.data += 0.1 * torch.randn(p.shape, generator=generator(2))
    return agent


class InFloat64(TorchFunctionMode):
    """Puts float64 in place of float32 in each call of PyTorch's; `used` are the types of the results."""

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "__get__":      # an attribute, as shapes are, has no dtype
            return function(*args)
        double = lambda x: torch.float64 if x is torch.float32 else x
        function = torch.Tensor.double if function is torch.Tensor.float else function
        result = function(*map(double, args), **{name: double(x) for name, x in (kwargs or {}).items()})
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.used.add(result.dtype)
        return result


@contextmanager
def float64():
    """Models are loaded and all is computed in float64."""
    load = PreTrainedModel.from_pretrained.__func__
    load_in_float64 = lambda *args, **kwargs: load(*args, **kwargs | {"dtype": torch.float64})
    with pytest.MonkeyPatch.context() as patch, InFloat64() as calls:
        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(load_in_float64))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
    assert calls.used == {torch.float64}, "weights, logits or others were not in float64"


def close(x, expected, tolerance=1e-6) -> None:
    x, expected = (torch.as_tensor(values, dtype=torch.float32) for values in (x, expected))
    torch.testing.assert_close(x, expected, atol=tolerance, rtol=tolerance)


def error_line(main, flags: list, capsys) -> str:
    """The one line, beside a progress bar, that a command with bad input ends in; its exit status is 2."""
    capsys.readouterr()                     # of what came before
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in flags])
    err = capsys.readouterr().err
    lines = [line for line in re.split("[\r\n]", err)
             if "error: " in line or line.strip() and not re.search(r"\| \d+/\d+ \[", line)]
    assert stop.value.code == 2 and len(lines) == 1 and "error: " in lines[0], err
    return lines[0]


def finished(flags: list[str], folder: Path, *more) -> Path:
    train_imdb.main([*flags, "--run_dir", str(folder), *map(str, more)])
    return folder


def resume(run_dir: Path, *more) -> None:
    finished(["--resume"], run_dir, *more)


def refusal(flags: list[str], folder: Path, capsys, *more) -> str:
    """The one line in which a run ends."""
    return error_line(train_imdb.main, [*flags, "--run_dir", folder, *more], capsys)


def rows(run_dir: Path, file: str = "metrics.jsonl") -> list[dict]:
    """Of a run's file, without the times, which no two runs share."""
    lines = [json.loads(line) for line in Path(run_dir, file).open()]
    timing = re.compile("seconds")
    return [{key: value for key, value in row.items() if not timing.match(key)} for row in lines]


def training(run_dir: Path) -> list[dict]:
    """The rows of training."""
    return [row for row in rows(run_dir) if "train/role/llm1" in row]


def evaluations(run_dir: Path) -> list[dict]:
    """The rows of held-out evaluation."""
    return [row for row in rows(run_dir) if "eval/kl/llm1" in row]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def stopped(run_dir: Path, copy: Path) -> Path:
    """A copy of a finished run as if it had been killed before its last checkpoint: its log knows more."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "final")
    (copy / "eval.json").unlink()
    checkpoints_of(copy)[0].unlink()
    return copy


def saved_tensors(checkpoint: Path) -> dict:
    """The agents' weights and Adam's moments, by AGENT/tensors/NAME and AGENT/adam/NAME/MOMENT."""
    flat = {}
    for agent, saved in torch.load(checkpoint, weights_only=True)["agents"].items():
        flat |= {f"{agent}/tensors/{name}": x for name, x in saved["tensors"].items()}
        flat |= {f"{agent}/adam/{name}/{moment}": x
                 for name, moments in saved["adam"].items() for moment, x in moments.items()}
    return flat


def same_tensors(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def require_same_runs(a: Path, b: Path) -> None:
    """Metrics, samples, held-out metrics and final weights, bit for bit."""
    assert rows(a) == rows(b) and rows(a, "samples.jsonl") == rows(b, "samples.jsonl")
    assert read(a / "eval.json") == read(b / "eval.json")
    finals = sorted(path.relative_to(a) for path in a.glob("final/*/*.safetensors"))
    assert finals == sorted(path.relative_to(b) for path in b.glob("final/*/*.safetensors"))
    for path in finals:
        assert same_tensors(load_file(a / path), load_file(b / path)), path
