"""The page computes what the package computes: two programs that share the settings and the task alone.

In float64, so that this holds on any processor. Where a gradient is 0 in theory, as that of a key's bias,
each program has a rounding error of its own, which Adam divides by its size plus 1e-8. An error of 1e-17
moves a weight by 1e-9 of a step; one of 1e-8, as in float32, would move it by half a step.
"""
import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import save_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import EXPERIMENTS, float64, rows, training
from transformers import PreTrainedTokenizerFast

import train_gsm8k
import train_imdb
from cory import one_page
from cory.config import parse
from cory.errors import UserError

SOURCE = Path(one_page.__file__)
END = "<|endoftext|>"
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789.:"?AIQRĠ'  # few, so that EOS and answers are frequent
DATA = {"imdb": [{"text": text} for text in ("good film", "a bad film", "it was", "the end")],
        "gsm8k": [{"question": question, "answer": f"#### {answer}"} for question, answer in (
            ("one and one?", 2), ("one and two?", 3), ("five?", 5), ("seven?", 7))]}
COMMON = (
    "--iterations 6 --batch_size 4 --mini_batch_size 1 --gradient_accumulation_steps 2 --num_ppo_epochs 2 "
    "--min_response_length 3 --max_response_length 6 --temperature 0.8 --gamma 0.97 --lam 0.9 --vf_coef 0.5 "
    "--cliprange 0.1 --cliprange_value 0.02 --kl_target 1 --kl_horizon 6 --lora_rank 0 "
    "--learning_rate 3e-3 --critic_learning_rate 1e-2 --lr_schedule linear --role_exchange_every 2 "
    "--partner_reward 0.5 --dtype float32 --device cpu --wandb disabled --eval_queries 1 --eval_samples 1 "
    "--eval_every 0 --save_every 0").split()
RUNS = {
    "imdb cory": "--kl_penalty full --seed 5",
    "gsm8k cory": "--kl_penalty k1 --one_shot false --seed 1",
    "imdb ppo": "--method ppo --kl_penalty full --iterations 2 --lr_schedule linear --critic_learning_rate 0 "
    "--kl_target 0",
    "gsm8k ablated": "--knowledge_transfer false --role_exchange_every 0 --iterations 1 --one_shot false"}


def save_models(folder: Path) -> Path:
    """A folder for each task, with a model and data. Each query occurs twice in a pass over the data."""
    vocabulary = {character: i for i, character in enumerate([*CHARACTERS, END])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([END])
    eos = vocabulary[END]
    for task, kind in (("imdb", "gpt2"), ("gsm8k", "llama")):
        save_model(kind, folder / task / "lm", PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END),
                   num_hidden_layers=1, vocab_size=eos + 1, bos_token_id=eos, eos_token_id=eos)
        for split in ("train", "validation", "test"):
            (folder / task / f"{split}.jsonl").write_text("\n".join(map(json.dumps, DATA[task] * 2)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("page"))


def flags_of(name: str, folder: Path) -> list[str]:
    place = folder / name.partition(" ")[0]
    return ["--model", f"{place}/lm", "--dataset", str(place), *COMMON, *RUNS[name].split()]


def run_package(name: str, folder: Path, run_dir: Path) -> None:
    script = {"imdb": train_imdb, "gsm8k": train_gsm8k}[name.partition(" ")[0]]
    script.main([*flags_of(name, folder), "--run_dir", str(run_dir)])


def run_page(page: ModuleType, name: str, folder: Path):
    return page.train(parse(*EXPERIMENTS[name.partition(" ")[0]], flags_of(name, folder)))


def require_same(steps, run_dir: Path) -> None:
    """What the page yields are the texts, the metrics and the final weights of the package's run."""
    trained = training(run_dir)
    agents, done = {}, 0
    for iteration, role, agent, responses, metrics in steps:
        row = trained[iteration - 1]
        expected = {name: row[f"train/{name}/{agent.name}"] for name in metrics}
        assert metrics == pytest.approx(expected, rel=1e-7, abs=1e-10), (iteration, agent.name)
        samples = [sample for sample in rows(run_dir, "samples.jsonl") if sample["iteration"] == iteration]
        assert [(x[f"{role}_agent"], x[role]) for x in samples] == [(agent.name, a.text) for a in responses]
        agents[agent.name], done = agent, done + 1
    assert done == len(trained) * sum(key.startswith("train/role/") for key in trained[0])
    for name, agent in agents.items():
        final = load_file(run_dir / "final" / name / "model.safetensors")
        assert final.keys() <= agent.pi.state_dict().keys()
        for key, weight in final.items():
            torch.testing.assert_close(agent.pi.state_dict()[key], weight, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_the_package_computes_what_the_page_computes(name, folder, tmp_path):
    with float64():
        run_package(name, folder, tmp_path / "r")
        require_same(run_page(one_page, name, folder), tmp_path / "r")
    trained = training(tmp_path / "r")
    assert all(row["train/clip_fraction/llm1"] > 0 for row in trained)
    if len(trained) == 6:          # the runs that are compared have what the page could get wrong
        assert [row["train/role/llm1"] for row in trained] == [0, 0, 1, 1, 0, 0]
        assert len({row["train/kl_coef/llm1"] for row in trained}) >= 4
        assert any(row["train/length/llm2"] % 1 for row in trained), "no response ended before the limit"
        queries = [[sample["query"] for sample in rows(tmp_path / "r", "samples.jsonl")
                    if sample["iteration"] == row["iteration"]] for row in trained]
        assert any(len({*of_batch}) < 4 for of_batch in queries), "no query occurs twice in a batch"


def test_without_the_lines_marked_cory_the_page_is_ppo(folder):
    page, lines = ModuleType("ppo"), SOURCE.read_text().split("\n")
    code = "\n".join(line for line in lines if "# CORY" not in line)
    exec(code, vars(page))
    assert "observer" not in code.partition("import copy")[2]
    assert next(run_page(page, "imdb ppo", folder))[4] == next(run_page(one_page, "imdb ppo", folder))[4]


def test_the_page_prints_metrics_and_refuses_what_it_leaves_out(folder, capsys):
    flags = [*flags_of("gsm8k cory", folder), "--iterations", "1", "--task", "gsm8k"]
    one_page.main(flags)
    said = capsys.readouterr().out
    printed = re.findall(r"\n1 (\w+ llm.): '.*'\ntask reward [\d.]+, score [\d.]+, kl 0, ", said)
    assert printed == ["pioneer llm1", "observer llm2"]
    for flag, value in (("lora_rank", "8"), ("advantage", "rloo"), ("method", "my:Own"), ("task", "my:Own")):
        with pytest.raises(UserError, match=f"^{flag} is '?{value}'?: the page has only"):
            one_page.main([*flags, f"--{flag}", value])


def test_the_page_reads_or_refuses_each_setting():
    """A new setting is in the page, in a task, or in what the page refuses."""
    tasks = SOURCE.parent / "tasks"
    code = "".join(path.read_text() for path in (SOURCE, *tasks.glob("*.py")))
    # read by `parse`; nothing without LoRA, an evaluation, a folder or W&B
    others = {"preset", "load_in_4bit", "eval_samples", "resume", "wandb_project", "eval_every", "run_dir"}
    for config_class, _ in EXPERIMENTS.values():
        unknown = {f.name for f in fields(config_class)} - {*one_page.FIXED} - others
        assert not {name for name in unknown if not re.search(rf'cfg\.{name}\b|resolve\("{name}"\)', code)}
