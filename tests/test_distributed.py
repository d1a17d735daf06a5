"""Several processes compute what one computes; and all end when one fails."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Process, get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from toys import error_line, rows, saved_tensors, stopped

import train_gsm8k
import train_imdb
from cory import distributed
from cory.checkpoint import checkpoints_of
from cory.distributed import processes
from cory.ppo.rollout import take
from cory.ppo.update import apply_gradient
from cory.train import Ppo

# One optimizer step for each iteration: Adam's first moment is then a tenth of the first gradient. Each
# later one moves weights of tiny gradients by their signs, and so multiplies rounding.
ONE_STEP = ("--method cory --num_ppo_epochs 1 --learning_rate 1e-5 --iterations 2 --eval_every 2 "
            "--eval_queries 4 --max_response_length 6").split()
SHARD = ["--shard", "true"]


class Supervised(Ppo):
    """A supervised step on the agent's own responses before each update, whose loss leaves the critic out: a
    gradient of 0 would move it by its momentum. In a folder named SIGTERM one process is sent it.
    """

    def scores(self, queries, rollouts, rewards):
        if Path(self.cfg.run_dir).name == "SIGTERM" and processes().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return rewards

    def respond(self, roles, queries, sample):
        (agent,), (rollout,) = roles, super().respond(roles, queries, sample)
        rows = take(rollout, torch.arange(len(queries))[processes().rows(len(queries))])
        real = rows.mask_BT.bool()
        hidden_BTH = agent.policy.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
        (-agent.policy.logp_and_entropy(hidden_BTH[real], rows.response_BT[real])[0].sum()).backward()
        apply_gradient(agent)
        return [rollout]

    def team_metrics(self, roles):
        """Adam's moments that this process holds: numbers of exp_avg."""
        moments = [state["exp_avg"] for state in roles[0].optimizer.state.values()]
        return {"held": sum(getattr(x, "_local_tensor", x).numel() for x in moments)}


def start(rank: int, store: dist.TCPStore, folder: Path, commands: list) -> Process:
    """One of two processes as torchrun starts them, but a copy of this one, which has imported all. It waits
    for `ready` in the folder.
    """
    def work():
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                          MASTER_ADDR="localhost", MASTER_PORT=str(store.port), TORCHELASTIC_RUN_ID="test",
                          TORCHELASTIC_USE_AGENT_STORE="True")
        torch.set_num_threads(1)
        sys.stdout, sys.stderr = ((folder / name).open("a", buffering=1) for name in ("out", "err"))
        while not (folder / "ready").exists():
            time.sleep(0.05)
        for command, *flags in commands:
            with suppress(SystemExit):
                command([str(rank) if flag == "RANK" else str(flag) for flag in flags])
            if dist.is_initialized():                       # after what is refused or stopped
                dist.destroy_process_group()

    process = get_context("fork").Process(target=work, daemon=True)
    process.start()
    return process


@pytest.fixture(scope="module")
def runs(small, small_flags, problem_flags, tmp_path_factory) -> Path:
    """The same by one process (one, lora, mixed) and by two (two, ..._shard, resumed)."""
    folder = tmp_path_factory.mktemp("distributed")
    ending = shutil.copytree(small / "lm", folder / "ending")           # whose responses end early
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(60), 256]}))
    imdb, lora = [*small_flags, *ONE_STEP], [*problem_flags, *ONE_STEP, "--lora_rank", "2"]
    mixed = [*imdb, "--model", ending, "--method", "test_distributed:Supervised", "--max_grad_norm", "0.1",
             "--responses_per_query", "2", "--kl_target", "6", "--lr_schedule", "cosine"]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    both = [start(rank, store, folder, [
        [train_imdb.main, *imdb, "--seed", "RANK", "--run_dir", folder / "refused"],
        [train_imdb.main, *imdb, "--run_dir", folder / "two"],
        [train_imdb.main, *imdb, "--run_dir", folder / "one_shard", *SHARD],
        [train_gsm8k.main, *lora, "--run_dir", folder / "lora_shard", *SHARD],
        [train_imdb.main, *mixed, "--run_dir", folder / "mixed_shard", *SHARD],
        [train_imdb.main, *mixed, "--run_dir", folder / "bfloat16_shard", *SHARD, "--dtype", "bfloat16"],
        [train_imdb.main, "--resume", "--run_dir", folder / "resumed", *SHARD],
        [train_imdb.main, *mixed, "--run_dir", folder / "SIGTERM", *SHARD]]) for rank in (0, 1)]
    for main, flags, name in ((train_imdb.main, imdb, "one"), (train_gsm8k.main, lora, "lora"),
                              (train_imdb.main, mixed, "mixed")):
        main([*map(str, flags), "--run_dir", str(folder / name)])
    stopped(folder / "mixed", folder / "resumed")
    (folder / "ready").touch()
    ended = [process.join(300) or process.exitcode for process in both]
    assert ended == [0, 0], (folder / "err").read_text()[:3000]
    return folder


def require_same_rows(run: Path, expected: Path) -> None:
    """Numbers to 1e-5, texts as they are."""
    for file in ("metrics.jsonl", "samples.jsonl"):
        for row, other in zip(rows(run, file), rows(expected, file), strict=True):
            assert row.keys() == other.keys()
            for key in row.keys() - {"eval_held/team"}:
                x, y = row[key], other[key]
                assert x == y or abs(x - y) <= 1e-5 * max(1, abs(y)), key


@pytest.mark.parametrize("name, of", [("two", "one"), ("one_shard", "one"), ("lora_shard", "lora"),
                                      ("mixed_shard", "mixed"), ("resumed", "mixed")])
def test_two_processes_compute_what_one_computes(runs, name, of):
    """The same metrics, the same responses, the same first gradient, the same final models."""
    require_same_rows(runs / name, runs / of)
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
    assert whole[-1]["eval_held/team"] - sharded[-1]["eval_held/team"] == 2 * 12 * 32 * 32 / 2
    assert sharded[2]["grad_norm/llm1"] == pytest.approx(whole[2]["grad_norm/llm1"], rel=0.1)


def test_flags_that_differ_are_one_line(runs):
    assert "error: seed is 0: is 1 in process 1; give the same flags\n" in (runs / "err").read_text()
    assert not (runs / "refused").exists()


def test_a_signal_to_one_process_ends_all_after_the_iteration_and_one_goes_on(runs):
    assert [row["iteration"] for row in rows(runs / "SIGTERM")] == [0, 1]
    assert "stopped after iteration 1; go on with: torchrun --nproc_per_node 2 " in (runs / "out").read_text()
    (runs / "SIGTERM").rename(runs / "one goes on")
    train_imdb.main(["--resume", "--run_dir", str(runs / "one goes on"), "--shard", "false"])
    require_same_rows(runs / "one goes on", runs / "mixed")


SCRIPT = """
from cory.distributed import launched, processes
from cory.errors import UserError, exit_on_user_error

@exit_on_user_error
def main():
    with launched({"device": "cpu"}):
        print(processes().gather([processes().rank]), processes().launcher, flush=True)
    with launched({"device": "cpu"}):               # another run of the same processes
        if processes().rank == 1:
            raise UserError("prompt", "", "has no tokens")
        processes().gather([0])

main()
"""


def test_torchrun_starts_processes_and_ends_all_when_one_fails(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                           "2", tmp_path / "script.py"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.stdout.count("[0, 1] torchrun --nproc_per_node 2\n") == 1        # PyTorch 2.10 prints, too
    assert done.returncode == 1 and done.stderr.count("error: prompt is '': has no tokens\n") == 1


def test_each_process_makes_as_many_passes(monkeypatch):
    """Beside 3 groups elsewhere the larger of 2 is halved."""
    monkeypatch.setattr(distributed, "processes", lambda: SimpleNamespace(gather=lambda counts: [*counts, 3]))
    groups = distributed.as_many_as_others([torch.tensor([4, 2, 7, 1]), torch.tensor([0])])
    assert [rows.tolist() for rows in groups] == [[0], [4, 2], [7, 1]]


def test_shards_need_torchrun(small_flags, tmp_path, capsys):
    line = error_line(train_imdb.main, [*small_flags, *SHARD, "--run_dir", tmp_path / "r"], capsys)
    assert line == "error: shard is True: needs `torchrun --nproc_per_node N` in place of `python`"
