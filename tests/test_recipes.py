"""Each python file of docs/recipes.md runs for two iterations, by the command that stands below it."""
import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import train_gsm8k
import train_imdb

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
# (text of the file, command line) of each recipe
RECIPES = {re.match(r"# (\w+)\.py\n", body)[1]: (body, shlex.split(command)) for body, command in re.findall(
    r"```python\n(.*?)```\n\n(?: {4}python \w+\.py\n)? {4}python (.*?)\n", PAGE, re.DOTALL)}
SCRIPTS = {"train_imdb.py": train_imdb.main, "train_gsm8k.py": train_gsm8k.main}
SHORT = ("--iterations 2 --max_response_length 4 --num_ppo_epochs 1 --eval_every 0 --eval_queries 4 "
         "--save_every 2").split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in RECIPES:
        sys.modules.pop(name, None)


def test_every_file_of_the_page_has_its_command():
    assert len(RECIPES) == PAGE.count("```python\n")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs(name, folder, small_flags, problem_flags):
    text, (script, *flags) = RECIPES[name]
    Path(f"{name}.py").write_text(text)
    if name == "mention":
        runpy.run_path("mention.py", run_name="__main__")           # writes its data
    main = SCRIPTS.get(script) or importlib.import_module(name).main
    small = problem_flags if script == "train_gsm8k.py" else small_flags
    # of a flag that is given twice the last one holds
    main([*small, *flags, *SHORT, "--run_dir", "run"])
    assert Path("run/eval.json").exists()
