"""Files, models and classifiers that are broken, and a Hub that does not answer: one line each, at once."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, save_gpt2
from huggingface_hub import close_session, constants, get_session
from safetensors.torch import load_file, save_file
from toys import settings
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from cory.config import Gsm8kConfig
from cory.errors import UserError
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.lora import load_adapter
from cory.system import hub
from cory.tasks.data import load_columns
from cory.tasks.gsm8k import Gsm8k
from cory.tasks.imdb import SentimentReward


def refusal(call, field: str) -> str:
    """The one line that a call ends in: what, its value, and what there is to do."""
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    what, _, way_out = text.partition(": ")
    assert what.startswith(f"{field} is ") and way_out and text.isprintable() and len(text) < 700, text
    return text


def change(name: str, **values):
    """Sets values in a JSON file of a folder."""

    def changed(folder: Path):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | values))

    return changed


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, share: float):
    def cut_off(folder: Path):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return cut_off


def weights(edit):
    def edited(folder: Path):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edited


def fifo(name: str):
    def put(folder: Path):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return put


@pytest.fixture
def reports(capfd):
    """What the loaders have reported since the last call: on their logger, and on the terminal."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append

    def since() -> list[str]:
        said = [record.getMessage() for record in records] + list(filter(None, capfd.readouterr()))
        records.clear()
        return said

    logging.getLogger("transformers").addHandler(handler)
    yield since
    logging.getLogger("transformers").removeHandler(handler)


# --- data ---
GOOD, DEEP = b'{"text": "a good film"}\n', b"[" * 200_000


def link_to_itself(folder: Path):
    (folder / "train.jsonl").symlink_to("train.jsonl")


def sparse(name: str):
    def made(folder: Path):
        (folder / name).touch()
        os.truncate(folder / name, 10**12)

    return made


DATA = {
    "a pipe": (fifo("train.jsonl"), "train.jsonl': is no regular file"),
    "a pipe of csv": (fifo("train.csv"), "train.csv': is no regular file"),
    "a folder": (lambda folder: (folder / "train.jsonl").mkdir(), "is no regular file"),
    "a link to itself": (link_to_itself, "train.jsonl': cannot be opened (Too many levels"),
    "a link to nothing": (lambda folder: (folder / "test.csv").symlink_to("gone"), "test.csv': cannot be op"),
    "a terabyte": (sparse("train.jsonl"), "has 1000.0 GB, and all rows are held in memory"),
    "a terabyte of csv": (sparse("train.csv"), "has 1000.0 GB"),
    "deep JSON": (write("train.jsonl", GOOD + b'{"text": ' + DEEP), "train.jsonl:2': is no JSON of a row"),
    "6000 digits": (write("train.jsonl", GOOD + b'{"a": ' + b"9" * 6000 + b"}"), ":2': is no JSON of a row"),
    "half a character": (
        write("train.jsonl", GOOD + b'{"text": "a \\ud800"}'),
        "row 2': its 'text' holds '\\ud800', half a character",
    ),
    "a list as text": (write("train.jsonl", b'{"text": [' + b"1," * 9999 + b"1]}"), "row 1': its 'text' is"),
    "strange columns": (write("train.jsonl", b'{"\\u001b[31m": 1}'), "columns found: \\x1b[31m"),
    "csv of 2 and 4": (write("train.csv", b"text,n\na,1\nb,2,3,4\n"), "train.csv': could not be read: Pars"),
    "csv, no UTF-8": (write("train.csv", b"text\n\xff\n"), "train.csv': could not be read: UnicodeDecode"),
    "csv, no end of text": (write("train.csv", b'text\n"a,1\nb,2\n'), "EOF inside string starting at row 1"),
    "broken json": (write("train.json", b'[{"text": "a"'), "train.json': could not be read: ValueError"),
    "deep json": (write("train.json", DEEP), "train.json': could not be read: ValueError"),
    "empty parquet": (write("train.parquet", b""), "train.parquet': could not be read: ArrowInvalid"),
    "nothing": (lambda folder: None, "doesn't contain any data files"),
}


@pytest.mark.parametrize("case", DATA)
def test_broken_data_names_file_and_row(case, tmp_path):
    break_it, says = DATA[case]
    break_it(tmp_path)
    assert says in refusal(lambda: load_columns(str(tmp_path), ["text"]), "dataset")


def denied(*args):
    raise PermissionError(13, "Permission denied")


def test_unreadable_data_is_said(tmp_path, monkeypatch):
    write("train.jsonl", GOOD)(tmp_path)
    monkeypatch.setattr(Path, "open", denied)
    assert "(Permission denied)" in refusal(lambda: load_columns(str(tmp_path), ["text"]), "dataset")


def test_linked_data_and_zero_bytes_in_text_are_fine(tmp_path):
    write("blob", b'{"text": "a\\u0000b"}\n')(tmp_path)
    (tmp_path / "train.jsonl").symlink_to("blob")
    assert load_columns(str(tmp_path), ["text"]) == {"train": [("a\0b",)]}


# --- names ---
LOADERS = {
    "dataset": lambda name: load_columns(name, ["text"]),
    "model": load_language_model,
    "reward_model": lambda name: SentimentReward(name, torch.device("cpu")),
}
NAMES = {
    "too long": ("x" * 5000, "no such file or folder"),
    "a path too long": ("/tmp/" + "x" * 5000, "no such file or folder"),
    "a zero byte": ("a\0b", "no such file or folder"),
    "nothing": ("", "no such file or folder"),
    "no such path": ("/no/such/folder", "no such file or folder"),
    "mistyped file": ("nothing.jsonl", "no such file or folder"),
    "mistyped in a folder": ("here/nothing", "no such file or folder; mend the path, or take it"),
    "a link to itself": ("loop", "is a link to nothing, or to itself"),
    "a pipe": ("pipe", "is "),
    "a file": ("table.csv", "folder"),
}


@pytest.mark.parametrize("field", LOADERS)
@pytest.mark.parametrize("case", NAMES)
def test_names_that_are_no_hub_names_are_refused_at_once(case, field, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reach", lambda name: pytest.fail("asks the Hub"))
    Path("here").mkdir()
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    Path("table.csv").write_text("text\na\n")
    name, says = NAMES[case]
    assert says in refusal(lambda: LOADERS[field](name), field)


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


@pytest.mark.parametrize("field", LOADERS)
@pytest.mark.parametrize("listens", [True, False])
def test_a_hub_that_does_not_answer_is_waited_for_once(field, listens, online, capsys):
    """30 s are for a busy machine: without a limit the libraries take minutes, or never end."""
    import datasets

    server = Server(listens=listens)
    online.setattr(constants, "ENDPOINT", server.url)
    online.setattr(hub, "FIRST", 0.2)
    for waits in (True, False):
        start = time.perf_counter()
        assert "with a network run" in refusal(lambda: LOADERS[field]("nobody/nothing"), field)
        assert time.perf_counter() - start < 30
        said = "waiting for the Hub (nobody/nothing), at most 15 s\n"
        assert capsys.readouterr().out == (said if waits else "")
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


def test_a_process_with_a_silent_hub_ends_with_one_line():
    server = Server()
    code = (
        "from cory import errors; from cory.system import hub; from cory.tasks.data import load_columns;"
        "hub.FIRST = 0.5;"
        "errors.exit_on_user_error(load_columns)('nobody/nothing', ['text'])"
    )
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=env | {"HF_ENDPOINT": server.url},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: dataset is 'nobody/nothing': ")
    assert done.stdout == "waiting for the Hub (nobody/nothing), at most 15 s\n" and server.seen == 1
    assert time.perf_counter() - start < 60


# --- language models ---
CONFIG, GENERATION, FORMAT = "config.json", "generation_config.json", "tokenizer.json"


def spoil(value: float):
    return weights(lambda tensors: tensors["transformer.h.1.ln_1.weight"].fill_(value))


def far_token(folder: Path):
    content = json.loads((folder / FORMAT).read_text())
    content["model"]["vocab"]["a"] = 10**6
    (folder / FORMAT).write_text(json.dumps(content))


MODELS = {
    "end: text": (change(GENERATION, eos_token_id="x"), "its eos_token_id is 'x', no token from 0 to 256"),
    "end: text in a list": (change(GENERATION, eos_token_id=[256, "x"]), "its eos_token_id is 'x'"),
    "end: out of range": (change(GENERATION, eos_token_id=257), "its eos_token_id is 257"),
    "end: below 0": (change(GENERATION, eos_token_id=-1), "its eos_token_id is -1"),
    "end: a fraction": (change(GENERATION, eos_token_id=1.5), "its eos_token_id is 1.5"),
    "end: a list of lists": (change(GENERATION, eos_token_id=[[1]]), "its eos_token_id is [1]"),
    "end: text in config": (change(CONFIG, eos_token_id="x"), "eos_token_id"),
    "no number": (spoil(float("nan")), "not all finite numbers (see transformer.h.1.ln_1.weight)"),
    "infinite": (spoil(float("inf")), "not all finite numbers (see transformer.h.1.ln_1.weight)"),
    "overflow": (spoil(3e38), "its logits are not finite numbers"),
    "a tensor less": (weights(lambda tensors: tensors.pop("transformer.h.1.ln_1.weight")), "lack 1 tensors"),
    "half of the weights": (cut("model.safetensors", 0.5), "could not be loaded (SafetensorError"),
    "no weights": (write("model.safetensors", b""), "could not be loaded (SafetensorError"),
    "half a tokenizer": (cut(FORMAT, 0.5), "its tokenizer.json cannot be read (JSONDecodeError"),
    "deep tokenizer": (write(FORMAT, DEEP), "its tokenizer.json cannot be read (RecursionError"),
    "another tokenizer": (change(FORMAT, model={"type": "?"}), "could not be loaded (Exception"),
    "a far token": (far_token, "its tokenizer has 1000001 tokens and its embedding 257 rows"),
    "half a config": (cut(CONFIG, 0.5), "its config.json cannot be read (JSONDecodeError"),
    "a list as config": (write(CONFIG, b"[]"), "its config.json holds no JSON object"),
    "half a generation config": (cut(GENERATION, 0.5), "its generation_config.json cannot be read"),
    "layers: text": (change(CONFIG, n_layer="many"), "'n_layer' expected int, got str"),
    "layers: -1": (change(CONFIG, n_layer=-1), "config.json says -1 layers and its weights have 28 tensors"),
    "layers: 0": (change(CONFIG, n_layer=0), "config.json says 0 layers"),
    "layers: 10^9": (change(CONFIG, n_layer=10**9), "config.json says 1000000000 layers"),
    "labels: 10^9": (change(CONFIG, num_labels=10**9), "config.json says num_labels 1000000000"),
    "width: -32": (change(CONFIG, n_embd=-32), "negative dimension"),
    "width: 10^9": (change(CONFIG, n_embd=10**9), "overflowed"),
    "words: 10^9": (change(CONFIG, vocab_size=10**9), "its weights have other shapes than its config.json"),
    "positions: 10^9": (change(CONFIG, n_positions=10**9), "its weights have other shapes"),
    "positions: 10^20": (change(CONFIG, n_positions=10**20), "could not be loaded (TypeError"),
    "epsilon: NaN": (change(CONFIG, layer_norm_epsilon=float("nan")), "its logits are not finite numbers"),
    "a pipe": (fifo(FORMAT), "its tokenizer.json is no regular file"),
}


@pytest.mark.parametrize("case", MODELS)
def test_broken_models_are_refused_in_silence(case, small, tmp_path, reports):
    break_it, says = MODELS[case]
    folder = tmp_path / "m"
    shutil.copytree(small / "lm", folder)
    break_it(folder)
    assert says in refusal(lambda: load_language_model(str(folder)), "model")
    assert reports() == []


def test_an_unreadable_folder_is_said(small, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", denied)
    text = refusal(lambda: load_language_model(str(small / "lm")), "model")
    assert "could not be loaded (PermissionError: [Errno 13] Permission denied)" in text


def test_a_model_of_links_is_fine(small, tmp_path):
    """As the Hub's cache has them."""
    for file in (small / "lm").iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load_language_model(str(tmp_path)).end_ids == [256]


def test_what_the_loaders_say_is_heard_again_afterwards(small):
    from transformers.utils import logging

    before = logging.get_verbosity()
    load_language_model(str(small / "lm"))
    refusal(lambda: load_language_model("nobody/nothing"), "model")
    assert logging.get_verbosity() == before < 50


# --- chat templates ---
TEMPLATES = {
    "an error of its own": ("{{ raise_exception('no system\nrole') }}", "TemplateError: no system role"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
    "an unknown name": ("{{ nothing.at.all }}", "UndefinedError"),
    "a deep one": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_chat_templates_that_fail_are_said(case, problems):
    template, says = TEMPLATES[case]
    model = load_language_model(str(problems / "lm"))
    model.tokenizer.chat_template = template
    cfg = Gsm8kConfig(
        model="m",
        dataset=str(problems),
        chat_template=True,
        batch_size=8,
        mini_batch_size=8,
        gradient_accumulation_steps=1,
        eval_queries=8,
        max_response_length=12,
    )
    text = refusal(lambda: Gsm8k(cfg, Gsm8k.load_data(cfg), model), "chat_template")
    assert says in text and "use --chat_template false" in text


# --- adapters ---
@pytest.mark.parametrize("rank", [33, 2**31 - 1])
def test_a_rank_above_the_models_width_is_refused(small, rank):
    cfg = settings(lora=True, lora_rank=rank, device="cpu")
    model = load_language_model(str(small / "lm"))
    assert "use at most 32" in refusal(lambda: Agent("llm1", model, cfg, 0), "lora_rank")


def saved_adapter(small, folder: Path, rank: int = 4) -> Path:
    model = load_language_model(str(small / "lm"))
    Agent("llm1", model, settings(lora=True, lora_rank=rank, device="cpu"), 0)
    model.lm.set_adapter("llm1")
    model.lm.save_pretrained(folder)
    return folder


def adapter_weights(edit):
    def edited(folder: Path):
        tensors = load_file(folder / "adapter_model.safetensors")
        edit(tensors, min(tensors))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return edited


def pickled(folder: Path):
    (folder / "adapter_model.safetensors").unlink()
    torch.save({}, folder / "adapter_model.bin")


def renamed(tensors, name: str):
    tensors[name.replace("h.0", "h.7")] = tensors.pop(name)


SETTINGS = "adapter_config.json"
ADAPTERS = {
    "another rank": (change(SETTINGS, r=8), "cannot be loaded (RuntimeError"),
    "a rank of 10^9": (change(SETTINGS, r=10**9), "its rank is 1000000000, not 1 to 32"),
    "a rank of text": (change(SETTINGS, r="x"), "its rank is 'x', not 1 to 32"),
    "half a config": (cut(SETTINGS, 0.5), "JSONDecodeError"),
    "a list as config": (write(SETTINGS, b"[]"), "cannot be loaded (TypeError"),
    "half of the weights": (cut("adapter_model.safetensors", 0.5), "SafetensorError"),
    "a pickle": (pickled, "there is no file adapter_model.safetensors"),
    "a tensor less": (adapter_weights(lambda tensors, name: tensors.pop(name)), "is missing"),
    "a tensor of another": (adapter_weights(renamed), "of another model"),
    "no number": (adapter_weights(lambda tensors, name: tensors[name].fill_(float("nan"))), "or not finite"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_broken_adapters_are_refused_in_silence(case, small, tmp_path, reports):
    break_it, says = ADAPTERS[case]
    folder = saved_adapter(small, tmp_path / "a")
    base = load_language_model(str(small / "lm")).lm
    break_it(folder)
    reports()
    assert says in refusal(lambda: load_adapter(base, "llm1", folder), "adapter")
    assert reports() == []


def test_a_whole_adapter_loads(small, tmp_path):
    base = load_language_model(str(small / "lm")).lm
    assert load_adapter(base, "llm1", saved_adapter(small, tmp_path / "a", rank=3)) == "llm1"


# --- classifiers ---
def drop_tokenizer(folder: Path):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def one_more_token(folder: Path):
    tokenizer = byte_tokenizer(pad_token="[PAD]")
    assert tokenizer.pad_token_id == 257
    tokenizer.save_pretrained(folder)


def labels(*names: str, first: int = 0):
    return change(CONFIG, id2label=dict(enumerate(names, start=first)), label2id={})


def no_number(tensors):
    tensors["classifier.weight"][0, 0] = float("nan")


def too_large(tensors):
    for tensor in tensors.values():
        tensor.fill_(3e38)


CLASSIFIERS = {
    "no tokenizer": (drop_tokenizer, "holds no tokenizer that can encode text"),
    "padding out of range": (one_more_token, "its tokenizer has 258 tokens and its embedding 257 rows"),
    "no padding": (change("tokenizer_config.json", pad_token=None), "has no padding token"),
    "short texts": (change("tokenizer_config.json", model_max_length=22), "takes 22 tokens, and a query"),
    "length: text": (change("tokenizer_config.json", model_max_length="x"), "could not be loaded (TypeError"),
    "no number": (weights(no_number), "not all finite numbers (see classifier.weight)"),
    "overflow": (weights(too_large), "its logits are not finite numbers"),
    "strange labels": (labels("\x1b[31mbad\n", "x"), "labels found: \\x1b[31mbad , x"),
    "labels: from 1": (labels("NEG", "POS", first=1), "are numbered [1, 2]"),
    "labels: a list": (change(CONFIG, id2label=["POS"]), "could not be loaded (AttributeError"),
    "labels: three": (labels("POS", "NEG", "NEUTRAL"), "its weights have other shapes"),
    "layers: 10^9": (change(CONFIG, n_layers=10**9), "config.json says 1000000000 layers"),
    "half a config": (cut(CONFIG, 0.5), "its config.json cannot be read"),
    "half of the weights": (cut("model.safetensors", 0.5), "could not be loaded (SafetensorError"),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_broken_classifiers_are_refused_in_silence(case, small, tmp_path, reports):
    break_it, says = CLASSIFIERS[case]
    folder = tmp_path / "c"
    shutil.copytree(small / "classifier", folder)
    break_it(folder)
    call = lambda: SentimentReward(str(folder), torch.device("cpu"), longest=23)
    assert says in refusal(call, "reward_model")
    assert reports() == []


LABELS = dict(id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})


def save_roberta(folder: Path) -> str:
    """40 rows of positions, of which RoBERTa leaves out its padding's, 1, and those before."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=257,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        type_vocab_size=1,
        pad_token_id=1,
        initializer_range=0.5,
        **LABELS,
    )
    RobertaForSequenceClassification(config).save_pretrained(folder)
    byte_tokenizer(pad_token="<|endoftext|>").save_pretrained(folder)
    return str(folder)


def test_texts_are_cut_where_a_robertas_positions_end(tmp_path):
    reward = SentimentReward(save_roberta(tmp_path), torch.device("cpu"), longest=38)
    assert reward.limit == 38
    long, cut_off = reward(["b" * 100, "b" * 38])
    assert long == cut_off
    says = refusal(lambda: SentimentReward(str(tmp_path), torch.device("cpu"), longest=39), "reward_model")
    assert "takes 38 tokens, and a query with its response can have 39" in says


@pytest.mark.parametrize("pad, says", [
    (None, "could not be loaded (ValueError: Cannot handle batch sizes > 1"),
    (5, "scores a text otherwise beside a longer one"),
    (256, "")])
def test_a_decoder_that_does_not_know_its_padding_is_refused(pad, says, tmp_path):
    """It would score the padding behind all texts but the longest."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2, pad_token_id=pad, **LABELS
    )
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    byte_tokenizer(pad_token="<|endoftext|>").save_pretrained(tmp_path)
    load = lambda: SentimentReward(str(tmp_path), torch.device("cpu"), longest=23)
    if says:
        assert says in refusal(load, "reward_model")
    else:
        together, alone = load()(["good", "a longer text"])[0], load()(["good"])[0]
        assert together == pytest.approx(alone, abs=1e-5)


def test_a_context_as_small_as_a_toys_is_no_error_of_loading(tmp_path):
    """What does not fit is the task's to say, with its numbers."""
    model = load_language_model(str(save_gpt2(tmp_path, n_positions=4)))
    assert model.context_length == 4
