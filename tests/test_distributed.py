"""Several processes compute what one computes; and what becomes of all when one fails."""
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
from cory.ppo.rollout import collect_rollout, take
from cory.ppo.update import optimizer_step
from cory.run.checkpoint import checkpoints_of
from cory.system import sharding
from cory.system.distributed import processes
from cory.train import Ppo

# One optimizer step for each iteration: Adam's first moment is then a tenth of the first gradient. Each
# later one moves weights of tiny gradients by their signs, and so multiplies rounding.
ONE_STEP = ("--method cory --num_ppo_epochs 1 --learning_rate 1e-5 --iterations 2 --eval_every 2 "
            "--eval_queries 4 --max_response_length 6").split()
SHARD = ["--shard", "true"]


class Supervised(Ppo):
    """A supervised step on the agent's own responses before each update, whose loss leaves the critic out: a
    gradient of 0 would move it by its momentum. In iteration 2 comes what the run's folder is named by.
    """

    def score(self, agent, rollout, reward_B, partner_B):
        mine, fault = processes().rows(len(reward_B)), Path(agent.cfg.run_dir).name
        if agent.draws == 3 and fault == "prompt":
            collect_rollout(agent, ["a", ""], 4)            # of the second process alone
        elif agent.draws == 3 and fault in ("SIGTERM", "SIGKILL") and processes().rank == 1:
            os.kill(os.getpid(), signal.Signals[fault])
        rows = take(rollout, torch.arange(len(reward_B))[mine])
        real = rows.mask_BT.bool()
        hidden_BTH = agent.policy.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
        (-agent.policy.logp_and_entropy(hidden_BTH[real], rows.response_BT[real])[0].sum()).backward()
        optimizer_step(agent)
        return reward_B

    def team_metrics(self, run):
        """Adam's moments that this process holds: numbers of exp_avg."""
        moments = [state["exp_avg"] for state in run.roles[0].optimizer.state.values()]
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
    """The same by one process (one, lora, mixed) and by two (two, ..._shard, resumed); what fails in two."""
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
        [train_imdb.main, *mixed, "--run_dir", folder / "prompt"],
        [train_imdb.main, *mixed, "--run_dir", folder / "SIGTERM"],
        [train_imdb.main, *mixed, "--run_dir", folder / "SIGKILL", *SHARD]]) for rank in (0, 1)]
    for main, flags, name in ((train_imdb.main, imdb, "one"), (train_gsm8k.main, lora, "lora"),
                              (train_imdb.main, mixed, "mixed")):
        main([*map(str, flags), "--run_dir", str(folder / name)])
    stopped(folder / "mixed", folder / "resumed")
    (folder / "ready").touch()
    ended = [process.join(100) or process.exitcode for process in both]
    assert ended == [1, -signal.SIGKILL], (folder / "err").read_text()[:3000]
    return folder


def require_same_rows(run: Path, expected: Path) -> None:
    """Numbers to 1e-5, texts as they are."""
    for file in ("metrics.jsonl", "samples.jsonl"):
        for row, other in zip(rows(run, file), rows(expected, file), strict=True):
            assert row.keys() == other.keys()
            for key in row.keys() - {"eval/team/held"}:
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
        torch.testing.assert_close(load_file(path), load_file(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mixed_shard", "bfloat16_shard"])
def test_a_shard_is_half_of_the_layers_matrices(runs, name):
    """Which have 12 x 32 x 32 numbers in each of 2 layers. In bfloat16, too, they learn as the whole does."""
    row, whole = (rows(runs / run)[2] for run in (name, "mixed"))
    assert whole["eval/team/held"] - row["eval/team/held"] == 2 * 12 * 32 * 32 / 2
    assert row["pioneer/grad_norm"] == pytest.approx(whole["pioneer/grad_norm"], rel=0.1)


def test_what_is_wrong_is_one_line(runs):
    """In each process: of flags that differ, and of a prompt without tokens that one alone has met."""
    err = (runs / "err").read_text()
    assert "error: seed is 0: is 1 in process 1; give the same flags\n" in err
    assert err.count("error: prompt is '': has no tokens") == 2
    assert not (runs / "refused").exists() and len(rows(runs / "prompt")) == 2


def test_a_signal_to_one_process_ends_all_after_the_iteration(runs):
    assert checkpoints_of(runs / "SIGTERM")[0].name.startswith("iteration_000002")
    assert "stopped after iteration 2; go on with: torchrun --nproc_per_node 2 " in (runs / "out").read_text()


def test_where_a_process_was_killed_one_goes_on(runs):
    assert [row["iteration"] for row in rows(runs / "SIGKILL")] == [0, 1]
    train_imdb.main(["--resume", "--run_dir", str(runs / "SIGKILL"), "--shard", "false"])
    require_same_rows(runs / "SIGKILL", runs / "mixed")


SCRIPT = """
import os, signal
from cory.system.distributed import launched, processes
with launched({"device": "cpu"}):
    print(processes().gather([processes().rank]), processes().launcher, flush=True)
with launched({"device": "cpu"}):               # another run of the same processes
    if processes().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    processes().gather([0])
"""


def test_torchrun_starts_processes_and_ends_all_when_one_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                           "2", tmp_path / "script.py"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.stdout.count("[0, 1] torchrun --nproc_per_node 2\n") == 1        # PyTorch 2.10 prints, too
    assert done.returncode == 1 and "Signal 9 (SIGKILL)" in done.stderr


def test_each_process_makes_as_many_passes(monkeypatch):
    """Beside 3 groups elsewhere the larger of 2 is halved."""
    monkeypatch.setattr(sharding, "processes", lambda: SimpleNamespace(gather=lambda counts: [*counts, 3]))
    groups = sharding.as_many_as_others([torch.tensor([4, 2, 7, 1]), torch.tensor([0])])
    assert [rows.tolist() for rows in groups] == [[0], [4, 2], [7, 1]]


def test_shards_need_torchrun(small_flags, tmp_path, capsys):
    line = error_line(train_imdb.main, [*small_flags, *SHARD, "--run_dir", tmp_path / "r"], capsys)
    assert line == "error: shard is True: needs `torchrun --nproc_per_node N` in place of `python`"
