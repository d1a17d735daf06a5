"""Settings and the command line: the paper's tables, flags over presets and over a resumed run, what may not
stand together, settings of one's own, names of code.
"""
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from toys import EXPERIMENTS, error_line, read

import train_imdb
from cory import config
from cory.config import ImdbConfig, load_config, parse, to_save
from cory.errors import UserError, exit_on_user_error
from cory.run.evaluate import finished_run
from cory.train import Cory, train

# Tables of the paper; PPO and CORY alike.
OF_BOTH = dict(gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1, role_exchange_every=5,
               iterations=100, kl_penalty="full", kl_in="reward", advantage="gae", partner_reward=1.0,
               knowledge_transfer=True, max_grad_norm=0.0, temperature=1.0)
GPT2_LARGE = OF_BOTH | dict(
    model="gpt2-large", reward_model="lvwerra/distilbert-imdb", dataset="stanfordnlp/imdb", batch_size=256,
    learning_rate=1.41e-5, mini_batch_size=256, gradient_accumulation_steps=1, num_ppo_epochs=4,
    init_kl_coef=0.3, min_query_length=2, max_query_length=8, min_response_length=4, max_response_length=15)
LLAMA2_7B = OF_BOTH | dict(
    model="meta-llama/Llama-2-7b-chat-hf", dataset="openai/gsm8k", load_in_4bit=True, one_shot=True,
    batch_size=32, mini_batch_size=2, gradient_accumulation_steps=16, init_kl_coef=.01, checker="last_number")


@exit_on_user_error
def imdb(argv: list[str]) -> ImdbConfig:
    return parse(ImdbConfig, train_imdb.PRESETS, argv)


@pytest.mark.parametrize("task, name, expected", [
    ("imdb", "gpt2-large", GPT2_LARGE), ("gsm8k", "llama2-7b", LLAMA2_7B | {"learning_rate": 1e-5}),
    ("gsm8k", "llama2-7b-lr1e-4", LLAMA2_7B | {"learning_rate": 1e-4})])
def test_presets_are_the_papers_settings(task, name, expected):
    cfg = parse(*EXPERIMENTS[task], ["--preset", name])
    assert {setting: getattr(cfg, setting) for setting in expected} == expected


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_every_preset_is_valid_and_names_settings_that_exist(task):
    config_class, presets = EXPERIMENTS[task]
    for name, preset in presets.items():
        cfg = parse(config_class, presets, ["--preset", name])
        assert vars(cfg).items() >= preset.items(), name
        assert str(config.ASSETS) not in str(to_save(cfg, {}))       # two clones have the same config.json


def test_a_flag_overrides_the_preset_and_leaves_the_rest(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    flags = "--learning_rate 3e-5 --knowledge_transfer false --shard --partner_reward=-1e-1 --run_dir=~/x"
    old, new = vars(imdb(["--preset", "gpt2"])), vars(imdb(["--preset", "gpt2", *flags.split()]))
    assert {name: new[name] for name in new if new[name] != old[name]} == {
        "learning_rate": 3e-5, "knowledge_transfer": False, "shard": True, "partner_reward": -0.1,
        "run_dir": "/h/x"}
    assert imdb(["--partner_reward", "-1"]).partner_reward == -1


def test_help_has_the_presets_own_defaults(capsys):
    with pytest.raises(SystemExit):
        imdb(["--preset", "gpt2-xl", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: gpt2-xl)" in shown and "(default: gpt2-large)" not in shown


BAD = [                                 # one of each kind
    ("--resume --run_dir /nowhere", "'/nowhere': contains no run"),
    ("--method grpo", "method is 'grpo': choose from ppo, cory, or name your own"),
    ("--learning_rate nan", "must be above 0"), ("--gamma 1.1", "must be at least 0 and at most 1"),
    ("--batch_size 100 --mini_batch_size 32", "batch_size is 100: must be a multiple"),
    ("--responses_per_query 3", "must divide batch_size"),
    ("--advantage grpo --responses_per_query 4", "add --kl_in loss")]


@pytest.mark.parametrize("argv, says", BAD, ids=[argv for argv, _ in BAD])
def test_bad_command_lines_are_one_line(argv, says, capsys):
    main = exit_on_user_error(lambda argv: imdb(argv).resolve("method"))
    assert says in error_line(main, argv.split(), capsys)


def test_a_flag_that_is_mistyped_is_refused():
    for argv in (["--learning_rat", "1"], ["--knowledge_transfer", "maybe"], ["--iterations", "1.5"]):
        pytest.raises(SystemExit, imdb, argv)


@pytest.mark.parametrize("name, value", [
    ("learning_rate", "1e-5"), ("iterations", 2.0), ("iterations", True), ("gamma", True), ("shard", 1),
    ("model", Path("x")), ("kl_in", None), ("kl_in", "Loss")])
def test_a_value_of_another_type_or_a_misspelt_word_is_refused_from_python(name, value):
    with pytest.raises(UserError, match=f"^{name} is "):
        replace(ImdbConfig(), **{name: value})
    assert ImdbConfig(learning_rate=1).learning_rate == 1


def saved(folder, flags: list[str]) -> list[str]:
    """The command line that resumes a run which was started with these flags."""
    cfg = imdb([*flags, "--dtype", "float32"])
    (folder / "config.json").write_text(json.dumps(to_save(cfg, {"llm1": cfg, "llm2": cfg})))
    return ["--resume", "--run_dir", str(folder)]


def test_a_resumed_run_has_its_own_settings_and_not_its_presets(tmp_path, monkeypatch, capsys):
    resume = saved(tmp_path, ["--learning_rate", "3e-5"])
    monkeypatch.setitem(train_imdb.PRESETS["tiny"], "vf_coef", 9.0)
    cfg = imdb([*resume, "--iterations", "99", "--wandb", "offline"])
    assert (cfg.learning_rate, cfg.vf_coef, cfg.iterations, cfg.wandb) == (3e-5, 0.1, 99, "offline")
    assert "lam is 0.0: the run has 0.95;" in error_line(train_imdb.main, [*resume, "--lam", "0"], capsys)
    with pytest.raises(UserError, match="temperature is 0.5: the run has 1.0;"):        # from Python, too
        train(replace(load_config(tmp_path), resume=True, run_dir=str(tmp_path), temperature=0.5))
    monkeypatch.setattr(Cory, "agent_names", ("llm1", "llm2", "llm3"))
    assert "agents is {'llm1': 'base', 'llm2': 'base', 'llm3'" in error_line(train_imdb.main, resume, capsys)
    monkeypatch.setattr(Cory, "agent_names", ("llm1", "llm2"))
    edited = lambda cfg, name: replace(cfg, lam=0.5) if name == "llm2" else cfg
    monkeypatch.setattr(Cory, "agent_config", staticmethod(edited))
    with pytest.raises(UserError, match="llm2/lam is 0.5: the run has None;"):
        finished_run(tmp_path)
    assert "llm2/lam is 0.5: the run has None;" in error_line(train_imdb.main, resume, capsys)


@dataclass(frozen=True)
class WithBonus(ImdbConfig):
    bonus: float = config.setting(0.0, "added to each reward", min=0)


def test_settings_of_ones_own_are_flags_and_come_back(tmp_path):
    cfg = parse(WithBonus, {"mine": {"model": "m"}}, ["--bonus", "2"])
    assert (cfg.bonus, cfg.preset, cfg.model, cfg.lam) == (2.0, "mine", "m", 0.95)
    pytest.raises(AttributeError, setattr, cfg, "bonus", 3.0)       # a resume would have the old one
    (tmp_path / "config.json").write_text(json.dumps(to_save(cfg, {})))
    assert load_config(tmp_path) == cfg and type(load_config(tmp_path)) is WithBonus
    older = read(tmp_path / "config.json")
    del older["bonus"]                                  # a setting that was added since has its default
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert load_config(tmp_path).bonus == 0.0


def test_names_of_code_are_found_also_in_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "present.py").write_text("x = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert ImdbConfig().resolve("method") is Cory
    assert ImdbConfig(advantage="present:x").resolve("advantage") == 7
    for name, error in (("present:y", AttributeError), ("nowhere:x", UserError)):
        with pytest.raises(error):
            ImdbConfig(advantage=name).resolve("advantage")


def test_a_script_is_not_imported_again_by_its_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/there/myscript.py"])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    assert config.import_name("myscript:__name__") == "__main__"


def test_the_documented_sweep_is_of_flags_and_of_a_metric_that_there_are():
    page = (Path(__file__).parents[1] / "docs/settings.md").read_text()
    sweep = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert sweep["metric"]["name"] in read(Path(__file__).with_name("trajectory.json"))["imdb-cory"]
    for name, values in sweep["parameters"].items():
        for value in values.get("values", [values.get("value")]):
            cfg = parse(ImdbConfig, train_imdb.PRESETS, [f"--{name}={value}"])         # as the agent calls it
            assert getattr(cfg, name) == value
