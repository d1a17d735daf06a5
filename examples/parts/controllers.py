"""Controllers of eta. What they return after an iteration is the eta of the next one.

    python train_imdb.py --method cory --kl_controller examples.parts.controllers:linear
    python train_imdb.py --method cory --kl_controller examples.parts.controllers:dual --kl_target 3
"""


def linear(agent, kl_B):
    """eta falls linearly to 0."""
    progress = agent.iteration / agent.cfg.iterations
    return agent.cfg.init_kl_coef * (1 - progress)


def dual(agent, kl_B):
    """eta is the Lagrange multiplier of the constraint KL <= kl_target, adapted by dual ascent."""
    excess = kl_B.mean().item() - agent.cfg.kl_target
    return max(0.0, agent.kl_coef + 0.01 * excess)
