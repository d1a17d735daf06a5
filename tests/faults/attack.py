"""The fault suite: attacks with real processes and real faults, and how many of each were held.

    python tests/faults/attack.py                       # all, some 25 minutes on two cores
    python tests/faults/attack.py kills flips --times 0.1

Prints the table of docs/reliability.md. `--times` multiplies how often each attack is tried. Every run is of
the small random model that the tests use.
"""
import argparse
import contextlib
import io
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from conftest import SIZES, save_small  # noqa: E402


class Attack:
    """One row of the table: how often it was tried and held, and what did not hold."""

    def __init__(self, times: float, folder: Path, assets: Path):
        self.times, self.folder, self.assets = times, folder, assets
        self.tried, self.faults, self.noted = 0, [], []
        self.flags = ["--model", str(assets / "lm"), "--reward_model", str(assets / "classifier"),
                      "--dataset", str(assets / "openings"), *SIZES]

    def count(self, number: int) -> range:
        return range(max(1, round(number * self.times)))

    def held(self, holds: bool, what: str) -> None:
        self.tried += 1
        if not holds:
            self.faults.append(what)

    def held_quietly(self, main: Callable, argv: list, what: str) -> None:
        """A command in this process ends well, or in one line; a traceback is no good end."""
        err, status = io.StringIO(), 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            try:
                main([str(word) for word in argv])
            except SystemExit as stop:
                status = stop.code or 0
            except BaseException:
                traceback.print_exc()
                status = 1
        said = err.getvalue()
        self.held(status == 0 or is_one_line(status, said), f"{what!r}: {said[-250:]}")

    def row(self, what: str) -> str:
        """Of the table."""
        noted = f" ({'; '.join(dict.fromkeys(self.noted))})" if self.noted else ""
        return f"| {' '.join(what.split())}{noted} | {self.tried} | {self.tried - len(self.faults)} |"

    def start(self, *words, **how) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "train_imdb.py"), *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                **how)

    def begin(self, folder: Path, *words, **how) -> subprocess.Popen:
        """A run that has written its first row, or has ended."""
        process = self.start(*self.flags, *words, "--run_dir", folder, **how)
        while process.poll() is None and not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        return process

    def go_on(self, folder: Path) -> str:
        """Resumes a run, or begins one that had not begun; returns what it wrote to stderr."""
        begun = (folder / "config.json").exists()
        how = ["--resume"] if begun else [*self.flags, "--iterations", "7"]
        return self.start(*how, "--run_dir", folder).communicate()[1]

    def whole(self) -> Path:
        """An undisturbed run of seven iterations, made once."""
        path = self.assets / "whole"
        if not path.exists():
            process = self.start(*self.flags, "--iterations", "7", "--run_dir", path)
            assert process.wait() == 0, process.communicate()
        return path


def results(run_dir: Path) -> tuple:
    """What a run computed: its log without the times, its samples, its last held-out figures, its models."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    models = [(run_dir / "final" / name / "model.safetensors").read_bytes() for name in ("llm1", "llm2")]
    return ([{k: v for k, v in row.items() if k != "seconds"} for row in rows],
            (run_dir / "samples.jsonl").read_text(), (run_dir / "eval.json").read_text(), models)


def is_one_line(status: int, err: str) -> bool:
    """Exit status 2, one line that says error, and nothing else but a progress bar's."""
    of_bars = re.compile(r"[\d?](it/s|s/it|batch/s|s/batch)")
    lines = [line for line in re.split(r"[\n\r]", err) if line.strip() and not of_bars.search(line)]
    return status == 2 and len(lines) == 1 and lines[0].startswith("error: ")


def kills(attack: Attack) -> None:
    """SIGKILL at a random moment of a run, the writing of checkpoints and models included; resumed to its
    end: the same log, samples and models
    """
    expected = results(attack.whole())
    for number in attack.count(100):
        folder, begun, err = attack.folder / f"kill{number}", time.time(), ""
        process = attack.begin(folder, "--iterations", "7")
        time.sleep(random.uniform(0, 4.0))
        process.kill()
        process.communicate()
        for _ in range(2):
            if not (folder / "eval.json").exists():
                err = attack.go_on(folder)
        same = (folder / "eval.json").exists() and results(folder) == expected
        attack.held(same, f"killed after {time.time() - begun:.1f} s: {err[-200:]}")
        shutil.rmtree(folder)


def signals(attack: Attack) -> None:
    """SIGINT, SIGTERM, SIGHUP at a random moment: exit 130, 143, 129, no traceback, a checkpoint of the last
    iteration; resumed to the same results
    """
    expected = results(attack.whole())
    for number in attack.count(30):
        sent = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP][number % 3]
        folder = attack.folder / f"signal{number}"
        process = attack.start(*attack.flags, "--iterations", "7", "--run_dir", folder)
        time.sleep(random.uniform(0.5, 10.0))
        ended = (folder / "eval.json").exists()         # nothing is left to save, and Python may be ending
        process.send_signal(sent)
        _, err = process.communicate()
        early = process.returncode == -sent             # before Python had read this package
        sound = ended or early or process.returncode == 128 + sent and "Traceback" not in err
        rows = (folder / "metrics.jsonl")
        done = len(rows.read_text().splitlines()) - 1 if rows.exists() else 0
        if sound and done > 0 and not ended:
            sound = bool([*folder.glob(f"checkpoints/iteration_{done:06d}-*")])
        if sound and not (folder / "eval.json").exists():
            err = attack.go_on(folder)
        said = f"{sent.name}, status {process.returncode}: {err[-200:]}"
        attack.held(sound and results(folder) == expected, said)
        shutil.rmtree(folder, ignore_errors=True)


def renames(attack: Attack) -> None:
    """SIGKILL just before, or just after, each file of a run gets its name, the first checkpoint's included;
    resumed to its end: the same log, samples and models
    """
    code = ("import os, pathlib, signal, train_imdb\n"
            "left, rename = {number}, pathlib.Path.replace\n"
            "def replace(path, target):\n"
            "    global left\n"
            "    left -= 1\n"
            "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    rename(path, target)\n"
            "    left -= 1\n"
            "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
            "pathlib.Path.replace = replace\n"
            "train_imdb.main()")
    expected = results(attack.whole())
    for number in attack.count(40):
        folder = attack.folder / f"rename{number}"
        words = [*attack.flags, "--iterations", "7", "--run_dir", str(folder)]
        killed = subprocess.run([sys.executable, "-c", code.format(number=number + 1), *words], cwd=ROOT,
                                capture_output=True, text=True)
        err = attack.go_on(folder) if not (folder / "eval.json").exists() else ""
        same = (folder / "eval.json").exists() and results(folder) == expected
        attack.held(same, f"rename {number}, status {killed.returncode}: {err[-200:]}")
        shutil.rmtree(folder)


def terminals(attack: Attack) -> None:
    """A terminal that closes at a random moment: exit 129, a checkpoint; resumed to the same results"""
    expected = results(attack.whole())
    for number in attack.count(20):
        folder = attack.folder / f"terminal{number}"
        command = [sys.executable, str(ROOT / "train_imdb.py"), *attack.flags, "--iterations", "7"]
        child, terminal = pty.fork()
        if not child:
            os.execv(sys.executable, [*command, "--run_dir", str(folder)])
        threading.Thread(target=read_until_closed, args=(terminal,), daemon=True).start()
        while not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 3.0))
        os.dup2(os.open(os.devnull, os.O_RDWR), terminal)   # closes it, which sends SIGHUP
        os.kill(child, signal.SIGHUP)                       # and so does a shell
        status, err = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ""
        ended = (folder / "eval.json").exists()
        if not ended:
            err = attack.go_on(folder)
        sound = (status in (129, -1) or ended) and results(folder) == expected      # a shell has 129 for both
        attack.held(sound, f"status {status}: {err[-200:]}")
        shutil.rmtree(folder)


def read_until_closed(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


def forking_rewards(attack: Attack) -> None:
    """A reward that starts processes and ends them, interrupted by SIGTERM: exit 143, no process left"""
    module = ("import multiprocessing, time\nfrom cory.tasks.imdb import Imdb\n"
              "fork = multiprocessing.get_context('fork')\n"
              "class Forking(Imdb):\n"
              "    def reward_of(self, queries, responses):\n"
              "        slow = fork.Process(target=time.sleep, args=(600,))\n"
              "        slow.start(); slow.join(0.02); slow.terminate(); slow.join()\n"
              "        with fork.Pool(2) as pool:\n"
              "            return pool.map(len, responses)\n")
    for number in attack.count(12):
        place = attack.folder / f"forking{number}"
        place.mkdir()
        (place / "forking.py").write_text(module)
        words = [*attack.flags, "--task", "forking:Forking", "--iterations", "1000"]
        words += ["--run_dir", str(place / "r")]
        process = subprocess.Popen([sys.executable, str(ROOT / "train_imdb.py"), *words], cwd=place,
                                   stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (place / "r/metrics.jsonl").exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 3.0))
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        left = subprocess.run(["pgrep", "-f", str(place)], capture_output=True, text=True).stdout
        saved = [*place.glob("r/checkpoints/iteration_*")] or not (place / "r/metrics.jsonl").read_text()[1:]
        attack.held(process.returncode == 143 and not left and bool(saved), f"status {process.poll()} {left}")
        process.kill()
        shutil.rmtree(place)


def one_new_folder(attack: Attack) -> None:
    """Several runs started at once on one new folder: one of them runs, the others say in one line that it is
    taken
    """
    expected = results(attack.whole())
    for number in attack.count(8):
        folder = attack.folder / f"new{number}"
        processes = [attack.start(*attack.flags, "--iterations", "7", "--run_dir", folder) for _ in range(4)]
        ends = [(process.communicate()[1], process.returncode) for process in processes]
        one = [status for _, status in ends].count(0) == 1
        others = all(is_one_line(status, err) for err, status in ends if status)
        attack.held(one and others and results(folder) == expected, str(ends)[-300:])
        shutil.rmtree(folder)


def others_files(attack: Attack) -> None:
    """A run's log, checkpoints or config.json replaced by another run's; its log edited; its data or weights
    changed: refused in one line at resume, and where they matter to it at evaluation
    """
    run, other = attack.whole(), attack.folder / "other"
    process = attack.start(*attack.flags, "--iterations", "7", "--seed", "1", "--run_dir", other)
    assert process.wait() == 0, process.communicate()
    resume = ["train_imdb.py", "--resume", "--iterations", "8", "--run_dir"]
    evaluate = ["-m", "cory", "evaluate", "--samples", "1", "--k", "1"]

    def refused(folder: Path, what: str, *words) -> None:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
        attack.held(is_one_line(done.returncode, done.stderr), f"{what}: {done.stderr[-200:]}")

    for number in attack.count(4):
        for name in ("metrics.jsonl", "samples.jsonl", "checkpoints", "config.json"):
            folder = attack.folder / f"mixed-{number}-{name}"
            shutil.copytree(run, folder, ignore=shutil.ignore_patterns(name))
            copy = shutil.copytree if (other / name).is_dir() else shutil.copy
            copy(other / name, folder / name)
            refused(folder, f"{name} of another run", *resume, folder)
            shutil.rmtree(folder)
    folder = attack.folder / "edited"
    shutil.copytree(run, folder)
    for number in attack.count(20):
        name = ["metrics.jsonl", "samples.jsonl"][number % 2]
        before = (folder / name).read_text()
        lines = before.splitlines(keepends=True)
        row = random.randrange(len(lines))
        digits = [place for place, sign in enumerate(lines[row]) if sign.isdigit()]
        place = random.choice(digits)
        digit = str((int(lines[row][place]) + 1) % 10)
        changed = lines[row][:place] + digit + lines[row][place + 1:]
        above, below = lines[:row], lines[row + 1:]
        edits = [above + below, [*lines, lines[row]], [*above, changed, *below]]
        (folder / name).write_text("".join(edits[number % 3]))
        refused(folder, f"{name}, row {row}, edit {number % 3}", *resume, folder)
        (folder / name).write_text(before)
    for name in ("lm/model.safetensors", "openings/test.jsonl", "classifier/model.safetensors"):
        content = (attack.assets / name).read_bytes()
        # a letter of the first row; the exponent of the last weight: rewards are compared to 0.002
        at, bit = (15, 1) if name.endswith("jsonl") else (len(content) - 1, 64)
        (attack.assets / name).write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1:])
        refused(folder, f"{name} at resume", *resume, folder)
        refused(folder, f"{name} at evaluation", *evaluate, folder)
        (attack.assets / name).write_bytes(content)


def flips(attack: Attack) -> None:
    """A flipped bit or a cut file anywhere in a checkpoint: one line that names the file, nothing erased"""
    from cory.experiment.checkpoint import checkpoints_of, is_whole

    folder = attack.folder / "flips"
    shutil.copytree(attack.whole(), folder)
    newest = checkpoints_of(folder)[0]
    content, log = newest.read_bytes(), (folder / "metrics.jsonl").read_bytes()
    for number in attack.count(1000):
        place = random.randrange(len(content))
        flipped = content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1:]
        newest.write_bytes(content[:place] if number % 5 == 0 else flipped)
        attack.held(not is_whole(newest), f"at byte {place}")
    for _ in attack.count(10):                          # and by the command
        newest.write_bytes(content[:random.randrange(len(content))])
        process = attack.start("--resume", "--run_dir", folder, "--iterations", "9")
        _, err = process.communicate()
        kept = log == (folder / "metrics.jsonl").read_bytes()
        attack.held(kept and is_one_line(process.returncode, err) and newest.name in err, err[-300:])


def two_processes(attack: Attack) -> None:
    """Commands started in the same second, and resumes of a run in progress: a folder of its own for each, or
    `in use by process N` in one line
    """
    code = ("import sys, time; sys.path.insert(0, {root!r})\n"
            "from cory.experiment.flags import parse\nfrom cory.config import IMDB_PRESETS, ImdbConfig\n"
            "from cory.system.folder import claimed\n"
            "time.sleep(max(0, {start!r} - time.time()))\n"
            "with claimed(parse(ImdbConfig, IMDB_PRESETS, [])) as folder:\n"
            "    (folder / 'config.json').touch(); print(folder); time.sleep(1)\n")
    for number in attack.count(25):
        place = attack.folder / f"second{number}"
        place.mkdir()
        command = [sys.executable, "-c", code.format(root=str(ROOT), start=time.time() + 4)]
        processes = [subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True)
                     for _ in range(8)]
        folders = [process.communicate()[0].strip() for process in processes]
        for folder in folders:
            attack.held(bool(folder) and folders.count(folder) == 1, f"shared {folder!r}")
        shutil.rmtree(place)
    for number in attack.count(10):
        folder = attack.folder / f"resume{number}"
        first = attack.begin(folder, "--iterations", "100000", "--save_every", "1000")
        second = attack.start("--resume", "--run_dir", folder)
        _, err = second.communicate()
        said = is_one_line(second.returncode, err) and f"is in use by process {first.pid}" in err
        first.send_signal(signal.SIGTERM)
        first.communicate()
        attack.held(said and first.returncode == 143, err[-300:])
        shutil.rmtree(folder)


def full_disk(attack: Attack) -> None:
    """A file system of its own that fills up at some moment of a run: one line, exit 2, every checkpoint that
    stands is whole
    """
    from cory.experiment.checkpoint import checkpoints_of, is_whole

    place = attack.folder / "small"
    place.mkdir()
    for _ in attack.count(16):
        kilobytes = random.randint(600, 5200)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place])
        if mounted.returncode:
            attack.noted.append("no right to mount a file system here: not tried")
            return
        try:
            unguarded = ("import cory.experiment.run as r; r.require_disk = lambda *_: None\n"  # says so
                         "import train_imdb; train_imdb.main()")
            flags = [*attack.flags, "--iterations", "7", "--run_dir", str(place / "r")]
            done = subprocess.run([sys.executable, "-c", unguarded, *flags], cwd=ROOT, capture_output=True,
                                  text=True)
            whole = all(is_whole(saved) for saved in checkpoints_of(place / "r"))
            sound = done.returncode == 0 or is_one_line(done.returncode, done.stderr)
            pictures = [path for path in place.rglob("*.png") if path.stat().st_size == 0]
            attack.held(sound and whole and not pictures, f"{kilobytes} kB: {done.stderr[-300:]}")
        finally:
            subprocess.run(["umount", place])


def links(attack: Attack) -> None:
    """Every file and folder of a run replaced by a link out of it, then resumed: nothing outside is written
    or deleted
    """
    run = attack.whole()
    names = sorted({*(str(path.relative_to(run)) for path in run.rglob("*")), "checkpoints/writing",
                    "metrics.jsonl.writing", "config.json.writing", "curves.png.writing", "eval.json.writing",
                    "final/llm1.writing", ".lock", ".process", "evaluation"})
    for number in range(0, len(names), max(1, round(1 / min(1.0, attack.times)))):
        folder, outside = attack.folder / f"link{number}", attack.folder / f"outside{number}"
        shutil.copytree(run, folder)
        outside.mkdir()
        (outside / "precious").write_text("precious")
        path = folder / names[number]
        of_folders = ("checkpoints/writing", "final/llm1.writing", "evaluation")
        is_folder = path.is_dir() or names[number] in of_folders
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(outside if is_folder else outside / "precious")
        process = attack.start("--resume", "--run_dir", folder, "--iterations", "8")
        _, err = process.communicate()
        untouched = [p.name for p in outside.iterdir()] == ["precious"] and (
            outside / "precious").read_text() == "precious"
        ended = process.returncode == 0 or is_one_line(process.returncode, err)
        attack.held(untouched and ended, f"{names[number]}: {err[-200:]}")
        shutil.rmtree(folder)


def weights_and_biases(attack: Attack) -> None:
    """W&B's server hangs from the start, or dies in the middle: results and every record stay, 75 s more"""
    from wandb_server import Server

    for number in attack.count(4):
        dies_later = number % 2 == 1
        server = Server(answers=dies_later)
        folder = attack.folder / f"wandb{number}"
        environment = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "x" * 40}
        begun = time.time()
        process = attack.begin(folder, "--wandb", "online", "--iterations", "4", env=environment)
        started = time.time() - begun
        server.answers = False
        out, err = process.communicate(timeout=400)
        seconds = time.time() - begun
        records = list((folder / "wandb").glob("*run-*/run-*.wandb"))
        sound = (process.returncode == 0 and "| task reward" in out and "wandb sync" in out and records
                 and seconds < 110 and started < 45)
        attack.noted.append(f"{'dies' if dies_later else 'hangs'}: {seconds:.0f} s")
        attack.held(bool(sound), f"{seconds:.0f} s, status {process.returncode}: {(out + err)[-300:]}")
        server.shutdown()


# --- generated bad inputs ---
STRANGE = [None, True, -1, 0, 1.5, 1e300, float("nan"), 10**30, "", "x", "nan", "0x10", "\x1b[2J", "\ud800",
           [], [[1]], {}, {"a": None}]


def bad_command_lines(attack: Attack) -> None:
    """Generated command lines: unknown flags, values of other types and sizes"""
    from cory.config import ImdbConfig

    names = [f.name for f in fields(ImdbConfig) if f.name not in ("run_dir", "resume")]
    cases = [(random.choice([*names, *names, "lam\0", "-", "é"]), random.choice(STRANGE))
             for _ in attack.count(150)]
    generated(attack, cases, lambda case, place: [*attack.flags, f"--{case[0]}={case[1]}"])


def generated(attack: Attack, cases: list, flags: Callable) -> None:
    """Runs each case: an input that is no good ends in one line; one that happens to be good, in a run."""
    import train_imdb

    for number, case in enumerate(cases):
        place = attack.folder / f"case{number}"
        place.mkdir()
        argv = ["--iterations", "1", "--run_dir", place / "r", *flags(case, place)]
        attack.held_quietly(train_imdb.main, argv, str(case)[:150])
        shutil.rmtree(place, ignore_errors=True)


def bad_data(attack: Attack) -> None:
    """Generated files of rows: other types, broken JSON, bytes that are no text, odd names of columns"""
    def row() -> bytes:
        value = random.choice(STRANGE)
        return random.choice([b'{"text": "It was a good film and I liked it"}', json.dumps(value).encode(),
                              json.dumps({"text": value}).encode(), json.dumps({str(value): "a"}).encode(),
                              random.randbytes(20), b"[" * 5000, b'{"text": ' + b"9" * 6000 + b"}"])

    def flags(content, place):
        (place / "train.jsonl").write_bytes(content)
        return [*attack.flags, "--dataset", place]

    files = [b"\n".join(row() for _ in range(random.randrange(12))) for _ in attack.count(200)]
    generated(attack, files, flags)


def damaged(attack: Attack, folder: Path, pattern: str, count: int) -> list[tuple[str, bytes | None]]:
    """Files of a folder, each missing, cut or other bytes; of a JSON file also one value that is another."""
    cases = []
    for path in [path for path in sorted(folder.rglob(pattern)) if path.is_file()]:
        content, name = path.read_bytes(), str(path.relative_to(folder))
        cases += [(name, text) for text in (None, b"", b"[1]\n", b"\xff\xfe" + content)]
        for _ in attack.count(count):
            cases.append((name, content[:random.randrange(len(content) or 1)]))
            if name.endswith(".json"):
                value = json.loads(content)
                change = {random.choice(sorted(value)): random.choice(STRANGE)}
                cases.append((name, json.dumps(value | change).encode()))
    return cases


def edited_copy(source: Path, folder: Path, name: str, content: bytes | None) -> None:
    """With other content of one file, or without it."""
    shutil.copytree(source, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)


def bad_models(attack: Attack) -> None:
    """Generated model and classifier folders: config, tokenizer and weights edited, cut or missing"""
    def flags(case, place):
        folder, name, content = case
        edited_copy(attack.assets / folder, place / folder, name, content)
        return [*attack.flags, "--model" if folder == "lm" else "--reward_model", place / folder]

    cases = [(folder, *case) for folder in ("lm", "classifier")
             for case in damaged(attack, attack.assets / folder, "*", 6)]
    generated(attack, cases, flags)


def bad_runs(attack: Attack) -> None:
    """Generated run folders, resumed, evaluated and reported: every file edited, cut or missing"""
    import train_imdb
    from cory.commands import evaluate, report

    run = attack.whole()
    commands = [(train_imdb.main, ["--resume", "--iterations", "8", "--run_dir"]),
                (evaluate.main, ["--samples", "1", "--k", "1", "--out", attack.folder / "out.png"]),
                (report.main, ["--out", attack.folder / "out.png"])]
    cases = [case for case in damaged(attack, run, "*", 1) if "checkpoints" not in case[0]]
    cases += damaged(attack, run, "config.json", 20) + damaged(attack, run, "eval.json", 20)
    random.shuffle(cases)
    for number, (name, content) in enumerate(cases):
        main, flags = commands[number % 3]
        folder = attack.folder / f"run{number}"
        edited_copy(run, folder, name, content)
        argv = [*flags, folder] if number % 3 == 0 else [folder, *flags]
        attack.held_quietly(main, argv, f"{main.__module__}, {name} {str(content)[:80]}")
        shutil.rmtree(folder)


ATTACKS = {f.__name__: f for f in (kills, renames, signals, terminals, forking_rewards, flips, two_processes,
                                   one_new_folder, others_files, full_disk, links, weights_and_biases,
                                   bad_command_lines, bad_data, bad_models, bad_runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(ATTACKS)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], metavar="ATTACK", help=names)
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="another one makes other cases")
    args = parser.parse_args()
    random.seed(args.seed)
    for number in (signal.SIGINT, signal.SIGHUP):       # ignored under nohup, say, and by a run then, too
        signal.signal(number, signal.SIG_DFL)
    print("| attack | tried | held |\n|---|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        save_small(Path(place) / "assets")
        for name in args.attacks or ATTACKS:
            attack = Attack(args.times, Path(place) / name, Path(place) / "assets")
            attack.folder.mkdir()
            attack.whole()
            ATTACKS[name](attack)
            print(attack.row(ATTACKS[name].__doc__), flush=True)
            print("\n".join(attack.faults[:20]), file=sys.stderr, flush=True)
            shutil.rmtree(attack.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
