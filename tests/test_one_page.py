"""The page computes what the package computes: two programs that share the settings and the task alone.

In float64, so that this holds on any processor. Where a gradient is 0 in theory, as that of a key's bias,
each program has a rounding error of its own, which Adam divides by its size plus 1e-8. An error of 1e-17
moves a weight by 1e-9 of a step; one of 1e-8, as in float32, would move it by half a step.
"""
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import byte_tokenizer, save_model
from safetensors.torch import load_file
from toys import EXPERIMENTS, float64, samples_of, training

import train_gsm8k
import train_imdb
from cory import one_page
from cory.config import parse
from cory.errors import UserError
from cory.run.log import write_jsonl

SOURCE = Path(one_page.__file__)
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789.:"?AIQRĠ'  # few, so that EOS and answers are frequent
DATA = {
    "imdb": [{"text": "good film"}, {"text": "a bad film"}, {"text": "it was"}, {"text": "the end"}],
    "gsm8k": [
        {"question": "one and one?", "answer": "#### 2"},
        {"question": "one and two?", "answer": "#### 3"},
        {"question": "five?", "answer": "#### 5"},
        {"question": "seven?", "answer": "#### 7"}]}
COMMON = (
    "--iterations 6 --batch_size 4 --mini_batch_size 1 --gradient_accumulation_steps 2 --num_ppo_epochs 3 "
    "--min_response_length 3 --max_response_length 6 --temperature 0.8 --gamma 0.97 --lam 0.9 --vf_coef 0.5 "
    "--cliprange 0.1 --cliprange_value 0.02 --kl_target 1 --kl_horizon 7 --lora_rank 0 "
    "--learning_rate 3e-3 --critic_learning_rate 1e-2 --lr_schedule linear --role_exchange_every 2 "
    "--partner_reward 0.4 --dtype float32 --device cpu --wandb disabled --eval_queries 1 --eval_samples 1 "
    "--eval_every 0 --save_every 0").split()
RUNS = {
    "imdb cory": "--kl_penalty full --seed 5",
    "gsm8k cory": "--kl_penalty k1 --one_shot false --seed 1",
    "imdb ppo": "--method ppo --kl_penalty full --iterations 2 --lr_schedule linear --critic_learning_rate 0 "
    "--kl_target 0",
    "gsm8k ablated": "--knowledge_transfer false --role_exchange_every 0 --iterations 1 --one_shot false"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """It holds a folder for each task, with a model and data. Each query occurs twice in a pass over data."""
    folder = tmp_path_factory.mktemp("page")
    tokenizer = byte_tokenizer(CHARACTERS)
    eos = len(CHARACTERS)
    for task, kind in (("imdb", "gpt2"), ("gsm8k", "llama")):
        save_model(kind, folder / task / "lm", tokenizer, num_hidden_layers=1, vocab_size=eos + 1,
                   bos_token_id=eos, eos_token_id=eos)
        for split in ("train", "validation", "test"):
            write_jsonl(folder / task / f"{split}.jsonl", DATA[task] * 2)
    return folder


def task_of(name):
    return name.partition(" ")[0]


def flags_of(name, folder):
    data = str(folder / task_of(name))
    return ["--model", f"{data}/lm", "--dataset", data, *COMMON, *RUNS[name].split()]


def run_package(name, folder, run_dir):
    script = {"imdb": train_imdb, "gsm8k": train_gsm8k}[task_of(name)]
    script.main([*flags_of(name, folder), "--run_dir", str(run_dir)])


def run_page(page, name, folder):
    cfg = parse(*EXPERIMENTS[task_of(name)], flags_of(name, folder))
    return page.train(cfg)


def require_same(steps, run_dir):
    """The page yields the texts and metrics of the package's run, and ends with the same weights."""
    trained = training(run_dir)
    agents = {}
    updates = 0
    for iteration, role, agent, responses, metrics in steps:
        row = trained[iteration - 1]
        expected = {name: row[f"train/{name}/{agent.name}"] for name in metrics}
        assert metrics == pytest.approx(expected, rel=1e-7, abs=1e-10), (iteration, agent.name)
        samples = samples_of(run_dir, iteration)
        assert {sample[f"{role}_agent"] for sample in samples} == {agent.name}
        assert [sample[role] for sample in samples] == [response.text for response in responses]
        agents[agent.name] = agent
        updates += 1
    roles = [key for key in trained[0] if key.startswith("train/role/")]
    assert updates == len(trained) * len(roles)
    for name, agent in agents.items():
        weights = agent.pi.state_dict()
        final = load_file(run_dir / "final" / name / "model.safetensors")
        for key, expected in final.items():
            torch.testing.assert_close(weights[key], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_computes_what_the_package_computes(name, folder, tmp_path):
    run_dir = tmp_path / "r"
    with float64():
        run_package(name, folder, run_dir)
        require_same(run_page(one_page, name, folder), run_dir)
    trained = training(run_dir)
    assert all(row["train/clip_fraction/llm1"] > 0 for row in trained)
    if len(trained) == 6:               # these runs meet all that the page could compute differently
        assert [row["train/role/llm1"] for row in trained] == [0, 0, 1, 1, 0, 0]
        assert len({row["train/kl_coef/llm1"] for row in trained}) >= 4
        assert any(row["train/length/llm2"] % 1 for row in trained), "no response ended before the limit"
        different = []
        for iteration in range(1, 7):
            samples = samples_of(run_dir, iteration)
            different.append(len({sample["query"] for sample in samples}))
        assert min(different) < 4, "no query occurs twice in a batch"


def test_without_the_lines_marked_cory_the_page_is_ppo(folder):
    lines = SOURCE.read_text().split("\n")
    code = "\n".join(line for line in lines if "# CORY" not in line)
    assert "observer" not in code.partition("import copy")[2]
    page = ModuleType("ppo")
    exec(code, vars(page))
    *_, metrics = next(run_page(page, "imdb ppo", folder))
    *_, expected = next(run_page(one_page, "imdb ppo", folder))
    assert metrics == expected


def test_the_page_prints_metrics_and_refuses_settings_that_it_does_not_read(folder, capsys):
    flags = [*flags_of("gsm8k cory", folder), "--iterations", "1", "--task", "gsm8k"]
    one_page.main(flags)
    pattern = r"\n1 (\w+ llm.): '.*'\ntask reward [\d.]+, score [\d.]+, kl (\S+), "
    printed = re.findall(pattern, capsys.readouterr().out)
    assert [who for who, _ in printed] == ["pioneer llm1", "observer llm2"]
    assert [float(kl) for _, kl in printed] == pytest.approx([0, 0], abs=1e-6)
    refused = dict(lora_rank="8", advantage="rloo", method="my:Method", task="my:Task")
    for flag, value in refused.items():
        with pytest.raises(UserError, match=f"^{flag} is '?{value}'?: the page has only"):
            one_page.main([*flags, f"--{flag}", value])


def test_the_page_reads_or_refuses_each_setting():
    """A new setting must be read by the page or by a task, or be among those that the page refuses."""
    tasks = SOURCE.parent / "tasks"
    code = "".join(path.read_text() for path in (SOURCE, *tasks.glob("*.py")))
    # read by `parse`, or without effect where there is no LoRA, template, evaluation, run folder or W&B
    others = {"preset", "load_in_4bit", "chat_template_kwargs", "system_prompt", "eval_samples", "resume",
              "wandb_project", "eval_every", "run_dir"}
    for config_class, _ in EXPERIMENTS.values():
        names = {field.name for field in fields(config_class)}
        for name in names - one_page.FIXED.keys() - others:
            assert re.search(rf'cfg\.{name}\b|resolve\("{name}"\)', code), name
