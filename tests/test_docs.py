"""README and docs speak of what there is: files, links, flags, functions, and the loop as it stands."""
import re
import runpy
import shlex
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from cory.commands import study
from cory.config import Gsm8kConfig, ImdbConfig
from cory.studies import runs
from cory.studies.definitions import STUDIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ["report.py", "evaluate.py", "benchmark.py", "assets/make_imdb_assets.py",
            "assets/make_gsm8k_assets.py", "plan.py", "gpu_check.py", "study.py", "limit.py"]
OF_OTHERS = {"help", "local-dir", "repo-type", "project", "append",            # argparse's, hf's, wandb's
             "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "shutdown_timeout",
             "nodes", "ntasks-per-node", "gpus-per-node", "signal"}             # torchrun's, Slurm's

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def without_programs(page: Path) -> str:
    return re.sub(r"^```python\n.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)", without_programs(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 220
    assert [line for line in lines if len(line) > 110] == []


@each_page
def test_links_and_pictures_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", without_programs(page))
    for link in (a or b for a, b in links):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@each_page
def test_flags_exist(page):
    known = {f.name for config in (ImdbConfig, Gsm8kConfig) for f in fields(config)} | OF_OTHERS
    for path in (*(ROOT / "cory" / name for name in COMMANDS), ROOT / "tests" / "faults" / "attack.py"):
        known |= set(re.findall(r'add(?:_argument)?\(\s*"--(\w+)"', path.read_text()))
    known |= set(re.findall(r"^    (\w+): \w+ = setting\(", page.read_text(), re.M))    # a program's own
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text())) - known == set()


def test_every_setting_has_its_place_in_settings_md():
    text = (ROOT / "docs" / "settings.md").read_text()
    names = {f.name for config in (ImdbConfig, Gsm8kConfig) for f in fields(config)}
    assert [name for name in names if f"`--{name}`" not in text] == []


@each_page
def test_files_and_modules_exist(page):
    text = page.read_text()
    paths = re.findall(r"(?<![\w/.])(?:cory|tests|docs)/[\w/]+\.\w+", text)
    paths += [module.replace(".", "/") + ".py" for module in re.findall(r"python -m (cory[\w.]+)", text)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("title", ["Reading order", "To change X, edit this function"])
def test_functions_are_defined_in_the_files_named_beside_them(title):
    section = README.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("|") and "cory/" in row]
    assert len(rows) >= 11
    for cells in rows:
        files = re.findall(r"`(cory/[\w/]+\.py)`", "|".join(cells))
        source = "\n".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([A-Za-z_]\w*)`", cells[2]):
            assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b.* = ", source, re.M), (name, files)


def test_the_loop_is_quoted_from_its_file():
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert "\n" + textwrap.indent(block, "    ") in (ROOT / "cory" / "train.py").read_text()
    assert block.count("\n") > 25


NUMBER = r"([+-]?\d+(?:\.\d+)?)"
INTERVAL = re.compile(rf"{NUMBER}\*{{0,2}}( points?| nats| times)?\s\[{NUMBER},\s{NUMBER}\]")


def test_every_interval_of_the_results_is_one_of_a_studys_page():
    """Rounded, perhaps, in points of 0.01, of either sign: a difference may be read from either side."""
    pages = [page.read_text() for page in (ROOT / "docs" / "studies").glob("*/results.md")]
    found = [found for page in pages for found in INTERVAL.findall(page)]
    measured = [[float(mean), float(low), float(high)] for mean, _, low, high in found]
    measured += [[-mean, -high, -low] for mean, low, high in measured]
    said = INTERVAL.findall((ROOT / "docs" / "results.md").read_text())
    assert len([unit for _, unit, *_ in said if "point" in unit]) > 10 and len(said) > 80
    for mean, unit, *ends in said:
        size = 0.01 if "point" in unit else 1.0
        half = size * 0.5 * 10.0 ** -len(mean.partition(".")[2]) + 1e-9
        figures = [size * float(x) for x in (mean, *ends)]
        assert any(all(abs(a - b) <= half for a, b in zip(figures, m, strict=True)) for m in measured), (
            mean, unit, ends)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "studies").glob("*/results.md")),
                         ids=lambda page: page.parent.name)
def test_a_page_of_older_presets_says_so_and_its_rows_are_not_taken_for_todays(page, tmp_path, monkeypatch,
                                                                              capsys):
    assert page.read_text().splitlines()[2].startswith("> Of commit 0aa1143 and its `tiny` presets")
    rows = page.parent / "runs.jsonl"
    if rows.exists():
        monkeypatch.setattr(runs, "make", lambda planned, jobs: [])     # never hours of training in a test
        (command,) = re.findall(r"^    python -m cory\.study (.+)", page.read_text(), re.M)
        argv = [*without_published(shlex.split(command)), "--published", str(rows), "--out", str(tmp_path)]
        with pytest.raises(SystemExit) as stop:
            study.main(argv)
        assert stop.value.code == 2 and "was made with " in capsys.readouterr().err


def test_every_study_has_its_line():
    text = (ROOT / "docs" / "studies.md").read_text()
    for name, found in STUDIES.items():
        assert f"| `{name}` | {found.claim} ({found.seeds} seeds, {' and '.join(found.tasks)}) |" in text


def without_published(argv: list[str]) -> list[str]:
    at = argv.index("--published") if "--published" in argv else len(argv)
    rest = [i for i, word in enumerate(argv) if i > at and word.startswith("--")]
    return argv[:at] + (argv[rest[0]:] if rest else [])


def test_every_seeded_bug_still_has_its_place():
    """tests/faults/seeded_bugs.py edits what stands in the code once."""
    found = runpy.run_path(str(ROOT / "tests" / "faults" / "seeded_bugs.py"))["FAULTS"]
    assert len(found) == 100
    assert [fault for fault in found if (ROOT / fault.path).read_text().count(fault.old) != 1] == []
