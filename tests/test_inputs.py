"""Files, models and classifiers that are broken, and a Hub that does not answer: one line each, at once.

A case is a function of a folder that breaks it, its further arguments, and what is then said.
"""
import json
import logging
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, save_gpt2
from huggingface_hub import close_session, constants, get_session
from safetensors.torch import load_file, save_file
from toys import settings
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2ForSequenceClassification, GPT2Model

from cory.errors import UserError
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.lora import load_adapter
from cory.system import hub
from cory.tasks import data
from cory.tasks.data import load_columns
from cory.tasks.imdb import SentimentReward

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, ADAPTER_CONFIG = "tokenizer_config.json", "adapter_config.json"
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
GOOD, DEEP = b'{"text": "a good film"}\n', b"[" * 200_000


def refusal(call, field: str) -> str:
    """The one line that a call ends in: what, its value, and what there is to do."""
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    what, _, way_out = text.partition(": ")
    assert what.startswith(f"{field} is ") and way_out and text.isprintable() and len(text) < 700, text
    return text


# --- ways to break a folder ---
def write(folder: Path, name: str, content: bytes):
    (folder / name).write_bytes(content)


def change(folder: Path, name: str, **values):
    """Sets values in a JSON file."""
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(content | values))


def changing(name: str, **values):
    return lambda folder: change(folder, name, **values)


def halve(folder: Path, name: str):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:len(content) // 2])


def edit_weights(folder: Path, edit, name: str = WEIGHTS):
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def link(folder: Path, name: str, target: str):
    (folder / name).symlink_to(target)


def remove(folder: Path, pattern: str):
    for file in folder.glob(pattern):
        file.unlink()


def pickle(folder: Path, name: str, other: str):
    (folder / name).unlink()
    torch.save({}, folder / other)


@pytest.fixture
def reports(capfd):
    """What the loaders have reported since the last call: on their logger, and on the terminal."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append

    def since() -> list[str]:
        lines = [record.getMessage() for record in records] + list(filter(None, capfd.readouterr()))
        records.clear()
        return lines

    logging.getLogger("transformers").addHandler(handler)
    yield since
    logging.getLogger("transformers").removeHandler(handler)


# --- data ---
DATA = {
    "a folder": (lambda folder: (folder / "train.jsonl").mkdir(), "cannot be read (Is a directory)"),
    "a link to itself": (link, "train.jsonl", "train.jsonl", "cannot be read (Too many levels"),
    "deep JSON": (write, "train.jsonl", GOOD + b'{"text": ' + DEEP, "train.jsonl:2': is no row of JSON (Rec"),
    "half a character": (write, "train.jsonl", GOOD + b'{"text": "a \\ud800"}',
                         "row 2': its 'text' is 'a \\ud800', which is empty"),
    "no rows": (write, "train.jsonl", b"", "has no rows"),
    "no UTF-8": (write, "train.jsonl", GOOD + b'{"text": "\xff"}', ":2': is no row of JSON (Unicode"),
    "white space": (write, "train.jsonl", GOOD + b'{"text": "  "}', "row 2': its 'text' is ' ', which"),
    "strange columns": (write, "train.jsonl", b'{"\\u001b[31m": 1}', "columns found: \\x1b[31m"),
    "csv of 2 and 4": (write, "train.csv", b"text,n\na,1\nb,2,3,4\n", "could not be read (ParserError"),
    "nothing": (lambda folder: None, "doesn't contain any data files"),
}


@pytest.mark.parametrize("case", DATA)
def test_broken_data_names_file_and_row(case, tmp_path):
    break_it, *arguments, says = DATA[case]
    break_it(tmp_path, *arguments)
    assert says in refusal(lambda: load_columns(str(tmp_path), ["text"]), "dataset")


def test_a_folder_of_everything_is_not_walked(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MOST_FILES", 3)
    for number in range(4):
        write(tmp_path, f"{number}.txt", b"text")
    line = refusal(lambda: load_columns(str(tmp_path), ["text"]), "dataset")
    assert "holds more than 3 files; name the folder of the data alone" in line


def test_links_and_zero_bytes_in_text_are_fine(small, tmp_path):
    write(tmp_path, "blob", b'{"text": "a\\u0000b"}\n')
    link(tmp_path, "train.jsonl", "blob")
    assert load_columns(str(tmp_path), ["text"]) == {"train": [("a\0b",)]}
    for file in (small / "lm").iterdir():                       # as the Hub's cache has them
        link(tmp_path, file.name, str(file))
    assert load_language_model(str(tmp_path)).end_ids == [256]


# --- names ---
LOADERS = {
    "dataset": lambda name: load_columns(name, ["text"]), "model": load_language_model,
    "reward_model": lambda name: SentimentReward(name, torch.device("cpu"), longest=23)}
NAMES = {
    "a path too long": ("/tmp/" + "x" * 5000, "no such file or folder"),
    "a zero byte": ("a\0b", "no such file or folder"), "nothing": ("", "no such file or folder"),
    "mistyped file": ("nothing.jsonl", "no such file or folder"),
    "mistyped in a folder": ("here/nothing", "no such file or folder; mend the path, or take it"),
    "a link to itself": ("loop", "is a link to nothing, or to itself"), "a pipe": ("pipe", "is "),
    "a file": ("table.csv", "folder")}


@pytest.mark.parametrize("case", NAMES)
def test_names_that_are_no_hub_names_are_refused_at_once(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reach", lambda name: pytest.fail("asks the Hub"))
    Path("here").mkdir()
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    Path("table.csv").write_text("text\na\n")
    name, says = NAMES[case]
    for field, load in LOADERS.items():
        assert says in refusal(lambda: load(name), field)


# --- a Hub that does not answer ---
class Server:
    """Accepts, answers as many first requests as it is told to, and is silent from then on. One that does not
    listen holds its port, and refuses.
    """

    def __init__(self, answers: int = 0, listens: bool = True):
        self.left, self.seen = answers, 0
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        if listens:
            self.socket.listen()
            threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        connections = []
        while True:
            connections.append(self.socket.accept()[0])
            connections[-1].recv(4096)
            self.seen += 1
            if self.seen <= self.left:
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                connections[-1].sendall(answer)
                connections.pop().close()


@pytest.fixture
def online(monkeypatch):
    """As if the process had been started without HF_HUB_OFFLINE."""
    import datasets

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "asked", set())
    close_session()
    yield monkeypatch
    close_session()


@pytest.mark.parametrize("field, listens", [*((field, True) for field in LOADERS), ("model", False)])
def test_a_hub_that_does_not_answer_is_waited_for_once(field, listens, online, capsys):
    """30 s are for a busy machine: without a limit the libraries take minutes, or never end."""
    import datasets

    server = Server(listens=listens)
    online.setattr(constants, "ENDPOINT", server.url)
    online.setattr(hub, "FIRST", 0.2)
    for waits in (True, False):
        start = time.perf_counter()
        assert "`hf download nobody/nothing" in refusal(lambda: LOADERS[field]("nobody/nothing"), field)
        assert time.perf_counter() - start < 30
        line = f"waiting for the Hub (nobody/nothing), at most {hub.FIRST + 5} s\n"
        assert capsys.readouterr().out == (line if waits else "")
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_falls_silent_is_given_up(online, capsys):
    server = Server(answers=1)
    online.setattr(constants, "ENDPOINT", server.url)
    online.setattr(hub, "LATER", 0.3)
    for _ in range(2):
        hub.reach("nobody/nothing")
    assert not constants.HF_HUB_OFFLINE and server.seen == 1 and capsys.readouterr().out.count("waiting") == 1
    start, errors = time.perf_counter(), []
    for _ in range(3):
        with pytest.raises(Exception) as error:
            get_session().get(server.url, timeout=None)
        errors.append(error.type.__name__)
    assert errors[0] == "ReadTimeout" and errors[-1] == "OfflineModeIsEnabled"
    assert constants.HF_HUB_OFFLINE and time.perf_counter() - start < 30


def test_an_address_that_is_looked_up_for_ever_is_waited_for_no_longer(monkeypatch):
    """No time limit of a request ends that."""
    looked_up = threading.Event()
    session = type("Session", (), {"head": lambda self, *args, **kwargs: looked_up.wait(60)})
    monkeypatch.setattr(hub, "get_session", session)
    start = time.perf_counter()
    assert not hub.answers(0.2) and time.perf_counter() - start < 30
    looked_up.set()


# --- language models ---
def no_head(folder: Path):
    GPT2Model(GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1, bos_token_id=256, eos_token_id=256,
                         tie_word_embeddings=False)).save_pretrained(folder)


def no_eos(folder: Path):
    byte_tokenizer(pad_token="<|endoftext|>").save_pretrained(folder)


def remote_code(folder: Path):
    classes = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    change(folder, CONFIG, model_type="mine", auto_map=classes)
    (folder / "mine.py").write_text("raise SystemExit('remote code ran')")


def soft_capped(folder: Path):
    Gemma2ForCausalLM(Gemma2Config(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.05, bos_token_id=256,
        eos_token_id=256, pad_token_id=256)).save_pretrained(folder)


MODELS = {
    "no config": (remove, CONFIG, "is no folder with a config.json"),
    "no tokenizer": (remove, "tokenizer*", "tokenizer"),
    "no EOS": (no_eos, "has no EOS token"),
    "no head": (no_head, "lack 1 tensors of a GPT2LMHeadModel (lm_head.weight"),
    "a smaller vocabulary": (lambda folder: save_gpt2(folder, vocab_size=200, bos_token_id=0, eos_token_id=0),
                             "257 tokens and its embedding 200 rows"),
    "a pickle": (pickle, WEIGHTS, "pytorch_model.bin", "no safetensors weights"),
    "remote code": (remote_code, "never run here"),
    "soft-capped logits": (soft_capped, "not those of a linear head alone"),
    "a classifier": (changing(CONFIG, model_type="distilbert"), "could not be loaded (ValueError: Unrec"),
    "end: text": (changing(GENERATION, eos_token_id="x"), "could not be loaded ("),
    "no number": (edit_weights, lambda x: x["transformer.h.1.ln_1.weight"].fill_(float("nan")),
                  "not all finite numbers (see transformer.h.1.ln_"),
    "half of the weights": (halve, WEIGHTS, "could not be loaded (SafetensorError"),
    "deep tokenizer": (write, TOKENIZER, DEEP, "its tokenizer.json cannot be read (RecursionError"),
    "fewer layers": (changing(CONFIG, n_layer=1), "tensors would be left out (transformer.h.1."),
    "no decoder": (changing(TOKENIZER, decoder=None), "does not give back the text that it has read"),
    "words: 10^9": (changing(CONFIG, vocab_size=10**9), "its weights have other shapes than its config.json")}


def test_what_the_loaders_say_is_heard_again_afterwards(small):
    from transformers.utils import logging

    before = logging.get_verbosity()
    load_language_model(str(small / "lm"))
    refusal(lambda: load_language_model("nobody/nothing"), "model")
    assert logging.get_verbosity() == before < 50


# --- adapters ---
def rename_first(tensors):
    first = min(tensors)
    tensors[first.replace("h.0", "h.7")] = tensors.pop(first)


ADAPTERS = {
    "another rank": (changing(ADAPTER_CONFIG, r=8), "cannot be loaded (RuntimeError"),
    "a pickle": (pickle, ADAPTER, "adapter_model.bin", "there is no file adapter_model.safetensors"),
    "a tensor less": (edit_weights, lambda x: x.pop(min(x)), ADAPTER, "is missing"),
    "a tensor of another": (edit_weights, rename_first, ADAPTER, "of another model"),
    "no number": (edit_weights, lambda x: x[min(x)].fill_(float("nan")), ADAPTER, "or not finite")}


# --- classifiers ---
CLASSIFIERS = {
    "no tokenizer": (remove, "tokenizer*", "holds no tokenizer that can encode text"),
    "no padding": (changing(TOKENIZER_CONFIG, pad_token=None), "has no padding token"),
    "short texts": (changing(TOKENIZER_CONFIG, model_max_length=22), "takes 22 tokens, and a query"),
    "overflow": (edit_weights, lambda x: [tensor.fill_(3e38) for tensor in x.values()],
                 "or load other weights"),
    "strange labels": (changing(CONFIG, id2label={0: "\x1b[31mbad\n", 1: "x"}, label2id={}),
                       "and has {0: '\\x1b[31mbad")}


@pytest.fixture(scope="module")
def adapter(small, tmp_path_factory) -> Path:
    model = load_language_model(str(small / "lm"))
    Agent("llm1", model, settings(lora=True, lora_rank=4, device="cpu"), 0)
    model.lm.set_adapter("llm1")
    folder = tmp_path_factory.mktemp("adapter")
    model.lm.save_pretrained(folder)
    return folder


BROKEN = {"model": MODELS, "adapter": ADAPTERS, "reward_model": CLASSIFIERS}


@pytest.mark.parametrize("field, case", [(field, case) for field, cases in BROKEN.items() for case in cases])
def test_what_is_broken_is_refused_in_silence(field, case, small, adapter, tmp_path, reports):
    whole = {"model": small / "lm", "adapter": adapter, "reward_model": small / "classifier"}[field]
    folder = shutil.copytree(whole, tmp_path / "broken")
    break_it, *arguments, says = BROKEN[field][case]
    break_it(folder, *arguments)
    reports()
    if field == "adapter":
        base = load_language_model(str(small / "lm")).lm
        line = refusal(lambda: load_adapter(base, "llm1", folder), field)
    else:
        line = refusal(lambda: LOADERS[field](str(folder)), field)
    assert says in line and reports() == []


@pytest.mark.parametrize("pad, says", [
    (None, "could not be loaded (ValueError: Cannot handle batch sizes > 1"),
    (5, "pad_token_id in its config.json to the tokenizer's"), (256, "")])
def test_a_decoder_that_does_not_know_its_padding_is_refused(pad, says, tmp_path):
    """It would score the padding behind all texts but the longest."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2, pad_token_id=pad,
                        id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    byte_tokenizer(pad_token="<|endoftext|>").save_pretrained(tmp_path)
    if says:
        assert says in refusal(lambda: LOADERS["reward_model"](str(tmp_path)), "reward_model")
    else:
        reward = LOADERS["reward_model"](str(tmp_path))
        together, alone = reward(["good", "a longer text"])[0], reward(["good"])[0]
        assert together == pytest.approx(alone, abs=1e-5)
