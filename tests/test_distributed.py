"""Several processes compute what one computes, and all end when one fails."""
import json
import os
import shutil
from pathlib import Path
from signal import SIGTERM
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from toys import final_models, refusal, resume, rows, saved_tensors, stopped, training

import train_gsm8k
import train_imdb
from cory.errors import UserError
from cory.machine import sharding
from cory.machine.distributed import Processes, processes
from cory.ppo.rollout import take
from cory.ppo.update import optimizer_step
from cory.run.checkpoint import checkpoints_of
from cory.tasks.imdb import Imdb
from cory.train import Ppo

# In the runs `one` and `lora` an iteration has one optimizer step: Adam's first moment is then a tenth of the
# first gradient. Each later step moves weights of tiny gradients by their signs, and so multiplies rounding.
ONE_STEP = "--method cory --learning_rate 1e-5 --iterations 2 --eval_every 2".split()
SHARD = ["--shard", "true"]


class Supervised(Ppo):
    """Before each update comes a supervised step on the agent's responses. Its loss leaves the critic out,
    which a gradient of 0 would move by its momentum. In a run named `error`, the second process fails.
    """

    def scores(self, rollouts, rewards):
        fails = Path(self.cfg.run_dir).name == "error"
        if fails and processes().rank == 1:
            raise UserError("a score", 0, "of the second process")
        return rewards

    def respond(self, players, queries, sample):
        (agent,) = players
        rollouts = super().respond(players, queries, sample)
        local = processes().local_rows(len(queries))
        rows = take(rollouts[0], torch.arange(len(queries))[local])
        real = rows.mask_BT.bool()
        hidden_BTH = agent.policy.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
        logp_N, _ = agent.policy.logp_and_entropy(hidden_BTH[real], rows.response_BT[real])
        loss = -logp_N.sum()
        loss.backward()
        optimizer_step(agent)
        return rollouts

    def update(self, role, agent, rollout, score_B):
        """Also counts the numbers of Adam's first moments that this process holds."""
        metrics = super().update(role, agent, rollout, score_B)
        held = 0
        for state in agent.optimizer.state.values():
            moment = state["exp_avg"]
            held += getattr(moment, "_local_tensor", moment).numel()
        return metrics | {"held": held}


class WithTerm(Imdb):
    """Its rewards have a term, the number of characters."""

    def compute_rewards(self, queries, responses):
        lengths = [len(response) for response in responses]
        return super().compute_rewards(queries, responses), {"characters": lengths}


def train_all(commands: list) -> None:
    for main, flags, run_dir in commands:
        main([*flags, "--run_dir", run_dir])


def train_all_on_a_node(commands: list) -> None:
    """In one of torchrun's processes. Each is the first of its node, as if there were two nodes."""
    os.environ["LOCAL_RANK"] = "0"
    train_all(commands)


@pytest.fixture(scope="module")
def runs(small, small_flags, problem_flags, tmp_path_factory) -> Path:
    """The same by one process (one, lora, mixed) and by two (two, ..._shard, resumed); what fails in two.
    They take 13 s: ten runs, of which seven are in two processes.
    """
    folder = tmp_path_factory.mktemp("distributed")
    ending = shutil.copytree(small, folder / "ending")           # whose responses end early
    stop_tokens = json.dumps({"eos_token_id": [*range(60), 256]})
    (ending / "generation_config.json").write_text(stop_tokens)
    imdb = [*small_flags, *ONE_STEP]
    lora = [*problem_flags, *ONE_STEP, "--lora_rank", "2"]
    mixed_flags = (
        "--method test_distributed:Supervised --task test_distributed:WithTerm --max_grad_norm 0.1 "
        "--responses_per_query 2 --batch_size 8 --lr_schedule linear")
    mixed = [*imdb, "--model", str(ending), *mixed_flags.split()]
    in_two_processes = [
        (train_imdb.main, imdb, "two"),
        (train_imdb.main, [*imdb, *SHARD], "one_shard"),
        (train_gsm8k.main, [*lora, *SHARD], "lora_shard"),
        (train_imdb.main, [*mixed, *SHARD], "mixed_shard"),
        (train_imdb.main, [*mixed, *SHARD, "--dtype", "bfloat16"], "bfloat16_shard"),
        (train_imdb.main, ["--resume", *SHARD], "resumed"),
        (train_imdb.main, mixed, "error"),
    ]
    # torchrun's own function; processes that are forked have read the libraries already
    launch = LaunchConfig(
        1, 1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, start_method="fork", monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(str(folder / "log"), Std.ALL))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_all([
            (train_imdb.main, imdb, "one"),
            (train_gsm8k.main, lora, "lora"),
            (train_imdb.main, mixed, "mixed")])
        stopped(folder / "mixed", folder / "resumed")
        deadline = Timer(300, os.kill, (os.getpid(), SIGTERM))      # on which torchrun ends its processes
        deadline.start()
        with pytest.raises(ChildFailedError):
            elastic_launch(launch, train_all_on_a_node)(in_two_processes)
        deadline.cancel()
    return folder


def require_same_rows(run: Path, expected: Path) -> None:
    """Numbers to 1e-5, texts as they are."""
    for file in ("metrics.jsonl", "samples.jsonl"):
        for row, other in zip(rows(run, file), rows(expected, file), strict=True):
            assert row.keys() == other.keys()
            for key in row.keys() - {"train/held/llm1"}:
                expected_value = other[key]
                if not isinstance(expected_value, str):
                    expected_value = pytest.approx(expected_value, rel=1e-5, abs=1e-5)
                assert row[key] == expected_value, key


def first_checkpoint(run: Path) -> dict:
    return saved_tensors(checkpoints_of(run)[-1])


@pytest.mark.parametrize("name, reference", [
    ("two", "one"), ("one_shard", "one"), ("lora_shard", "lora"),
    ("mixed_shard", "mixed"), ("resumed", "mixed")])
def test_two_processes_compute_what_one_computes(runs, name, reference):
    """The same metrics, responses, first moments of Adam and final models."""
    run = runs / name
    expected = runs / reference
    require_same_rows(run, expected)
    first = first_checkpoint(run)
    first_expected = first_checkpoint(expected)
    assert first.keys() == first_expected.keys()
    for key, moment in first_expected.items():
        if "/exp_avg" in key:
            error = (first[key] - moment).norm()
            assert error <= 1e-5 * moment.norm() + 1e-9, key
    models = final_models(run)
    models_expected = final_models(expected)
    assert models.keys() == models_expected.keys()
    for path, tensors in models_expected.items():
        assert models[path].keys() == tensors.keys()
        errors = [(models[path][name] - x).flatten() for name, x in tensors.items()]
        mean_square = torch.cat(errors).square().mean()     # Adam moves single weights by their rounding
        assert mean_square.sqrt() < 1e-6


@pytest.mark.parametrize("name", ["mixed_shard", "bfloat16_shard"])
def test_a_shard_is_half_of_the_layers_matrices(runs, name):
    """Each of 2 layers has 12 x 32 x 32 numbers in matrices. In bfloat16 the gradient is about the same."""
    sharded = training(runs / name)[-1]
    whole = training(runs / "mixed")[-1]
    assert whole["train/held/llm1"] - sharded["train/held/llm1"] == 2 * 12 * 32 * 32 / 2
    assert sharded["train/grad_norm/llm1"] == pytest.approx(whole["train/grad_norm/llm1"], rel=0.2)


def test_an_error_of_one_process_is_one_line_and_ends_both(runs):
    logs = [path.read_text() for path in runs.glob("log/**/stderr.log")]
    assert "".join(logs).count("error: a score is 0: of the second process") == 1
    assert [row["iteration"] for row in rows(runs / "error")] == [0]


def test_one_process_resumes_what_two_have_saved(runs):
    run = stopped(runs / "mixed_shard", runs / "resumed by one")
    resume(run, "--shard", "false")
    require_same_rows(run, runs / "mixed")


def test_each_row_belongs_to_one_process():
    local = [Processes(rank, 3).local_rows(7) for rank in range(3)]
    assert local == [slice(0, 2), slice(2, 4), slice(4, 7)]


def test_each_process_makes_as_many_passes(monkeypatch):
    """Another process has 3 groups: the larger of the 2 here is halved."""
    both = SimpleNamespace(all_gather=lambda counts: [*counts, 3])
    monkeypatch.setattr(sharding, "processes", lambda: both)
    groups = [torch.tensor([4, 2, 7, 1]), torch.tensor([0])]
    split = sharding.split_to_equal_count(groups)
    assert [rows.tolist() for rows in split] == [[0], [4, 2], [7, 1]]


def test_shards_need_torchrun(small_flags, tmp_path, capsys):
    assert "shard is True: needs torchrun" in refusal([*small_flags, *SHARD], tmp_path / "r", capsys)
