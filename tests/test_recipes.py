"""Each python file of README and of docs/recipes.md runs for two iterations, by the command below it."""
import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toys import finished, read, settings

from cory.ppo.model import LanguageModel, Policy

HOME = Path(__file__).parents[1]
PAGES = (HOME / "README.md").read_text() + (HOME / "docs" / "recipes.md").read_text()
# (text of the file, command line) of each recipe
RECIPES = {re.match(r"# (\w+)\.py\n", body)[1]: (body, shlex.split(command)) for body, command in re.findall(
    r"```python\n(.*?)```\n\n(?: {4}python \w+\.py\n)? {4}python (.*?)\n", PAGES, re.DOTALL)}
pytestmark = pytest.mark.usefixtures("read_once")
SHORT = "--iterations 2 --eval_every 0 --save_every 2".split()


def test_every_file_of_the_pages_has_its_command():
    assert len(RECIPES) == PAGES.count("```python\n")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs(name, tmp_path, monkeypatch, small_flags, problem_flags, capsys):
    text, (script, *words) = RECIPES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Policy, "logits", LanguageModel.logits)         # which a recipe changes
    Path(f"{name}.py").write_text(text)
    if name == "mention":
        runpy.run_path("mention.py", run_name="__main__")           # writes its data
    main = importlib.import_module(Path(script).stem).main
    small = [*(problem_flags if script == "train_gsm8k.py" else small_flags)]
    if name != "crossplay":
        # of a flag that is given twice the last one holds
        main([*small, *words, *SHORT, "--run_dir", "run"])
        assert "base" in read(Path("run/eval.json"))
    else:
        for seed, run_dir in enumerate(words):
            finished(small, Path(run_dir), *SHORT, "--lora_rank", 2, "--seed", seed)
        main(words)
        said = capsys.readouterr().out
        for run_dir in words:                                       # with itself it plays as in the run
            reward = read(Path(run_dir, "eval.json"))["team"]["observer_reward"]
            assert f"{run_dir} llm1, {run_dir} llm2: {reward:.3f}\n" in said
    if name == "losses":
        main = importlib.import_module("train_imdb").main
        main([*small_flags, "--loss", "losses:entropy_bonus", *SHORT, "--run_dir", "bonus"])
    sys.modules.pop(name, None)


def test_losses_of_the_recipe_by_hand(tmp_path):
    """Two responses of two tokens and of one, with advantages 1 and -1."""
    own, f = {}, lambda rows: torch.tensor(rows, dtype=torch.float64)
    exec(RECIPES["losses"][0], own)
    mask_BT, log_ratio_BT, entropy_BT = f([[1, 1], [1, 0]]), f([[0.3, 0.1], [-0.5, 0]]), f([[2, 3], [4, 0]])
    rows = SimpleNamespace(mask_BT=mask_BT, logp_BT=f([[-1, -2], [-3, 0]]), advantage_BT=f([[1, 1], [-1, 0]]))
    for iteration, weight in ((1, 0.01), (2, 0.0075), (4, 0.0025)):
        agent = SimpleNamespace(cfg=settings(iterations=4, cliprange=0.1), iteration=iteration)
        given = agent, rows, rows.logp_BT + log_ratio_BT, entropy_BT, None
        loss_BT, metrics = own["gspo"](*given)                  # ratios exp(0.2), exp(-0.5): both clipped
        torch.testing.assert_close(loss_BT * mask_BT, f([[-1.1, -1.1], [0.9, 0]]))
        assert (metrics["clip_fraction"] * mask_BT).tolist() == [[1, 1], [1, 0]]
        loss_BT, _ = own["clip_higher"](*given)                 # exp(0.3) above 1.28
        torch.testing.assert_close(loss_BT * mask_BT, f([[-1.28, -1.1051709], [0.9, 0]]))
        loss_BT, metrics = own["entropy_bonus"](*given)
        torch.testing.assert_close(loss_BT, metrics["policy_loss"] - weight * entropy_BT)
        assert metrics["policy_loss"][0, 1] == pytest.approx(-1.1)      # exp(0.1), clipped
