"""The command line: flags over presets and a resumed run's settings, agents' own settings, names of code."""
import json
import re
import sys
from dataclasses import dataclass, fields

import pytest
from toys import error_line, read

import train_gsm8k
from cory.config import ADVANTAGES, IMDB_PRESETS, METHODS, ImdbConfig, setting
from cory.errors import UserError, exit_on_user_error
from cory.flags import config_json, load_config, parse
from cory.names import find
from cory.train import Cory


@exit_on_user_error
def imdb(argv: list[str]) -> ImdbConfig:
    return parse(ImdbConfig, IMDB_PRESETS, argv)


def test_a_flag_overrides_the_preset_and_leaves_the_rest():
    changed = imdb("--preset gpt2 --learning_rate 3e-5 --knowledge_transfer false --shard".split())
    old, new = vars(imdb(["--preset", "gpt2"])), vars(changed)
    assert {name: new[name] for name in new if new[name] != old[name]} == {
        "learning_rate": 3e-5, "knowledge_transfer": False, "shard": True}


def test_a_negative_number_and_a_home_are_read_as_one_means_them(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    cfg = imdb("--partner_reward -1e-1 --run_dir=~/x --llm2 model=~/m learning_rate=1".split())
    assert (cfg.partner_reward, cfg.run_dir) == (-0.1, "/h/x")
    assert cfg.agent_settings == {"llm2": {"model": "/h/m", "learning_rate": 1.0}}


def test_python_labels_what_it_gives():
    assert ImdbConfig().preset == "defaults" and imdb([]).preset == "tiny"


def test_ctrl_c_while_models_are_loaded_is_one_line(capsys):
    @exit_on_user_error
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_help_has_every_flag_with_the_presets_own_default(capsys):
    with pytest.raises(SystemExit):
        imdb(["--preset", "gpt2-xl", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"--{f.name}" in shown for f in fields(ImdbConfig) if f.name != "agent_settings")
    assert "(default: gpt2-xl)" in shown and "(default: gpt2-large)" not in shown


@pytest.mark.parametrize("argv, says", [
    ("--learning_rat 1", "flag is '--learning_rat': unknown; did you mean --learning_rate?"),
    ("--learning_rat=1", "flag is '--learning_rat=1': unknown; did you mean --learning_rate?"),
    ("model=x", "flag is 'model=x': unknown"), ("--llm2 --seed 3", "flag is '--llm2': unknown"),
    ("--llm2 seed=3", "setting is 'seed=3'"), ("--llm2 lerning_rate=1", "setting is 'lerning_rate=1'"),
    ("--llm2 learning_rate=x", "--learning_rate: invalid float value: 'x'"),
    ("--knowledge_transfer maybe", "error: argument --knowledge_transfer: 'maybe' is neither true nor false"),
    ("--kl_in rewards", "'rewards'"),
    ("--preset huge", "preset is 'huge': choose from tiny, smollm2"), ("--preset", "--preset: expected one"),
    ("--resume", "run_dir is '': names no run"), ("--resume --run_dir /nowhere", "'/nowhere': holds no run")])
def test_bad_command_lines_are_one_line(argv, says, capsys):
    assert says in error_line(imdb, argv.split(), capsys)


def resume(folder, *flags: str) -> list[str]:
    """The command line that resumes a run with these flags."""
    (folder / "config.json").write_text(config_json(imdb([*flags]), ["llm1", "llm2"]))
    return ["--resume", "--run_dir", str(folder)]


def test_a_resumed_run_has_its_own_settings_and_not_its_presets(tmp_path, monkeypatch):
    argv = resume(tmp_path, "--learning_rate", "3e-5", "--lr_schedule", "constant", "--llm2", "lam=0.5")
    monkeypatch.setitem(IMDB_PRESETS["tiny"], "vf_coef", 9.0)
    cfg = imdb([*argv, "--iterations", "99", "--wandb", "offline"])
    assert (cfg.learning_rate, cfg.vf_coef, cfg.agent_settings) == (3e-5, 0.1, {"llm2": {"lam": 0.5}})
    assert (cfg.iterations, cfg.wandb, cfg.resume) == (99, "offline", True)


@pytest.mark.parametrize("flags", ["", "--lr_schedule constant --llm2 lr_schedule=cosine"])
def test_a_resumed_run_whose_rate_falls_keeps_its_iterations(flags, tmp_path, capsys):
    argv = resume(tmp_path, *flags.split())
    line = error_line(imdb, [*argv, "--iterations", "99", "--lam", "0"], capsys)
    assert re.search(r"was 40, now 99 \(over which --lr_schedule (linear|cosine) falls\); lam was 0.95", line)
    assert "holds a run of imdb" in error_line(train_gsm8k.main, argv, capsys)


@dataclass
class WithBonus(ImdbConfig):
    bonus: float = setting(0.0, "added to each reward", min=0)


def test_settings_of_ones_own_are_flags_and_come_back(tmp_path):
    words = "--llm2 model=n lam=0 --bonus 2 --llm3 num_ppo_epochs=8".split()
    cfg = parse(WithBonus, {"mine": {"model": "m"}}, words)
    assert (cfg.bonus, cfg.preset, cfg.model, cfg.lam) == (2.0, "mine", "m", 0.95)
    assert cfg.agent_settings == {"llm2": {"model": "n", "lam": 0.0}, "llm3": {"num_ppo_epochs": 8}}
    assert cfg.of_agent("llm2") == WithBonus(preset="mine", model="n", lam=0.0, bonus=2.0)
    (tmp_path / "config.json").write_text(config_json(cfg, ["llm1", "llm2", "llm3"]))
    assert load_config(tmp_path) == cfg and type(load_config(tmp_path)) is WithBonus
    saved = read(tmp_path / "config.json")
    assert saved["agents"] == {"llm1": "base", "llm2": "base_llm2", "llm3": "base"}
    del saved["bonus"]                                  # a setting that was added since has its default
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_config(tmp_path).bonus == 0.0


def test_names_of_code_are_found_or_refused(tmp_path, monkeypatch):
    (tmp_path / "present.py").write_text("x = 7")
    (tmp_path / "lacking.py").write_text("import lack")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert find("method", "cory", METHODS) is Cory and find("advantage", "present:x", ADVANTAGES) == 7
    for name, says in (("rlo", "advantage is 'rlo': unknown; did you mean rloo? choose from gae, rloo"),
                       ("present:", "unknown"), ("present:y", "the module present has no y"),
                       ("nowhere:x", "there is no module nowhere"), ("present.py:x", "name it without .py")):
        with pytest.raises(UserError, match=says.replace("?", r"\?")):
            find("advantage", name, ADVANTAGES)
    with pytest.raises(ModuleNotFoundError, match="No module named 'lack'"):
        find("task", "lacking:Mine", {})
