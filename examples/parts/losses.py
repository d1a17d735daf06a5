"""Three losses. The command of GSPO has the lower clip range of its paper (section 5.1).

    python train_gsm8k.py --method cory --loss examples.parts.losses:gspo --cliprange 3e-4 \
        --advantage grpo --responses_per_query 4 --kl_in loss --loss_mean responses
    python train_imdb.py --method cory --loss examples.parts.losses:clip_higher
    python train_imdb.py --method cory --loss examples.parts.losses:entropy_bonus
"""
from cory.ppo import formulas
from cory.ppo.update import losses


def gspo(*given):
    """GSPO (arXiv:2507.18071): one ratio per response, the geometric mean of its tokens' ratios."""
    return losses(*given, policy_loss=sequence_policy_loss)


def sequence_policy_loss(log_ratio_BT, advantage_BT, mask_BT, low, high):
    length_B1 = mask_BT.sum(1, keepdim=True)
    log_ratio_B1 = (log_ratio_BT * mask_BT).sum(1, keepdim=True) / length_B1
    return formulas.policy_loss(log_ratio_B1, advantage_BT, low, high)


def clip_higher(*given):
    """DAPO's clip-higher (arXiv:2503.14476): ratios are clipped above 1.28, and below 1 - cliprange."""
    return losses(*given, policy_loss=clipped_above)


def clipped_above(high, **given):
    return formulas.policy_loss(high=0.28, **given)


def entropy_bonus(agent, batch, logp_BT, entropy_BT, value_BT):
    """PPO's loss with a bonus for entropy that falls linearly from 0.01 to 0."""
    loss_BT, metrics = losses(agent, batch, logp_BT, entropy_BT, value_BT)
    progress = (agent.iteration - 1) / agent.cfg.iterations
    weight = 0.01 * (1 - progress)
    return loss_BT - weight * entropy_BT, metrics
