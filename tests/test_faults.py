"""A short sample of tests/faults: damage, signals, two processes, links, full disks and strange folders."""

import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from toys import error_line, mend_checksum, settings

import train_imdb
from cory.config import ASSETS, IMDB_PRESETS, ImdbConfig
from cory.errors import UserError, exit_on_user_error
from cory.experiment import checkpoint, run
from cory.experiment.checkpoint import checkpoints_of
from cory.experiment.flags import parse
from cory.experiment.log import RunLog
from cory.experiment.saved_config import load_config, saved_config
from cory.ppo.update import ppo_update
from cory.system import files, folder
from cory.system.signals import Signals

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(small_flags, tmp_path_factory) -> Path:
    """A finished run of two iterations with a checkpoint of each."""
    path = tmp_path_factory.mktemp("saved") / "run"
    train_imdb.main([*small_flags, "--iterations", "2", "--run_dir", str(path)])
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def refused(capsys, *flags) -> str:
    return error_line(train_imdb.main, flags, capsys)


def resume(capsys, run_dir, *more) -> str:
    """The one line of a resume that is refused, and changes nothing that is kept."""
    before = {path: path.read_bytes() for path in kept_files(run_dir)}
    line = refused(capsys, "--resume", "--run_dir", run_dir, "--iterations", "3", *more)
    assert before == {path: path.read_bytes() for path in kept_files(run_dir)}
    return line


def kept_files(run_dir: Path) -> list[Path]:
    return [*run_dir.glob("*.jsonl"), *run_dir.glob("checkpoints/iteration*")]


# --- output ---
@pytest.mark.parametrize("output", ["/dev/full", "a closed pipe", "a closed terminal"])
def test_no_print_ends_a_program(output, monkeypatch):
    """As with `> /dev/full`, `| head -1`, and when a terminal closes."""
    if output == "/dev/full":
        end = os.open(output, os.O_WRONLY)
    else:
        other, end = os.pipe() if output == "a closed pipe" else pty.openpty()
        os.close(other)
    with open(end, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert exit_on_user_error(lambda: [print("a line", flush=True) for _ in range(3)])() == [None] * 3


def test_a_letter_that_the_terminal_lacks_is_escaped(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="latin-1") as file:
        monkeypatch.setattr(sys, "stdout", file)
        exit_on_user_error(print)("1 – 2")
    assert (tmp_path / "out").read_text() == "1 \\u2013 2\n"


# --- checkpoints ---
def test_every_flipped_or_cut_byte_is_found(copy, capsys):
    newest, older = checkpoints_of(copy)
    whole, rng = newest.read_bytes(), random.Random(0)
    for number in range(60):
        place = rng.randrange(len(whole) if number % 2 else 2000)
        flipped = whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1:]
        newest.write_bytes(whole[:place] if number % 4 == 0 else flipped)
        assert not checkpoint.is_whole(newest)
    line = resume(capsys, copy)
    assert f"{str(newest)!r}: is damaged" in line and f"delete it to go on from {older.name}" in line
    older.write_bytes(b"")
    assert "put back a copy of it, or start a new run" in resume(capsys, copy)
    newest.write_bytes(whole)
    assert checkpoint.is_whole(newest) and not checkpoint.is_whole(older)


OTHERS = {
    "another shape": (lambda name, x: {name: torch.ones(1)}, "wte.weight of shape (1,)"),
    "another agent": (lambda name, x: {name.replace("llm1", "llm3"): x}, "differ in llm1/weights/lm.t"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_other_agents_is_refused(case, copy, capsys):
    change, says = OTHERS[case]
    newest, name = checkpoints_of(copy)[0], "llm1/weights/lm.transformer.wte.weight"
    with checkpoint.safe_open(newest, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(newest)
    save_file(tensors | change(name, tensors.pop(name)), newest, metadata)
    mend_checksum(newest)
    line = resume(capsys, copy)
    assert "is of other agents" in line and says in line


def test_a_checkpoint_of_another_optimizer_is_refused(copy, capsys, monkeypatch):
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.AdamW)
    assert "'llm1': 'Adam'" in (line := resume(capsys, copy)) and "now {'llm1': 'AdamW'" in line


def test_what_lies_beside_the_checkpoints_is_none(copy):
    """A file that a kill has left, a copy under another name."""
    found = checkpoints_of(copy)
    for name in ("writing", "iteration_000009", "iteration_000009.safetensors", "best.safetensors"):
        shutil.copy(found[0], copy / "checkpoints" / name)
    assert checkpoints_of(copy) == found


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_log_that_is_not_the_checkpoints_is_refused(name, copy, capsys):
    rows = (copy / name).read_text().splitlines(keepends=True)
    for edited in (rows[:-1], [*rows, rows[-1]], [*rows[:-1], rows[-1].replace(".", ".1", 1)]):
        (copy / name).write_text("".join(edited))
        assert "its metrics.jsonl or samples.jsonl is not as iteration 2 left it" in resume(capsys, copy)
    (copy / name).write_text(rows[0] + "[]\n" + rows[1])
    assert f"{name}:2': is damaged (ValueError: no row of a log)" in resume(capsys, copy)


def test_config_and_checkpoint_of_two_runs_are_refused(copy, capsys):
    saved = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(saved | {"run": "0" * 16}))
    assert "its config.json and its checkpoint are of two runs" in resume(capsys, copy)


def test_a_diverged_agent_is_not_saved(copy, capsys, monkeypatch):
    def diverge(agent, *_):
        if agent.name == "llm2":
            next(iter(agent.policy.trained().values())).data[0] = torch.inf
        return {}

    checkpoints_of(copy)[0].unlink()                        # no evaluation comes before the next
    good = {path: path.read_bytes() for path in copy.rglob("*.safetensors")}
    monkeypatch.setattr("cory.train.ppo_update", diverge)
    said = refused(capsys, "--resume", "--run_dir", copy, "--iterations", "3")
    assert "llm2 has diverged: these weights are not finite and not saved, older checkpoints stay" in said
    assert good == {path: path.read_bytes() for path in copy.rglob("*.safetensors")}


# --- what a run is on ---
def test_other_data_or_model_is_refused_and_another_place_is_not(small, small_flags, tmp_path, capsys):
    shutil.copytree(small, tmp_path / "small")
    flags = [word.replace(str(small), str(tmp_path / "small")) for word in small_flags]
    run_dir = tmp_path / "r"
    train_imdb.main([*flags, "--iterations", "1", "--run_dir", str(run_dir)])
    (tmp_path / "small").rename(tmp_path / "moved")
    run_dir.rename(tmp_path / "moved_run")
    run_dir, moved = tmp_path / "moved_run", tmp_path / "moved"
    places = ["--model", moved / "lm", "--dataset", moved / "openings"]
    places += ["--reward_model", moved / "classifier"]
    train_imdb.main(["--resume", "--run_dir", str(run_dir), *map(str, places)])
    rows = (moved / "openings" / "train.jsonl").read_text()
    (moved / "openings" / "train.jsonl").write_text(rows.replace("a", "b", 1))
    assert "the data of this run was another" in resume(capsys, run_dir)
    (moved / "openings" / "train.jsonl").write_text(rows)
    weights = load_file(moved / "lm" / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1e-3}, moved / "lm" / "model.safetensors", {"format": "pt"})
    assert "the model of this run was another" in resume(capsys, run_dir)


def test_a_terminal_that_closes_costs_nothing_and_a_folder_has_one_process(small_flags, tmp_path, capsys):
    """SIGHUP, and no line can be printed any more: checkpoint, exit 129."""
    run_dir, more = tmp_path / "r", "--iterations 100000 --save_every 5000 --run_dir"
    command = [sys.executable, str(ROOT / "train_imdb.py"), *small_flags, *more.split(), str(run_dir)]
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, command)
    os.set_blocking(terminal, False)
    log, deadline = run_dir / "metrics.jsonl", time.time() + 60
    while time.time() < deadline and not (log.exists() and log.read_text().count("\n") > 1):
        with suppress(BlockingIOError):
            os.read(terminal, 4096)
        time.sleep(0.05)
    assert f"is in use by process {child}" in refused(capsys, "--resume", "--run_dir", run_dir)
    os.close(terminal)
    os.kill(child, signal.SIGHUP)               # once more, as from a shell
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    done = len(log.read_text().splitlines()) - 1
    assert checkpoints_of(run_dir)[0].name.startswith(f"iteration_{done:06d}-")
    train_imdb.main(["--resume", "--run_dir", str(run_dir), "--iterations", str(done + 1)])


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handled = Signals().install()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == handled.handle
        handled.remove()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_versions_are_said(copy, capsys, monkeypatch):
    """They are asked at the start, and kept: the clone may stand at another commit at a checkpoint."""
    asked, now = [], {**checkpoint.versions(), "torch": "9.0"}
    monkeypatch.setattr(run, "versions", lambda: asked.append("asked") or now)
    run.Run(parse(ImdbConfig, IMDB_PRESETS, ["--resume", "--run_dir", str(copy)])).close()
    assert len(asked) == 2
    assert f"torch {torch.__version__} then, 9.0 now" in capsys.readouterr().out


def test_config_json_names_no_place_of_this_machine_and_finds_what_is_embedded(tmp_path):
    cfg = parse(ImdbConfig, IMDB_PRESETS, ["--reward_model", "/elsewhere/classifier"])
    text = json.dumps(saved_config(cfg, ["llm1"], {}, "mark"))
    assert '"model": "embedded:imdb/lm"' in text and str(ROOT) not in text
    (tmp_path / "config.json").write_text(text)
    found = load_config(tmp_path)
    assert found == cfg and found.dataset == str(ASSETS / "imdb/openings")


def test_a_setting_that_a_run_is_older_than_can_be_given_at_resume(copy, capsys):
    saved = json.loads((copy / "config.json").read_text())
    del saved["importance_cap"]
    (copy / "config.json").write_text(json.dumps(saved))
    flags = ["--resume", "--run_dir", copy, "--iterations", "3", "--importance_cap", "2"]
    train_imdb.main([*map(str, flags)])
    assert "older than, from here on: --importance_cap: 2.0" in capsys.readouterr().out
    assert json.loads((copy / "config.json").read_text())["importance_cap"] == 2


@pytest.mark.parametrize("change, says", [
    ({"iterations": "7"}, "iterations is '7': must be of type int"), ({"agents": []}, "its agents are []"),
    ({"warp": 9}, "unexpected keyword argument 'warp'"), ({"agents": ["../x"]}, "its agents are ['../x']"),
    ({"config": "numpy:median"}, "is no class of settings"), ({"fingerprints": 3}, "fingerprints are not")])
def test_a_strange_config_is_one_line(change, says, copy, capsys):
    saved = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(saved | change))
    assert says in resume(capsys, copy)


# --- processes ---
def test_a_second_signal_ends_at_once_and_processes_that_a_reward_starts_die_as_usual():
    """By SIGTERM, also as they start, though the run answers signals in Python: else pools wait for them."""
    handled = subprocess.run([sys.executable, "-c", """
import multiprocessing, os, signal, time
from cory.system.signals import Signals
Signals().install().waiting = True
fork, ends = multiprocessing.get_context("fork"), set()
for _ in range(100):
    child = fork.Process(target=time.sleep, args=(20,))
    child.start()
    child.terminate()
    child.join(10)
    ends.add(child.exitcode)
    with fork.Pool(2) as pool:
        pool.map(abs, [-1])
print(ends, flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1)
print("never", flush=True)
"""], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert handled.returncode == -signal.SIGINT and handled.stdout == f"{{{-signal.SIGTERM}}}\ngoes on\n"
    assert "this iteration is finished and saved first" in handled.stderr
    assert "Traceback" not in handled.stderr


def test_two_commands_of_one_second_have_two_folders(small_flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "now")
    cfg = parse(ImdbConfig, IMDB_PRESETS, [])
    with folder.claimed(cfg) as first, folder.claimed(cfg) as second:
        (first / "config.json").touch()
        assert [path.name for path in (first, second)] == [
            "imdb-cory-tiny-seed0-now", "imdb-cory-tiny-seed0-now-2"]
    assert first.exists() and not second.exists()           # one in which nothing was written is not kept


def test_only_who_made_a_folder_removes_it_and_only_while_it_has_the_lock(tmp_path, monkeypatch):
    cfg, lock = ImdbConfig(run_dir=str(tmp_path / "r")), tmp_path / "r" / ".lock"
    with folder.claimed(cfg):
        with pytest.raises(UserError, match="is in use by process"), folder.claimed(cfg):
            pass
        assert lock.exists()
    assert not (tmp_path / "r").exists()
    faster, make = FileLock(lock), folder.make
    monkeypatch.setattr(folder, "make", lambda path: make(path) and faster.acquire())
    with pytest.raises(UserError, match="is in use by another process"), folder.claimed(cfg):
        pass
    assert lock.exists()
    faster.release()


# --- a stranger's folder, a full disk ---
@pytest.mark.pictures
def test_links_in_a_run_folder_are_not_followed(copy, tmp_path, capsys):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("precious")
    for name in ("metrics.jsonl.writing", "config.json.writing", "curves.png.writing", "eval.json.writing"):
        (copy / name).symlink_to(outside / "file")
    (copy / "curves.png").symlink_to(outside / "file")
    (copy / "checkpoints" / "writing").symlink_to(outside)
    oldest = checkpoints_of(copy)[1]
    oldest.rename(tmp_path / "oldest")
    oldest.symlink_to(tmp_path / "oldest")
    train_imdb.main(["--resume", "--run_dir", str(copy), "--iterations", "3"])
    assert not oldest.is_symlink() and (tmp_path / "oldest").exists()
    assert (outside / "file").read_text() == "precious" and [*outside.iterdir()] == [outside / "file"]
    assert not (copy / "curves.png").is_symlink()
    for name in ("metrics.jsonl", "samples.jsonl", ".lock", "config.json"):
        kept = copy / f"{name}.kept"
        (copy / name).rename(kept)
        (copy / name).symlink_to(kept)
        assert "is a link" in refused(capsys, "--resume", "--run_dir", copy, "--iterations", "4")
        (copy / name).unlink()
        kept.rename(copy / name)
    for name in ("checkpoints", "final"):
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        assert "not a link" in refused(capsys, "--resume", "--run_dir", copy, "--iterations", "4")
        (copy / name).unlink()
        (tmp_path / name).rename(copy / name)


@pytest.mark.parametrize("where", ["os.fsync", "cory.experiment.checkpoint.save_file"])
def test_a_full_disk_is_one_line_and_costs_no_checkpoint(where, copy, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in (copy / "checkpoints").rglob("*") if path.is_file()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(where, full)
    line = refused(capsys, "--resume", "--run_dir", copy, "--iterations", "3")
    assert "cannot be written (No space left on device)" in line
    for path, content in before.items():
        assert path.read_bytes() == content


def test_a_folder_that_is_emptied_is_one_line(copy, capsys, monkeypatch):
    """While its run goes on: nothing is begun anew under the old name."""
    def update(*args):
        shutil.rmtree(copy / "checkpoints")
        [path.unlink() for path in copy.iterdir() if path.is_file()]
        monkeypatch.setattr("cory.train.ppo_update", ppo_update)
        return ppo_update(*args)

    monkeypatch.setattr("cory.train.ppo_update", update)
    line = refused(capsys, "--resume", "--run_dir", copy, "--iterations", "3")
    assert "metrics.jsonl': cannot be written (No such file or directory)" in line
    assert not (copy / "eval.json").exists()


def test_the_libraries_words_for_a_full_disk_are_understood(tmp_path):
    with pytest.raises(UserError, match="No space left"), files.writable(tmp_path / "x"):
        raise Exception("No space left on device (os error 28)")
    with pytest.raises(RuntimeError), files.writable(tmp_path / "x"):        # our own bug stays one
        raise RuntimeError("size mismatch")


def test_a_run_goes_on_where_wandb_falls_silent(tmp_path, capsys, monkeypatch):
    """First it takes no table, then its process is gone; no row of metrics.jsonl is lost."""
    class Silent:
        id, taken, dead = "abc", [], False

        def log(self, row, step):
            if self.dead or "samples" in row:
                raise (BrokenPipeError if self.dead else ValueError)("no answer")
            self.taken.append(step)

        def finish(self):
            raise TimeoutError

    run = Silent()
    monkeypatch.setattr("cory.experiment.weights_and_biases.start_wandb", lambda *_: run)
    log = RunLog(settings(iterations=4), ["llm1"], tmp_path, 0, "")
    for iteration in range(1, 5):
        run.dead = iteration == 4
        log.iteration(iteration, {"eval/llm1/kl": 1.0}, [{"iteration": iteration, "query": "q"}], {})
    log.close()
    assert run.taken == [1, 2, 3] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    said = capsys.readouterr().out
    assert said.count("W&B fails") == 1
    assert "W&B fails (ValueError: no answer). metrics.jsonl has every row" in said


def test_a_folder_that_the_libraries_cannot_write_into_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not writable"):
        folder.make(tmp_path / os.fsdecode(b"a\xff"))
