"""Several processes compute what one computes; and what becomes of all when one fails."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toys import error_line, read, rows, settings
from transformers import AutoModelForCausalLM

import train_gsm8k
import train_imdb
from cory.commands import evaluate
from cory.commands.plan import Plan
from cory.config import ImdbConfig
from cory.errors import UserError
from cory.experiment.checkpoint import checkpoints_of
from cory.experiment.run import Run
from cory.ppo.loading import model_config
from cory.system import distributed
from cory.system.distributed import launched

PROCESSES = Path(__file__).with_name("processes.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]


def torchrun(folder: Path, *commands: list[str], agents: int = 1, until: Path | None = None):
    """Commands in two processes, of one torchrun or of two, which meet at a port of this machine. Once the
    log `until` has three rows, torchrun is told to stop. Returns its exit status, and what was printed.
    """
    (folder / "commands.json").write_text(json.dumps(commands))
    place = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint",
             f"localhost:{29400 + os.getpid() % 1000}", "--rdzv_id", folder.name]
    line = [*TORCHRUN, *(["--standalone"] if agents == 1 else place), str(PROCESSES),
            str(folder / "commands.json")]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        running = [subprocess.Popen(line, stdout=out, stderr=err, cwd=folder) for _ in range(agents)]
        while until and running[0].poll() is None:
            time.sleep(0.05)
            if until.exists() and until.read_text().count("\n") > 2:
                running[0].terminate()
                break
        status = max(process.wait(timeout=200) for process in running)
    return status, (folder / "out").read_text(), (folder / "err").read_text()


def numbers(folder: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "roles"} for row in rows(folder)]


# One optimizer step for each iteration: Adam's first moment is then a tenth of the first gradient. Each
# later one moves weights of tiny gradients by their signs, and so multiplies rounding.
ONE_STEP = "--method cory --num_ppo_epochs 1 --learning_rate 1e-5 --iterations 2 --eval_every 2".split()


@pytest.fixture(scope="module")
def runs(small, small_flags, problem_flags, tmp_path_factory) -> Path:
    """The same runs by one process (one, lora, mixed) and by two: of parts of each batch (two), of sharded
    models (shard, lora_shard, mixed_shard), going on where one process stopped (one_two); evaluated by both.
    Flags that differ are refused before, and the last run is stopped.
    """
    folder = tmp_path_factory.mktemp("distributed")
    imdb = [*small_flags, *ONE_STEP]
    lora = [*problem_flags, *ONE_STEP, "--lora", "true", "--lora_rank", "2"]

    ending = shutil.copytree(small / "lm", folder / "ending")           # whose responses end early
    settings = json.loads((ending / "generation_config.json").read_text())
    settings["eos_token_id"] = [*range(60), 256]
    (ending / "generation_config.json").write_text(json.dumps(settings))
    mixed = [*imdb, "--model", str(ending), "--max_grad_norm", "0.1", "--share_weights", "true",
             "--role_exchange_every", "5", "--advantage", "rloo", "--responses_per_query", "2",
             "--adap_kl_ctrl", "true", "--lr_schedule", "cosine"]

    def to(name: str) -> list[str]:
        return ["--run_dir", str(folder / name)]

    train_imdb.main([*imdb, *to("one")])
    train_gsm8k.main([*lora, *to("lora")])
    train_imdb.main([*mixed, *to("mixed")])
    train_imdb.main([*imdb, *to("one_two"), "--iterations", "1"])
    for name in ("one", "two"):
        shutil.copytree(folder / "one", folder / f"evaluated_{name}")
    pass_at_k = [str(folder / "evaluated_two"), "--samples", "2", "--k", "1", "2"]
    _, out, err = torchrun(
        folder,
        ["processes:refused", *imdb, "--seed", "{rank}", *to("refused")],
        ["train_imdb:main", *imdb, *to("two")],
        ["train_imdb:main", *imdb, *to("shard"), "--shard", "true"],
        ["processes:weigh", *imdb, *to("shard_one"), "--shard", "true", "--iterations", "1"],
        ["train_imdb:main", "--resume", *to("one_two"), "--iterations", "2", "--shard", "true"],
        ["train_gsm8k:main", *lora, *to("lora_shard"), "--shard", "true"],
        ["train_imdb:main", *mixed, *to("mixed_shard"), "--shard", "true"],
        ["train_imdb:main", *imdb, *to("bfloat16"), "--shard", "true", "--dtype", "bfloat16"],
        ["cory.commands.evaluate:main", *pass_at_k],
        ["train_imdb:main", *small_flags, "--iterations", "500", *to("stopped")],
        until=folder / "stopped" / "metrics.jsonl",
    )
    assert (folder / "stopped").exists(), err[:3000]
    evaluate.main([str(folder / "evaluated_one"), *pass_at_k[1:]])
    (folder / "said.json").write_text(json.dumps([out, err]))
    return folder


@pytest.mark.parametrize("name, of", [("two", "one"), ("shard", "one"), ("lora_shard", "lora"),
                                      ("mixed_shard", "mixed")])
def test_two_processes_compute_what_one_computes(runs, name, of):
    """The same metrics to 1e-5, the same responses, and the same first gradient."""
    for row, expected in zip(numbers(runs / name), numbers(runs / of), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    samples = [rows(runs / run, "samples.jsonl") for run in (name, of)]
    assert len(samples[0]) > 4
    for row, expected in zip(*samples, strict=True):
        assert row.keys() == expected.keys()            # the base answers at evaluations alone
        assert all(row[role] == expected[role] for role in ("pioneer", "observer", "base") if role in row)
    checkpoint, expected = (load_file(checkpoints_of(runs / run)[-1]) for run in (name, of))
    assert checkpoint.keys() == expected.keys()
    for key, x in expected.items():
        if "/moments/" in key:
            assert (checkpoint[key].double() - x.double()).norm() <= 1e-5 * x.double().norm() + 1e-9, key


def test_two_processes_in_bfloat16_answer_alike_and_learn(runs):
    """The gathered layers are in bfloat16 whole, the norms in them too, where one process keeps these."""
    row, expected = numbers(runs / "bfloat16")[1], numbers(runs / "one")[1]
    assert row["pioneer/grad_norm"] == pytest.approx(expected["pioneer/grad_norm"], rel=0.1)
    assert row["pioneer/entropy"] == pytest.approx(expected["pioneer/entropy"], rel=1e-3)


def test_what_two_have_saved_one_goes_on_from_and_the_other_way_round(runs):
    flags = ["--run_dir", str(runs / "shard_one"), "--iterations", "2", "--shard", "false"]
    train_imdb.main(["--resume", *flags])
    for name in ("shard_one", "one_two"):
        assert numbers(runs / name)[2] == pytest.approx(numbers(runs / "one")[2], rel=1e-5, abs=1e-5)


def test_final_models_of_shards_are_whole(runs):
    for name in ("two", "shard", "one_two"):
        model = AutoModelForCausalLM.from_pretrained(runs / name / "final" / "llm1")
        expected = AutoModelForCausalLM.from_pretrained(runs / "one" / "final" / "llm1")
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_two_processes_answer_what_one_answers(runs):
    one, two = (runs / f"evaluated_{name}" / "evaluation" for name in ("one", "two"))
    for name in ("base.jsonl", "llm1.jsonl", "llm2.jsonl", "results.json"):
        assert (one / name).read_text() == (two / name).read_text()


def test_two_processes_hold_what_the_plan_counts(runs, small):
    config = model_config(str(small / "lm"))
    cfg = settings(batch_size=8, mini_batch_size=4, max_response_length=10, device="cpu", dtype="float32",
                   shard=True)
    plan = Plan(cfg, config, prompt=20, gpus=2)
    for rank in (0, 1):
        held = read(runs / "shard_one" / f"weighed_{rank}.json")
        assert held == {name: plan.parts()[name] for name in held}
    assert held["moments"] < 0.7 * 2 * 2 * 4 * plan.weights             # a third of this model are embeddings


def test_a_process_that_is_killed_ends_all_and_the_run_goes_on(small_flags, tmp_path, monkeypatch):
    flags = ["--iterations", "3", "--run_dir", str(tmp_path / "r")]
    begun = time.time()
    command = ["train_imdb:main", *small_flags, "--task", "processes:Faulty", *flags]
    status, _, err = torchrun(tmp_path, command, agents=2)
    assert status == 1 and time.time() - begun < 100
    assert "Signal 9 (SIGKILL)" in err and err.count("error: ") <= 1
    assert [row["iteration"] for row in rows(tmp_path / "r")] == [0, 1]
    monkeypatch.setenv("RANK", "0")
    train_imdb.main(["--resume", *flags])
    assert [row["iteration"] for row in rows(tmp_path / "r")] == [0, 1, 2, 3]


def test_a_signal_to_torchrun_ends_all_after_the_iteration(runs):
    out, err = read(runs / "said.json")
    done = rows(runs / "stopped")[-1]["iteration"]
    assert f"stopped by SIGTERM after iteration {done}; go on with: torchrun --nnodes 1 " in out
    assert err.count("this iteration is finished and saved first") == 1
    assert checkpoints_of(runs / "stopped")[0].name.startswith(f"iteration_{done:06d}-")


def test_different_flags_are_refused(runs):
    _, err = read(runs / "said.json")
    first = next(line for line in err.splitlines() if "error: " in line)
    assert first == "error: seed is 0: is 1 in process 1; give all the same flags"
    assert not (runs / "refused").exists()


def test_shards_need_torchrun(small_flags, tmp_path, capsys):
    line = error_line(train_imdb.main, [*small_flags, "--shard", "true", "--run_dir", tmp_path / "r"], capsys)
    assert line.startswith("error: shard is True: divides the models among processes")
    with pytest.raises(UserError), launched({"shard": True}):
        pass


def test_a_run_that_did_not_join_its_peers_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="processes is '2': have not been joined"):
        Run(ImdbConfig())


def test_the_line_to_go_on_starts_as_many_processes(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(distributed, "world_size", lambda: 16)
    line = "torchrun --nnodes 2 --nproc_per_node 8 train_imdb.py"
    assert distributed.started_as("train_imdb.py") == line
    monkeypatch.setattr(distributed, "world_size", lambda: 1)
    assert distributed.started_as("train_imdb.py") == "python train_imdb.py"
