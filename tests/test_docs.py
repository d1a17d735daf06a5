"""README and docs speak of what there is: files, links, flags, functions, and the loop as it stands."""
import re
import runpy
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from cory.config import Gsm8kConfig, ImdbConfig
from cory.studies.definitions import STUDIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {f.name for config in (ImdbConfig, Gsm8kConfig) for f in fields(config)}
SCRIPTS = [*(ROOT / "cory" / "commands").glob("*.py"), *(ROOT / "cory" / "assets").glob("make_*.py"),
           *(ROOT / "tests" / "faults").glob("*.py")]
OTHERS_FLAGS = {"help", "local-dir", "repo-type", "project",                    # argparse's, hf's, wandb's
                "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "shutdown_timeout",
                "nodes", "ntasks-per-node", "gpus-per-node", "signal"}          # torchrun's, Slurm's

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def without_programs(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)", without_programs(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_a_page_is_short(page):
    assert len(page.read_text().split()) <= (1400 if page.name == "README.md" else 2000)


@each_page
def test_sentences_are_short(page):
    """Of the prose: code, tables, headings and pictures are left out."""
    lines = without_programs(page).splitlines()
    lines = [line for line in lines if not line.startswith(("|", "    ", "#", "!"))]
    paragraphs = re.split(r"\n\s*\n|^\s*[-*] ", "\n".join(lines), flags=re.M)
    lengths = [len(sentence.split()) for text in paragraphs for sentence in re.split(r"(?<=[.?!])\s+", text)]
    lengths = [length for length in lengths if length > 2]
    assert sum(lengths) <= 18 * len(lengths)
    assert sum(length > 30 for length in lengths) <= 0.08 * len(lengths)


@each_page
def test_links_and_pictures_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_programs(page)):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@each_page
def test_flags_exist(page):
    text = page.read_text()
    known = {*SETTINGS, *OTHERS_FLAGS, "llm1", "llm2"}
    for script in SCRIPTS:
        known |= set(re.findall(r'add(?:_argument)?\(\s*"--(\w+)"', script.read_text()))
    known |= set(re.findall(r"^    (\w+): \w+ = setting\(", text, re.M))        # of a program on the page
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)) - known == set()


def test_every_setting_has_one_place_in_the_table_of_settings():
    text = (ROOT / "docs" / "settings.md").read_text()
    section = text.partition("## All settings\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("|")]
    listed = {*re.findall(r"`--(\w+)[` ]", " ".join(cells))} - {"llm1", "llm2"}
    assert listed == {*SETTINGS} - {"agent_settings"}, "list each flag once in docs/settings.md"


def test_every_study_has_its_place_in_studies_md():
    text = (ROOT / "docs" / "studies.md").read_text()
    assert [name for name in STUDIES if f"`{name}`" not in text] == []


@each_page
def test_files_and_commands_exist(page):
    text = page.read_text()
    paths = re.findall(r"(?<![\w/.])(?:cory|tests|docs)/[\w/]+\.\w+", text)
    paths += [module.replace(".", "/") + ".py" for module in re.findall(r"-m (cory\.[\w.]+)", text)]
    paths += [f"cory/commands/{name}.py" for name in re.findall(r"-m cory ([a-z_]+)", text)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("title", ["Reading order", "To change X, edit this function"])
def test_functions_are_defined_in_the_files_named_beside_them(title):
    section = README.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("|") and "cory/" in row]
    assert len(rows) > 5
    for cells in rows:
        files = re.findall(r"`(cory/[\w/]+\.py)`", "|".join(cells))
        source = "\n".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([A-Za-z_]\w*)`", cells[2]):
            assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b.* = ", source, re.M), (name, files)


def test_the_loop_is_quoted_from_its_file():
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert "\n" + textwrap.indent(block, "    ") in (ROOT / "cory" / "train.py").read_text()
    assert block.count("\n") > 25


def test_every_seeded_bug_still_has_its_place():
    """tests/faults/seeded_bugs.py edits what stands in the code once."""
    found = runpy.run_path(str(ROOT / "tests" / "faults" / "seeded_bugs.py"))["FAULTS"]
    assert len(found) == 100
    assert [fault for fault in found if (ROOT / fault.path).read_text().count(fault.old) != 1] == []
    assert all((ROOT / f"tests/test_{name}.py").exists() for fault in found for name in fault.tests.split())
