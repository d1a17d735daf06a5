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
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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

    def row(self, what: str) -> str:
        """Of the table."""
        noted = f" ({'; '.join(dict.fromkeys(self.noted))})" if self.noted else ""
        return f"| {' '.join(what.split())}{noted} | {self.tried} | {self.tried - len(self.faults)} |"

    def start(self, *words, **how) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "train_imdb.py"), *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                **how)

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
        folder = attack.folder / f"kill{number}"
        process = attack.start(*attack.flags, "--iterations", "7", "--run_dir", folder)
        begun = time.time()
        while process.poll() is None and not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
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
        length = ["--iterations", "100000", "--save_every", "1000"]
        first = attack.start(*attack.flags, *length, "--run_dir", folder)
        while first.poll() is None and not (folder / "metrics.jsonl").exists():
            time.sleep(0.05)
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
        flags = [word for word in attack.flags if word not in ("--wandb", "disabled")]
        environment = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "x" * 40}
        begun = time.time()
        process = attack.start(*flags, "--wandb", "online", "--iterations", "4", "--run_dir", folder,
                               env=environment)
        while process.poll() is None and not (folder / "metrics.jsonl").exists():
            time.sleep(0.05)
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
def quietly(main: Callable, argv: list) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command in this process; a traceback is status 1."""
    import traceback
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in argv])
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
    return status, out.getvalue(), err.getvalue()


def examples(strategy, count: int) -> list:
    """`count` values that hypothesis generates, the same each time."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    found = []

    @seed(0)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found[:count]


def json_values():
    from hypothesis import strategies as st

    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
    return st.recursive(scalars, lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)), max_leaves=6)


def bad_command_lines(attack: Attack) -> None:
    """Generated command lines: unknown flags, values of other types and sizes"""
    from dataclasses import fields

    from hypothesis import strategies as st

    import train_imdb
    from cory.config import ImdbConfig

    names = [f.name for f in fields(ImdbConfig) if f.name not in ("run_dir", "resume")]
    numbers = [f.name for f in fields(ImdbConfig) if f.type in (int, float)]
    words = st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str))
    line = st.one_of(
        st.tuples(st.sampled_from(names), words).map(lambda pair: [f"--{pair[0]}={pair[1]}"]),
        st.tuples(st.sampled_from(numbers), st.sampled_from(
            ["nan", "inf", "-1", "1e300", "1e-300", "0x10", "", "1_0x", str(10**30)])).map(
                lambda pair: [f"--{pair[0]}", pair[1]]),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=10).map(lambda text: [f"--{text}", "1"]))
    generated(attack, train_imdb.main, examples(line, len(attack.count(150))),
              lambda words, place: [*attack.flags, "--iterations", "1", "--run_dir", place / "r", *words])


def generated(attack: Attack, main: Callable, cases: list, argv: Callable) -> None:
    """Runs each case: an input that is no good ends in one line; one that happens to be good, in a run."""
    for number, case in enumerate(cases):
        place = attack.folder / f"case{number}"
        place.mkdir()
        status, _, err = quietly(main, argv(case, place))
        attack.held(status == 0 or is_one_line(status, err), f"{str(case)[:150]!r}: {err[-250:]}")
        shutil.rmtree(place, ignore_errors=True)


def bad_data(attack: Attack) -> None:
    """Generated files of rows: other types, broken JSON, bytes that are no text, odd names of columns"""
    from hypothesis import strategies as st

    import train_imdb

    good = st.sampled_from([b'{"text": "It was a good film and I liked it"}'])
    line = st.one_of(good, st.binary(max_size=60), json_values().map(lambda x: json.dumps(x).encode()),
                     json_values().map(lambda x: json.dumps({"text": x}).encode()),
                     st.text(max_size=30).map(lambda x: json.dumps({"text": x}).encode()),
                     st.integers(1, 5000).map(lambda n: b"[" * n), st.integers(4000, 6000).map(
                         lambda n: b'{"text": ' + b"9" * n + b"}"))
    files = st.lists(line, max_size=12).map(b"\n".join)

    def argv(content, place):
        (place / "train.jsonl").write_bytes(content)
        at = attack.flags.index("--dataset") + 1
        flags = [*attack.flags[:at], str(place), *attack.flags[at + 1:]]
        return [*flags, "--iterations", "1", "--run_dir", place / "r"]

    generated(attack, train_imdb.main, examples(files, len(attack.count(200))), argv)


def json_files_with(attack: Attack, source: Path, name: str, count: int):
    """Cases (file, its new content) of a folder's JSON file: one value replaced, cut, or other JSON."""
    from hypothesis import strategies as st

    content = (source / name).read_bytes()
    keys = st.sampled_from(sorted(json.loads(content)))
    value = json.loads(content)
    change = st.tuples(keys, json_values()).map(lambda pair: {pair[0]: pair[1]})
    replaced = change.map(lambda change: json.dumps(value | change).encode())
    case = st.one_of(replaced, replaced, json_values().map(lambda x: json.dumps(x).encode()),
                     st.integers(0, len(content) - 1).map(lambda n: content[:n]), st.binary(max_size=40))
    return [(name, text) for text in examples(case, count)]


def bad_models(attack: Attack) -> None:
    """Generated model and classifier folders: config, tokenizer and weights edited, cut or missing"""
    import train_imdb

    cases = []
    for folder, count in (("lm", 60), ("classifier", 40)):
        for name in sorted(path.name for path in (attack.assets / folder).iterdir()):
            number = len(attack.count(count)) // 4 + 1
            if name.endswith(".json"):
                edits = json_files_with(attack, attack.assets / folder, name, number)
                cases += [(folder, *case) for case in edits]
            else:
                content = (attack.assets / folder / name).read_bytes()
                places = [random.randrange(len(content)) for _ in range(number)]
                cases += [(folder, name, content[:place]) for place in places]
            cases.append((folder, name, None))

    def argv(case, place):
        folder, name, content = case
        shutil.copytree(attack.assets / folder, place / folder)
        (place / folder / name).unlink()
        if content is not None:
            (place / folder / name).write_bytes(content)
        changed = {str(attack.assets / folder): str(place / folder)}
        flags = [changed.get(word, word) for word in attack.flags]
        return [*flags, "--iterations", "1", "--run_dir", place / "r"]

    generated(attack, train_imdb.main, cases, argv)


def bad_runs(attack: Attack) -> None:
    """Generated run folders, resumed, evaluated and reported: every file edited, cut or missing"""
    import train_imdb
    from cory.commands import evaluate, report

    run = attack.whole()
    commands = {"resume": (train_imdb.main, ["--resume", "--iterations", "8", "--run_dir"]),
                "evaluate": (evaluate.main, ["--samples", "1", "--k", "1"]), "report": (report.main, [])}
    cases = []
    for name in ("config.json", "eval.json"):
        cases += json_files_with(attack, run, name, len(attack.count(40)))
    for path in [path for path in sorted(run.rglob("*")) if path.is_file()]:
        name, content = str(path.relative_to(run)), path.read_bytes()
        if "checkpoints" not in name and content:
            cut = content[:random.randrange(len(content))]
            cases += [(name, None), (name, cut), (name, b""), (name, b"\xff\xfe" + content), (name, b"[1]\n")]
    random.shuffle(cases)
    for number, (name, content) in enumerate(cases):
        command = list(commands)[number % 3]
        main, flags = commands[command]
        folder = attack.folder / f"run{number}"
        shutil.copytree(run, folder)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        at = [*flags, folder] if command == "resume" else [folder, *flags]
        at += ["--out", attack.folder / "out.png"] if command != "resume" else []
        status, _, err = quietly(main, at)
        said = f"{command}, {name} {str(content)[:80]}: {err[-250:]}"
        attack.held(status == 0 or is_one_line(status, err), said)
        shutil.rmtree(folder)


ATTACKS = {f.__name__: f for f in (kills, signals, flips, two_processes, full_disk, links, weights_and_biases,
                                   bad_command_lines, bad_data, bad_models, bad_runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(ATTACKS)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], metavar="ATTACK", help=names)
    parser.add_argument("--times", type=float, default=1.0)
    args = parser.parse_args()
    random.seed(0)
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
