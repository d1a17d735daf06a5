"""Settings and the command line: the paper's tables, flags over presets and over a resumed run, what may not
stand together or has no effect, settings of one's own, names of code.
"""
import inspect
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import yaml
from toys import EXPERIMENTS, error_line, read

import train_gsm8k
import train_imdb
from cory import config
from cory.config import Gsm8kConfig, ImdbConfig, config_json, load_config, parse
from cory.errors import UserError, exit_on_user_error
from cory.train import Cory, train
from cory.wandb_log import in_section

# Tables of the paper; PPO and CORY alike.
OF_BOTH = dict(gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1, role_exchange_every=5,
               iterations=100, kl_penalty="full", kl_in="reward", advantage="gae", partner_reward=1.0,
               knowledge_transfer=True, max_grad_norm=0.0, temperature=1.0, cliprange_high=0.0)
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
        assert str(config.ASSETS) not in config_json(cfg, {}, {})       # two clones have the same config.json


def test_every_setting_has_help():
    assert all(f.metadata["help"] for f in (*fields(ImdbConfig), *fields(Gsm8kConfig)))


def test_a_flag_overrides_the_preset_and_leaves_the_rest(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    flags = "--learning_rate 3e-5 --knowledge_transfer false --shard --partner_reward -1e-1 --run_dir=~/x"
    old, new = vars(imdb(["--preset", "gpt2"])), vars(imdb(["--preset", "gpt2", *flags.split()]))
    assert {name: new[name] for name in new if new[name] != old[name]} == {
        "learning_rate": 3e-5, "knowledge_transfer": False, "shard": True, "partner_reward": -0.1,
        "run_dir": "/h/x", "wandb_group":
        "imdb-cory-gpt2-knowledge_transfer_false-partner_reward_-0.1-learning_rate_3e-05"}
    assert imdb(["--partner_reward", "-1."]).partner_reward == -1


def test_the_default_group_names_what_differs_from_the_preset_and_changes_results():
    free = ["--seed", "3", "--device", "cpu", "--wandb", "disabled", "--run_dir", "x", "--save_every", "7"]
    assert imdb([]).wandb_group == imdb(free).wandb_group == "imdb-cory-tiny"
    assert imdb(["--method", "my:Own", "--model", "m"]).wandb_group == "imdb-Own-tiny-model_m"
    assert imdb(["--wandb_group", "mine"]).wandb_group == "mine"
    in_python = ImdbConfig(**train_imdb.PRESETS["gpt2-xl"])             # it cannot know the preset
    assert in_python.preset == "custom"
    assert config.default_group(in_python, {}) == "imdb-cory-custom-model_gpt2-xl"
    long = [config.default_group(ImdbConfig(model=120 * "m", seed=s, lam=lam), {})
            for s, lam in ((0, 0.5), (1, 0.5), (1, 0.6))]
    assert long[0] == long[1] != long[2] and {*map(len, long)} == {128}


def test_help_has_the_presets_own_defaults(capsys):
    with pytest.raises(SystemExit):
        imdb(["--preset", "gpt2-xl", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: gpt2-xl)" in shown and "(default: gpt2-large)" not in shown


def test_help_has_the_sections_of_the_settings_and_speaks_of_its_own_task(capsys):
    with pytest.raises(SystemExit):
        train_gsm8k.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n{section}:\n" in shown for section in config.SECTIONS.values())
    assert "ours)" not in shown and "imdb, " not in shown and "code: 15" not in shown
    in_source = re.findall(r"\n    # (.*)\n    (\w+): ", inspect.getsource(config.Config))
    assert in_source == [(section, name) for name, section in config.SECTIONS.items()][:-2]


BAD = [                                 # one of each kind
    ("--learning_rat 1", "unrecognized arguments: --learning_rat 1"),
    ("--knowledge_transfer maybe", "argument --knowledge_transfer: 'maybe' is neither true nor false"),
    ("--resume runs/x", "argument --resume: 'runs/x' is neither true nor false; a run's folder goes after"),
    ("--resume", "--resume needs --run_dir"), ("--resume --run_dir /nowhere", "'/nowhere': contains no run"),
    ("--method grpo", "method is 'grpo': choose from ppo, cory, or name your own"),
    ("--learning_rate nan", "must be above 0"), ("--gamma 1.1", "must be 1 or less"),
    ("--batch_size 100 --mini_batch_size 32", "batch_size is 100: must be a multiple"),
    ("--responses_per_query 3", "must divide batch_size"),
    ("--min_response_length 16", "must not exceed max_response_length = 15"),
    ("--min_query_length 9", "must not exceed max_query_length = 8"),
    ("--advantage grpo --responses_per_query 4", "add --kl_in loss"),
    ("--save_best", "add --eval_split validation"),
    ("--load_in_4bit --lora_rank 0", "trains nothing"), ("--load_in_4bit --shard", "cannot be divided"),
    ("--task gsm8k", "has its own script")]


@pytest.mark.parametrize("argv, says", BAD, ids=[argv for argv, _ in BAD])
def test_bad_command_lines_are_one_line(argv, says, capsys):
    assert says in error_line(imdb, argv.split(), capsys)


@pytest.mark.parametrize("name, value, kind", [
    ("knowledge_transfer", "false", "bool"), ("shard", 1, "bool"), ("learning_rate", "1e-3", "float"),
    ("iterations", 2.0, "int"), ("seed", None, "int"), ("seed", True, "int"), ("model", 3, "str")])
def test_a_value_of_another_type_is_refused(name, value, kind):
    """`bool("false")` is true."""
    with pytest.raises(UserError, match=f"{name} is .*: must be of type {kind}"):
        ImdbConfig(**{name: value})


def test_a_setting_of_a_type_that_no_flag_has_is_refused():
    """A flag would give it a text."""
    @dataclass(frozen=True)
    class WithNone(ImdbConfig):
        shown: int | None = config.setting(None, "rows to show")

    with pytest.raises(UserError, match=r"shown is None: is declared as int \| None; a setting is bool, int"):
        WithNone()


def test_the_commit_is_that_of_the_code_wherever_it_runs(tmp_path, monkeypatch):
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    of_code = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(tmp_path)
    assert config.commit().removesuffix("-dirty") == of_code


def test_a_path_is_a_text_and_a_whole_number_a_float():
    cfg = ImdbConfig(run_dir=Path("runs") / "a", learning_rate=1)
    assert (cfg.run_dir, cfg.learning_rate) == ("runs/a", 1)


def test_a_misspelt_word_in_a_preset_is_refused():
    with pytest.raises(UserError, match="kl_in is 'Loss': choose from reward, loss"):
        parse(ImdbConfig, {"mine": {"kl_in": "Loss"}}, [])


@pytest.mark.parametrize("argv, needs", [
    ("--method ppo --knowledge_transfer false", "a method of two agents"),
    ("--role_exchange_every 0 --reset_on_exchange", "--role_exchange_every above 0"),
    ("--share_weights --role_exchange_every 3", "--share_weights false"),
    ("--advantage rloo --responses_per_query 4 --gamma 0.9", "--advantage gae or reinforce"),
    ("--advantage reinforce --lam 0.5", "a critic, as with --advantage gae"),
    ("--advantage reinforce --critic mine:Deep", "a critic, as with --advantage gae"),
    ("--vf_coef 0 --cliprange_value 1", "--vf_coef above 0"), ("--kl_horizon 99", "--kl_target above 0"),
    ("--init_kl_coef 0 --kl_target 3", "--init_kl_coef above 0"),
    ("--kl_target 0 --init_kl_coef 0", ""),
    ("--share_weights --role_exchange_every 3 --reset_on_exchange", ""),
    ("--kl_controller mine:dual --kl_target 0 --kl_horizon 9", ""),
    ("--method mine:Method --share_weights --role_exchange_every 2 --advantage mine:own --lam 0.5 "
     "--kl_controller mine:dual --init_kl_coef 0 --kl_target 2", "")])
def test_a_flag_that_nothing_would_read_is_said(argv, needs, capsys):
    imdb(argv.split())
    flag = re.findall(r"--\w+", argv)[-1]
    assert capsys.readouterr().err == (f"{flag} has no effect here: it needs {needs}\n" if needs else "")


def saved(folder, flags: list[str]) -> list[str]:
    """The command line that resumes a run which was started with these flags."""
    cfg = imdb([*flags, "--dtype", "float32"])
    (folder / "config.json").write_text(config_json(cfg, {"llm1": "base"}, {}))
    return ["--resume", "--run_dir", str(folder)]


def test_a_resumed_run_has_its_own_settings_and_not_its_presets(tmp_path, monkeypatch, capsys):
    """Of flags without effect it speaks no second time."""
    resume = saved(tmp_path, ["--learning_rate", "3e-5", "--kl_horizon", "99"])
    monkeypatch.setitem(train_imdb.PRESETS["tiny"], "vf_coef", 9.0)
    capsys.readouterr()
    cfg = imdb([*resume, "--iterations", "99", "--wandb", "offline"])
    assert (cfg.learning_rate, cfg.vf_coef, cfg.iterations, cfg.wandb) == (3e-5, 0.1, 99, "offline")
    assert cfg.kl_horizon == 99 and capsys.readouterr().err == ""
    assert "lam is 0.0: the run has 0.95;" in error_line(train_imdb.main, [*resume, "--lam", "0"], capsys)
    with pytest.raises(UserError, match="temperature is 0.5: the run has 1.0;"):        # from Python, too
        train(replace(load_config(tmp_path), resume=True, run_dir=tmp_path, temperature=0.5))
    assert "holds a run of imdb" in error_line(train_gsm8k.main, resume, capsys)


@pytest.mark.parametrize("flag, name", [
    ("--lr_schedule", "cosine"), ("--kl_controller", "test_wiring:doubled")])
def test_a_resumed_run_whose_rate_or_eta_has_a_schedule_keeps_its_iterations(
        flag, name, small_flags, tmp_path, monkeypatch, capsys):
    resume = saved(tmp_path, [*small_flags, flag, name])
    monkeypatch.setattr("cory.record.load_checkpoint", lambda *_: {"iteration": 2, "iterations": 5})
    line = error_line(train_imdb.main, [*resume, "--iterations", "9"], capsys)
    assert f"iterations is 9: the run has 5, and {flag} {name} may depend on it" in line


@dataclass(frozen=True)
class WithBonus(ImdbConfig):
    bonus: float = config.setting(0.0, "added to each reward", min=0)


def test_settings_of_ones_own_are_flags_and_come_back(tmp_path):
    cfg = parse(WithBonus, {"mine": {"model": "m"}}, ["--bonus", "2"])
    assert (cfg.bonus, cfg.preset, cfg.model, cfg.lam) == (2.0, "mine", "m", 0.95)
    pytest.raises(AttributeError, setattr, cfg, "bonus", 3.0)       # a resume would have the old one
    (tmp_path / "config.json").write_text(config_json(cfg, {"llm1": "base"}, {}))
    assert load_config(tmp_path) == cfg and type(load_config(tmp_path)) is WithBonus
    older = read(tmp_path / "config.json")
    del older["bonus"]                                  # a setting that was added since has its default
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert load_config(tmp_path).bonus == 0.0


@pytest.mark.parametrize("text, says", [
    ("{", "file is .*config.json': is damaged, JSONDecodeError"),
    ("{}", "config.json': is damaged, KeyError.'config_class'"),
    ('{"config_class": "cory.config:ImdbConfig", "gama": 1}', "gama is 1: is no setting; edit .*config.json"),
    ('\ufeff{"config_class": "cory.config:ImdbConfig", "gamma": 2}', "gamma is 2: must be 1 or less")])
def test_a_config_json_edited_wrongly_is_named(text, says, tmp_path):
    """The last has a byte-order mark, which does not matter."""
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says):
        load_config(tmp_path)


def test_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True))
    exit_on_user_error(print)("1.0 ± 0.5", "–")
    assert sys.stdout.buffer.getvalue() == b"1.0 ? 0.5 ?\n"


def test_names_of_code_are_found_or_refused(tmp_path, monkeypatch):
    (tmp_path / "present.py").write_text("x = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert ImdbConfig().find("method") is Cory and ImdbConfig(advantage="present:x").find("advantage") == 7
    (tmp_path / "faulty.py").write_text("[].lenght")
    with pytest.raises(AttributeError):                 # by its own traceback
        ImdbConfig(advantage="faulty:x").find("advantage")
    for name in ("present:y", "nowhere:x"):
        with pytest.raises(UserError, match=f"advantage is '{name}': .* without .py"):
            ImdbConfig(advantage=name).find("advantage")


def test_the_sweep_of_the_readme_is_of_flags_and_of_a_metric_that_there_are():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    sweep = yaml.safe_load(re.search(r"```yaml\n(.*?)```", readme, re.DOTALL)[1])
    assert sweep["metric"]["name"] == in_section("eval_combined_reward/mean")
    for name, values in sweep["parameters"].items():
        for value in values.get("values", [values.get("value")]):
            cfg = parse(ImdbConfig, train_imdb.PRESETS, [f"--{name}={value}"])         # as the agent calls it
            assert getattr(cfg, name) == value
