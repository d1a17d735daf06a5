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
from cory.ppo.rollout import Rollout
from cory.ppo.sampling import sample_tokens
from cory.run.checkpoint import checkpoints_of

EXPERIMENTS = {"imdb": (ImdbConfig, train_imdb.PRESETS), "gsm8k": (Gsm8kConfig, train_gsm8k.PRESETS)}
LETTERS = "abcdef."                     # ids 0..6; "." is EOS
PROMPTS = ["a", "abcdef", "dd", "fedcba"] * 2


class LetterTokenizer:
    """One id per letter; "." is EOS, as a real tokenizer's EOS text would be."""
    eos_token_id = 6

    def __call__(self, texts, **_):
        if isinstance(texts, str):
            return {"input_ids": [max(0, LETTERS.find(letter)) for letter in texts]}
        return {"input_ids": [self(text)["input_ids"] for text in texts]}

    def batch_decode(self, rows, skip_special_tokens=True, **_):
        texts = ["".join(LETTERS[i] for i in row) for row in rows]
        if skip_special_tokens:
            return [text.replace(".", "") for text in texts]
        return texts


class Body(nn.Module):
    """Hidden state = one-hot of the current token, so that the head's column u holds the logits after u."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab = vocab
        self.zero = nn.Parameter(torch.zeros(1))            # without a parameter there would be no gradient

    def forward(self, input_ids, past_key_values=None, **_):
        hidden = nn.functional.one_hot(input_ids, self.vocab) + 0 * self.zero
        return SimpleNamespace(last_hidden_state=hidden, past_key_values=past_key_values)


class BigramLM(nn.Module):
    """log P(v | u) is row u of `logits`."""

    def __init__(self, logits_UV):
        super().__init__()
        vocab = len(logits_UV)
        self.base_model = Body(vocab)
        self.head = nn.Linear(vocab, vocab, bias=False)
        self.head.weight.data = logits_UV.float().T.contiguous()
        self.device = torch.device("cpu")
        self.config = PretrainedConfig(num_hidden_layers=1, num_attention_heads=1)
        self.generation_config = GenerationConfig()

    def get_output_embeddings(self):
        return self.head

    get_input_embeddings = get_output_embeddings            # it has a row for each letter


def bigram(logits_UV=None, seed=0) -> LanguageModel:
    if logits_UV is None:
        logits_UV = torch.randn(7, 7, generator=generator(seed))
    return LanguageModel(BigramLM(logits_UV).requires_grad_(False), LetterTokenizer())


def tiny_gpt2(seed=0, **changes) -> LanguageModel:
    """A frozen random GPT-2 over the letters, with dropout in its config. Responses end at all lengths."""
    sizes = dict(
        vocab_size=7, n_positions=40, n_embd=10, n_layer=2, n_head=2,
        bos_token_id=6, eos_token_id=6, initializer_range=0.3)
    torch.manual_seed(seed)
    lm = GPT2LMHeadModel(GPT2Config(**sizes | changes))
    return LanguageModel(lm.requires_grad_(False), LetterTokenizer())


def all_logits(model: LanguageModel, ids: torch.Tensor, mask=None) -> torch.Tensor:
    """The logits (B, L, V) after each token of rows that are padded on the left."""
    if mask is None:
        mask = torch.ones_like(ids)
    hidden_BLH, _ = model.hidden_states(ids, mask, positions(mask))
    return model.logits(hidden_BLH.flatten(0, 1)).unflatten(0, ids.shape)


def generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def settings(**changes) -> ImdbConfig:
    small = dict(
        batch_size=8, mini_batch_size=8, learning_rate=0.05,
        kl_target=0.0, min_response_length=0, eval_queries=8)
    return ImdbConfig(**small | changes)


def agent_of(model: LanguageModel, **changes) -> Agent:
    return Agent("llm1", model, settings(**changes), 0)


def moved(agent: Agent) -> Agent:
    """The agent with a policy that is no longer its reference, and a critic that says something."""
    for p in agent.trainable_parameters().values():
        p.data += 0.1 * torch.randn(p.shape, generator=generator(2))
    return agent


def require_same_greedy(plain, policy: LanguageModel, prompts: list[str], limit: int) -> Rollout:
    """A model in plain transformers gives the policy's greedy responses, which are returned."""
    greedy = sample_tokens(policy, prompts, prompts, limit, None)
    generated = plain.generate(
        greedy.prompt_BP, attention_mask=greedy.prompt_mask_BP, do_sample=False, max_new_tokens=limit)
    response_BT = generated[:, greedy.prompt_BP.shape[1]:] * greedy.mask_BT.long()
    assert torch.equal(response_BT, greedy.response_BT)
    return greedy


def double(x):
    """The argument of a function of PyTorch's, with float64 for float32."""
    return torch.float64 if x is torch.float32 else x


class InFloat64(TorchFunctionMode):
    """Puts float64 in place of float32 in each call of PyTorch's; `used` are the types of the results."""

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "__get__":      # an attribute, as shapes are, has no dtype
            return function(*args)
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [double(x) for x in args]
        kwargs = {name: double(x) for name, x in (kwargs or {}).items()}
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.used.add(result.dtype)
        return result


@contextmanager
def float64():
    """Models are loaded and all is computed in float64."""
    load = PreTrainedModel.from_pretrained.__func__

    def load_in_float64(*args, **kwargs):
        kwargs["dtype"] = torch.float64
        return load(*args, **kwargs)
    with pytest.MonkeyPatch.context() as patch, InFloat64() as calls:
        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(load_in_float64))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
    assert calls.used == {torch.float64}, "weights, logits or others were not in float64"


def close(x, expected, tolerance=1e-6) -> None:
    x = torch.as_tensor(x, dtype=torch.float32)
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(x, expected, atol=tolerance, rtol=tolerance)


PROGRESS_BAR = re.compile(r"[^\r\n]*\| \d+/\d+ \[[^]]*\]")


def error_line(main, flags: list, capsys) -> str:
    """The line in which a command with bad input ends: the only one beside progress bars; exit status 2."""
    capsys.readouterr()                     # discards what was printed before
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in flags])
    assert stop.value.code == 2
    err = PROGRESS_BAR.sub("", capsys.readouterr().err)
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert "error: " in lines[0]
    return lines[0]


def finished(flags: list[str], folder: Path, *more) -> Path:
    train_imdb.main([*flags, "--run_dir", str(folder), *map(str, more)])
    return folder


def resume(run_dir: Path, *more) -> None:
    finished(["--resume"], run_dir, *more)


def refusal(flags: list[str], folder: Path, capsys, *more) -> str:
    """The one line in which a run that is refused ends."""
    return error_line(train_imdb.main, [*flags, "--run_dir", folder, *more], capsys)


def rows(run_dir: Path, file: str = "metrics.jsonl") -> list[dict]:
    """The rows of a run's file, without the times, which differ between any two runs."""
    rows = []
    for line in Path(run_dir, file).open():
        row = json.loads(line)
        untimed = {key: x for key, x in row.items() if not key.startswith("seconds")}
        rows.append(untimed)
    return rows


def samples_of(run_dir: Path, iteration: int) -> list[dict]:
    return [row for row in rows(run_dir, "samples.jsonl") if row["iteration"] == iteration]


def training(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl that have training metrics."""
    return [row for row in rows(run_dir) if "train/role/llm1" in row]


def evaluations(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl that have held-out metrics."""
    return [row for row in rows(run_dir) if "eval/kl/llm1" in row]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def stopped(run_dir: Path, copy: Path) -> Path:
    """A copy of a finished run as if it had been killed before its last checkpoint: its log goes further."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "final")
    (copy / "eval.json").unlink()
    checkpoints_of(copy)[0].unlink()
    return copy


def saved_tensors(checkpoint: Path) -> dict:
    """The agents' weights and Adam's moments, by AGENT/tensors/NAME and AGENT/adam/NAME/MOMENT."""
    flat = {}
    agents = torch.load(checkpoint, weights_only=True)["agents"]
    for agent, saved in agents.items():
        for name, x in saved["tensors"].items():
            flat[f"{agent}/tensors/{name}"] = x
        for name, moments in saved["adam"].items():
            for moment, x in moments.items():
                flat[f"{agent}/adam/{name}/{moment}"] = x
    return flat


def same_tensors(a: dict, b: dict) -> bool:
    if a.keys() != b.keys():
        return False
    return all(torch.equal(x, b[key]) for key, x in a.items())


def final_models(run_dir: Path) -> dict[str, dict]:
    """The tensors of each weights file under final/, by its path there."""
    final = run_dir / "final"
    paths = final.rglob("*.safetensors")
    return {path.relative_to(final): load_file(path) for path in paths}


def require_same_runs(a: Path, b: Path) -> None:
    """Metrics, samples, held-out metrics and final weights, bit for bit."""
    assert rows(a) == rows(b)
    assert rows(a, "samples.jsonl") == rows(b, "samples.jsonl")
    assert read(a / "eval.json") == read(b / "eval.json")
    models_a = final_models(a)
    models_b = final_models(b)
    assert models_a.keys() == models_b.keys()
    for path, tensors in models_a.items():
        assert same_tensors(tensors, models_b[path]), path
