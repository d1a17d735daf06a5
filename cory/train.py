"""The training loops of PPO and CORY, side by side."""
from cory.ppo.update import ppo_update
from cory.ppo.rollout import rollout
from cory.experiment.run import Run, Turn


def train_ppo(run: Run) -> None:
    """One agent, which keeps the pioneer's seat: it answers the bare query and is trained on its own reward."""
    cfg, task, reference = run.cfg, run.task, run.reference
    (agent,) = run.roles
    for step in run.iterations():
        queries, length = task.batch(step)
        only = rollout(agent, reference, task.pioneer_prompts(queries), length, cfg)                # a ~ pi(. | s0)
        r = task.reward(queries, only.text)
        turns = [Turn("pioneer", agent, only, r, ppo_update(agent, only, r, cfg))]
        run.finish_iteration(step, queries, length, turns, roles=[agent])


def train_cory(run: Run) -> None:
    """Algorithm 1 of the paper: a pioneer, an observer that sees its answer, one reward for both, roles exchanged."""
    cfg, task, reference = run.cfg, run.task, run.reference
    pioneer, observer = run.roles
    for step in run.iterations():
        queries, length = task.batch(step)
        first = rollout(pioneer, reference, task.pioneer_prompts(queries), length, cfg)             # a1 ~ pi_pio(. | s0)
        prompts = task.observer_prompts(queries, first.text) if cfg.knowledge_transfer else task.pioneer_prompts(queries)
        second = rollout(observer, reference, prompts, length, cfg)                                 # a2 ~ pi_obs(. | s0, a1)
        r1, r2 = task.reward(queries, first.text), task.reward(queries, second.text)
        turns = [Turn("pioneer", pioneer, first, r1, ppo_update(pioneer, first, r1 + cfg.partner_reward * r2, cfg)),
                 Turn("observer", observer, second, r2, ppo_update(observer, second, r2 + cfg.partner_reward * r1, cfg))]
        if cfg.role_exchange_every and step % cfg.role_exchange_every == 0:
            pioneer, observer = observer, pioneer                                                   # roles move, state stays
            if cfg.reset_on_exchange:                                                               # DIFFERS: the released code always does
                pioneer.reset(), observer.reset()
        run.finish_iteration(step, queries, length, turns, roles=[pioneer, observer])


def train(run: Run) -> None:
    {"ppo": train_ppo, "cory": train_cory}[run.cfg.method](run)
    run.finish()
