"""What a machine decides of a run's settings, and that it runs where Unix's own modules are missing."""
import ctypes
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import error_line, read, settings

import cory
import train_imdb
from cory.errors import UserError
from cory.ppo.loading import load_language_model
from cory.ppo.precision import multiply
from cory.ppo.sampling import encode_prompts, sample
from cory.system import machine
from cory.system.machine import Processor, choose_device, peak_memory, prepare_device, settled, settled_anew

ROOT = Path(__file__).parents[1]
VCUDA = ROOT.parent / "shared" / "vcuda"
EPYC = Processor("AMD EPYC", True, ["AVX-512", "bfloat16"])
OLD_AMD = Processor("AMD Ryzen", True, [])
XEON = Processor("Intel Xeon", False, ["AVX-512"])
AMX = Processor("Intel Xeon", False, ["AVX-512", "bfloat16"])
ARM = Processor("arm", False, [])


@pytest.mark.parametrize("cpu, dtype, head, matmul", [
    (EPYC, "auto", "float32", "onednn"), (EPYC, "bfloat16", "bfloat16", "onednn"),
    (OLD_AMD, "bfloat16", "float32", "pytorch"), (XEON, "auto", "float32", "pytorch"),
    (AMX, "bfloat16", "bfloat16", "pytorch"), (ARM, "float32", "float32", "pytorch")])
def test_a_processor_decides_by_what_it_is(monkeypatch, cpu, dtype, head, matmul):
    monkeypatch.setattr(machine, "processor", lambda: cpu)
    cfg = settled(settings(dtype=dtype, device="cpu"))
    wanted = "float32" if dtype == "auto" else dtype
    assert (cfg.dtype, cfg.head_precision, cfg.cpu_matmul) == (wanted, head, matmul)
    monkeypatch.setattr(machine, "processor", lambda: EPYC if cpu is not EPYC else AMX)
    assert settled(cfg) == cfg                          # once settled, no machine decides again


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability; PyTorch imitates bfloat16 on those that lack it."""
    def of(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation=True: including_emulation or capability >= (8, 0))
    return of


@pytest.mark.parametrize("dtype, capability, expected", [
    ("auto", (9, 0), ("bfloat16", "tf32")), ("auto", (7, 5), ("float32", "float32")),
    ("tf32", (8, 0), ("tf32", "tf32"))])
def test_a_gpu_decides_by_what_it_has(gpu, monkeypatch, dtype, capability, expected):
    gpu(capability)
    monkeypatch.setattr(machine, "processor", lambda: EPYC)     # beside a GPU it multiplies nothing
    cfg = settled(settings(dtype=dtype))
    assert (cfg.dtype, cfg.head_precision, cfg.cpu_matmul) == (*expected, "pytorch")


def test_cudnns_attention_is_off_on_a_gpu(gpu, monkeypatch):
    """Its backward pass gives NaN for left padding on some cards."""
    gpu((9, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        prepare_device(settled(settings()))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


@pytest.mark.parametrize("device, name, value", [
    ("auto", "dtype", "bfloat16"), ("auto", "head_precision", "tf32"), ("cpu", "dtype", "tf32")])
def test_what_a_machine_only_imitates_is_refused(gpu, device, name, value):
    gpu((7, 5))
    device_name = "the GPU" if device == "auto" else "this processor"
    with pytest.raises(UserError, match=f"{name} is '{value}': {device_name} has no such arithmetic"):
        choose_device(settings(device=device, **{name: value}))


def test_a_run_of_a_gpu_is_evaluated_on_a_processor_and_not_resumed_there(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: XEON)
    trained = settings(device="cuda", dtype="bfloat16", head_precision="tf32", cpu_matmul="pytorch")
    here = settled_anew(replace(trained, device="auto"))
    assert (here.dtype, here.head_precision, here.cpu_matmul) == ("float32", "float32", "pytorch")
    with pytest.raises(UserError, match="go on where the run was started"):
        settled(settings(device="cpu", dtype="bfloat16", head_precision="tf32"))
    of_epyc = settings(device="cpu", dtype="float32", head_precision="float32", cpu_matmul="onednn")
    assert settled_anew(of_epyc).cpu_matmul == "pytorch"


def test_settings_that_no_machine_has_seen_have_no_precision():
    for name in ("precision", "storage"):
        with pytest.raises(UserError, match="dtype is 'auto': let the machine choose"):
            getattr(settings(), name)
    assert settled(settings(device="cpu")).precision == ("float32", "float32")


@pytest.mark.parametrize("text, name, amd", [
    ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9B45\n", "AMD EPYC 9B45", True),
    (None, "Intel64 Family 6 Model 85, GenuineIntel", False),
    (None, "AMD64 Family 25 Model 1, AuthenticAMD", True)])
def test_the_processor_by_linux_and_by_python(monkeypatch, tmp_path, text, name, amd):
    cpuinfo = tmp_path / "cpuinfo"
    if text:
        cpuinfo.write_text(text)
    monkeypatch.setattr(machine, "Path", lambda _: cpuinfo)
    monkeypatch.setattr(machine.platform, "processor", lambda: "x86_64" if text else name)
    assert machine.processor()[:2] == (name, amd)


def test_a_run_says_and_keeps_what_it_is_computed_by(small_flags, tmp_path, capsys):
    """On any machine: the choice is written down, and a resumed run goes on with it."""
    train_imdb.main([*small_flags, "--run_dir", str(tmp_path / "r"), "--iterations", "1", "--cpu_matmul",
                     "onednn"])
    line = capsys.readouterr().out.splitlines()[1]
    assert machine.processor().name in line and "float32, head in float32, products by" in line
    resumed = ["--run_dir", str(tmp_path / "r"), "--resume"]
    line = error_line(train_imdb.main, [*resumed, "--cpu_matmul", "pytorch"], capsys)
    assert "cpu_matmul was 'onednn', now 'pytorch'" in line
    train_imdb.main([*resumed, "--iterations", "2"])
    config = read(tmp_path / "r" / "config.json")
    assert [config[k] for k in ("dtype", "head_precision", "cpu_matmul")] == ["float32", "float32", "onednn"]
    prepare_device(settled(settings(device="cpu")))                         # what the other tests run by


@pytest.mark.skipif(not VCUDA.exists(), reason="no imitated card at ../shared/vcuda")
def test_no_tensor_is_on_a_wrong_device_and_no_row_is_waited_for(small_flags, tmp_path):
    """On an imitated card, which refuses what mixes devices, and counts how often the host waits for it."""
    on_gpu = "--device cuda --dtype bfloat16 --lora true --iterations 1 --num_ppo_epochs 1".split()
    command = [sys.executable, "train_imdb.py", *small_flags, *on_gpu]
    log = tmp_path / "log.jsonl"
    environment = {**os.environ, "VCUDA": "1", "VCUDA_LOG": str(log), "PYTHONPATH": str(VCUDA)}
    done = subprocess.run([*command, "--run_dir", str(tmp_path / "r")], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bfloat16, head in tf32" in done.stdout and "| kl " in done.stdout
    waits = lambda file: sum(count for place, count in read(log)["syncs"] if f"/{file}:" in place)
    # two rollouts of two forward passes each, and three evaluations of eight answers each
    assert waits("rollout.py") <= 2 * 4 and waits("evaluation.py") <= 3 * 6


def test_a_gpu_whose_driver_is_too_old_is_named(monkeypatch, tmp_path, capsys):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "GPU", tmp_path / "nvidia0")
    for cuda, device, warns in (("13.0", "auto", True), (None, "auto", False), ("13.0", "cpu", False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        prepare_device(settled(settings(device=device)))
        said = capsys.readouterr().err
        assert ("(CUDA 13.0) cannot use the GPU; is its driver too old?" in said) == warns


def test_only_what_every_system_has_is_imported_at_the_start():
    """`resource` and its like are Unix's; where one is used, it is imported there and may be missing."""
    unix = r"^(?:import|from) (?:resource|fcntl|pwd|grp|termios|syslog|posix|curses|readline)\b"
    root = Path(cory.__file__).parents[1]
    for path in [*root.glob("cory/**/*.py"), *root.glob("train_*.py")]:
        assert not re.findall(unix, path.read_text(), re.M), path


def test_without_unix_memory_is_not_told_and_nothing_fails(monkeypatch):
    def no_library(name):
        raise OSError(name)

    assert peak_memory(torch.device("cpu")) > 0.05
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert peak_memory(torch.device("cpu")) is None
    prepare_device(settled(settings(device="cpu")))


def test_a_build_without_onednn_is_no_obstacle(monkeypatch):
    """As on Apple's processors, where its operations do not exist."""
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.delitem(sys.modules, "cory.system.onednn")
    fresh = importlib.import_module("cory.system.onednn")
    fresh.install()
    assert not fresh.AVAILABLE and fresh.overrides == [] and fresh.DTYPES == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: products on a GPU were not checked")
@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-4), ("tf32", 0.05), ("bfloat16", 0.5)])
def test_the_heads_products_on_a_gpu(precision, tolerance):
    a, b = torch.randn(64, 256, device="cuda"), torch.randn(256, 300, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = multiply(a, b, precision)
    assert y.dtype == torch.float32
    exact = a.cpu().double() @ b.cpu().double()
    torch.testing.assert_close(y.cpu().double(), exact, atol=tolerance, rtol=0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: sampling on a GPU was not checked")
def test_a_gpu_samples_what_a_cpu_samples(small):
    drawn = []
    for device in ("cpu", "cuda"):
        model = load_language_model(str(small / "lm"), device=device)
        rng = torch.Generator().manual_seed(0)
        sampled = sample(model, encode_prompts(model, ["a", "some longer prompt"] * 8, 20), 20, rng)
        drawn.append((sampled.response_BT.cpu(), rng.get_state()))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
