"""Statistics of studies by hand, the plan of runs, and a study of seconds."""
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from toys import error_line, settings

import train_imdb
from cory.commands import study
from cory.errors import UserError
from cory.studies import loops, page, pictures, rows, runs, statistics
from cory.studies.definitions import STUDIES, Study


def frame(variant, seed, *agents, diverged=False, eta=0.1, **more):
    """Rows of one run; each agent as (iteration, reward, kl) points. Combined reward is reward - kl."""
    about = {"task": "imdb", "variant": variant, "seed": seed, "diverged": diverged, "core_seconds": 3600.0,
             "commit": "c", "data": "d", "weights": "w", "dtype": "float32", "head_precision": "float32",
             "init_kl_coef": eta, "distinct_2": 1.0, "repeated_tokens": 0.0} | more
    return pd.DataFrame([about | {"agent": f"llm{i + 1}", "iteration": n, "reward": reward, "kl": kl,
                                  "combined_reward": reward - kl}
                         for i, points in enumerate(agents) for n, reward, kl in points])


# --- statistics ---
def test_differences_are_paired_by_seed_with_students_interval():
    """x = 0, 1, 2, 3, 4 at the seeds both have: mean 2, s = sqrt(10 / 4), t of 4 degrees 2.776 (tables)."""
    baseline = pd.Series({seed: 10.0 * seed for seed in range(5)})
    variant = pd.Series({seed: 11.0 * seed for seed in range(6)})
    d = statistics.difference(variant, baseline)
    half = 2.776 * math.sqrt(10 / 4) / math.sqrt(5)
    assert (d.mean, d.seeds, d.decided) == (2.0, 5, True)
    assert (d.low, d.high) == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert str(d) == "+2.00 [+0.04, +3.96]"


def test_intervals_that_decide_nothing():
    """One seed has none, no seed no difference, and one that holds 0 leaves the sign open."""
    one = statistics.difference(pd.Series({0: 1.0, 1: math.nan}), pd.Series({0: 0.5, 1: 1.0}))
    assert str(one) == "+0.50" and one.seeds == 1 and not one.decided
    assert str(statistics.difference(pd.Series({0: 1.0}), pd.Series({1: 1.0}))) == "–"
    d = statistics.difference(pd.Series({0: -1.0, 1: 0.5, 2: -0.2}), pd.Series(dict.fromkeys(range(3), 0.0)))
    assert d.low < 0 < d.high and not d.decided
    assert statistics.difference(pd.Series({0: -1.0, 1: -1.0}), pd.Series({0: 0.0, 1: 0.0})).decided


def test_a_figure_where_another_first_reaches_a_level():
    points = pd.DataFrame({"kl": [0.0, 5.0, 3.0, 9.0], "reward": [0.0, 1.0, 3.0, 5.0]})
    for kl, reward in ((4.0, 0.8), (9.0, 5.0), (0.0, 0.0)):
        assert statistics.value_at(points, "reward", "kl", kl) == pytest.approx(reward)
    assert statistics.value_at(points, "kl", "reward", 2.0) == 4.0


def test_differences_by_hand():
    """Ends: PPO 2 at a KL of 4; CORY's agents 3 at 10 and 1 at 2. At a KL of 2, which all reach, PPO has 1
    and CORY (0.6 + 1) / 2. At a reward of 1, CORY's KL is (10 / 3 + 2) / 2.
    """
    ppo = frame("ppo", 0, [(0, 0.0, 0.0), (10, 9.0, 3.0), (20, 2.0, 4.0)], distinct_2=0.5)
    ppo.loc[ppo.iteration == 10, ["reward", "kl"]] = 1.5, 3.0
    cory = frame("cory", 0, [(0, 0.0, 0.0), (20, 3.0, 10.0)], [(0, 0.0, 0.0), (20, 1.0, 2.0)])
    other_seed = frame("cory", 1, [(0, 0.0, 0.0), (20, 9.0, 9.0)])
    d = statistics.differences(pd.concat([ppo, cory, other_seed]), "cory", "ppo")
    means = {name: found.mean for name, found in d.items()}
    assert means == pytest.approx({"reward": 0.0, "kl": 2.0, "combined_reward": -2.0, "distinct_2": 0.5,
                                   "reward at equal KL": -0.2, "KL at equal reward": 8 / 3 - 2,
                                   "distinct-2 at equal reward": 0.5})
    other_eta = pd.concat([ppo, cory.assign(init_kl_coef=0.3)])
    assert "combined_reward" not in statistics.differences(other_eta, "cory", "ppo")
    lines = page.differences_table(STUDIES["curves"], other_eta)
    cells = lines[0].splitlines()[-1].strip("| ").split("|")
    assert [cell.strip() for cell in cells] == [
        "cory", "ppo", "1", "other eta", "+0.00", "-0.20", "+2.00", "+0.67", "+0.50", "+0.50"]
    combined, reward, *_ = pictures.forest(STUDIES["curves"], "imdb", other_eta).axes
    assert len(reward.lines) == len(combined.lines) + 2                 # an interval and its mean
    sizes = pd.concat([ppo.assign(batch_size=256), cory.assign(batch_size=64)])
    reward, *_ = pictures.curves("imdb", sizes).axes
    assert [line.get_xdata()[-1] for line in reward.lines] == [5.12, 1.28]
    assert reward.get_xlabel() == "thousand answers of a role"
    unknown = pd.concat([sizes, ppo.assign(variant="rows of another file")])
    for by_iteration in (pd.concat([ppo, cory]), unknown):
        assert pictures.curves("imdb", by_iteration).axes[0].get_xlabel() == "iteration"
    _, _, of_ppo, of_cory = page.ends_table(pd.concat([ppo, cory.assign(observer_copies=0.5)]))
    assert (of_ppo[-3], of_cory[-3]) == ("–", "0.50")                   # PPO has no team


@pytest.mark.parametrize("reward, distinct, repeated, collapsed", [
    (0.5, 1.0, 0.1, False), (0.16, 1.0, 0.1, False), (0.14, 1.0, 0.1, True), (0.5, 0.34, 0.1, False),
    (0.5, 0.33, 0.1, True), (0.5, 1.0, 0.29, False), (0.5, 1.0, 0.31, True)])
def test_collapse_by_the_rule_that_is_stated(reward, distinct, repeated, collapsed):
    points = pd.DataFrame({"reward": [0.2, reward], "distinct_2": [1.0, distinct],
                           "repeated_tokens": [0.1, repeated], "diverged": False})
    assert statistics.collapsed(points) == collapsed
    assert statistics.collapsed(points.assign(diverged=True))


def test_a_run_that_diverged_is_collapsed_and_in_no_mean():
    good = frame("ppo", 0, [(0, 1.0, 0.0), (9, 3.0, 1.0)])
    gone = frame("ppo", 1, [(0, 1.0, 0.0), (3, 9.0, 9.0)], diverged=True)
    _, base, line = page.ends_table(pd.concat([good, gone]))
    assert base[:4] == ["base", "", "1.00", "0.00"]
    assert line == ["ppo", "1", "3.00", "1.00", "2.00", "1.00", "0.00", "1 of 2", "1.00"]
    both = pd.concat([good, frame("cory", 0, [(0, 1.0, 0.0)], diverged=True)])
    assert statistics.compared(STUDIES["curves"], both) == {}


# --- definitions and plan ---
def test_draws_are_those_that_ran_and_more_of_them_lie_near_the_best():
    assert "--learning_rate 5.9e-04 --critic_learning_rate 1.7e-02" in STUDIES["search"].variants["cory 8"]
    for task, name, low, high in (("imdb", "critic_learning_rate", 0.0099, 0.032),
                                  ("gsm8k", "learning_rate", 0.000099, 0.00051)):
        near = [float(re.search(rf" --{name} (\S+)", flags)[1])
                for flags in STUDIES[f"search_cory_{task}"].variants.values()]
        assert len(near) == 8 and all(low < rate < high for rate in near)
    better = STUDIES["tuned_gsm8k"].variants["cory, lower rate"]
    assert better == STUDIES["search_cory_gsm8k"].variants["cory 16"] and "--learning_rate 1.8e-04" in better


@pytest.mark.parametrize("task", ["imdb", "gsm8k"])
@pytest.mark.parametrize("study_name, variant", [("tuned", "ppo"), ("parts", "no transfer")])
def test_a_control_has_half_the_iterations_and_nothing_else_changed(study_name, variant, task):
    variants = STUDIES[f"{study_name}_{task}"].variants
    whole, half = variants[variant].split(), variants[f"{variant}, half the iterations"].split()
    (pair,) = [(a, b) for a, b in zip(whole, half, strict=True) if a != b]
    of_whole, of_half = (float(value.removeprefix("iterations*")) for value in pair)
    assert of_half == of_whole / 2


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_made_of_flags_that_there_are(name, tmp_path):
    of_name = STUDIES[name]
    assert of_name.baseline in list(of_name.variants)[:study.QUICK_VARIANTS]
    tasks, variants = list(of_name.tasks), list(of_name.variants)
    planned = runs.plan(of_name, tasks, variants, of_name.seeds, "tiny", [], tmp_path)
    assert len({run.folder for run in planned}) == len(planned)
    assert len({(run.task, run.variant) for run in planned}) == len(variants) * len(tasks)


def test_a_baseline_is_a_variant():
    with pytest.raises(UserError, match="baseline is 'pp0': is no variant; choose from ppo, cory"):
        replace(STUDIES["curves"], baselines={"cory": "pp0"})
    assert STUDIES["reward"].baseline_of("ppo") == "weight 0"


def test_runs_of_the_same_flags_in_two_studies_share_a_folder(tmp_path):
    folders = {runs.plan(STUDIES[name], ["imdb"], ["cory"], range(3, 4), "tiny", [], tmp_path)[0].folder
               for name in ("curves", "ablations")}
    (folder,) = folders
    assert re.fullmatch("imdb-method_cory_preset_tiny-[0-9a-f]{6}-seed3", folder.name)
    assert runs.slug(["--model", "org/name"]) != runs.slug(["--model", "org_name"])


def flags_of(variant, *users):
    """The words that `variant` adds under the tiny preset and what stands behind the study's `--`."""
    one = Study("?", {"it": variant}, baseline="it")
    (run,) = runs.plan(one, ["gsm8k"], ["it"], range(1), "tiny", list(users), rows.Path("nowhere"))
    return list(run.flags[2 + len(runs.COMMON.split()) + len(users):])


def test_multiples_are_of_what_a_run_would_have_otherwise():
    assert flags_of("--init_kl_coef init_kl_coef*2 --iterations iterations*2") == [
        "--init_kl_coef", "0.04", "--iterations", "120"]
    assert flags_of("--batch_size batch_size*0.5", "--batch_size", "64") == ["--batch_size", "32"]


@pytest.mark.parametrize("variant, users, says", [
    ("--knowlege_transfer false", [], "flag is '--knowlege_transfer': unknown; did you mean --knowledge_tr"),
    ("--method ppo", ["--run_dir", "x"], "flag is '--run_dir': is the study's to set"),
    ("--method ppo", ["--method", "cory"], "flag is '--method': is set by the variant `"),
    ("--lam lamm*2", [], "must be a setting that is a number, times a number"),
    ("--model model*2", [], "times a number"), ("--lam 2", [], "lam is 2.0: must be 1 or less")])
def test_a_variant_that_is_not_what_it_says_is_one_line(variant, users, says):
    with pytest.raises(UserError, match=says):
        flags_of(variant, *users)


@pytest.mark.parametrize("argv, says", [
    (["curves", "--jobs", "0"], "jobs is 0: must be 1 or more"),
    (["curves", "--variants", "corry"], "variants is 'corry': is not of this study; choose from ppo, cory"),
    (["curves", "--preset", "gpt3"], "preset is 'gpt3': choose from tiny, gpt2"),
    (["curves", "--from", "none.csv"], "file is 'none.csv': does not exist; check the path"),
    (["curves", "--out", "/proc/x"], "file is '/proc/x/runs': cannot be written"),
    (["nothing"], "invalid choice: 'nothing'")])
def test_what_a_study_cannot_do_is_one_line(argv, says, capsys):
    assert says in error_line(study.main, argv, capsys)


# --- runs ---
def small_study(small, out, *more, flags=()):
    data = ["--model", small / "lm", "--reward_model", small / "classifier", "--dataset", small / "openings"]
    size = "--iterations 1 --batch_size 8 --mini_batch_size 8 --eval_queries 8 --max_response_length 6"
    study.main(["curves", "--quick", "--tasks", "imdb", "--out", str(out), *more, "--", *map(str, data),
                *size.split(), "--eval_every", "1", "--device", "cpu", *flags])


@pytest.fixture
def commands(monkeypatch):
    """Runs in this process, as a process each would take seconds to start. The second one fails."""
    made = []

    def process(run, threads):
        made.append(run.command)
        if len(made) == 2:
            run.log.write_text("a line\nerror: the machine fell over\n")
            return 2, 1.0
        train_imdb.main(run.command[2:])
        return 0, 1800.0

    monkeypatch.setattr(runs, "process", process)
    return made


def test_a_study_from_runs_to_page_and_nothing_twice(small, tmp_path, capsys, commands):
    with pytest.raises(SystemExit) as stopped:
        small_study(small, tmp_path)
    said = capsys.readouterr()
    assert "curves: 4 runs, 4 to make, 1 at a time" in said.out and stopped.value.code == 1
    assert "error: imdb, cory, seed 0: error: the machine fell over\n" in said.err
    assert "- imdb, cory, seed 0: error: the machine fell over" in said.out
    small_study(small, tmp_path, "--dry_run")
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"mkdir -p \S+/runs && python train_imdb.py --preset tiny .* --method cory --seed 0 "
                    r"--run_dir (\S+) 2> \1.log$", line)
    small_study(small, tmp_path)
    out = tmp_path / "curves-quick"
    text = (out / "results.md").read_text()
    assert len(commands) == 5 and text in capsys.readouterr().out
    assert re.search(r"\| base .*\n\| ppo +\| +2 \| .*\n\| cory +\| +2 \| .* of 4 \| +0.50 \|\n\n", text)
    assert {path.name for path in out.iterdir()} == {
        "results.md", "rows.csv", "curves_imdb.png", "differences_imdb.png"}
    frame = pd.read_csv(out / "rows.csv")
    per_run = [("ppo", "llm1"), ("cory", "llm1"), ("cory", "llm2")]
    assert list(zip(frame.variant, frame.agent, frame.iteration)) == [
        (*whose, n) for _ in range(2) for whose in per_run for n in (0, 1)]
    assert "method" in frame and "lam" not in frame                 # settings that differ
    assert "batch_size" in frame
    end = json.loads((next(tmp_path.glob("runs/*cory*seed1")) / "eval.json").read_text())["llm2"]
    assert frame.iloc[-1].reward == end["task_reward"] and frame.iloc[-1].distinct_2 == end["distinct_2"]
    study.main(["curves", "--out", str(tmp_path / "again"), "--from", str(out / "rows.csv")])
    again = tmp_path / "again" / "curves"
    assert (again / "rows.csv").read_text() == (out / "rows.csv").read_text()
    of_command = re.compile("    python .*")
    assert of_command.sub("", (again / "results.md").read_text()) == of_command.sub("", text)
    assert (again / "differences_imdb.png").exists()
    study.main(["curves", "--out", str(again.parent), "--variants", "cory", "--from", str(out / "rows.csv")])
    assert len(commands) == 5 and not (again / "differences_imdb.png").exists()
    assert "| less |" not in (again / "results.md").read_text()     # nothing to compare
    line = error_line(study.main, ["curves", "--tasks", "gsm8k", "--from", out / "rows.csv"], capsys)
    assert "holds no row of these tasks and variants" in line


def test_runs_of_other_settings_are_refused(small, tmp_path, capsys, commands):
    def again(_=None):
        small_study(small, tmp_path, "--variants", "ppo", "--seeds", "1")

    again()
    (folder,) = tmp_path.glob("runs/*seed0")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"lam": 0.5}))
    line = error_line(again, [], capsys)
    assert re.search(r"run_dir is .*seed0': was made with lam 0.5, not 0.95: delete", line)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))     # `auto` elsewhere
    again()
    (folder / "metrics.jsonl").write_text("")
    assert "lacks rows of its metrics.jsonl" in error_line(again, [], capsys)


@pytest.mark.parametrize("change, says", [
    ({"data": "x"}, "data x, not d"), ({"weights": "x"}, "weights x, not w"),
    ({"dtype": "bfloat16"}, "dtype bfloat16, not float32"),
    ({"reward": 1.06}, "a base of reward 1.06, not 1.00")])
def test_runs_that_cannot_be_compared_are_not(change, says):
    one = frame("ppo", 0, [(0, 1.0, 0.0)])
    other = frame("cory", 3, [(0, 1.0, 0.0)]).assign(**change)
    with pytest.raises(UserError, match=f"'imdb cory seed 3': has {says} as ppo seed 0 has: delete one"):
        rows.require_comparable(pd.concat([one, other]))
    rows.require_comparable(pd.concat([one, other.assign(**{name: one.iloc[0][name] for name in change})]))
    larger = [one.assign(model="gpt2"), other.assign(model="gpt2-xl")]
    rows.require_comparable(pd.concat(larger))                      # by a setting that says so


def test_rows_that_are_none_and_rows_in_two_files_are_refused(tmp_path):
    one, none = tmp_path / "rows.csv", tmp_path / "none.csv"
    frame("ppo", 0, [(0, 1.0, 0.0)], commit="0012345678").to_csv(one, index=False)
    none.write_text("task,variant\nimdb,ppo\n")
    assert rows.read([one]).commit.tolist() == ["0012345678"]       # no number
    with pytest.raises(UserError, match="none.csv': is no rows.csv of a study: it lacks seed, agent"):
        rows.read([none])
    with pytest.raises(UserError, match="holds two rows of imdb ppo 0 llm1 0; leave one file out"):
        rows.read([one, one])


def started(tmp_path, name="run", flags=("--method", "ppo")) -> runs.StudyRun:
    run = runs.StudyRun("imdb", "ppo", 0, flags, tmp_path / name)
    run.folder.mkdir()
    (run.folder / "config.json").write_text("{}")
    return run


def test_an_interrupted_run_is_resumed_and_its_log_goes(tmp_path, monkeypatch):
    run = started(tmp_path)
    assert run.command == ["python", "train_imdb.py", "--resume", "--run_dir", str(run.folder)]
    assert rows.of_runs([run]).empty                                # it has no end
    seen = []

    def process(command, env, stdout, stderr):
        print("error: of this try", file=stderr, flush=True)
        seen.append((command[1:3], env["OMP_NUM_THREADS"], run.error))
        return SimpleNamespace(returncode=[1, 0, -9][len(seen) - 1])

    monkeypatch.setattr(runs.subprocess, "run", process)
    monkeypatch.setattr(runs, "cores", lambda: 8)
    run.log.write_text("error: of another try, and much longer\n")
    assert runs.make([run], 2) == [run] and run.log.exists()
    assert runs.make([run], 2) == [] and not run.log.exists()
    assert runs.make([run], 2) == [run] and run.error == "error: ended by signal 9"
    assert seen == [(["train_imdb.py", "--resume"], "4", "error: of this try")] * 3
    costs = [json.loads(line) for line in (run.folder / "cost.jsonl").read_text().splitlines()]
    assert rows.core_seconds(run) == sum(cost["core_seconds"] for cost in costs) > 0


def test_a_run_that_diverged_is_a_result_and_not_made_again(tmp_path):
    run = started(tmp_path)
    run.log.write_text("weights has diverged, says a sample\nerror: no disk\n")
    same = replace(run, variant="of the same flags")
    assert not run.diverged and runs.to_make([run, same]) == [same]             # each folder once
    run.log.write_bytes(b"\xff 1/6]error: weights is 'w': llm1 has diverged: lower the rate\n")
    assert run.diverged and runs.to_make([run]) == [] and runs.make([run], 1) == [run]


# --- loops ---
def test_what_the_loops_train_on():
    r, partner = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([10.0, 20.0, 60.0])
    cfg = settings(partner_reward=0.5)
    assert loops.zero(None, r, partner, cfg).tolist() == [0.0, 0.0, 0.0]
    assert loops.shuffled(None, r, partner, cfg).tolist() == [12.0, 36.0, 6.0]
    assert loops.strangers(None, r, partner, cfg).tolist() == [11.0, 32.0, 11.0]
    assert loops.centred(None, r, partner, cfg).tolist() == [1 - 10.0, 2 - 5.0, 6 + 15.0]
    with pytest.raises(UserError, match="responses_per_query is 2: .* takes neighbours; use 1"):
        loops.shuffled(None, r, partner, settings(responses_per_query=2))
    with pytest.raises(UserError, match="partner_term is 'critic': this loop changes the sampled"):
        loops.centred(None, r, 0.0, settings(partner_term="critic"))


@pytest.mark.parametrize("loop", ["zero_ppo", "zero_cory", "shuffled_ppo", "shuffled_cory", "strangers_cory",
                                  "centred_cory"])
def test_a_loop_gives_its_score_to_the_ordinary_one(loop):
    name, method = loop.split("_")
    train, ordinary = getattr(loops, f"train_{loop}"), getattr(loops, f"train_{method}")
    assert (train.func, train.keywords) == (ordinary, {"score": getattr(loops, name)})
    assert (train.agents, train.evaluate) == (ordinary.agents, ordinary.evaluate)


def test_an_agents_own_metric_wins_over_its_teams():
    log = [{"iteration": 1, "eval/llm1/kl": 1.0, "eval/team/kl": 9.0, "eval/team/copies": 2.0}]
    run = SimpleNamespace(finished=False)
    assert rows.evaluations(run, "llm1", "base", log) == {1: {"kl": 1.0, "copies": 2.0}}
