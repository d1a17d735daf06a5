"""Several processes compute what one computes; and all end when one fails."""
import json
import os
import shutil
from pathlib import Path
from signal import SIGTERM
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from toys import resume, rows, saved_tensors, stopped, training

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

# One optimizer step for each iteration: Adam's first moment is then a tenth of the first gradient. Each
# later one moves weights of tiny gradients by their signs, and so multiplies rounding.
ONE_STEP = "--method cory --learning_rate 1e-5 --iterations 2 --eval_every 2".split()
SHARD = ["--shard", "true"]


class Supervised(Ppo):
    """A supervised step on the agent's own responses before each update, whose loss leaves the critic out: a
    gradient of 0 would move it by its momentum. One process meets what the run's folder is named by.
    """

    def scores(self, rollouts, rewards):
        fault = Path(self.cfg.run_dir).name
        if fault == "error" and processes().rank == 1:
            raise UserError("a score", 0, "of the second process")
        return rewards

    def respond(self, players, queries, sample):
        (agent,), (rollout,) = players, super().respond(players, queries, sample)
        rows = take(rollout, torch.arange(len(queries))[processes().local_rows(len(queries))])
        real = rows.mask_BT.bool()
        hidden_BTH = agent.policy.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
        (-agent.policy.logp_and_entropy(hidden_BTH[real], rows.response_BT[real])[0].sum()).backward()
        optimizer_step(agent)
        return [rollout]

    def update(self, role, agent, rollout, score_B):
        """With the numbers of Adam's moments that this process holds."""
        metrics = super().update(role, agent, rollout, score_B)
        moments = [state["exp_avg"] for state in agent.optimizer.state.values()]
        return metrics | {"held": sum(getattr(x, "_local_tensor", x).numel() for x in moments)}


class Measured(Imdb):
    """Its rewards have a part."""

    def compute_rewards(self, queries, responses):
        return super().compute_rewards(queries, responses), {"characters": [*map(len, responses)]}


def in_each(commands: list) -> None:
    """The runs of one of torchrun's processes."""
    os.environ["LOCAL_RANK"] = "0"                          # as on two nodes
    for main, *flags in commands:
        main(flags)


@pytest.fixture(scope="module")
def runs(small, small_flags, problem_flags, tmp_path_factory) -> Path:
    """The same by one process (one, lora, mixed) and by two (two, ..._shard, resumed); what fails in two.
    They take 13 s: ten runs, of which seven are in two processes.
    """
    folder = tmp_path_factory.mktemp("distributed")
    ending = shutil.copytree(small, folder / "ending")           # whose responses end early
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(60), 256]}))
    imdb, lora = [*small_flags, *ONE_STEP], [*problem_flags, *ONE_STEP, "--lora_rank", "2"]
    mixed = [*imdb, "--model", str(ending), *"""--method test_distributed:Supervised --max_grad_norm 0.1
             --task test_distributed:Measured --responses_per_query 2 --batch_size 8 --lr_schedule linear
             """.split()]
    for main, flags, name in ((train_imdb.main, imdb, "one"), (train_gsm8k.main, lora, "lora"),
                              (train_imdb.main, mixed, "mixed")):
        main([*flags, "--run_dir", str(folder / name)])
    stopped(folder / "mixed", folder / "resumed")
    commands = [[train_imdb.main, *imdb, "--run_dir", "two"],
                [train_imdb.main, *imdb, *SHARD, "--run_dir", "one_shard"],
                [train_gsm8k.main, *lora, *SHARD, "--run_dir", "lora_shard"],
                [train_imdb.main, *mixed, *SHARD, "--run_dir", "mixed_shard"],
                [train_imdb.main, *mixed, *SHARD, "--dtype", "bfloat16", "--run_dir", "bfloat16_shard"],
                [train_imdb.main, "--resume", *SHARD, "--run_dir", "resumed"],
                [train_imdb.main, *mixed, "--run_dir", "error"]]
    # torchrun's own function; processes that are forked have read the libraries already
    two = LaunchConfig(1, 1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                       max_restarts=0, start_method="fork", monitor_interval=0.1,
                       logs_specs=DefaultLogsSpecs(str(folder / "log"), Std.ALL))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        late = Timer(300, os.kill, (os.getpid(), SIGTERM))      # on which torchrun ends its processes
        late.start()
        with pytest.raises(ChildFailedError):
            elastic_launch(two, in_each)(commands)
        late.cancel()
    (folder / "err").write_text("".join(path.read_text() for path in folder.glob("log/**/stderr.log")))
    return folder


def require_same_rows(run: Path, expected: Path) -> None:
    """Numbers to 1e-5, texts as they are."""
    for file in ("metrics.jsonl", "samples.jsonl"):
        for row, other in zip(rows(run, file), rows(expected, file), strict=True):
            assert row.keys() == other.keys()
            for key in row.keys() - {"train/held/llm1"}:
                x, y = row[key], other[key]
                assert x == y or abs(x - y) <= 1e-5 * max(1, abs(y)), key


@pytest.mark.parametrize("name, of", [("two", "one"), ("one_shard", "one"), ("lora_shard", "lora"),
                                      ("mixed_shard", "mixed"), ("resumed", "mixed")])
def test_two_processes_compute_what_one_computes(runs, name, of):
    """The same metrics, the same responses, the same first gradient, the same final models."""
    require_same_rows(runs / name, runs / of)
    assert of != "mixed" or all(row["train/characters/llm1"] > 0 for row in training(runs / name))
    first, expected = (saved_tensors(checkpoints_of(runs / run)[-1]) for run in (name, of))
    assert first.keys() == expected.keys()
    for key, x in expected.items():
        if "/exp_avg" in key:
            assert (first[key] - x).norm() <= 1e-5 * x.norm() + 1e-9, key
    final, expected = (sorted((runs / run / "final").rglob("*.safetensors")) for run in (name, of))
    for path, other in zip(final, expected, strict=True):
        found, whole = load_file(path), load_file(other)
        assert found.keys() == whole.keys()
        apart = torch.cat([(x - whole[name]).flatten() for name, x in found.items()])
        assert apart.square().mean().sqrt() < 1e-6          # Adam moves single weights by their rounding


@pytest.mark.parametrize("name", ["mixed_shard", "bfloat16_shard"])
def test_a_shard_is_half_of_the_layers_matrices(runs, name):
    """Which have 12 x 32 x 32 numbers in each of 2 layers. In bfloat16, too, they learn as the whole does."""
    sharded, whole = (rows(runs / run) for run in (name, "mixed"))
    assert whole[2]["train/held/llm1"] - sharded[2]["train/held/llm1"] == 2 * 12 * 32 * 32 / 2
    assert sharded[2]["train/grad_norm/llm1"] == pytest.approx(whole[2]["train/grad_norm/llm1"], rel=0.2)


def test_an_error_of_one_process_is_one_line_and_ends_both(runs):
    err = (runs / "err").read_text()
    assert err.count("error: a score is 0: of the second process") == 1
    assert [row["iteration"] for row in rows(runs / "error")] == [0]


def test_one_process_goes_on_with_what_two_have_saved(runs):
    part = stopped(runs / "mixed_shard", runs / "one goes on")
    resume(part, "--shard", "false")
    require_same_rows(part, runs / "mixed")


def test_every_row_is_one_process_s():
    assert [[*range(7)[Processes(rank, 3).local_rows(7)]] for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]


def test_each_process_makes_as_many_passes(monkeypatch):
    """Beside 3 groups elsewhere the larger of 2 is halved."""
    monkeypatch.setattr(sharding, "processes", lambda: SimpleNamespace(gather=lambda counts: [*counts, 3]))
    groups = sharding.split_to_equal_count([torch.tensor([4, 2, 7, 1]), torch.tensor([0])])
    assert [rows.tolist() for rows in groups] == [[0], [4, 2], [7, 1]]
