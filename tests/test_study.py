"""Statistics of studies by hand, the plan of runs, and a study of seconds."""

import json
import math
import re
import shlex
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import agent_of, bigram, settings

import cory.experiment.run
import cory.ppo.rollout
import cory.train
import train_imdb
from cory.commands import study
from cory.commands.flags import parse
from cory.config import GSM8K_PRESETS, IMDB_PRESETS, METHODS, Gsm8kConfig, ImdbConfig
from cory.errors import Diverged, UserError
from cory.experiment.plots import COLORS
from cory.experiment.run import Run
from cory.experiment.saved_config import saved_config
from cory.names import find
from cory.ppo.loading import load_language_model
from cory.ppo.model import PolicyWithValue
from cory.ppo.sampling import encode_prompts
from cory.studies import claims, comparison, loops, pictures, published, results, runs, tables, team
from cory.studies import statistics as st
from cory.studies.definitions import STUDIES
from cory.studies.loops import penalised_sample
from cory.studies.results import REWARD
from cory.train import partner_terms, score, train


def test_differences_are_paired_by_seed():
    # seeds 0 to 4: +1 each, although they spread by 40; seed 5 is of one variant alone
    d = st.difference({i: 10.0 * i + 1 for i in range(6)}, {i: 10.0 * i for i in range(5)})
    assert (d.mean, d.low, d.high, d.improved, d.seeds) == (1.0, 1.0, 1.0, 1.0, 5)
    assert d.verdict == "higher" and str(d) == "+1.00 [+1.00, +1.00]"


def test_no_verdict_where_the_interval_holds_0_or_seeds_are_few():
    zero = dict.fromkeys(range(5), 0.0)
    d = st.difference({0: 1.0, 1: -1.0, 2: 0.5, 3: -0.2, 4: 0.0}, zero)
    assert d.low < 0 < d.high and d.verdict == "not decided with 5 seeds"
    assert d.improved == pytest.approx((2 + 0.5) / 5)               # a tie counts half
    four = st.difference({i: 1.0 for i in range(4)}, zero)
    assert math.isnan(four.low) and four.verdict == "not decided with 4 seeds" and str(four) == "+1.00"
    none = st.difference({0: math.nan}, {0: 1.0})
    assert none.seeds == 0 and str(none) == "never comparable" and none.verdict.startswith("not decided")
    assert st.difference({i: -1.0 - i for i in range(5)}, zero).verdict == "lower"


@pytest.mark.parametrize("n, least, most", [(5, 172, 194), (12, 178, 198)])
def test_the_interval_covers_the_mean_as_often_as_it_says(n, least, most):
    """Of 200; the plain percentile bootstrap would hold the mean of five in some 166."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = st.interval(rng.normal(3.0, 1.0, n))
        inside += low <= 3.0 <= high
    assert least <= inside <= most


def test_an_interval_by_hand():
    """Of five, Student's 97.5% point times sqrt(5/4) is 3.104, so that 0.1% of the 5^5 means lie beyond each
    end: the second least (a 1 for one 0) and the second largest (a 3 for one 10).
    """
    assert st.interval(np.array([0.0, 1.0, 2.0, 3.0, 10.0])) == pytest.approx((1 / 5, 43 / 5))


def test_reward_at_equal_kl_by_hand():
    assert st.at([(0, 0.0), (4, 1.0), (8, 2.0)], 6) == 1.5
    assert st.at([(0, 0.0), (5, 1.0), (3, 3.0), (9, 5.0)], 4) == 0.8        # where it is first reached
    assert math.isnan(st.at([(0, 0.0), (1, 1.0)], 2))


def test_height_of_a_frontier_by_hand():
    """Two runs have min(k, 2) at most within a KL of k, though one goes to 2 and falls: against k itself that
    is k - 2 lower, and 1 in the mean from 2, where one is evaluated first, to 4, which both reach.
    """
    two, one = [[(0.0, 0.0), (4.0, 2.0)], [(0.0, 0.0), (2.0, 2.0), (6.0, 1.0)]], [[(0.0, 0.0), (4.0, 4.0)]]
    assert st.frontier_height(two, one) == pytest.approx(-1.0, abs=1e-3)
    assert st.frontier_height(one, two) == pytest.approx(1.0, abs=1e-3)
    below = [[(0.0, 0.0), (4.0, 4.0), (1.0, 6.0)]]                  # 6 from 1 on: 3.5 above k in the mean
    assert st.frontier_height(below, [[(0.0, 0.0), (2.0, 2.0), (4.0, 4.0)]]) == pytest.approx(3.5, abs=1e-2)
    back = [[(0.0, 0.0), (4.0, 4.0), (2.0, 6.0)]]                   # 6 at a KL of 2, which it had left
    assert st.frontier_height(back, [[(0.0, 0.0), (2.0, 2.0), (4.0, 4.0)]]) == pytest.approx(3.0, abs=1e-2)
    apart = [[(0.0, 0.0), (1.0, 1.0)]]                              # ends of 1 and 4: only 1 is shared
    assert st.frontier_height(apart, one) == pytest.approx(0.0, abs=1e-9)


def test_a_share_of_few_has_an_interval():
    """Wilson's of 5 of 5: from 1 / (1 + z^2 / 5), z = 1.96, to 1."""
    assert st.share_interval(np.ones(5)) == pytest.approx((1 / (1 + 1.959964**2 / 5), 1.0))
    low, high = st.share_interval(np.array([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert low < 0.5 < high and math.isnan(st.share_interval(np.ones(4))[0])


# --- the partner's term ---
def exact_gradients(term, theta1=0.3, theta2=-0.2):
    """Of a two-agent bandit: each agent draws 0 or 1, r(a) is a table, the observer's reward depends on what
    it saw. Mean and variance of grad log pi(a) score over every (a1, a2), for pioneer and observer.
    """
    r_pioneer = torch.tensor([0.0, 1.0])
    r_observer = torch.tensor([[0.0, 3.0], [1.0, -1.0]])                    # by a1, a2
    p1 = torch.sigmoid(torch.tensor([-theta1, theta1]))                     # of a1 = 0, 1
    p2 = torch.sigmoid(torch.tensor([[-theta2, theta2], [theta2, -theta2]]))
    a1, a2 = (x.flatten() for x in torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij"))
    weight = p1[a1] * p2[a1, a2]
    r1, r2 = r_pioneer[a1], r_observer[a1, a2]
    cfg = settings(partner_term=term)
    value = (p2 * r_observer).sum(1)[a1]                                    # a critic that has learned all
    rollout = SimpleNamespace(value_BT=torch.stack([value, torch.zeros(4)], 1))
    for_pioneer, for_observer = partner_terms(r1, r2, rollout, cfg)
    score1, score2 = score(None, r1, for_pioneer, cfg), score(None, r2, for_observer, cfg)
    grad1 = (a1 - p1[1]).float()                                            # d log pi / d theta of a sigmoid
    grad2 = torch.where(a1 == 0, a2 - p2[0, 1], -(a2 - p2[1, 1])).float()
    found = []
    for sample in (grad1 * score1, grad2 * score2):
        mean = (weight * sample).sum()
        found.append((mean.item(), (weight * (sample - mean) ** 2).sum().item()))
    return found


def test_a_partners_term_without_noise_has_the_same_expected_gradient_and_less_variance():
    (mean1, variance1), (mean2, variance2) = exact_gradients("sampled")
    for term in ("sampled_to_pioneer", "critic"):
        (m1, v1), (m2, v2) = exact_gradients(term)
        assert m1 == pytest.approx(mean1, abs=1e-6) and m2 == pytest.approx(mean2, abs=1e-6), term
        assert v1 < 0.7 * variance1 if term == "critic" else v1 == pytest.approx(variance1)
        assert v2 < variance2               # r1 is no baseline that was chosen: elsewhere it might lower it


def test_a_critic_that_knows_nothing_leaves_the_pioneer_on_its_own():
    r1, r2, cfg = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0]), settings(partner_term="critic")
    for_pioneer, for_observer = partner_terms(r1, r2, SimpleNamespace(value_BT=torch.zeros(2, 3)), cfg)
    assert score(None, r1, for_pioneer, cfg).tolist() == [1.0, 2.0]
    assert score(None, r2, for_observer, cfg).tolist() == [5.0, 7.0]


def test_without_a_critic_there_is_no_value_to_take():
    with pytest.raises(UserError, match="partner_term is 'critic': needs a critic, which rloo has not"):
        settings(partner_term="critic", advantage="rloo", responses_per_query=4)
    with pytest.raises(UserError, match="use an advantage that asks for value_BT"):
        partner_terms(torch.ones(2), torch.ones(2), SimpleNamespace(value_BT=None),
                      settings(partner_term="critic"))


# --- definitions and runs ---
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_made_of_flags_that_there_are(name, tmp_path):
    study = STUDIES[name]
    assert {*study.quick, *study.pairs, *study.only} <= set(study.variants)
    assert {*study.pairs.values(), study.baseline} <= set(study.variants) and study.baseline in study.quick
    assert {name for sweep in study.sweeps.values() for name in sweep} <= set(study.variants)
    assert set(study.measure) <= set(study.tasks) and set(study.measure.values()) <= runs.MEASURES.keys()
    variants = study.variants_of("tiny", quick=False)
    planned = runs.plan(study, list(study.tasks), [0, 1], variants, "tiny", [], tmp_path)
    alike = {"sampled KL": "cory"}                                          # the preset's own, said again
    folders = {(run.task, alike.get(run.variant, run.variant), run.seed): run.folder for run in planned}
    assert len({*folders.values()}) == len(folders)                         # no other two lie in one folder
    for run in planned:
        config_class, presets = runs.SCRIPTS[run.task]
        cfg = parse(config_class, presets, run.commands()[0][2:])
        assert cfg.seed == run.seed and cfg.preset == "tiny"


def test_a_study_without_quick_variants_has_all_of_them():
    assert replace(STUDIES["curves"], quick=()).variants_of("tiny", quick=True) == ["ppo", "cory"]


def test_multiples_are_of_what_a_run_would_have_otherwise():
    variant = "--init_kl_coef init_kl_coef*2 --iterations iterations*2"
    tiny = ["--preset", "tiny"]
    assert runs.resolved(variant, "gsm8k", tiny) == ["--init_kl_coef", "0.04", "--iterations", "80"]
    assert runs.resolved("--method cory --init_kl_coef init_kl_coef*1 --kl_penalty k1", "gsm8k", tiny) == [
        "--method", "cory"]                                                 # what it would have anyway
    assert runs.resolved(variant, "gsm8k", [*tiny, "--iterations", "3"])[-1] == "6"
    with pytest.raises(UserError, match="preset is 'none': choose from tiny"):
        runs.resolved("", "imdb", ["--preset", "none"])
    for method in (["--method", "cory"], ["--method=cory"]):
        with pytest.raises(UserError, match="flag is '--method': is set by the variant"):
            runs.resolved("--method ppo", "imdb", [*tiny, *method])
    with pytest.raises(UserError, match="flag is '--seed': is the study's to set"):
        runs.resolved("--method ppo", "imdb", [*tiny, "--seed", "3"])
    for words in ("--share_weights", "--lora --share_weights", "--no_lora true", "--learning-rate 1e-3",
                  "--lam=0.9 --gamma=1", "ppo --method"):
        with pytest.raises(UserError, match="flags as `--name value`"):
            runs.resolved(words, "imdb", tiny)


@pytest.mark.parametrize("variant, says", [
    ("--knowlege_transfer false", "there is no setting knowlege_transfer; did you mean knowledge_transfer"),
    ("--seed 5", "--seed is the study's to set"), ("--run_dir x", "--run_dir is the study's to set"),
    ("--eval_every 5", "is the same in every run of a study; leave it out of the variant `--eval_every 5`"),
    ("--init_kl_coef init_kl_coeff*3", "init_kl_coeff.3 must be a setting that is a number, times a number"),
    ("--init_kl_coef init_kl_coef*x", "times a number"), ("--lam lam*nan", "times a number"),
    ("--model model*2", "times a number"), ("--share_weights share_weights*2", "times a number"),
    ("--batch_size batch_size*1.001", "batch_size.1.001 is 128, as without it"),
    ("--model 'x", "cannot be read .No closing quotation")])
def test_a_variant_that_is_not_what_it_says_is_one_line(variant, says):
    with pytest.raises(UserError, match=says):
        runs.resolved(variant, "imdb", ["--preset", "tiny", *runs.ALWAYS.split()])


@pytest.mark.parametrize("change, says", [
    ({"baseline": "weight1"}, "baseline is 'weight1': is unknown; did you mean weight 1"),
    ({"quick": ("weight",)}, "quick is 'weight'"), ({"pairs": {"pp0": "weight 0"}}, "pairs is 'pp0'"),
    ({"pairs": {"ppo": "weight0"}}, "pairs is 'weight0'"), ({"pairs": {"ppo": "ppo"}}, "is its own baseline"),
    ({"only": {"ppo, gpt2xl": "gpt2-large"}}, "only is 'ppo, gpt2xl'"),
    ({"only": {"ppo": "gpt2_large"}}, "only is 'gpt2_large': is unknown; did you mean gpt2-large"),
    ({"measure": {"gms8k": "pass@k"}}, "measure is 'gms8k'"), ({"tasks": ("imbd",)}, "tasks is 'imbd'"),
    ({"measure": {"gsm8k": "passk"}}, "measure is 'passk': is unknown; did you mean pass@k"),
    ({"sweeps": {"ppo": ()}}, "must be of ppo and cory"),
    ({"sweeps": {"ppo": ("ppo",), "cory": ()}}, "sweeps is 'ppo'"),
    ({"variants": {"weight 1": "", "a | b": ""}, "pairs": {}, "quick": ()}, "must be one line without |")])
def test_a_study_that_names_what_is_not_there_is_one_line(change, says, tmp_path):
    study = replace(STUDIES["reward"], **change)
    with pytest.raises(UserError, match=says.replace("|", "[|]")):
        runs.plan(study, ["imdb"], [0], ["weight 1"], "tiny", [], tmp_path)


def test_two_sets_of_flags_do_not_share_a_folder(tmp_path):
    variants = {"one": "--model org/name", "two": "--model org_name"}
    study = replace(STUDIES["curves"], variants=variants, baseline="one", quick=())
    with pytest.raises(UserError, match="is of `.*org/name`, too: give one of them another name"):
        runs.plan(study, ["imdb"], [0], list(variants), "tiny", [], tmp_path)


def test_runs_of_the_same_flags_in_two_studies_share_a_folder(tmp_path):
    folders = [runs.plan(STUDIES[name], ["imdb"], [3], ["cory"], "tiny", [], tmp_path)[0].folder
               for name in ("curves", "ablations", "variance")]
    assert len(set(folders)) == 1 and folders[0].name == "imdb-preset_tiny_method_cory-seed3"


def small_study(small, tmp_path, *more, name="curves"):
    data = ["--model", small / "lm", "--reward_model", small / "classifier", "--dataset", small / "openings"]
    size = "--iterations 2 --batch_size 8 --mini_batch_size 8 --eval_queries 8 --max_response_length 6"
    study.main([name, "--quick", "--tasks", "imdb", "--out", str(tmp_path), *more, "--", *map(str, data),
                *size.split(), "--eval_every", "1", "--device", "cpu"])


def test_a_study_from_start_to_pictures_and_nothing_twice(small, tmp_path, capsys, monkeypatch):
    """Runs in this process, as a process each would take seconds to start; one of them fails once."""
    made = []

    def run(command, stderr=None, **_):
        if command[0] == "git":
            return SimpleNamespace(stdout="abc123\n")
        made.append(command)
        failed = len(made) == 2
        if failed:
            stderr.write("error: the machine fell over\n")
        else:
            train_imdb.main(command[2:])
        return SimpleNamespace(returncode=2 * failed)

    monkeypatch.setattr(runs.subprocess, "run", run)
    with pytest.raises(SystemExit) as stopped:
        small_study(small, tmp_path)
    said = capsys.readouterr()
    failed_out = next(tmp_path.glob("curves-quick*")) / "results.md"
    assert "- imdb, cory, seed 0: status 2: error: the machine fell over" in failed_out.read_text()
    assert stopped.value.code == 1 and "seed 0 failed, status 2: error: the machine fell over" in said.err
    assert "curves: 4 runs, 4 to make, 1 at a time; time unknown until one is finished" in said.out
    small_study(small, tmp_path, "--dry_run")
    assert capsys.readouterr().out.count("python train_imdb.py") == 1
    small_study(small, tmp_path)
    said = capsys.readouterr()
    assert len(made) == 5 and "4 runs, 1 to make, 1 at a time; about 0 minutes" in said.out
    (out,) = tmp_path.glob("curves-quick*")
    text = (out / "results.md").read_text()
    assert text in said.out and "| cory | 2 |" in text and "not decided with 2 seeds" in text
    rows = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    both = [(variant, seed) for seed in (0, 1) for variant in ("ppo", "cory")]
    assert [(row["variant"], row["seed"]) for row in rows] == both
    assert [row["responses"] for row in rows] == [8, 16] * 2        # a batch for each role of the loop
    assert {path.name for path in out.glob("*.p*")} == {
        f"{name}_imdb.{kind}" for name in ("curves", "frontier", "differences") for kind in ("png", "pdf")}
    small_study(small, tmp_path / "elsewhere", "--published", str(out / "runs.jsonl"))
    said = capsys.readouterr()
    assert len(made) == 5 and "curves: 4 runs, 0 to make, 1 at a time" in said.out
    assert said.err == "published: 4 of 4 runs, in 1 of 1 files\n"
    again = tmp_path / "elsewhere" / out.name
    assert (again / "runs.jsonl").read_text() == (out / "runs.jsonl").read_text()
    as_it_was = text.partition("95% intervals")[2]                  # tables, verdicts, pictures, answers
    assert (again / "results.md").read_text().partition("Published before: 4. 95% intervals")[2] == as_it_was
    assert "Answers of the last iteration, seed 0:" in as_it_was
    assert all("run_dir" not in row["config"] and len(row["answers"]) == 2 for row in rows)
    small_study(small, tmp_path / "elsewhere", "--published", str(out / "runs.jsonl"), name="claims")
    assert re.search(r"PPO's combined reward falls .*, 2 seeds \|", capsys.readouterr().out)
    run = tmp_path / "runs" / rows[0]["folder"]
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    for name in ("curves", "claims"):                               # of another arithmetic
        with pytest.raises(SystemExit) as stopped:
            small_study(small, tmp_path, name=name)
        said = capsys.readouterr()
        assert stopped.value.code == 2 and re.search("with dtype (bfloat16|float32), ", said.err)
        assert "to make" not in said.out                            # and before anything is trained
    (run / "config.json").write_text(config)
    (run / "eval.json").unlink()
    run.with_name(run.name + ".log").write_text("error: weights is 'w': is not finite: llm1 has diverged\n")
    small_study(small, tmp_path)                                    # which is a result, and no failure
    said = capsys.readouterr()
    assert len(made) == 5 and "llm1 has diverged" in said.err
    assert re.search(r"\| ppo \| 1 \| .* \| [12] of 2 \| (50|100)% \|", said.out)


def test_an_interrupted_run_is_resumed(tmp_path, monkeypatch):
    run = runs.StudyRun("imdb", "ppo", 0, ("--method", "ppo"), tmp_path / "run")
    run.folder.mkdir()
    (run.folder / "config.json").write_text("{}")
    commands = []
    monkeypatch.setattr(runs.subprocess, "run",
                        lambda command, **_: commands.append(command) or SimpleNamespace(returncode=0))
    run.log.write_text("error: of an earlier try\n")
    assert runs.make([run], 1) == [] and not run.log.exists()
    assert commands[0][1:] == ["train_imdb.py", "--resume", "--run_dir", str(run.folder)]
    forgets = ("--method", "cory.studies.loops:train_normalised_cory")      # it is made anew
    assert runs.make([replace(run, flags=forgets)], 1) == []
    assert commands[1][1:4] == ["train_imdb.py", *forgets] and not run.folder.exists()
    assert not replace(run, flags=("--lam", "0.9")).forgets         # a variant that leaves the method open


def test_what_a_run_says_goes_into_its_log_and_not_through_the_study(tmp_path, monkeypatch):
    """A pipe would end with a study that is killed, and take the run along before it has saved."""
    run, seen = runs.StudyRun("imdb", "ppo", 0, ("--method", "ppo"), tmp_path / "run"), []

    def make(command, stdout, stderr, **_):
        print("error: half a line", file=stderr, flush=True)
        seen.append((stdout.fileno() == stderr.fileno(), run.said))
        return SimpleNamespace(returncode=len(seen) % 2)

    monkeypatch.setattr(runs.subprocess, "run", make)
    assert runs.make([run], 1) == [(run, "status 1: error: half a line")] and run.log.exists()
    assert runs.make([run], 1) == [] and not run.log.exists()
    assert seen == [(True, "error: half a line\n")] * 2
    run.log.write_bytes(b"a sample says that it has diverged")
    assert not run.diverged
    run.log.write_bytes(b"\xff 1/6]error: llm1 has diverged")       # of a shell that redirects what it likes
    assert run.diverged


def test_a_run_that_variants_share_fails_for_each(tmp_path, monkeypatch):
    run = runs.StudyRun("imdb", "cory", 0, ("--method", "cory"), tmp_path / "run")
    monkeypatch.setattr(runs.subprocess, "run", lambda command, stderr, **_: (
        stderr.write("error: no\n"), SimpleNamespace(returncode=1))[1])
    both = [run, replace(run, variant="sampled KL")]
    assert runs.make(both, 1) == [(one, "status 1: error: no") for one in both]


def test_a_run_in_use_does_not_stop_the_others(tmp_path, monkeypatch):
    """One that can only be made anew is not deleted under another process: it is reported."""
    forgets = ("--method", "cory.studies.loops:train_normalised_cory")
    used, free = (runs.StudyRun("imdb", "cory", seed, forgets, tmp_path / f"run{seed}") for seed in (0, 1))
    used.folder.mkdir()
    (used.folder / "config.json").write_text("{}")
    made = []
    monkeypatch.setattr(runs.subprocess, "run",
                        lambda command, **_: made.append(command) or SimpleNamespace(returncode=0))

    @contextmanager
    def locked(folder):
        raise UserError("run_dir", str(folder), "is in use by another process")
        yield

    monkeypatch.setattr(runs, "locked", locked)
    used.log.write_text("what the other process says")
    ((failed, why),) = runs.make([used, free], 1)
    assert used.log.read_text() == "what the other process says"
    assert failed == used and "is in use by another process" in why and used.folder.exists()
    assert [command[-1] for command in made] == [str(free.folder)]


def test_what_is_measured_follows_training_and_is_done_once(tmp_path, monkeypatch):
    run = runs.StudyRun("gsm8k", "ppo", 0, ("--method", "ppo"), tmp_path / "run", "team")
    assert [command[1:3] for command in run.commands()] == [
        ["train_gsm8k.py", "--method"], ["-m", "cory.studies.team"]]
    run.folder.mkdir()
    (run.folder / "eval.json").write_text("{}")
    saved = saved_config(Gsm8kConfig(eval_queries=64, temperature=0.7), ["llm1"], {})
    (run.folder / "config.json").write_text(json.dumps(saved))
    assert not run.finished and [command[2] for command in run.commands()] == ["cory.studies.team"]

    def measured(measure, name, found):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text(json.dumps(found))
        return replace(run, measure=measure).finished

    figures = dict.fromkeys(("base", "agents"), dict.fromkeys(tables.TEAM, 1.0))
    assert not measured("team", "team.json", {"rounds": 4, "base": {"first": 1.0}})     # fewer figures
    assert not measured("team", "team.json", {"rounds": 1, **figures})
    assert measured("team", "team.json", {"rounds": 4, **figures}) and run.commands() == []
    of_k = {"samples": 16, "queries": 64, "temperature": 0.7,
            **dict.fromkeys(("base", "llm1"), {f"pass@{2**i}": 1.0 for i in range(6)})}
    assert measured("pass@k", "evaluation/results.json", of_k)
    for other in ({"samples": 64}, {"queries": 32}, {"temperature": 1.0}, {"llm1": {}}):        # by hand
        assert not measured("pass@k", "evaluation/results.json", of_k | other)


@pytest.mark.parametrize("loop", ["noisy_ppo", "normalised_cory", "normalised_ppo", "dropout_cory",
                                  "penalised_cory", "released_cory", "released_ppo", "fast_critic_cory",
                                  "fast_critic_ppo", "long_critic_cory", "long_critic_ppo"])
def test_the_studies_own_loops_train_and_leave_everything_as_it_was(loop, small_flags, tmp_path, capsys,
                                                                    monkeypatch):
    """And those that sample from another distribution than they train are said to, once."""
    monkeypatch.setitem(cory.experiment.run.OFF_POLICY, "float32", 1e-4)    # this model's logits are near 0

    def patched():
        return (cory.train.score, cory.train.ppo_update, cory.ppo.rollout.sample, PolicyWithValue.values)

    before = patched()
    flags = ["--iterations", "2", "--run_dir", str(tmp_path / "run")]
    method = ["--method", f"cory.studies.loops:train_{loop}"]
    run = train(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, *flags, *method]))
    assert before == patched()
    assert not any(agent.policy.lm.training for agent in run.agents)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gap = max(row["pioneer/sampling_gap"] for row in rows[1:])
    off_policy = loop.startswith(("penalised", "dropout", "released"))
    assert (gap > 1e-4) == off_policy == capsys.readouterr().err.count("warning: sampling_gap is")


@pytest.mark.parametrize("flags, warns", [
    ({}, True), ({"head_precision": "bfloat16"}, False), ({"lora": True, "load_in_4bit": True}, False)])
def test_what_rounding_may_make_is_no_warning(flags, warns, capsys):
    """0.05 nats: of bfloat16 in the body, in the head, or in a base of 4 bits, and of no float32."""
    cfg = settings(**{"dtype": "float32", "head_precision": "float32"} | flags)
    turn = SimpleNamespace(role="pioneer", rollout=SimpleNamespace(sampling_gap=0.05))
    Run.say_if_off_policy(SimpleNamespace(cfg=cfg, said_off_policy=False), [turn])
    assert ("sampling_gap is 0.05 nats per token: pioneer's" in capsys.readouterr().err) == warns


def test_a_repetition_penalty_by_hand():
    """From logits 2, 1, -1 after a: seen tokens a (2) and b (-1) become 2 / 1.1 and -1.1."""
    logits = torch.full((7, 7), -50.0)
    logits[0, :3] = torch.tensor([2.0, -1.0, 1.0])
    model = bigram(logits)
    drawn = penalised_sample(model, encode_prompts(model, ["ba"], 1), 1, None)
    expected = torch.tensor([2 / 1.1, -1.1, 1.0]).log_softmax(0)[0]
    assert drawn.response_BT.tolist() == [[0]] and drawn.logp_BT.item() == pytest.approx(expected.item())
    assert drawn.logp_BT.item() != pytest.approx(torch.tensor([2.0, -1.0, 1.0]).log_softmax(0)[0].item())


def test_runs_of_other_data_or_arithmetic_are_not_mixed(tmp_path):
    def made(seed, *flags, prints=None, reward=1.0, variant="ppo", **settings):
        run = runs.StudyRun("imdb", variant, seed, flags, tmp_path / str(seed))
        run.folder.mkdir()
        saved = saved_config(ImdbConfig(dtype="float32", head_precision="float32"), ["llm1"], prints or {})
        (run.folder / "config.json").write_text(json.dumps(saved | {"iterations": 1} | settings))
        (run.folder / "eval.json").write_text("{}")
        base = {"task_reward": reward, "kl": 0.0, "combined_reward": 1.0, "distinct_2": 0.9,
                "repeated_tokens": 0.1}
        end = {"roles": ["llm1"], "llm1/task_reward": 1.0, "llm1/kl": 1.0}
        rows = [{"iteration": 0, **{f"eval/base/{key}": x for key, x in base.items()}},
                {"iteration": 1, **end}]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run

    one = made(0, prints={"data": "aa", "model": "bb"})
    old = made(1)                                                   # of before fingerprints were kept
    asked = made(2, "--dtype", "bfloat16", prints={"data": "aa", "model": "bb"}, dtype="bfloat16")
    larger = made(3, "--model", "gpt2-xl", prints={"data": "aa", "model": "cc"})
    others = made(7, "--dataset", "else", variant="else", prints={"data": "dd", "model": "dd"}, reward=3.0)
    fewer = made(8, "--eval_queries", "64", variant="fewer", prints={"data": "aa", "model": "dd"})

    def require_alike(*of_runs):
        results.require_alike(results.of_ended(of_runs))

    require_alike(one, old, asked, larger, others, fewer, made(9, reward=1.04))
    with pytest.raises(UserError, match="the untrained model's reward is 1.06 here and 1.00 in 0: the reward "
                                        "or its evaluation was changed, or another kind of GPU"):
        require_alike(one, made(10, reward=1.06))
    (one.folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="0/metrics.jsonl': lacks iterations; put back a copy of it"):
        require_alike(one)
    one = made(11, prints={"data": "aa", "model": "bb"})
    mine = [made(n, "--dataset", "mine", prints={"data": data}) for n, data in ((12, "ee"), (13, "ff"))]
    with pytest.raises(UserError, match="was made with data ff, 12 with ee"):       # the folder was changed
        require_alike(*mine)
    for other, what in ((made(4, dtype="bfloat16"), "dtype bfloat16, 11 with float32"),
                        (made(5, prints={"data": "cc"}), "data cc, 11 with aa"),
                        (made(6, prints={"model": "cc"}), "weights cc, 11 with bb")):
        with pytest.raises(UserError, match=f"was made with {what}; delete one of the two"):
            require_alike(one, other)


def test_rows_of_a_page_stand_for_runs(tmp_path, capsys):
    """Whose folder is not there, and of which all that is asked was measured; none is taken that differs."""
    def plan(flags=(), out=tmp_path / "out"):
        return runs.plan(STUDIES["curves"], ["imdb", "gsm8k"], [0], ["ppo"], "tiny", list(flags), out)

    def page(name, *rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    imdb, gsm8k = plan()
    config = saved_config(parse(ImdbConfig, IMDB_PRESETS, [*imdb.flags, "--dtype", "bfloat16"]), ["llm1"], {})
    of_gsm8k = saved_config(parse(Gsm8kConfig, GSM8K_PRESETS, list(gsm8k.flags)), ["llm1"], {})
    whole = replace(result("ppo", [(0, 0.0, 0.0), (36, 3.0, 1.0)]), run=imdb, config=config)
    solved = replace(result("ppo", [(0, 0.0, 0.0), (40, 3.0, 1.0)]), run=gsm8k, config=of_gsm8k)
    row = results.row_of("curves", whole)
    file = page("runs.jsonl", row, results.row_of("curves", solved))
    of_imdb, unmeasured = published.take([imdb, gsm8k], [file])
    assert of_imdb.finished and runs.to_make([of_imdb, unmeasured]) == [gsm8k]      # it lacks pass@k
    assert replace(results.read(of_imdb), run=imdb) == replace(whole, unsteady=0.0)
    assert published.take([imdb, *plan(["--lam", "0.9"])], [file])[1].row is None   # of other flags
    of_k = dict.fromkeys(("base", "llm1"), {f"pass@{k}": 0.5 for k in (1, 2, 4, 8, 16)}) | {"samples": 16}
    row_of_gsm8k = results.row_of("curves", replace(solved, measured=of_k))
    assert published.take([gsm8k], [page("solved", row_of_gsm8k)])[0].finished
    with pytest.raises(UserError, match="solved:2': has other measured than the same run at .*solved:1"):
        published.take([gsm8k], [page("solved", row_of_gsm8k, row_of_gsm8k | {"measured": of_k | {"x": 1}})])
    diverged = replace(whole, agents={}, roles={}, unsteady=math.nan, diverged=True)
    (gone,) = published.take([imdb], [page("diverged", results.row_of("curves", diverged))])
    assert gone.diverged and runs.make([gone], 1) == [(gone, "diverged, as published")]
    assert results.read(gone).collapsed
    unsolved = replace(diverged, run=gsm8k, config=of_gsm8k)        # of which nothing can be measured
    assert published.take([gsm8k], [page("diverged", results.row_of("curves", unsolved))])[0].diverged
    imdb.folder.mkdir(parents=True)
    (imdb.folder / "config.json").write_text(json.dumps(config))
    assert published.take([imdb], [file])[0].row is None            # its folder is there, and goes on
    (imdb.folder / "config.json").unlink()
    older = row | {"answers": [], "unsteady": None}                 # what was not kept is not known
    found = results.read(published.take([imdb], [page("older", older)])[0])
    assert math.isnan(found.unsteady) and results.row_of("team", found) == older | {"study": "team"}
    for rows in ([row, older], [older, row]):                       # of the same run: more is known of one
        assert published.take([imdb], [page("both", *rows)])[0].row == row
    points, cut = row["agents"]["llm1"], "the evaluations of llm1 do not go from 0 to 36"
    for rows, says in (
            ([row | {"config": config | {"lam": 0.9}}], "wrong:1': was made with lam 0.9, not 0.95: leave"),
            ([row | {"config": config | {"lambda": 1.0}}], "there is no setting lambda"),
            ([row, row | {"agents": {"llm2": points}}], "has other agents than the same run at .*wrong:1; "),
            ([row, row | {"responses": 9}], "wrong:2': has other responses"),
            ([row | {"agents": {"llm1": points[:1]}}], cut), ([row | {"agents": {"llm1": points[1:]}}], cut),
            ([row | {"agents": {}}], "no whole row of a study's runs.jsonl .StopIteration"),
            ([row | {"made_by": {}}], "KeyError: 'commit'"), ([{"task": "imdb"}], "KeyError: 'seed'"),
            ([row | {"config": {}}], "KeyError: 'iterations'"),
            ([row | {"metric": "accuracy"}], "wrong:1': is of accuracy, not of task_reward: leave"),
            ([row | {"config": config | {"fingerprints": None}}], "AttributeError"),
            ([row | {"roles": {"llm1": {}}}], "KeyError: 'task_reward'"),
            ([row | {"answers": [{}]}], "KeyError: 'query'"), ([row | {"responses": None}], "TypeError"),
            ([row | {"seed": "0"}], "has no run of these tasks, variants, seeds, preset and flags; leave")):
        with pytest.raises(UserError, match=says):
            published.take([imdb], [page("wrong", *rows)])
    capsys.readouterr()
    others = page("else", row_of_gsm8k)                             # of no use: said, and refused by itself
    assert published.take([imdb, replace(imdb, seed=1)], [file, others])[0].finished
    assert capsys.readouterr().err == "published: 1 of 2 runs, in 1 of 2 files\n"
    with pytest.raises(UserError, match="else, .*else': has no run of these tasks"):
        published.take([imdb], [others, others])
    lines = json.dumps(row)
    (tmp_path / "cut").write_text(f"{lines}\n\n{lines}")           # whole rows, of which the last has no end
    assert published.take([imdb], [tmp_path / "cut"])[0].finished
    (tmp_path / "cut").write_text(f"{lines}\n{lines[:99]}")
    (tmp_path / "results.md").write_text("# curves\n")
    for name, says in (("cut", "cut:2': is no whole row of a study's runs.jsonl .JSON"),
                       ("results.md", "results.md:1': is no whole row of a study's runs.jsonl .JSON"),
                       ("", "is no file"), ("none", "is no file; give the runs.jsonl of a study's page")):
        with pytest.raises(UserError, match=says):
            published.take([imdb], [tmp_path / name])


def test_rows_of_embedded_models_are_taken_again(tmp_path, capsys):
    """Their paths are this checkout's; rows have them by short name."""
    (run,) = runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", ["--iterations", "1"], tmp_path)
    run.folder.mkdir(parents=True)
    cfg = parse(ImdbConfig, IMDB_PRESETS, [*run.flags, "--dtype", "float32", "--head_precision", "float32"])
    (run.folder / "config.json").write_text(json.dumps(saved_config(cfg, ["llm1"], {})))
    found = replace(result("ppo", [(0, 0.0, 0.0), (1, 3.0, 1.0)]), run=run, config=results.config_of(run))
    (tmp_path / "runs.jsonl").write_text(json.dumps(results.row_of("curves", found)) + "\n")
    (elsewhere,) = runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", ["--iterations", "1"],
                             tmp_path / "elsewhere")
    assert published.take([elsewhere], [tmp_path / "runs.jsonl"])[0].finished
    assert str(Path.cwd()) not in (tmp_path / "runs.jsonl").read_text()
    study.main(["curves", "--tasks", "imdb", "--variants", "ppo", "--seeds", "2", "--dry_run",
                "--published", str(tmp_path / "runs.jsonl"), "--out", str(tmp_path / "elsewhere"),
                "--", "--iterations", "1"])
    said = capsys.readouterr()
    assert said.out.count("train_imdb.py") == 1 and "published: 1 of 2 runs, in 1 of 1 files" in said.err


def test_a_run_made_with_other_settings_is_refused(small_flags, tmp_path):
    (planned,) = runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", [], tmp_path)
    train_imdb.main([*small_flags, "--method", "ppo", "--iterations", "1", "--run_dir", str(planned.folder)])
    with pytest.raises(UserError, match="was made with model .*lm, not .*; iterations 1, not 36"):
        runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", [], tmp_path)
    cfg = parse(ImdbConfig, IMDB_PRESETS, [*planned.flags, "--dtype", "bfloat16"])
    saved = saved_config(cfg, ["llm1"], {})
    (planned.folder / "config.json").write_text(json.dumps(saved))  # what `auto` may be on another machine
    runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", [], tmp_path)
    (planned.folder / "config.json").write_text(json.dumps(saved | {"whiten_advantages": "false"}))
    with pytest.raises(UserError, match="is '.*': was made with whiten_advantages false, not "):
        runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", [], tmp_path)
    del saved["partner_term"]                                       # of before it was a setting
    (planned.folder / "config.json").write_text(json.dumps(saved))
    runs.plan(STUDIES["curves"], ["imdb"], [0], ["ppo"], "tiny", [], tmp_path)


def test_what_a_loop_remembers_is_not_lost_by_a_resume(small_flags, tmp_path, capsys):
    flags = [*small_flags, "--run_dir", str(tmp_path / "run")]
    train_imdb.main([*flags, "--method", "cory.studies.loops:train_normalised_cory", "--iterations", "1"])
    with pytest.raises(SystemExit):
        train_imdb.main(["--resume", "--run_dir", str(tmp_path / "run"), "--iterations", "2"])
    assert "remembers what no checkpoint holds" in capsys.readouterr().err


# --- from runs to figures ---
def result(variant, *agents) -> results.Result:
    """One seed; each agent as (iteration, reward, kl) points, whose combined reward is reward - kl."""
    points = {f"llm{i + 1}": [results.Point(n, r, r / 2, kl, r - kl, 1.0, 0.0) for n, r, kl in agent]
              for i, agent in enumerate(agents)}
    return results.Result(runs.StudyRun("imdb", variant, 0, (), Path(variant)), points, {}, 0.0, {},
                          responses=32 * len(agents), config={"init_kl_coef": 0.1, "dtype": "float32"},
                          made_by={"commit": "c", "dtype": "float32"})


def with_eta(of_seed, eta):
    return {seed: replace(run, config=run.config | {"init_kl_coef": eta}) for seed, run in of_seed.items()}


def test_the_end_of_a_run_is_its_last_evaluation():
    assert result("ppo", [(0, 0.0, 0.0), (10, 3.0, 1.0), (20, 1.0, 2.0)]).last.reward == 1.0


def test_figures_of_a_role_are_of_the_last_quarter(small_flags, tmp_path):
    run = runs.StudyRun("imdb", "ppo", 0, (), tmp_path / "r")
    train_imdb.main([*small_flags, "--method", "ppo", "--iterations", "8", "--run_dir", str(run.folder)])
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    role = next(iter(rows[1]["roles"]))
    expected = (rows[7][f"{role}/task_reward"] + rows[8][f"{role}/task_reward"]) / 2
    found = results.read(run)
    assert found.roles[role]["task_reward"] == pytest.approx(expected)
    assert found.responses == 8                                     # an iteration's batch, of one role


def test_a_role_need_not_play_in_every_iteration(small_flags, tmp_path):
    folder = tmp_path / "run"
    train_imdb.main([*small_flags, "--method", "cory", "--iterations", "8", "--run_dir", str(folder)])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]

    def without_observer(some) -> results.Result:
        for row in some:
            for key in [key for key in row if key.startswith("observer/")]:
                del row[key]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return results.read(runs.StudyRun("imdb", "cory", 0, ("--method", "cory"), folder))

    found = without_observer(rows[1::2])                            # it plays in 2, 4, 6 and 8
    assert found.roles["observer"]["kl"] == rows[8]["observer/kl"]  # of the last quarter, 7 and 8
    assert found.roles["pioneer"]["kl"] == (rows[7]["pioneer/kl"] + rows[8]["pioneer/kl"]) / 2
    assert list(without_observer(rows[7:]).roles) == ["pioneer"]


def test_differences_at_equal_iterations_kl_and_compute_by_hand():
    ppo = result("ppo", [(0, 0.0, 0.0), (10, 2.0, 4.0)])
    pair = result("cory", [(0, 0.0, 0.0), (10, 3.0, 10.0)], [(0, 0.0, 0.0), (10, 1.0, 2.0)])
    d = comparison.differences({"ppo": {0: ppo}, "cory": {0: pair}}, STUDIES["curves"], "cory")
    assert (d["reward"].mean, d["kl"].mean, d["combined"].mean) == (0.0, 2.0, -2.0)
    # at KL 2, which all reach: (0.6 + 1) / 2 against 1
    assert d["reward at equal KL"].mean == pytest.approx(-0.2)
    assert d["sampled reward at equal KL"].mean == pytest.approx(-0.1)      # half of all rewards here
    # 10 batches: PPO's iteration 10, CORY's iteration 5: (1.5 + 0.5) / 2 against 2
    assert d["reward at equal compute"].mean == pytest.approx(-1.0)
    # but two of them were not evaluated before 4 and 10
    groups = {"ppo": {0: ppo}, "cory": {0: pair}}
    assert comparison.before_an_evaluation(groups, STUDIES["curves"], "cory") == 1
    (row,) = tables.difference_table(groups, STUDIES["curves"], "imdb")[4:-1]
    assert row.startswith("| cory | ppo | 1 | +0.00 (50%) | -0.20 (0%) | ") and "| 1 of 1 | not dec" in row
    alike = {"ppo": {0: ppo}, "cory": {0: ppo}}                    # at 4, where they were
    assert comparison.before_an_evaluation(alike, STUDIES["curves"], "cory") == 0
    groups = {"ppo": {0: ppo}, "cory": with_eta({0: pair}, 0.3)}
    assert comparison.differences(groups, STUDIES["curves"], "cory")["combined"] is None    # of another eta
    rows = tables.final_table(groups, groups, STUDIES["curves"], "imdb")
    assert rows[3].endswith("| -4.00 (eta 0.3) | 0 of 1 | 0% |") and "eta" not in rows[2]
    turned = {"cory": groups["cory"], "ppo": groups["ppo"]}         # the baseline's is the usual one
    assert comparison.of_other_eta(turned, STUDIES["curves"]) == {"cory": 0.3}
    twice = {0: replace(ppo, responses=2 * ppo.responses)}        # of twice the batch: its iteration 5
    assert comparison.differences({"ppo": groups["ppo"], "cory": twice}, STUDIES["curves"], "cory")[
        "reward at equal compute"].mean == pytest.approx(-1.0)


@pytest.mark.parametrize("reward, distinct, repeated, collapsed", [
    (0.5, 1.0, 0.1, False), (0.16, 1.0, 0.1, False), (0.14, 1.0, 0.1, True), (0.5, 0.34, 0.1, False),
    (0.5, 0.33, 0.1, True), (0.5, 1.0, 0.29, False), (0.5, 1.0, 0.31, True)])
def test_collapse_by_the_rule_that_is_stated(reward, distinct, repeated, collapsed):
    base, end = (0, 0.2, 0.2, 0.0, 0.2, 1.0, 0.1), (9, reward, reward, 1.0, 0.0, distinct, repeated)
    points = [results.Point(*base), results.Point(*end)]
    assert results.Result(None, {"llm1": points}, {}, 0.0, {}).collapsed == collapsed
    one_of_two = results.Result(None, {"llm1": points, "llm2": points[:1]}, {}, 0.0, {})
    assert one_of_two.share_collapsed == collapsed / 2 and one_of_two.collapsed == collapsed


@pytest.mark.parametrize("loop", ["noisy_ppo", "normalised_cory"])
def test_what_the_loops_train_on(loop, monkeypatch):
    """Another response's reward beside one's own; scores of mean 0 and variance 1 over all that was seen."""
    scored = []

    def two_calls(run):
        for r in (torch.tensor([0.0, 2.0]), torch.tensor([4.0, 6.0])):
            scored.append(cory.train.score(None, r, torch.zeros(2), settings()))

    for name in ("train_ppo", "train_cory"):
        monkeypatch.setattr(loops, name, two_calls)
    getattr(loops, f"train_{loop}")(SimpleNamespace(cfg=settings(), start=0))
    if loop == "noisy_ppo":
        assert [x.tolist() for x in scored] == [[2.0, 2.0], [10.0, 10.0]]           # r + the neighbour's r
    else:                                       # 0, 2: mean 1, deviation 1; then 0, 2, 4, 6: mean 3, sqrt(5)
        assert scored[0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-4)
        assert scored[1].tolist() == pytest.approx([1 / 5**0.5, 3 / 5**0.5], abs=1e-4)


def test_loops_that_see_one_process_refuse_more(monkeypatch):
    run = SimpleNamespace(cfg=settings(responses_per_query=4, batch_size=8), start=0)
    with pytest.raises(UserError, match="responses_per_query is 4: makes a neighbour's reward one to the sa"):
        loops.train_noisy_ppo(run)
    monkeypatch.setattr(loops, "world", lambda: SimpleNamespace(size=2))
    for name in ("noisy_ppo", "long_critic_ppo", "long_critic_cory", "normalised_cory", "released_cory"):
        with pytest.raises(UserError, match="processes is 2: this loop is for one"):
            getattr(loops, f"train_{name}")(run)


def test_ten_times_the_heads_output_is_ten_times_its_rate(small):
    """Three updates of value heads that start at 0, with the body frozen: Adam's first steps are of the
    rate's size, whatever the gradient.
    """
    def values_after(rate):
        agent = agent_of(load_language_model(str(small / "lm")), learning_rate=rate)
        agent.policy.lm.requires_grad_(False)
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            (agent.policy.values(hidden) - 1).square().mean().backward()
            agent.optimizer.step()
            agent.optimizer.zero_grad()
        return agent.policy.values(hidden).tolist()

    with loops.fast_critic():
        fast = values_after(1e-3)
    assert fast == pytest.approx(values_after(1e-2), rel=1e-4)


@pytest.mark.parametrize("method", ["ppo", "cory"])
def test_better_critics_bring_values_nearer_to_their_targets(method, small_flags, tmp_path):
    """And change nothing before the first update."""
    errors, first = {}, {}
    for name in (method, f"cory.studies.loops:train_fast_critic_{method}",
                 f"cory.studies.loops:train_long_critic_{method}"):
        flags = ["--method", name, "--vf_coef", "1", "--cliprange_value", "100", "--iterations", "6"]
        flags += ["--run_dir", str(tmp_path / str(len(errors)))]
        train(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, *flags]))
        rows = [json.loads(line) for line in open(tmp_path / str(len(errors)) / "metrics.jsonl")]
        errors[name], first[name] = rows[-1]["pioneer/value_error"], rows[1]["pioneer/task_reward"]
    plain, *better = errors.values()
    assert len(set(first.values())) == 1 and max(better) < 0.9 * plain


def test_16_passes_move_the_value_head_alone(small, monkeypatch):
    """By Adam's steps of full size, past the value clip; the update before them is the ordinary one."""
    cfg = settings(cliprange_value=1e-9, vf_coef=1.0)
    agent = agent_of(load_language_model(str(small / "lm")), learning_rate=1e-3)
    body = {name: p.clone() for name, p in agent.policy.lm.named_parameters()}
    prompts = encode_prompts(agent.policy, ["the film", "a story of"], 8)
    rollout = SimpleNamespace(value_BT=torch.zeros(2, 3))
    experience = SimpleNamespace(
        prompt_BP=prompts.ids_BP, prompt_mask_BP=prompts.mask_BP,
        response_BT=torch.tensor([[3, 4, 5], [6, 7, 0]]), mask_BT=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        return_BT=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 99.0]]))
    monkeypatch.setattr(loops, "make_experience", lambda *_: experience)
    monkeypatch.setattr(loops, "ppo_update", lambda *args: {"args": args})
    hidden_NH = agent.policy.response_hidden(prompts.ids_BP, prompts.mask_BP, experience.response_BT)[
        experience.mask_BT.bool()].detach()
    head = torch.nn.Linear(hidden_NH.shape[-1], 1)
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    adam = torch.optim.Adam(head.parameters(), lr=1e-3, eps=agent.optimizer.defaults["eps"])
    for _ in range(16):
        (0.5 * (head(hidden_NH).squeeze(-1) - 1.0).square().mean()).backward()
        adam.step()
        adam.zero_grad()
    with loops.long_critic():
        said = cory.train.ppo_update(agent, rollout, torch.ones(2), 7, cfg)
    assert said["args"][:2] == (agent, rollout) and said["args"][3:] == (7, cfg)
    assert torch.allclose(agent.policy.values(hidden_NH), head(hidden_NH).squeeze(-1), atol=1e-6)
    assert agent.policy.values(hidden_NH).min() > 0.01
    assert all(torch.equal(body[name], p) for name, p in agent.policy.lm.named_parameters())


@pytest.mark.parametrize("method", ["ppo", "cory"])
@pytest.mark.parametrize("critic", ["fast_critic", "long_critic"])
def test_loops_with_better_critics_are_the_ordinary_ones_inside_their_block(critic, method, monkeypatch):
    seen = []

    @contextmanager
    def block():
        seen.append("on")
        yield
        seen.append("off")

    monkeypatch.setattr(loops, critic, block)
    monkeypatch.setattr(loops, f"train_{method}", seen.append)
    loop = getattr(loops, f"train_{critic}_{method}")
    loop("run")
    assert seen == ["on", "run", "off"] and loop.agents == getattr(cory.train, f"train_{method}").agents


@pytest.mark.parametrize("task", ["imdb", "gsm8k"])
def test_what_is_held_against_ppo_of_the_same_compute_has_as_many_responses(task):
    def responses(run):
        cfg = runs.settings_of(run.task, run.flags)
        return cfg.iterations * cfg.batch_size * len(find("method", cfg.method, METHODS).agents)

    study = STUDIES["compute"]
    planned = runs.plan(study, [task], [0], [*study.variants], "tiny", [], Path("out"))
    assert len({responses(run) for run in planned}) == 1 and len(planned) > 10


def test_two_answers_of_a_finished_run(small_flags, tmp_path, monkeypatch):
    """Of a run of seconds; then with letters counted for rewards: what is read, and which answer is best."""
    run_dir = tmp_path / "run"
    train_imdb.main([*small_flags, "--iterations", "2", "--run_dir", str(run_dir)])
    team.main([str(run_dir), "--rounds", "1"])
    found = json.loads((run_dir / "team.json").read_text())
    for of in (found["base"], found["agents"]):
        assert of.keys() == {"first", "second", "team", "alone"}
        assert of["team"] > max(of["first"], of["second"]) and of["alone"] > of["first"]
    asked = []
    task = SimpleNamespace(cfg=settings(), held_out_queries=["q1", "q2", "q3"], pioneer_prompts=lambda q: q,
                           observer_prompts=lambda q, a: [f"{x}+{y}" for x, y in zip(q, a, strict=True)],
                           reward=lambda q, texts: torch.tensor([float(len(text)) for text in texts]))

    def answer(model, prompts, limit, seed):
        asked.append((model, prompts, seed))
        return [model * (2 if "+" in prompt else 1) for prompt in prompts]

    monkeypatch.setattr(team, "answer", answer)
    # a (length 2) before b (length 5), and b before a: firsts 2, 5; seconds 10, 4; better 10, 5; bare 5, 5
    assert team.measure(task, ["aa", "bbbbb"], 1) == {"first": 3.5, "second": 7.0, "team": 7.5, "alone": 5.0}
    assert asked[1] == ("bbbbb", ["q1+aa", "q2+aa", "q3+aa"], asked[0][2] + 1)
    assert len({seed for _, _, seed in asked[:3]}) == 3
    asked.clear()
    team.measure(task, ["aa"], 2)
    assert [model for model, _, _ in asked] == ["aa"] * 6 and len({seed for _, _, seed in asked}) == 6


# --- claims and tables ---
def seeds_of(variant, rewards, kls, **more):
    """One agent that starts at reward 0 and ends, by seed, at these."""
    found = {}
    for seed, (reward, kl) in enumerate(zip(rewards, kls, strict=True)):
        one = result(variant, [(0, 0.0, 0.0), (5, reward / 2, kl / 2), (10, reward, kl)])
        found[seed] = replace(one, run=replace(one.run, seed=seed, folder=Path(f"{variant}-{seed}")), **more)
    return found


def of_another_reward(of_seed):
    """That gives 1 more to every answer, the untrained model's too."""
    return {seed: replace(run, agents={name: [replace(p, reward=p.reward + 1) for p in points]
                                       for name, points in run.agents.items()})
            for seed, run in of_seed.items()}


def claim_of(text, means=""):
    return next(claim for claim in claims.CLAIMS if text in claim.text and means in claim.means)


@pytest.mark.parametrize("kls, verdict", [
    ([5.0] * 5, "holds"), ([2.0] * 5, "does not hold"), ([5.0] * 4, "not decided with 4 seeds"),
    ([1.9, 2.1, 3.0, 1.0, 2.0], "not decided with 5 seeds")])
def test_a_claim_holds_only_where_its_whole_interval_does(kls, verdict):
    n = len(kls)
    groups = {"ppo": seeds_of("ppo", [1.0] * n, kls), "cory": seeds_of("cory", [1.0] * n, [1.0] * n)}
    measured, found = claim_of("more than twice").outcome(groups)
    mean = np.exp(np.mean(np.log(kls)))                             # geometric: of a ratio
    assert found == verdict and measured.startswith(f"{mean:.2f}") and measured.endswith(f"{n} seeds")


def test_claims_by_hand():
    ppo, pair = seeds_of("ppo", [2.0] * 5, [4.0] * 5), seeds_of("cory", [1.9] * 5, [1.0] * 5)
    groups = {"ppo": ppo, "cory": pair}
    assert claim_of("end alike").outcome(groups)[0].startswith("-0.05")            # -0.1 of a gain of 2
    assert claim_of("end alike").region == "-0.1 to 0.1"
    assert claim_of("close together").region == "below 0.2"
    assert claim_of("KL is much higher").region == "above 1.25"                     # of a logarithm
    assert claim_of("combined reward falls").outcome(groups)[0].startswith("-2.00")    # 2 - 4
    assert claim_of("combined reward rises").outcome(groups) == ("0.90 [0.90, 0.90], 5 seeds", "holds")
    assert claim_of("declines in the second half").outcome(groups)[1] == "does not hold"
    assert claim_of("keeps growing").outcome(groups)[0].startswith("2.00")
    assert claim_of("twice the parameters").outcome(groups) == ("not run", "not run")
    two = {seed: replace(run, agents={"llm1": run.agents["llm1"], "llm2": ppo[seed].agents["llm1"]})
           for seed, run in pair.items()}
    assert claim_of("close together").outcome({"cory": two})[0].startswith("0.05")     # 0.1 of 1.95
    assert claim_of("observer is below", "LLM1").outcome({"no exchange": two})[0].startswith("-0.10")
    roles = {"pioneer": {"task_reward": 1.0, "kl": 2.0}, "observer": {"task_reward": 0.6, "kl": 4.0}}
    better = {role: {"task_reward": x["task_reward"] + 0.3, "kl": 1.5 * x["kl"]} for role, x in roles.items()}
    by_role = {name: {seed: replace(run, roles=found) for seed, run in pair.items()}
               for name, found in (("cory", roles), ("no exchange", better))}
    for text, value in (("reward is as good", 0.3 / 0.95), ("KL is much higher", 1.5),
                        ("observer is below", 0.4)):
        measured = claim_of(text, "in training").outcome(by_role)
        assert measured == (f"{value:.2f} [{value:.2f}, {value:.2f}], 5 seeds", "holds"), text
    of_k = {"llm1": {f"pass@{k}": 0.5 for k in (1, 4, 16)}, "base": {f"pass@{k}": 0.2 for k in (1, 16)}}
    solved = {name: seeds_of(name, [1.0] * 5, [1.0] * 5, measured=of_k) for name in ("ppo", "cory")}
    assert claim_of("pass@4 is above PPO").outcome(solved) == ("0.00 [0.00, 0.00], 5 seeds", "does not hold")
    assert claim_of("pass@16 is above the base").outcome(solved) == ("0.30 [0.30, 0.30], 5 seeds", "holds")


def test_frontiers_are_compared_seed_by_seed():
    """PPO's is k, CORY's 2 k: k higher in the mean over 0.5, where the first is evaluated, to 4; to 3 without
    the eta that only CORY has.
    """
    groups = {name: seeds_of(name, [slope * kl] * 5, [kl] * 5)
              for method, slope in (("ppo", 1.0), ("cory", 2.0))
              for eta, kl in (("0.1", 4.0), ("0.3", 3.0), ("1", 2.0), ("3", 1.0))
              for name in [f"{method}, eta x {eta}"]}
    found = comparison.frontier_gap(groups, STUDIES["frontier"])
    assert found.mean == pytest.approx(2.25) and found.verdict == "higher" and found.seeds == 5
    asked = "| imdb | mean height, over the KL of both | above 0 |"
    every = [run for of_seed in groups.values() for run in of_seed.values()]
    assert f"{asked} +2.25 [+2.25, +2.25], 5 seeds | holds |" in claims.page({"frontier": every}, "")
    other = {**groups, "ppo, eta x 1": of_another_reward(groups["ppo, eta x 1"])}
    assert comparison.frontier_gap(other, STUDIES["frontier"]).seeds == 0
    del groups["ppo, eta x 0.1"]
    some = [run for of_seed in groups.values() for run in of_seed.values()]
    assert f"{asked} not run" in claims.page({"frontier": some}, "")
    assert comparison.frontier_gap(groups, STUDIES["frontier"]).mean == pytest.approx(1.75)
    assert comparison.frontier_gap({"ppo, eta x 1": groups["ppo, eta x 1"]}, STUDIES["frontier"]).seeds == 0
    assert f"{asked} not run | not run |" in claims.page({}, "command")


def test_a_frontier_is_of_each_agent_by_itself():
    """PPO has 2 at KLs of 1 and 2. One agent of CORY has 3, and 3 again as the best so far: 1 more; the other
    1 and then 3: as much in the mean. The mean of both never has more than 2.
    """
    ppo = result("ppo, eta x 1", [(0, 0.0, 0.0), (5, 2.0, 1.0), (10, 2.0, 2.0)])
    pair = result("cory, eta x 1", [(0, 0.0, 0.0), (5, 3.0, 1.0), (10, 1.0, 2.0)],
                  [(0, 0.0, 0.0), (5, 1.0, 1.0), (10, 3.0, 2.0)])
    groups = {"ppo, eta x 1": {0: ppo}, "cory, eta x 1": {0: pair}}
    assert comparison.frontier_gap(groups, STUDIES["frontier"]).mean == pytest.approx(0.5, abs=1e-6)


def test_shares_are_of_the_mean_gain_of_all_seeds():
    """0.05 to the pair's gains of 0.5, which no seed's small gain blows up; none of what has lost."""
    def pair(rewards):
        runs_of = seeds_of("cory", rewards, [1.0] * len(rewards))
        return {"cory": {seed: replace(run, agents=run.agents | {"llm2": [
            replace(p, reward=p.reward + 0.05 * (p.iteration > 0)) for p in run.agents["llm1"]]})
            for seed, run in runs_of.items()}}

    claim = claim_of("close together")
    assert claim.outcome(pair([0.925, 0.027, 0.473, 0.475, 0.475])) == ("0.10 [0.10, 0.10], 5 seeds", "holds")
    assert claim.outcome(pair([-1.0] * 5)) == ("5 without a figure", "not decided")


def test_claims_say_how_many_runs_diverged_and_compare_no_other_rewards():
    ppo, cory = seeds_of("ppo", [2.0] * 7, [4.0] * 7), seeds_of("cory", [1.9] * 7, [1.0] * 7)
    ppo[1] = replace(ppo[1], agents={}, diverged=True)
    claim = claim_of("end alike")
    assert claim.outcome({"ppo": ppo, "cory": cory})[0].endswith("], 6 seeds, 1 diverged")
    gone = {seed: replace(run, agents={}, diverged=True) for seed, run in ppo.items()}
    assert claim.outcome({"ppo": gone, "cory": cory}) == ("7 diverged", "not decided")
    assert claim.outcome({"ppo": ppo, "cory": of_another_reward(cory)}) == (
        "of other rewards or evaluations", "not comparable")


@pytest.mark.parametrize("change, says", [
    ({"study": "rewards"}, "there is no study rewards; did you mean reward"),
    ({"study": "released", "task": "gsm8k"}, "there is no task gsm8k"), ({"task": "imbd"}, "no task imbd"),
    ({"variants": ("weight -.5",)}, "there is no variant weight -.5; did you mean weight -0.5"),
    ({"low": -math.inf}, "where it should lie"), ({"low": 0.1, "high": -0.1}, "low below high")])
def test_a_claim_of_nothing_is_one_line(change, says):
    with pytest.raises(UserError, match=says):
        replace(claim_of("cooperation is better"), **change)


def test_a_frontier_says_what_diverged():
    """One run less is a seed less; an eta without any run that ended leaves nothing to compare."""
    groups = {name: seeds_of(name, [1.0] * 6, [2.0] * 6) for name in STUDIES["frontier"].variants}

    def row(*seeds):
        runs_of = groups["cory, eta x 0.1"]
        gone = {seed: replace(runs_of[seed], agents={}, diverged=True) for seed in seeds}
        every = {**groups, "cory, eta x 0.1": {**runs_of, **gone}}
        found = [run for of_seed in every.values() for run in of_seed.values()]
        text = claims.page({"frontier": found}, "")
        return next(line for line in text.splitlines() if "As fig. 2c" in line).split(" | ")[-2:]

    assert row() == ["+0.00 [+0.00, +0.00], 6 seeds", "not decided with 6 seeds |"]
    assert row(3) == ["+0.00 [+0.00, +0.00], 5 seeds, 1 diverged", "not decided with 5 seeds |"]
    assert row(*range(6)) == ["an eta has no run that ended, 6 diverged", "not decided |"]
    del groups["ppo, eta x 3"]
    assert comparison.etas_without_both(groups, STUDIES["frontier"]) == ["eta x 3"]


def test_half_way_is_the_evaluation_nearest_to_it():
    points = [(0, 0.0, 0.0), (10, 1.0, 0.0), (20, 3.0, 0.0), (30, 5.0, 0.0), (60, 7.0, 0.0)]
    assert claims.since_the_middle("reward")(result("ppo", points)) == 2.0
    assert claims.since_the_middle("reward")(result("ppo", [*points[:2], (30, 2.0, 0.0)])) == 1.0
    assert math.isnan(claims.since_the_middle("reward")(result("ppo", points[:2])))


def test_what_rises_evenly_is_not_unsteady():
    assert results.unsteadiness([1.0, 2.0, 3.0, 4.0]) == 0.0
    # steps of 2, -2, 2 with mean 2/3: (16 + 64 + 16) / 9 / 3 / 2 = 16 / 9
    assert results.unsteadiness([0.0, 2.0, 0.0, 2.0]) == pytest.approx(4 / 3)
    assert math.isnan(results.unsteadiness([1.0, 2.0]))
    rng = np.random.default_rng(0)
    noise = list(rng.normal(0, 0.3, 4000) + np.linspace(0, 2, 4000))
    assert results.unsteadiness(noise) == pytest.approx(0.3, rel=0.05)


def test_rows_of_what_cannot_be_compared():
    """Another reward, as the untrained model's shows; a baseline that is not there."""
    ppo, cory = seeds_of("ppo", [2.0] * 5, [4.0] * 5), seeds_of("cory", [1.9] * 5, [1.0] * 5)
    curves, other = STUDIES["curves"], of_another_reward(cory)
    (row,) = tables.difference_table({"ppo": ppo, "cory": other}, curves, "imdb")[4:-1]
    assert row.startswith("| cory | ppo | other reward of the untrained model |  |")
    assert pictures.compared({"ppo": ppo, "cory": other}, curves) == []
    larger = {seed: replace(run, run=replace(run.run, flags=("--model", "gpt2-xl")))
              for seed, run in other.items()}
    (row,) = tables.difference_table({"ppo": ppo, "cory": larger}, curves, "imdb")[4:-1]
    assert row.startswith("| cory | ppo | 5 | +0.90 [")                 # 2.9 - 2.0
    assert list(pictures.drawn({"ppo": ppo, "cory": other}, curves)) == ["ppo"]
    of_k = {name: {f"pass@{k}": 0.5 for k in (1, 2, 4, 8, 16)} for name in ("base", "llm1")}
    measured = {name: {seed: replace(run, measured=of_k) for seed, run in of_seed.items()}
                for name, of_seed in (("ppo", ppo), ("cory", other))}
    *_, row, _ = tables.measured_table(measured, curves, "gsm8k")
    assert row == "| cory less ppo | other reward of the untrained model |  |  |  |  |"
    heads = [tables.difference_table({"ppo": ppo, "cory": cory}, curves, task)[2] for task in REWARD]
    assert "at equal KL | at equal compute" in heads[0] and "at equal KL | sampled, at equal KL" in heads[1]
    (row,) = tables.difference_table({"cory": cory}, curves, "imdb")[4:-1]
    assert row.startswith("| cory | ppo | no finished run of that |  |")


def test_figures_of_an_untrained_model_are_alike_up_to_rounding():
    """In bfloat16 another GPU draws other answers; figures above 1 may differ in proportion."""
    one = results.Point(0, 1.0, 1.0, 0.0, 1.0, 0.9, 0.1)
    other = replace(one, sampled_reward=1.1)
    assert results.unlike(one, other, "float32") == ["sampled_reward"]
    assert results.unlike(one, other, "bfloat16") == []
    assert results.unlike(one, replace(one, distinct_2=0.7), "bfloat16") == ["distinct_2"]
    assert results.unlike(replace(one, reward=10.4), replace(one, reward=10.0), "float32") == []


def test_two_agents_of_any_name_are_compared():
    pair = result("cory", [(0, 0.0, 0.0), (10, 3.0, 1.0)], [(0, 0.0, 0.0), (10, 1.0, 1.0)])
    roles = {role: {"task_reward": 1.0, "kl": 1.0} for role in ("pioneer", "observer")}
    named = replace(pair, agents=dict(zip(("ann", "bob"), pair.agents.values())), roles=roles)
    assert any(line.startswith("| cory | +2.00 |") for line in tables.agents_table({"cory": {0: named}}))


def test_every_agent_has_a_column():
    three = result("cory", *([(0, 0.0, 0.0), (10, float(i), 1.0)] for i in (1, 2, 3)))
    groups = {"cory": {0: three}}
    head, _, row, _ = tables.final_table(groups, groups, STUDIES["ablations"], "imdb")
    assert "| LLM1 | LLM2 | LLM3 | KL |" in head and "| 2.00 | 1.00 | 2.00 | 3.00 | 1.00 |" in row


def test_a_run_that_diverged_counts_as_collapsed(tmp_path):
    """What it said last may stand before the bar's line; it has no figures, and is in no mean."""
    error = f"error: {Diverged('grad_norm', math.nan, 'llm1', 'the gradient was not applied. Start anew')}"
    said = f"{error}\nppo:   0%|   | 0/6 [00:00<?]\n"
    assert runs.last_words(said) == error
    planned = runs.StudyRun("imdb", "ppo, rate x 10, eta x 0.1", 3, ("--method", "ppo"), tmp_path / "run")
    planned.log.write_text("error: model is 'x': its logits are not finite numbers; load other weights")
    assert not planned.diverged and runs.to_make([planned, planned]) == [planned]       # it was none before
    planned.log.write_text(said)
    assert planned.diverged and runs.make([planned], 1) == [(planned, error)]           # and not made again
    gone = results.read(planned)
    whole = list(seeds_of("ppo, rate x 10, eta x 0.1", [1.0], [1.0]).values())
    groups, every = (results.by_variant([*whole, gone], "imdb", diverged) for diverged in (False, True))
    stability = STUDIES["stability"]
    assert tables.final_table(groups, every, stability, "imdb")[2].endswith("| 1 of 2 | 50% |")
    (row,) = tables.final_table({}, results.by_variant([gone], "imdb", True), stability, "imdb")[2:3]
    assert row.split(" | ")[1] == "0" and row.endswith("| 1 of 1 | 100% |")
    five = [replace(gone, run=replace(planned, seed=seed)) for seed in range(5)]
    ppo, _ = (line for line in claims.page({"stability": five}, "").splitlines() if "As app. E" in line)
    assert ppo.endswith("| above 0.5 | 1.00 [0.57, 1.00], 5 seeds | holds |")
    assert tables.measured_table({}, STUDIES["curves"], "gsm8k") == []
    tables.write("stability", stability, [gone], [(planned, error)], "", [], tmp_path)  # without its folder
    (row,) = (json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines())
    assert row["diverged"] and row["collapsed"] and row["made_by"]["commit"] == "unknown"


def test_a_pair_is_held_against_two_answers_to_the_bare_query():
    measured = {"ppo": {"first": 1.0, "second": 1.0, "team": 1.1, "alone": 2.0},
                "cory": {"first": 1.0, "second": 1.0, "team": 1.5, "alone": 1.4}}
    groups = {name: seeds_of(name, [1.0], [1.0], measured={"base": found, "agents": found})
              for name, found in measured.items()}
    lines = tables.measured_table(groups, STUDIES["team"], "imdb")
    assert "| cory's pair less ppo's two to the bare query |  |  | -0.50 (0%) |  |" in lines


def test_another_baseline_takes_the_place_of_all(tmp_path, capsys, monkeypatch):
    """Of those with one of their own, too; its page lies apart and says so. On rows of an older preset."""
    changed = dict(learning_rate=5e-5, batch_size=64, mini_batch_size=64, lora=False, num_ppo_epochs=4,
                   critic_learning_rate=0.0, lr_schedule="constant", eval_queries=256, eval_samples=1)
    monkeypatch.setitem(GSM8K_PRESETS, "tiny", GSM8K_PRESETS["tiny"] | changed)
    monkeypatch.setattr(runs, "settings_of", runs.settings_of.__wrapped__)          # without what it has kept
    rows = str(Path(__file__).parents[1] / "docs" / "studies" / "reward" / "runs.jsonl")
    study.main(["reward", "--tasks", "gsm8k", "--baseline", "weight 0.5", "--published", rows,
                "--out", str(tmp_path)])
    (out,) = tmp_path.glob("reward-gsm8k_less_weight_0.5")
    assert "Here all are held against `weight 0.5`." in (out / "results.md").read_text()
    text = capsys.readouterr().out
    assert text.count("| weight 0.5 | 5 | ") == 1 + 4               # its own row, and four differences
    assert "| ppo | weight 0.5 | 5 | +" in text


def test_commands_for_a_cluster_are_whole_lines(tmp_path, capsys):
    study.main(["team", "--tasks", "imdb", "--seeds", "1", "--dry_run", "--out", str(tmp_path)])
    first = capsys.readouterr().out.splitlines()[0]
    assert " && python train_imdb.py" in first and ".log && python -m cory.studies.team " in first
    folder = tmp_path / "runs" / "imdb-preset_tiny_method_train_normalised_cory-seed0"
    study.main(["released", "--seeds", "1", "--variants", "scores normalised", "--out", str(tmp_path),
                "--dry_run"])
    fresh = capsys.readouterr().out
    assert str(folder) in fresh and "rm -r" not in fresh
    made, run = fresh.split(" && ")
    command, log = run.strip().split(" 2> ")                        # where a study looks for its last words
    assert made == f"mkdir -p {folder.parent}" and log == f"{folder}.log"
    cfg = parse(ImdbConfig, IMDB_PRESETS, shlex.split(command)[2:])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(saved_config(cfg, ["llm1", "llm2"], {})))
    study.main(["released", "--seeds", "1", "--variants", "scores normalised", "--out", str(tmp_path),
                "--dry_run"])
    assert capsys.readouterr().out.startswith(
        f"rm -r {folder} && mkdir -p {folder.parent} && python train_imdb.py --preset tiny")


@pytest.mark.parametrize("argv, says", [
    (["curves", "--", "--preset", "gpt2"], "give it before the --"),
    (["team", "--", "--knowledge_transfer", "false"], "an observer that sees no answer is no team"),
    (["ablations", "--variants", "ppo, gpt2-xl"], "variants is 'ppo, gpt2-xl'"),
    (["ablations", "--", "--no_knowledge_transfer"], "is set by the variant"),
    (["released", "--preset", "llama2-7b"], "preset is 'llama2-7b': choose from tiny, gpt2"),
    (["released", "--tasks", "gsm8k"], "is not of this study"),
    (["claims", "--variants", "ppo"], "variants is ['ppo']: claims is a table of finished runs"),
    (["claims"], "dry_run is True: claims is a table"), (["curves", "--seeds", "0"], "must be 1 or more"),
    (["reward", "--baseline", "weight1"], "baseline is 'weight1': is not among the variants; did you mean"),
    (["reward", "--variants", "weight1"], "variants is 'weight1': did you mean weight 1?")])
def test_what_a_study_cannot_do_is_one_line(argv, says, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        study.main([argv[0], "--out", str(tmp_path), "--dry_run", *argv[1:]])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_claims_are_planned_under_a_paper_preset_and_need_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        study.main(["claims", "--preset", "gpt2-large", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and not (tmp_path / "out").exists()
    assert "out' : holds no finished run; make studies" in capsys.readouterr().err.replace("':", "' :")


def test_pages_of_other_seeds_lie_apart_and_pictures_of_ones_own_stay(tmp_path):
    def folder(*argv):
        return study.folder_of(study.parser().parse_args(["curves", "--out", str(tmp_path), *argv]), []).name

    assert [folder(), folder("--seeds", "2"), folder("--tasks", "imdb", "--seeds", "2")] == [
        "curves", "curves-2-seeds", "curves-imdb_2-seeds"]
    for name in ("slide.png", "curves_imdb.png", "curves_gsm8k.pdf"):
        (tmp_path / name).write_text("")
    assert pictures.draw(STUDIES["curves"], [], tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["slide.png"]


def test_ppo_is_blue_and_cory_orange_wherever_they_stand():
    for name, of_cory in (("compute", "cory"), ("variance", "cory"), ("reward", "weight 1")):
        looks = pictures.looks_of(STUDIES[name].variants, STUDIES[name])
        assert looks[of_cory]["color"] == COLORS[1]
        assert name == "compute" or looks["ppo"]["color"] == COLORS[0]
        every = [(look["color"], look["linestyle"], look["marker"]) for look in looks.values()]
        assert len(set(every)) == len(every)
        of_others = {look["color"] for variant, look in looks.items() if variant not in ("ppo", of_cory)}
        assert not of_others & {*COLORS[:2]}
    for names in (["cory, eta x 1"], ["cory, eta x 1", "ppo, eta x 1"]):
        looks = pictures.looks_of(names, STUDIES["frontier"])
        assert looks["cory, eta x 1"]["color"] == COLORS[1]


def test_a_variant_that_collapsed_does_not_stretch_the_pictures():
    """Of four variants the one whose every run ends at a KL of 100; where half collapse, all are in."""
    study = STUDIES["variance"]
    names = list(study.variants)[:4]
    groups = {name: seeds_of(name, [1.0] * 5, [2.0] * 5) for name in names[:3]}
    groups[names[3]] = seeds_of(names[3], [-9.0] * 5, [100.0] * 5)
    for picture in (pictures.curves, pictures.frontier):
        figure = picture(groups, study, "imdb")
        axis = figure.axes[0]
        low = axis.get_ylim()[0]
        title = figure.get_suptitle() or axis.get_title()
        assert low > -1 and f"scaled without {names[3]}: most agents collapsed" in title
    assert pictures.frontier(groups, study, "imdb").axes[0].get_xlim()[1] < 3
    del groups[names[0]]
    assert pictures.mostly_collapsed(groups) == []
    assert pictures.curves(groups, study, "imdb").axes[0].get_ylim()[0] < -9


def test_looks_tell_variants_apart():
    several = pictures.looks_of(["cory", "ppo", "ppo, twice the batch"], STUDIES["controls"])
    assert len({(look["linestyle"], look["marker"]) for look in several.values()}) == 3
    grid = pictures.looks_of(STUDIES["stability"].variants, STUDIES["stability"])
    assert len({(look["color"], look["marker"]) for look in grid.values()}) == 12
    assert len({look["color"] for look in grid.values()}) == 2
    assert grid["ppo, rate x 4, eta x 1"]["marker"] == grid["cory, rate x 4, eta x 1"]["marker"]


def test_what_is_the_baselines_own_runs_is_not_drawn_over_it(tmp_path, monkeypatch):
    cory = seeds_of("cory", [1.0] * 5, [2.0] * 5)
    groups = {"cory": cory, "no transfer": seeds_of("no transfer", [1.0] * 5, [2.0] * 5), "sampled KL": cory}
    drawn = pictures.drawn(groups, STUDIES["ablations"])
    assert list(drawn) == ["cory", "no transfer"]
    assert pictures.compared(drawn, STUDIES["ablations"]) == ["no transfer"]
    alone = {"sampled KL": cory}
    assert pictures.drawn(alone, STUDIES["ablations"]) == alone
    (axis,) = pictures.frontier(drawn, STUDIES["ablations"], "imdb").axes
    assert sorted(line.get_zorder() for line in axis.lines)[-2:] == [3, 4]      # the baseline's end on top,
    (ring,) = (line for line in axis.lines if line.get_zorder() == 4)
    assert ring.get_markerfacecolor() == "none"                                 # through which others show
    asked = []
    for name in ("curves", "frontier", "forest"):
        monkeypatch.setattr(pictures, name, lambda groups, study, task: asked.append(list(groups)))
    monkeypatch.setattr(pictures, "save", lambda figure, path, dpi: None)
    every = [replace(run, run=replace(run.run, variant=variant))
             for variant, of_seed in groups.items() for run in of_seed.values()]
    pictures.draw(STUDIES["ablations"], every, tmp_path)
    assert asked == [["cory", "no transfer"]] * 3


def test_pictures_of_other_etas_and_of_sweeps():
    """Combined rewards of one eta alone share a panel; each eta has a marker, each seed a small one."""
    groups = {name: with_eta(seeds_of(name, [1.0] * 5, [2.0] * 5), 0.3 if "0.3" in name else 0.1)
              for name in STUDIES["frontier"].variants}
    *_, combined = pictures.curves(groups, STUDIES["frontier"], "imdb").axes
    assert len(combined.lines) == 6 and combined.get_title() == "combined reward, eta 0.1"
    (axis,) = pictures.over_eta(groups, STUDIES["frontier"], "imdb").axes
    assert sorted(line.get_markersize() for line in axis.lines if line.get_linestyle() == "None") == (
        [4] * 8 + [9] * 8)
    figure = pictures.forest(groups, STUDIES["frontier"], "imdb")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert figure.get_suptitle().startswith("imdb: difference to ppo, eta x 1, paired by seed (n = 5)")
    assert labels == [f"ppo, eta x {eta}" for eta in ("0.1", "0.3", "3")] + [
        f"cory, eta x {eta}\n(less ppo, eta x {eta})" for eta in ("0.1", "0.3", "1", "3")]
    (between,) = [line for line in figure.axes[0].lines if list(line.get_ydata()) == [2.5, 2.5]]
    assert between.get_color() == "gray"
    two_roles = {seed: replace(run, roles={"pioneer": {}, "observer": {}})
                 for seed, run in groups["cory, eta x 1"].items()}
    figure = pictures.forest({**groups, "cory, eta x 1": two_roles}, STUDIES["frontier"], "imdb")
    points = [line.get_color() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert points == [COLORS[0]] * 5 + [COLORS[1], COLORS[0]]                # orange: a method of two roles
    pairs = {name: of_seed for name, of_seed in groups.items() if name[-1] == "3"}
    assert "difference to PPO of the same setting" in pictures.forest(
        pairs, STUDIES["frontier"], "imdb").get_suptitle()
    assert pictures.kl_scale(groups) == {"value": "linear"}
    groups["cory, eta x 0.1"] = seeds_of("cory, eta x 0.1", [0.0] * 5, [2.0, 2.0, 2.0, 2.0, 21.0])
    assert pictures.kl_scale(groups) == {"value": "symlog", "linthresh": 10.0}
    assert pictures.curves(groups, STUDIES["frontier"], "imdb").axes[1].get_yscale() == "symlog"
    solved = {"llm1": {f"pass@{2**i}": 0.5 for i in range(5)}}
    of_k = {"ppo": seeds_of("ppo", [1.0] * 5, [1.0] * 5, measured=solved | {"base": solved["llm1"]})}
    (axis,) = pictures.pass_at_k(of_k, STUDIES["curves"], "gsm8k").axes
    assert [list(line.get_xdata()) for line in axis.lines] == [[1, 2, 4, 8, 16]] * 2


def test_the_line_of_a_method_is_its_frontier_over_eta():
    """PPO's two etas have min(k, 2) and k / 2 at best within a KL of k, from 1, where one is evaluated first,
    to 6, which every seed reaches: one of five has 4 there, the others 3. CORY's agents have k and 3 k.
    """
    ppo = {"ppo, eta x 1": seeds_of("ppo, eta x 1", [2.0] * 5, [2.0] * 5),
           "ppo, eta x 3": seeds_of("ppo, eta x 3", [4.0] * 5, [6.0, 8.0, 8.0, 8.0, 8.0])}
    pair = result("cory, eta x 1", [(0, 0.0, 0.0), (5, 2.0, 2.0), (10, 4.0, 4.0)],
                  [(0, 0.0, 0.0), (5, 6.0, 2.0), (10, 9.0, 3.0)])          # which goes no farther than 3
    (axis,) = pictures.over_eta({**ppo, "cory, eta x 1": {0: pair}}, STUDIES["frontier"], "imdb").axes
    of_ppo, of_cory = [line.get_xydata() for line in axis.lines if line.get_linestyle() == "-"]
    assert of_ppo[0] == pytest.approx([1.0, 1.0]) and of_ppo[-1] == pytest.approx([6.0, (4.0 + 4 * 3.0) / 5])
    assert of_cory == pytest.approx(np.stack([of_cory[:, 0], 2 * of_cory[:, 0]], 1))
    assert of_cory[[0, -1], 0] == pytest.approx([2.0, 3.0])
    assert len(axis.collections) == 2


def test_of_many_variants_the_baseline_alone_has_a_band():
    def bands(n, first=0):
        names = list(STUDIES["variance"].variants)[first:first + n]
        groups = {name: seeds_of(name, [1.0] * 5, [2.0] * 5) for name in names}
        figure = pictures.curves(groups, STUDIES["variance"], "imdb")
        return len(figure.axes[0].collections), figure.get_suptitle().rpartition(" and ")[2]

    assert bands(7) == (7, "its 95% interval")
    assert bands(8) == (1, "cory's 95% interval")
    assert bands(8, first=1) == (8, "its 95% interval")             # without the baseline


def test_answers_are_of_a_seed_that_all_have():
    def run(variant, seed, text):
        found = result(variant, [(0, 0.0, 0.0), (10, 1.0, 1.0)])
        row = {"query": "q", "answer": text, "reward": 1.0, "base": "b", "base_reward": 0.0}
        return replace(found, run=replace(found.run, seed=seed), answers=[row])

    groups = {"ppo": {seed: run("ppo", seed, f"p{seed}") for seed in (0, 1, 2)},
              "cory": {seed: run("cory", seed, f"c{seed}") for seed in (2, 1)},
              "old": {0: replace(run("old", 0, ""), answers=[])}}
    lines = tables.answers(groups)
    assert lines[0] == "Answers of the last iteration, seed 1:" and "| ppo | p1 | 1.00 |" in lines
    assert tables.answers({**groups, "none": {}}) == lines and tables.answers({"old": groups["old"]}) == []


def test_text_of_a_model_is_plain_in_a_table():
    assert tables.cell("a | b\n#### *x*") == "a \\| b \\#\\#\\#\\# \\*x\\*"
