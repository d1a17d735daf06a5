"""A short sample of tests/faults: damage, signals, two processes, links, full disks and strange folders."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import mend_checksums, settings

import train_imdb
from cory.commands.flags import parse
from cory.config import ASSETS, IMDB_PRESETS, ImdbConfig
from cory.errors import UserError
from cory.experiment import checkpoint, run
from cory.experiment.checkpoint import checkpoints_of
from cory.experiment.log import RunLog
from cory.experiment.saved_config import load_config
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


def refused(capsys, *argv) -> str:
    """The one line of a command that a person can mend."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([str(word) for word in argv])
    lines = capsys.readouterr().err.strip("\n").split("\n")
    assert stop.value.code == 2 and lines[-1].startswith("error: ") and "Traceback" not in "".join(lines)
    return lines[-1]


def resume(capsys, run_dir, *more) -> str:
    before = {path: path.read_bytes() for path in run_dir.rglob("*.jsonl")}
    line = refused(capsys, "--resume", "--run_dir", run_dir, "--iterations", "3", *more)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*.jsonl")}     # nothing is erased
    return line


# --- checkpoints ---
def test_every_flipped_or_cut_byte_is_found_and_the_file_named(copy, capsys):
    newest, older = checkpoints_of(copy)
    paths, rng = sorted(newest.iterdir()), random.Random(0)
    assert len(paths) == 7
    for number in range(60):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        place = rng.randrange(len(whole))
        broken = whole[:place] if number % 4 == 0 else (
            whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1:])
        path.write_bytes(broken)
        with pytest.raises(UserError) as error:
            checkpoint.require_unharmed(newest)
        assert str(newest) in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(whole)
    checkpoint.require_unharmed(newest)
    (newest / "llm2.moments.safetensors").write_bytes(b"")
    line = resume(capsys, copy)
    assert "llm2.moments.safetensors" in line and f"iteration_000001 is whole: delete {newest}" in line
    shutil.rmtree(newest)
    train_imdb.main(["--resume", "--run_dir", str(copy), "--iterations", "2"])
    assert checkpoints_of(copy)[0].name == "iteration_000002"


def edit_state(**changes):
    def edit(newest):
        path = newest / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return edit


def edit_tensors(file, change):
    def edit(newest):
        tensors = load_file(newest / file)
        name = next(name for name, x in tensors.items() if x.dim() == 2)
        save_file(change(name, tensors), newest / file)
    return edit


def edit_weights(change):
    return edit_tensors("llm1.safetensors", change)


def edit_moments(change):
    return edit_tensors("llm1.moments.safetensors", change)


def swapped(newest):
    for suffix in (".safetensors", ".moments.safetensors"):
        (newest / f"llm1{suffix}").rename(newest / "x")
        (newest / f"llm2{suffix}").unlink()
        (newest / "x").rename(newest / f"llm2{suffix}")


@pytest.mark.parametrize("edit, says", [
    (edit_state(iteration=-1), "holds iteration -1"), (edit_state(iteration=True), "holds iteration True"),
    (edit_state(roles=["llm1", "llm1"]), "holds roles"), (edit_state(roles=3), "is damaged"),
    (edit_state(kl_coef={"llm1": 1.0}), "holds kl_coef"),
    (edit_state(kl_coef={"llm1": -1.0, "llm2": 0.1}), "holds kl_coef"),
    (edit_state(python_random=[3, [1], None]), "is damaged"),
    (edit_weights(lambda name, w: w | {name: torch.ones(1)}), "is (1,), not ("),
    (edit_weights(lambda name, w: w | {name: w[name] * torch.nan}), "holds numbers that are not finite"),
    (edit_weights(lambda name, w: {k: x for k, x in w.items() if k != name}), "lacks lm."),
    (edit_moments(lambda name, m: m | {name: torch.ones(1)}), "is (1,), of no parameter"),
    (edit_moments(lambda name, m: {k: x for k, x in m.items() if k != name}), "lacks lm."),
    (swapped, "llm1.safetensors': cannot be read")])
def test_a_checkpoint_edited_on_purpose_is_refused_too(edit, says, copy, capsys):
    newest, _ = checkpoints_of(copy)
    edit(newest)
    mend_checksums(newest)
    assert says in resume(capsys, copy)


def test_lost_checkpoints_erase_nothing(copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    assert "has done 2 iterations and has no checkpoint" in resume(capsys, copy)


def test_a_log_that_lost_rows_is_refused(copy, capsys):
    rows = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(rows[:-2]))
    assert "metrics.jsonl lacks iterations" in resume(capsys, copy)
    (copy / "metrics.jsonl").write_text(rows[0] + "[]\n" + rows[1])
    assert "metrics.jsonl:2': is no row of a log" in resume(capsys, copy)


def test_a_diverged_agent_is_not_saved(small_flags, tmp_path, capsys, monkeypatch):
    def diverge(agent, *_):
        if agent.name == "llm2":
            next(iter(agent.policy.trained().values())).data[0] = torch.inf
        return {}

    train_imdb.main([*small_flags, "--iterations", "1", "--run_dir", str(tmp_path / "r")])
    checkpoints = tmp_path / "r" / "checkpoints"
    good = {path: path.read_bytes() for path in checkpoints.rglob("*.safetensors")}
    monkeypatch.setattr("cory.train.ppo_update", diverge)
    flags = ["--resume", "--run_dir", tmp_path / "r", "--iterations", "3"]
    said = refused(capsys, *flags)
    assert "llm2 has diverged: these weights are not finite and not saved, older checkpoints stay" in said
    assert good == {path: path.read_bytes() for path in checkpoints.rglob("*.safetensors")}


# --- what a run is on ---
def test_other_data_or_model_is_refused_and_another_place_is_not(small, small_flags, tmp_path, capsys):
    shutil.copytree(small, tmp_path / "small")
    flags = [word.replace(str(small), str(tmp_path / "small")) for word in small_flags]
    run_dir = tmp_path / "r"
    train_imdb.main([*flags, "--iterations", "2", "--run_dir", str(run_dir)])
    (tmp_path / "small").rename(tmp_path / "moved")
    run_dir.rename(tmp_path / "moved_run")
    run_dir, moved = tmp_path / "moved_run", tmp_path / "moved"
    places = ["--model", moved / "lm", "--dataset", moved / "openings"]
    places += ["--reward_model", moved / "classifier"]
    train_imdb.main(["--resume", "--run_dir", str(run_dir), *map(str, places), "--iterations", "2"])
    rows = (moved / "openings" / "train.jsonl").read_text()
    (moved / "openings" / "train.jsonl").write_text(rows.replace("a", "b", 1))
    assert "the data of this run was another" in resume(capsys, run_dir)
    (moved / "openings" / "train.jsonl").write_text(rows)
    weights = load_file(moved / "lm" / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1e-3}, moved / "lm" / "model.safetensors", {"format": "pt"})
    assert "the model of this run was another" in resume(capsys, run_dir)


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


def test_other_versions_are_said(copy, capsys):
    newest, _ = checkpoints_of(copy)
    edit_state(versions={"torch": "1.0"})(newest)
    mend_checksums(newest)
    train_imdb.main(["--resume", "--run_dir", str(copy)])
    said = next(line for line in capsys.readouterr().out.splitlines() if "other versions" in line)
    assert f"torch 1.0 then, {torch.__version__} now" in said


def test_the_commit_is_that_of_the_start(small_flags, tmp_path, monkeypatch):
    """A checkpoint comes minutes later: the clone may stand at another commit by then."""
    asked = []
    monkeypatch.setattr(run, "versions", lambda: asked.append("asked") or {})
    run.Run(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--run_dir", str(tmp_path / "r")])).close()
    assert asked == ["asked"]


def test_an_older_run_that_was_to_reset_at_no_exchange_goes_on(tmp_path):
    """It reset nothing then, and is refused now if asked for anew."""
    (tmp_path / "config.json").write_text(json.dumps({
        "config": "cory.config:ImdbConfig", "agents": ["llm1", "llm2"], "role_exchange_every": 0,
        "reset_on_exchange": True}))
    assert not load_config(tmp_path).reset_on_exchange


def test_embedded_assets_are_found_after_a_move(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "config": "cory.config:ImdbConfig", "agents": ["llm1"], "model": "embedded:imdb/lm",
        "dataset": "/somewhere/else/cory/assets/imdb/openings", "reward_model": "/elsewhere/classifier"}))
    cfg = load_config(tmp_path)
    assert cfg.model == str(ASSETS / "imdb/lm") and cfg.dataset == str(ASSETS / "imdb/openings")
    assert cfg.reward_model == "/elsewhere/classifier"


def test_config_json_names_no_place_of_this_machine(saved, tmp_path):
    from cory.commands.flags import parse
    from cory.config import IMDB_PRESETS, ImdbConfig
    from cory.experiment.saved_config import saved_config
    text = json.dumps(saved_config(parse(ImdbConfig, IMDB_PRESETS, []), ["llm1"], {}))
    assert '"model": "embedded:imdb/lm"' in text and str(ROOT) not in text


@pytest.mark.parametrize("change, says", [
    ({"iterations": "7"}, "its iterations is '7'"), ({"lora": 1}, "its lora is '1'"),
    ({"seed": 1.5}, "its seed is '1.5'"), ({"dtype": "float64"}, "its dtype is 'float64'"),
    ({"warp": 9}, "there is no setting warp"), ({"agents": []}, "its agents are no list"),
    ({"agents": ["../x"]}, "its agents are no list"), ({"config": "pathlib:Path"}, "Python's own"),
    ({"config": "numpy:median"}, "is no class of settings"), ({"gamma": 7.0}, "gamma is 7.0"),
    ({"fingerprints": 3}, "fingerprints are not")])
def test_a_strange_config_is_one_line(change, says, copy, capsys):
    saved = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(saved | change))
    assert says in resume(capsys, copy)


# --- processes ---
def start(flags, *more) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train_imdb.py"), *flags, *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_iteration(run_dir: Path, process: subprocess.Popen) -> None:
    deadline = time.time() + 60
    while time.time() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text().count("\n") > 1:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def test_a_signal_ends_a_run_after_its_iteration_and_a_folder_has_one_process(small_flags, tmp_path, capsys):
    run_dir = tmp_path / "r"
    process = start(small_flags, "--iterations", "100000", "--save_every", "5000", "--run_dir", str(run_dir))
    wait_for_iteration(run_dir, process)
    line = refused(capsys, "--resume", "--run_dir", run_dir)
    assert f"is in use by process {process.pid}" in line
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
    done = len((run_dir / "metrics.jsonl").read_text().splitlines()) - 1
    assert checkpoints_of(run_dir)[0].name == f"iteration_{done:06d}"
    assert f"stopped by SIGTERM after iteration {done}; go on with: python" in out
    train_imdb.main(["--resume", "--run_dir", str(run_dir), "--iterations", str(done + 1)])


def test_a_second_signal_ends_at_once():
    handled = subprocess.run([sys.executable, "-c", """
import os, signal, time
from cory.system.signals import Signals
signals = Signals().install()
signals.waiting = True
os.kill(os.getpid(), signal.SIGINT)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1)
print("never", flush=True)
"""], cwd=ROOT, capture_output=True, text=True)
    assert handled.returncode == -signal.SIGINT and handled.stdout == "goes on\n"
    assert "a second signal ends the run at once" in handled.stderr and "Traceback" not in handled.stderr


def test_two_commands_of_one_second_have_two_folders(small_flags, tmp_path, monkeypatch):
    from cory.commands.flags import parse
    from cory.config import IMDB_PRESETS, ImdbConfig
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "now")
    cfg = parse(ImdbConfig, IMDB_PRESETS, [])
    with folder.claimed(cfg) as first, folder.claimed(cfg) as second:
        (first / "config.json").touch()
        assert [path.name for path in (first, second)] == [
            "imdb-cory-tiny-seed0-now", "imdb-cory-tiny-seed0-now-2"]
    assert first.exists() and not second.exists()           # one in which nothing was written is not kept


# --- a stranger's folder, a full disk ---
@pytest.mark.pictures
def test_links_in_a_run_folder_are_not_followed(copy, tmp_path, capsys):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("precious")
    for name in ("metrics.jsonl.writing", "config.json.writing", "curves.png.writing", "eval.json.writing"):
        (copy / name).symlink_to(outside / "file")
    (copy / "curves.png").unlink()
    (copy / "curves.png").symlink_to(outside / "file")
    (copy / "checkpoints" / "writing").symlink_to(outside)
    oldest = copy / "checkpoints" / "iteration_000001"
    oldest.rename(tmp_path / "oldest")
    oldest.symlink_to(tmp_path / "oldest")
    train_imdb.main(["--resume", "--run_dir", str(copy), "--iterations", "3"])
    assert not oldest.is_symlink() and (tmp_path / "oldest" / "state.json").exists()
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


@pytest.mark.parametrize("where", ["os.fsync", "torch.save", "cory.experiment.checkpoint.write_tensors"])
def test_a_full_disk_is_one_line_and_costs_no_checkpoint(where, copy, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in (copy / "checkpoints").rglob("*") if path.is_file()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(where, full)
    line = refused(capsys, "--resume", "--run_dir", copy, "--iterations", "3")
    assert "cannot be written (No space left on device)" in line and "GB free" in line
    for path, content in before.items():
        assert path.read_bytes() == content


def test_torchs_own_words_for_a_full_disk_are_understood(tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    with pytest.raises(UserError, match="No space left"), files.writable(tmp_path / "x"):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**40}))
    with pytest.raises(RuntimeError), files.writable(tmp_path / "x"):        # our own bug stays one
        raise RuntimeError("size mismatch")


def test_control_characters_do_not_reach_the_terminal(capsys):
    from cory.errors import exit_on_user_error

    @exit_on_user_error
    def main():
        raise UserError("label", None, "\x1b[2J\x07 gone \u202e txt")

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: label is None: \\x1b[2J\\x07 gone \\u202e txt\n"


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
