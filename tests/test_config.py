"""Settings and the command line: the paper's tables, flags over presets and over a resumed run, values that
are refused, custom settings, and names of code.
"""
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from toys import EXPERIMENTS, error_line, read

import train_imdb
from cory import config
from cory.config import ImdbConfig, load_config, parse, to_save
from cory.errors import UserError, exit_on_user_error
from cory.run.evaluate import finished_run
from cory.train import Cory, train

# The paper's tables of settings, which are the same for PPO and CORY.
BOTH_TASKS = dict(
    iterations=100, role_exchange_every=5, partner_reward=1.0,
    knowledge_transfer=True, temperature=1.0, advantage="gae",
    gamma=1.0, lam=0.95, vf_coef=0.1,
    cliprange=0.2, cliprange_value=0.2, max_grad_norm=0.0,
    kl_penalty="full", kl_in="reward")
GPT2_LARGE = BOTH_TASKS | dict(
    model="gpt2-large", reward_model="lvwerra/distilbert-imdb",
    dataset="stanfordnlp/imdb", batch_size=256, mini_batch_size=256,
    gradient_accumulation_steps=1, num_ppo_epochs=4,
    learning_rate=1.41e-5, init_kl_coef=0.3,
    min_query_length=2, max_query_length=8,
    min_response_length=4, max_response_length=15)
LLAMA2_7B = BOTH_TASKS | dict(
    model="meta-llama/Llama-2-7b-chat-hf", load_in_4bit=True,
    dataset="openai/gsm8k", one_shot=True, checker="last_number",
    batch_size=32, mini_batch_size=2, gradient_accumulation_steps=16,
    init_kl_coef=0.01)


def imdb(argv: list[str]) -> ImdbConfig:
    return parse(ImdbConfig, train_imdb.PRESETS, argv)


@pytest.mark.parametrize("task, preset, expected", [
    ("imdb", "gpt2-large", GPT2_LARGE),
    ("gsm8k", "llama2-7b", LLAMA2_7B | {"learning_rate": 1e-5}),
    ("gsm8k", "llama2-7b-lr1e-4", LLAMA2_7B | {"learning_rate": 1e-4})])
def test_presets_are_the_papers_settings(task, preset, expected):
    cfg = parse(*EXPERIMENTS[task], ["--preset", preset])
    assert vars(cfg) == vars(cfg) | expected


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_every_preset_is_valid_and_names_settings_that_exist(task):
    config_class, presets = EXPERIMENTS[task]
    for name, preset in presets.items():
        cfg = parse(config_class, presets, ["--preset", name])
        assert vars(cfg) == vars(cfg) | preset
        assert str(config.ASSETS) not in str(to_save(cfg, {}))       # two clones have the same config.json


def test_a_flag_overrides_the_preset_and_leaves_the_rest(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    flags = "--learning_rate 3e-5 --knowledge_transfer false --shard --partner_reward -1e-1 --run_dir=~/x"
    preset = imdb(["--preset", "gpt2"])
    expected = replace(preset, learning_rate=3e-5, knowledge_transfer=False, shard=True,
                       partner_reward=-0.1, run_dir="/h/x")
    assert imdb(["--preset", "gpt2", *flags.split()]) == expected


def test_a_model_of_ones_own_with_the_smallest_preset_is_noted(capsys):
    """Its responses are short, and its problems generated."""
    imdb(["--model", "gpt2"])
    assert capsys.readouterr().out == (
        "preset tiny has the settings of its own model, not of gpt2; see --preset\n")
    imdb([])
    imdb(["--preset", "smollm2", "--model", "gpt2"])
    assert capsys.readouterr().out == ""


def test_help_shows_the_defaults_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        imdb(["--preset", "gpt2-xl", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: gpt2-xl)" in shown


BAD = {                                 # one of each kind
    "--min_response_length 20": "must be at most max_response_length = 15",
    "--resume --run_dir /nowhere": "'/nowhere': contains no run",
    "--method grpo": "method is 'grpo': choose from ppo, cory, or name your own",
    "--learning_rate nan": "must be above 0",
    "--gamma 1.1": "must be at least 0 and at most 1",
    "--batch_size 100 --mini_batch_size 32": "batch_size is 100: must be a multiple",
    "--responses_per_query 3": "must divide batch_size",
    "--advantage grpo --responses_per_query 4": "add --kl_in loss",
    "--system_prompt Hello": "chat_template is False: must be true with --system_prompt",
    """--chat_template_kwargs {"a":1}""": "chat_template is False: must be true with",
}


@pytest.mark.parametrize("flags", BAD)
def test_a_bad_command_line_ends_in_one_line(flags, capsys):
    @exit_on_user_error
    def main(argv):
        imdb(argv).resolve("method")
    assert BAD[flags] in error_line(main, flags.split(), capsys)


@pytest.mark.parametrize("flags", ["--learning_rat 1", "--knowledge_transfer maybe", "--iterations 1.5"])
def test_a_mistyped_flag_is_refused(flags):
    with pytest.raises(SystemExit):
        imdb(flags.split())


@pytest.mark.parametrize("name, value", [
    ("learning_rate", "1e-5"), ("iterations", 2.0),
    ("iterations", True), ("gamma", True), ("shard", 1),
    ("model", Path("x")), ("kl_in", None), ("kl_in", "Loss")])
def test_python_values_of_a_wrong_type_or_not_among_the_choices_are_refused(name, value):
    with pytest.raises(UserError, match=f"^{name} is "):
        replace(ImdbConfig(), **{name: value})


def test_an_int_may_stand_for_a_float():
    assert ImdbConfig(learning_rate=1).learning_rate == 1


@pytest.fixture
def resume_flags(tmp_path) -> list[str]:
    """The command line that resumes a run, which was started with a learning rate of 3e-5."""
    cfg = imdb(["--learning_rate", "3e-5", "--dtype", "float32"])
    saved = to_save(cfg, {"llm1": cfg, "llm2": cfg})
    (tmp_path / "config.json").write_text(json.dumps(saved))
    return ["--resume", "--run_dir", str(tmp_path)]


def test_a_resumed_run_keeps_its_settings_when_its_preset_has_changed(resume_flags, monkeypatch):
    monkeypatch.setitem(train_imdb.PRESETS["tiny"], "vf_coef", 9.0)
    cfg = imdb([*resume_flags, "--iterations", "99"])
    assert cfg.learning_rate == 3e-5
    assert cfg.vf_coef == 0.1
    assert cfg.iterations == 99


def test_a_run_is_resumed_by_the_script_that_started_it(resume_flags):
    with pytest.raises(UserError, match="run_dir is '.*': was started by another script"):
        parse(*EXPERIMENTS["gsm8k"], resume_flags)


def test_a_resumed_run_refuses_other_settings(tmp_path, resume_flags, capsys):
    line = error_line(train_imdb.main, [*resume_flags, "--lam", "0"], capsys)
    assert "lam is 0.0: the run has 0.95;" in line
    cfg = replace(load_config(tmp_path), resume=True, run_dir=str(tmp_path), temperature=0.5)
    with pytest.raises(UserError, match="temperature is 0.5: the run has 1.0;"):
        train(cfg)


def test_a_resumed_run_refuses_other_agents(resume_flags, capsys, monkeypatch):
    monkeypatch.setattr(Cory, "agent_names", ("llm1", "llm2", "llm3"))
    line = error_line(train_imdb.main, resume_flags, capsys)
    assert "agents is {'llm1': 'base', 'llm2': 'base', 'llm3'" in line


def test_resume_and_evaluate_refuse_agents_with_other_settings(tmp_path, resume_flags, capsys, monkeypatch):
    def agent_config(cfg, name):
        return replace(cfg, lam=0.5) if name == "llm2" else cfg
    monkeypatch.setattr(Cory, "agent_config", staticmethod(agent_config))
    message = "llm2/lam is 0.5: the run has None;"
    assert message in error_line(train_imdb.main, resume_flags, capsys)
    with pytest.raises(UserError, match="holds a run that is not finished"):
        finished_run(tmp_path)
    (tmp_path / "eval.json").touch()
    with pytest.raises(UserError, match=message):
        finished_run(tmp_path)


@dataclass(frozen=True)
class WithBonus(ImdbConfig):
    bonus: float = config.setting(0.0, "added to each reward", min=0)


def test_a_custom_setting_is_a_flag_and_is_loaded_with_the_run(tmp_path):
    cfg = parse(WithBonus, {"my-preset": {"model": "my-model"}}, ["--bonus", "2"])
    assert cfg == WithBonus(bonus=2.0, preset="my-preset", model="my-model")
    with pytest.raises(AttributeError):                 # a resumed run would not have the change
        cfg.bonus = 3.0
    path = tmp_path / "config.json"
    saved = to_save(cfg, {})
    path.write_text(json.dumps(saved))
    assert load_config(tmp_path) == cfg
    del saved["bonus"]                                  # as in a run from before the setting was added
    path.write_text(json.dumps(saved))
    assert load_config(tmp_path).bonus == 0.0


def test_code_is_also_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "present.py").write_text("x = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert ImdbConfig(advantage="present:x").resolve("advantage") == 7
    with pytest.raises(AttributeError):
        ImdbConfig(advantage="present:y").resolve("advantage")
    with pytest.raises(UserError):
        ImdbConfig(advantage="nowhere:x").resolve("advantage")


@pytest.mark.parametrize("spec, name", [
    (None, "myscript"),                                                     # python myscript.py
    (SimpleNamespace(name="examples.tasks.my"), "examples.tasks.my")])      # python -m examples.tasks.my
def test_a_script_is_not_imported_again_by_its_name(spec, name, monkeypatch):
    script = SimpleNamespace(__spec__=spec, x=7)
    monkeypatch.setattr(sys, "argv", ["/there/myscript.py"])
    monkeypatch.setattr(sys, "modules", sys.modules | {"__main__": script})
    assert config.import_name(f"{name}:x") == 7


def test_the_documented_sweep_has_flags_and_a_metric_that_exist():
    page = Path(__file__).parents[1] / "docs/settings.md"
    block = re.search(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    sweep = yaml.safe_load(block[1])
    trajectories = read(Path(__file__).with_name("trajectory.json"))
    assert sweep["metric"]["name"] in trajectories["imdb-cory"]
    for name, choice in sweep["parameters"].items():
        values = choice.get("values", [choice.get("value")])
        for value in values:
            cfg = imdb([f"--{name}={value}"])           # as the agent of W&B calls it
            assert getattr(cfg, name) == value
