"""An advantage estimator: GAE, whitened over each group of responses to one query instead of over the batch.

    python train_gsm8k.py --method cory --advantage examples.parts.advantages:whitened_by_group \
        --responses_per_query 4
"""
import torch

from cory.ppo.advantages import estimator, gae
from cory.ppo.formulas import whiten


@estimator(critic=True, whiten=False, grouped=True)
def whitened_by_group(mask_BT, group_B, **given):
    advantage_BT, return_BT = gae(mask_BT=mask_BT, **given)
    whitened_BT = torch.zeros_like(advantage_BT)
    for group in group_B.unique():
        rows = group_B == group
        whitened_BT[rows] = whiten(advantage_BT[rows], mask_BT[rows])
    return whitened_BT, return_BT
