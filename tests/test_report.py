"""What a run shows: log, Weights & Biases, held-out metrics, pictures, tables; and the comparison of runs."""
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from test_sampling import path_model
from toys import bigram, error_line, settings

import train_imdb
from cory.commands import report
from cory.config import GSM8K_PRESETS, IMDB_PRESETS, Gsm8kConfig, ImdbConfig
from cory.experiment import plots, weights_and_biases
from cory.experiment.checkpoint import checkpoints_of, read_state
from cory.experiment.evaluation import distinct, evaluate
from cory.experiment.flags import parse
from cory.experiment.log import RunLog
from cory.experiment.tables import grouped, groups_table, results_table
from cory.ppo.loading import load_language_model
from cory.system.files import read_jsonl


# --- held-out metrics -------------------------------------------------------------------------------------
def test_distinct_by_hand():
    assert distinct([[1, 1, 2], [1, 2]], 1) == 2 / 5                    # tokens 1 and 2 among five
    assert distinct([[1, 1, 2], [1, 2]], 2) == 2 / 3                    # (1,1), (1,2), (1,2)
    assert distinct([[1]], 2) == 0.0


class Letters:
    """A task of one query; the reward counts letters."""
    held_out_queries, greedy = ["a"] * 8, False
    pioneer_prompts = staticmethod(lambda queries: queries)
    reward = staticmethod(lambda queries, responses: torch.tensor([float(len(r)) for r in responses]))
    metrics = staticmethod(lambda queries, responses: {"longest": max(map(len, responses))})


def test_evaluation_metrics_by_hand():
    """A model that surely says "bcbcb" against a base that is uniform over 7 tokens."""
    logits = path_model(*"abcb")
    model, base = bigram(logits), bigram(torch.zeros(7, 7))
    got = evaluate(model, base, Letters, settings(max_response_length=5, init_kl_coef=0.5))
    kl = 5 * torch.tensor(7.0).log().item()                             # each token costs log 7 nats
    expected = {"task_reward": 5.0, "kl": kl, "combined_reward": 5 - 0.5 * kl, "length": 5.0, "longest": 5,
                "distinct_1": 2 / 40,                                   # 2 kinds among 40 tokens
                "distinct_2": 2 / 32,                                   # (b,c) and (c,b) among 32 pairs
                "repeated_tokens": 0.6, "base_perplexity": 7.0}         # 3 of 5 repeat
    assert got == pytest.approx(expected, rel=1e-4)


def test_evaluation_leaves_every_random_stream_and_repeats_itself(small):
    model = load_language_model(str(small / "lm"))
    state = torch.get_rng_state()
    first, second = (evaluate(model, model, Letters, settings()) for _ in range(2))
    assert first == second and torch.equal(state, torch.get_rng_state()) and first["kl"] == 0


# --- runs made by hand ------------------------------------------------------------------------------------
def held_out_of(reward: float) -> dict:
    return {"task_reward": reward, "kl": 10 * reward, "combined_reward": -reward, "length": 5.0,
            "repeated_tokens": 0.1}


def write_run(folder: Path, agents=("llm1", "llm2"), roles=("pioneer", "observer"), task_metrics=(),
              loop_metrics=(), reward=1.0, iterations=12, exchange=3, **changes) -> Path:
    """A finished run as `Run` writes it. Agent j ends at held-out reward `reward` + j / 10."""
    config = {"config": "cory.config:ImdbConfig", "run": "", "agents": list(agents), "fingerprints": {},
              "task": "imdb", "method": "cory", "preset": "tiny", "seed": 0, "learning_rate": 1e-4,
              "gamma": 1.0, "eval_queries": 256, "temperature": 1.0, "run_dir": str(folder),
              "wandb": "auto", "wandb_group": "", "device": "auto"} | changes
    base = held_out_of(0.0) | {f"greedy_{name}": 0.5 for name in task_metrics}
    rows = [{"iteration": 0} | {f"eval/base/{name}": value for name, value in base.items()}]
    final = {"iteration": iterations, "queries": 256, "base": held_out_of(0.0)}
    for i in range(1, iterations + 1):
        played = {role: agents[(k + (i - 1) // exchange) % len(agents)] for k, role in enumerate(roles)}
        metrics = held_out_of(i / iterations) | dict.fromkeys(task_metrics, 0.25)
        metrics |= {"entropy": 2.0, "policy_loss": 0.1, "learning_rate": 1e-4}
        row = {"iteration": i, "roles": played, **dict.fromkeys(loop_metrics, 0.1 * i), "seconds": 1.0}
        for who in (*played, *played.values()):
            row |= {f"{who}/{name}": value for name, value in metrics.items()}
        for j, agent in enumerate(agents if i % 4 == 0 or i == iterations else []):
            final[agent] = held_out_of(reward * i / iterations + j / 10)
            final[agent] |= {prefix + name: 0.75 for name in task_metrics for prefix in ("", "greedy_")}
            row |= {f"eval/{agent}/{name}": value for name, value in final[agent].items()}
        rows.append(row)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.json").write_text(json.dumps(final))
    return folder


def columns_of(table: str) -> dict[str, list[str]]:
    """{first cell of a row: its other cells}"""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def titles(figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes]


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def require_no_overlap(figure) -> None:
    """Of a figure that has been saved: panels with their titles, and the legend."""
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    for one, other in itertools.combinations(boxes, 2):
        assert not (one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)
    for box in boxes:                                                   # and nothing is cut off
        assert min(box.x0, box.y0) >= -1
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1


# --- the log ----------------------------------------------------------------------------------------------
def test_the_log_writes_whatever_agents_and_roles_there_are(tmp_path):
    log = RunLog(settings(wandb="disabled", method="chain:train_chain"), ["llm1", "llm2"], tmp_path, 0, "")
    log.iteration(0, {"eval/base/kl": 0.0}, [], {})
    metrics = {f"llm{i}/{name}": i + 0.5 for i in (1, 2) for name in ("task_reward", "kl")} | {"copied": 0.5}
    roles = {"first": "llm1", "second": "llm2"}
    log.iteration(1, metrics, [{"iteration": 1, "query": "q"}], roles)
    assert log.bar.desc.startswith("chain") and log.bar.postfix == "reward 1.50 / 2.50, KL 1.50 / 2.50"
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"iteration": 0, "eval/base/kl": 0.0},
                                                      {"iteration": 1, "roles": roles, **metrics}]
    log.iteration(2, {"llm1/task_reward": 1.0, "llm1/kl": 2.0}, [], {"first": "llm1"})
    assert log.bar.postfix == "reward 1.00 / -, KL 2.00 / -"            # the second did not play


def test_a_resumed_log_drops_what_the_checkpoint_does_not_know(tmp_path):
    cfg = settings(wandb="disabled")
    log = RunLog(cfg, ["llm1"], tmp_path, 0, "")
    for i in range(4):
        log.iteration(i, {"llm1/kl": float(i)}, [{"iteration": i, "query": str(i)}], {"pioneer": "llm1"})
    again = RunLog(cfg, ["llm1"], tmp_path, 2, "abc")
    assert [row["iteration"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["query"] for row in read_jsonl(tmp_path / "samples.jsonl")] == ["0", "1", "2"]
    assert again.wandb.id == "abc"
    RunLog(cfg, ["llm1"], tmp_path, 0, "")
    assert not read_jsonl(tmp_path / "metrics.jsonl")


# --- Weights & Biases -------------------------------------------------------------------------------------
@pytest.fixture
def started(monkeypatch):
    """Options of each `wandb.init`, of which nothing starts; online a run of the name `refused` fails."""
    import wandb
    calls = []

    def init(mode, **options):
        if mode == "online" and options["name"] == "refused":
            raise wandb.errors.CommError("no such server")
        calls.append({"mode": mode, **options})
        return SimpleNamespace(id=options["id"], define_metric=lambda *a, **k: calls.append((a, k)))

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return calls


@pytest.mark.parametrize("asked, environment, key, name, expected", [
    ("auto", None, True, "", "online"), ("auto", None, False, "", "offline"),
    ("online", None, False, "", "offline"), ("offline", None, True, "", "offline"),
    ("disabled", None, True, "", None), ("auto", "disabled", True, "", None),
    ("auto", "dryrun", True, "", "offline"), ("auto", None, True, "refused", "offline")])
def test_wandb_mode(asked, environment, key, name, expected, started, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("wandb.login", lambda **_: key)
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    run = weights_and_biases.start_wandb(settings(wandb=asked, wandb_name=name), tmp_path, "abc")
    assert [call["mode"] for call in started[::2]] == ([expected] if expected else [])
    assert (run and run.id) == ("abc" if expected else None)
    assert ("wandb sync --append" in capsys.readouterr().out) == (expected == "offline")


def test_wandb_group_tags_and_name(started, tmp_path):
    weights_and_biases.start_wandb(settings(wandb="offline"), tmp_path / "folder", "")
    flags = dict(wandb_project="p", wandb_group="rates", wandb_tags="imdb, a b,", wandb_name="mine")
    weights_and_biases.start_wandb(settings(wandb="offline", **flags), tmp_path / "folder", "")
    plain, named = [(c["project"], c["group"], c["tags"], c["name"]) for c in started[::2]]
    assert plain == ("cory", None, None, "folder") and named == ("p", "rates", ["imdb", "a b"], "mine")
    assert started[1] == (("*",), {"step_metric": "iteration"})         # the x axis of every panel


def test_wandb_keys_have_the_prefixes():
    metrics = {"pioneer/kl": 1.0, "llm2/kl": 1.0, "eval/llm1/kl": 3.0, "copied": 4.0, "seconds": 5.0}
    got = weights_and_biases.prefixed(metrics, ["llm1", "llm2"], {"pioneer": "llm2", "observer": "llm1"})
    assert got == {"agent/llm1/role": 1, "agent/llm2/role": 0, "role/pioneer/kl": 1.0, "agent/llm2/kl": 1.0,
                   "eval/llm1/kl": 3.0, "copied": 4.0, "seconds": 5.0}
    alone = weights_and_biases.prefixed({"llm1/kl": 1.0}, ["llm1"], {"pioneer": "llm1"})
    assert alone == {"agent/llm1/kl": 1.0}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No key, W&B offline; what is logged, as (step, row)."""
    import wandb
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logged, log = [], wandb.sdk.wandb_run.Run.log

    def spy(self, data, step=None):
        logged.append((step, data))
        log(self, data, step=step)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", spy)
    monkeypatch.setattr(weights_and_biases, "INIT_SECONDS", 120)        # on a busy machine W&B starts slowly
    return logged


@pytest.mark.pictures
def test_wandb_offline_receives_every_metric_and_the_tables(small_flags, offline, tmp_path, capsys):
    folder = tmp_path / "a run"
    train_imdb.main([*small_flags, "--run_dir", str(folder), "--iterations", "1", "--wandb", "auto"])
    assert f"wandb sync '{folder}'/wandb/offline-run-" in capsys.readouterr().out
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))

    def saved_id():
        return read_state(checkpoints_of(folder)[0])["wandb_id"]

    first_id, logged = saved_id(), read_jsonl(folder / "metrics.jsonl")
    sent = [(step, data) for step, data in offline if "samples" not in data]
    assert [step for step, _ in sent] == [0, 1, None]                   # what comes last joins the last row
    for row, (_, data) in zip(logged, sent[:-1], strict=True):
        roles = row.pop("roles", {})
        assert data == weights_and_biases.prefixed(row, ["llm1", "llm2"], roles)
    assert sent[-1][1].keys() == {"iteration", "curves"}
    (step, data), = [item for item in offline if "samples" in item[1]]
    assert step == 1 and data.keys() == {"samples"} and len(data["samples"].data) == 4
    assert {"query", "pioneer", "observer", "base", "pioneer_reward", "observer_reward",
            "base_reward"} <= set(data["samples"].columns)
    train_imdb.main(["--resume", "--run_dir", str(folder), "--iterations", "2"])
    assert saved_id() == first_id and first_id
    assert len(offline[-2][1]["samples"].data) == 8                     # rows of before the stop included


@pytest.mark.parametrize("name, config, presets", [("imdb", ImdbConfig, IMDB_PRESETS),
                                                   ("gsm8k", Gsm8kConfig, GSM8K_PRESETS)])
def test_sweep_files_fit_the_command_line(name, config, presets):
    """Each parameter, at each value or end that the file allows, as W&B's agent hands it over."""
    sweep = yaml.safe_load((Path(__file__).parents[1] / f"docs/sweep_{name}.yaml").read_text())
    assert sweep["program"] == f"train_{name}.py"
    assert sweep["command"] == ["${env}", "${interpreter}", "${program}", "${args}"]
    choices = {}
    for key, given in sweep["parameters"].items():
        assert given.keys() in ({"value"}, {"values"}, {"distribution", "min", "max"})
        given.pop("distribution", None)
        choices[key] = given.get("values") or list(given.values())
    assert not {"run_dir", "resume"} & choices.keys()
    for i in range(max(map(len, choices.values()))):
        values = {key: allowed[i % len(allowed)] for key, allowed in choices.items()}
        cfg = parse(config, presets, [f"--{key}={value}" for key, value in values.items()])
        assert {key: getattr(cfg, key) for key in values} == values
    assert sweep["metric"]["name"] in ("eval/llm1/combined_reward", "eval/llm1/greedy_accuracy")


# --- curves -----------------------------------------------------------------------------------------------
FIVE = ["task reward", "KL per response (nats)", "combined reward", "entropy per token (nats)",
        "held-out reward against KL"]


def test_a_metric_of_a_task_or_a_loop_has_a_panel_of_its_own(tmp_path):
    """Whatever their number: the grid grows, and nothing is drawn over anything else."""
    plain = plots.draw_curves(write_run(tmp_path / "plain"))
    assert titles(plain) == FIVE                            # explained variance was not measured: no panel
    assert labels(plain) == ["base", "CORY LLM1", "CORY LLM2"]
    loop, of_loop = [f"copied_{i}" for i in range(7)], [f"copied {i}" for i in range(7)]
    folder = write_run(tmp_path / "many", task_metrics=["rhymes", "accuracy"], loop_metrics=loop)
    figure = plots.draw_curves(folder)
    assert titles(figure) == [*FIVE[:-1], "rhymes", "accuracy", *of_loop, FIVE[-1]]
    require_no_overlap(figure)
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert all(any(len(line.get_xdata()) > 2 for line in ax.lines) for ax in figure.axes)
    copied = figure.axes[6].lines[0]                                    # a raw line: every iteration as it is
    assert copied.get_ydata() == pytest.approx([0.1 * i for i in range(1, 13)])
    accuracy = figure.axes[5]                                           # greedy answers share their panel
    hollow = [line for line in accuracy.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_ydata().tolist() for line in hollow] == 2 * [[0.5, 0.75, 0.75, 0.75]]  # the base first
    assert "hollow: greedy answers" in labels(figure)


def test_smoothing_is_a_centred_mean_over_a_tenth():
    assert plots.smooth({1: 0.0, 2: 3.0, 3: 6.0, 5: 0.0}) == {1: 1.5, 2: 3.0, 3: 3.0, 5: 3.0}
    ones = dict.fromkeys(range(60), 0.0) | {30: 7.0}                    # 3 on each side
    assert [x for x, y in plots.smooth(ones).items() if y] == [*range(27, 34)]


def test_a_band_is_the_mean_and_one_sample_std_by_hand():
    """Seeds 1 and 3 at iteration 5: mean 2, std sqrt(2). Iteration 6 has one seed only and is left out."""
    ax = Figure().subplots()
    plots.band(ax, [{5: 1.0, 6: 9.0}, {5: 3.0}], color="red")
    assert ax.lines[0].get_xydata().tolist() == [[5.0, 2.0]]
    low, high = ax.collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))


def test_values_that_are_no_finite_number_are_left_out():
    rows = [{"iteration": i, "copied": value} for i, value in enumerate([1.0, float("nan"), None, "text"])]
    rows_of_loop = [*rows, {"iteration": 9, "roles": {}, "other/kl": 1.0}]
    curves = plots.curves_of(rows_of_loop, "llm1", "base", first=True)
    assert curves == {"iteration": {0: 0, 1: 1, 2: 2, 3: 3, 9: 9}, "copied": {0: 1.0}}
    assert plots.metric_names([curves]) == ["copied"]
    assert not plots.curves_of(rows, "llm2", "base", first=False)       # the loop's are the first agent's
    of_team = plots.curves_of([{"iteration": 1, "eval/team/accuracy": 0.7}], "llm1", "base", first=True)
    assert of_team["eval/team: accuracy"] == {1: 0.7}


# --- tables -----------------------------------------------------------------------------------------------
def test_the_held_out_table_has_every_agent_and_metric_found():
    judge = {"task_reward": 2.0, "kl": 1.0, "greedy_accuracy": 0.5, "rhymes_found": 1234.5678}
    held_out = {"iteration": 3, "queries": 8, "base": {"task_reward": 0.126, "kl": 0.0},
                "llm1": {"task_reward": 1.0, "kl": 2.34}, "judge": judge}
    assert columns_of(results_table(held_out)) == {
        "held-out": ["base", "llm1", "judge"],
        "task reward": ["0.13", "1.00", "2.00"], "kl": ["0.0", "2.3", "1.0"],
        "greedy accuracy": ["–", "–", "0.500"], "rhymes found": ["–", "–", "1234.568"]}


def test_pass_at_k_of_groups_by_hand(tmp_path):
    runs = []
    for rate, seed, value in ((1e-4, 1, 0.4), (1e-4, 0, 0.2), (1e-5, 0, 0.8)):
        config = {"method": "ppo", "agents": ["llm1"], "seed": seed, "learning_rate": rate,
                  "eval_queries": 7, "task": "gsm8k", "temperature": 1.0}
        shares = {"base": 0.1, "llm1": value}
        runs.append((config, {name: {"pass@1": share, "pass@2": share} for name, share in shares.items()}))
    table = columns_of(groups_table("held-out", grouped(runs, ["learning_rate"])))
    assert table["held-out"] == ["base", "PPO LLM1, learning_rate 1e-05", "PPO LLM1, learning_rate 0.0001"]
    assert table["pass@1"] == ["0.100", "0.800", "0.300 ± 0.141"]       # std of 0.2 and 0.4: 0.2 / sqrt(2)
    plots.draw_pass_at_k(runs, [2, 1], tmp_path / "p.svg", ["learning_rate"])
    assert (tmp_path / "p.svg").stat().st_size > 5000


# --- comparison of runs -----------------------------------------------------------------------------------
@pytest.fixture
def rates(tmp_path) -> list[Path]:
    """Three learning rates, two seeds each: llm1's held-out reward ends at 1 and 2, 3 and 4, 5 and 8."""
    ends = {1e-5: (1.0, 2.0), 1e-4: (3.0, 4.0), 1.41e-3: (5.0, 8.0)}
    return [write_run(tmp_path / f"{rate}-{seed}", learning_rate=rate, seed=seed, reward=reward)
            for rate, pair in ends.items() for seed, reward in enumerate(pair)]


def test_rates_are_grouped_and_never_averaged(rates, tmp_path, capsys, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "draw_runs", lambda *args: figures.append(plots.draw_runs(*args)))
    report.main([*map(str, rates), "--out", str(tmp_path / "c.png"), "--by", "learning_rate"])
    out = capsys.readouterr().out
    rows = columns_of(out)                                              # seven groups: one in a row
    reward = {name: cells[0] for name, cells in rows.items()}
    assert list(reward.items()) == [                                    # in the order of their size
        ("held-out", "task reward"), ("base", "0.00"),
        ("CORY LLM1, learning_rate 1e-05", "1.50 ± 0.71"),
        ("CORY LLM2, learning_rate 1e-05", "1.60 ± 0.71"),
        ("CORY LLM1, learning_rate 0.0001", "3.50 ± 0.71"),
        ("CORY LLM2, learning_rate 0.0001", "3.60 ± 0.71"),
        ("CORY LLM1, learning_rate 0.00141", "6.50 ± 2.12"),
        ("CORY LLM2, learning_rate 0.00141", "6.60 ± 2.12")]
    (figure,) = figures
    require_no_overlap(figure)
    held_out = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 4]
    ends = [line.get_ydata()[-1] for line in held_out]
    assert ends == pytest.approx([1.5, 1.6, 3.5, 3.6, 6.5, 6.6])
    assert len(labels(figure)) == 7 and "CORY LLM2, learning_rate 0.00141 (n = 2)" in labels(figure)


@dataclass
class WithBonus(ImdbConfig):
    bonus: float = 0.0


def test_a_setting_that_a_run_is_older_than_has_its_default(tmp_path, capsys):
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", top_p=0.5)
    report.main([str(old), str(new), "--by", "top_p"])
    shown = capsys.readouterr().out
    assert f"{old} is older than --top_p: taken as its default, 1.0" in shown
    assert "CORY LLM1, top_p 1.0" in shown and "CORY LLM1, top_p 0.5" in shown
    other = write_run(tmp_path / "other", config="test_report:WithBonus", bonus=0.1)
    report.main([str(old), str(other), "--by", "bonus"])
    assert "| CORY LLM1, bonus 0.1 | CORY LLM2, bonus 0.1 | CORY LLM1, bonus None" in capsys.readouterr().out
    assert "in top_p; make a group" in error_line(report.main, [old, new], capsys)


def test_runs_that_differ_are_refused_with_the_way_out(rates, tmp_path, capsys):
    error = error_line(report.main, rates, capsys)
    assert "differs from" in error and "in learning_rate" in error and "--by learning_rate" in error
    assert "did you mean learning_rate?" in error_line(report.main, [*rates, "--by", "learning_rte"], capsys)
    other = write_run(tmp_path / "gamma", gamma=0.9, learning_rate=1e-3)
    error = error_line(report.main, [*rates, other, "--by", "learning_rate"], capsys)
    assert "in gamma;" in error and "--by learning_rate gamma" in error
    report.main([*map(str, rates), str(other), "--by", "learning_rate", "gamma"])
    assert "CORY LLM1, learning_rate 0.001, gamma 0.9" in capsys.readouterr().out


def test_the_same_run_twice_is_no_second_seed(tmp_path, capsys):
    first, again = write_run(tmp_path / "a"), write_run(tmp_path / "b", device="cuda", wandb_group="x")
    for other in (first, again):
        assert "has seed 0 as" in error_line(report.main, [first, other], capsys)
    ppo = write_run(tmp_path / "p", agents=["llm1"], roles=["pioneer"], method="ppo")
    report.main([str(first), str(ppo)])                     # another method, another group


def test_groups_follow_methods_and_bases_as_they_are():
    def run(method, seed, base=0.0, **changes):
        config = {"method": method, "agents": ["llm1"], "seed": seed, **changes}
        return config, {"base": {"kl": base}, "llm1": seed}

    both = [run("b:train_chain", 0), run("a:train_chain", 1), run("a:train_chain", 0)]
    assert grouped(both) == {"base": [{"kl": 0.0}], "a:train_chain LLM1": [0, 1], "b:train_chain LLM1": [0]}
    models = [run("ppo", seed, base, model=model) for seed, base, model in
              ((0, 1.0, "gpt2"), (1, 1.0, "gpt2"), (0, 2.0, "xl"))]
    assert grouped(models, ["model"]) == {"base, model gpt2": [{"kl": 1.0}], "base, model xl": [{"kl": 2.0}],
                                          "PPO LLM1, model gpt2": [0, 1], "PPO LLM1, model xl": [0]}


def test_groups_are_of_each_agents_own_settings_and_of_its_team():
    config = {"method": "cory", "agents": ["llm1", "llm2"], "seed": 0, "learning_rate": 0.1,
              "agent_settings": {"llm2": {"learning_rate": 0.2}}}
    of_name = {"base": {"kl": 0}, "iteration": 3, "llm1": {"kl": 1}, "llm2": {"kl": 2}, "team": {"copies": 3}}
    other = config | {"agent_settings": {}}
    runs = [(config, of_name), (other, of_name)]
    assert grouped(runs[:1], ["learning_rate"]) == {
        "base": [{"kl": 0}], "CORY LLM1, learning_rate 0.1": [{"kl": 1}],
        "CORY LLM2, learning_rate 0.2": [{"kl": 2}], "CORY TEAM, learning_rate 0.1/0.2": [{"copies": 3}]}
    assert len(grouped(runs, ["agent_settings"])) == 1 + 2 * 3      # each value a group of its own


@pytest.mark.pictures
@pytest.mark.parametrize("name, text, says", [
    ("eval.json", "[]", "is damaged"), ("eval.json", "{}", "is damaged (KeyError: 'base')"),
    ("eval.json", '{"iteration": 1, "base": "x"}', "is damaged (ValueError"),
    ("config.json", None, "config.json"), ("config.json", "{}", "KeyError: "),
    ("metrics.jsonl", "", "holds no rows"), ("metrics.jsonl", "{\n", "metrics.jsonl:1': is damaged")])
def test_a_folder_that_is_no_finished_run_is_one_line(name, text, says, tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    assert says in error_line(report.main, [folder], capsys)
