"""What a machine decides of a run's settings, and that it runs where Unix's own modules are missing."""

import ast
import ctypes
import json
import sys
from pathlib import Path

import pytest
import torch
from toys import settings

import cory
import train_imdb
from cory.errors import UserError
from cory.experiment import files, machine
from cory.experiment.machine import Processor, choose_device, described, peak_memory, prepare_device, settled

EPYC = Processor("AMD EPYC", True, ["AVX-512", "bfloat16"])
OLD_AMD = Processor("AMD Ryzen", True, [])
XEON = Processor("Intel Xeon", False, ["AVX-512"])
AMX = Processor("Intel Xeon", False, ["AVX-512", "bfloat16", "AMX"])
ARM = Processor("arm", False, [])


@pytest.mark.parametrize("cpu, dtype, head, matmul", [
    (EPYC, "auto", "float32", "onednn"), (EPYC, "bfloat16", "bfloat16", "onednn"),
    (OLD_AMD, "auto", "float32", "pytorch"), (OLD_AMD, "bfloat16", "float32", "pytorch"),
    (XEON, "auto", "float32", "pytorch"), (XEON, "bfloat16", "float32", "pytorch"),
    (AMX, "auto", "float32", "pytorch"), (AMX, "bfloat16", "bfloat16", "pytorch"),
    (ARM, "float32", "float32", "pytorch"),
])
def test_a_processor_decides_by_what_it_is(monkeypatch, cpu, dtype, head, matmul):
    monkeypatch.setattr(machine, "processor", lambda: cpu)
    cfg = settled(settings(dtype=dtype, device="cpu"))
    wanted = "float32" if dtype == "auto" else dtype
    assert (cfg.dtype, cfg.head_precision, cfg.cpu_matmul) == (wanted, head, matmul)
    monkeypatch.setattr(machine, "processor", lambda: OLD_AMD if cpu is not OLD_AMD else EPYC)
    assert settled(cfg) == cfg                          # once settled, no machine decides again


@pytest.mark.parametrize("dtype, has_bfloat16, expected", [
    ("auto", True, ("bfloat16", "tf32")), ("auto", False, ("float32", "float32")),
    ("float32", True, ("float32", "float32")), ("tf32", True, ("tf32", "tf32")),
])
def test_a_gpu_decides_by_what_it_has(monkeypatch, dtype, has_bfloat16, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    cfg = settled(settings(dtype=dtype))
    assert (cfg.dtype, cfg.head_precision) == expected


@pytest.mark.parametrize("name", ["dtype", "head_precision"])
def test_tf32_on_a_cpu_is_refused(name):
    with pytest.raises(UserError, match=f"{name} is 'tf32': only a GPU has it; use --{name} auto"):
        choose_device(settings(device="cpu", **{name: "tf32"}))


def test_settings_that_no_machine_has_seen_have_no_precision():
    with pytest.raises(UserError, match="dtype is 'auto': let the machine choose"):
        settings().precision
    assert settled(settings(device="cpu")).precision == ("float32", "float32")


@pytest.mark.parametrize("text, name, amd", [
    ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9B45\n", "AMD EPYC 9B45", True),
    ("vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\n", "Intel(R) Xeon(R)", False),
    (None, "Intel64 Family 6 Model 85, GenuineIntel", False),
    (None, "AMD64 Family 25 Model 1, AuthenticAMD", True),
])
def test_the_processor_by_linux_and_by_python(monkeypatch, text, name, amd):
    def read_text(path):
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(machine.platform, "processor", lambda: name if text is None else "x86_64")
    assert machine.processor()[:2] == (name, amd)


def test_a_run_says_and_keeps_what_it_is_computed_by(small_flags, tmp_path, capsys):
    """On any machine: the choice is written down, and a resumed run goes on with it."""
    run_dir = tmp_path / "run"
    flags = [*small_flags, "--run_dir", str(run_dir), "--save_every", "1"]
    train_imdb.main([*flags, "--iterations", "1", "--cpu_matmul", "onednn"])
    said = capsys.readouterr().out.splitlines()[1]
    assert machine.processor().name in said and "float32, head in float32, products by" in said
    config = json.loads((run_dir / "config.json").read_text())
    assert [config[k] for k in ("dtype", "head_precision", "cpu_matmul")] == ["float32", "float32", "onednn"]
    with pytest.raises(SystemExit):
        train_imdb.main(["--run_dir", str(run_dir), "--resume", "--cpu_matmul", "pytorch"])
    assert "cpu_matmul was 'onednn', now 'pytorch'" in capsys.readouterr().err
    train_imdb.main(["--run_dir", str(run_dir), "--resume", "--iterations", "2"])
    assert json.loads((run_dir / "config.json").read_text())["cpu_matmul"] == "onednn"
    prepare_device(settled(settings()))                         # what the other tests run by


def test_what_a_machine_lacks_is_said_where_the_settings_ask_for_it(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: ARM)
    monkeypatch.setattr(machine.onednn, "overrides", [])
    cfg = settled(settings(device="cpu", cpu_matmul="onednn", dtype="bfloat16"))
    line = described(cfg, torch.device("cpu"))
    assert "has no oneDNN for x86: figures differ by rounding" in line and "float32 is faster here" in line


def test_only_what_every_system_has_is_imported_at_the_start():
    """`resource` and its like are Unix's; where one is used, it is imported there and may be missing."""
    unix = {"resource", "fcntl", "pwd", "grp", "termios", "syslog", "posix", "curses", "readline"}
    root = Path(cory.__file__).parents[1]
    for path in [*root.glob("cory/**/*.py"), *root.glob("train_*.py")]:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])] + [getattr(node, "module", "") or ""]
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not unix & {name.split(".")[0] for name in names}, path


def test_without_unix_memory_is_not_told_and_nothing_fails(monkeypatch, tmp_path):
    def no_library(name):
        raise OSError(name)

    assert peak_memory(torch.device("cpu")) > 0.05
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert peak_memory(torch.device("cpu")) is None
    prepare_device(settled(settings(device="cpu")))

    opened, original = [], files.os.open
    monkeypatch.setattr(files.os, "open", lambda path, flags: opened.append(path) or original(path, flags))
    monkeypatch.setattr(files.os, "name", "nt")
    (tmp_path / "file").write_text("a")
    files.flush(tmp_path, tmp_path / "file")
    monkeypatch.undo()                                          # or pathlib would take this for Windows
    assert opened == [tmp_path / "file"]
