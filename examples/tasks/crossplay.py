"""The observer's held-out reward, with llm1 of one run as the pioneer and llm2 of another as the observer.
Runs must be finished, and may differ only in their seeds. A learned reward is that of the pioneer's run.

    python -m examples.tasks.crossplay runs/seed1 runs/seed2
"""
import sys
from pathlib import Path

from cory.errors import exit_on_user_error
from cory.run.evaluate import evaluate_team, finished_run


@exit_on_user_error
def main(run_dirs):
    runs = {run_dir: finished_run(Path(run_dir)) for run_dir in run_dirs}
    for one, (run, (pioneer, _)) in runs.items():
        for two, (_, (_, observer)) in runs.items():
            metrics = evaluate_team(run.method, [pioneer, observer])
            print(f"{one} llm1, {two} llm2: {metrics['observer_task_reward']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
