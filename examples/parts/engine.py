"""Responses in training from another engine, here transformers' `generate`. `sampling_gap` shows how far its
log-probabilities are from the policy's; the loss corrects for this by truncated importance sampling (Yao et
al. 2025, openreview.net/forum?id=xsonlP8DRV).

    python train_imdb.py --method cory --sampler examples.parts.engine:by_generate \
        --loss examples.parts.engine:truncated_importance
"""
import torch
from transformers import GenerationConfig

from cory.ppo import formulas
from cory.ppo.rollout import Rollout, real_ids
from cory.ppo.sampling import decode, encode_prompts
from cory.ppo.update import losses


@torch.no_grad()
def by_generate(model, prompts, queries, max_new_tokens, uniform_TB):
    prompt_BP, prompt_mask_BP = encode_prompts(model, prompts, max_new_tokens)
    ends = torch.tensor([*model.end_ids], device=model.device)
    rules = GenerationConfig(
        do_sample=True, top_k=0, temperature=model.temperature, max_new_tokens=max_new_tokens,
        eos_token_id=ends.tolist(), pad_token_id=0, output_scores=True, return_dict_in_generate=True)
    seed = int(uniform_TB[0, 0] * 2**53)            # the same in a resumed run, another in each process
    model.activate()
    with torch.random.fork_rng(), model.autocast():
        torch.manual_seed(seed)
        out = model.lm.generate(prompt_BP, attention_mask=prompt_mask_BP, generation_config=rules)
    response_BT = out.sequences[:, prompt_BP.shape[1]:]
    is_end_BT = torch.isin(response_BT, ends).long()
    ends_before_BT = is_end_BT.cumsum(1) - is_end_BT
    mask_BT = (ends_before_BT == 0).float()
    logp_BTV = torch.stack(out.scores, 1).float().log_softmax(-1)
    logp_BT = logp_BTV.gather(2, response_BT[..., None]).squeeze(2) * mask_BT
    response_BT = response_BT * mask_BT.long()
    text = decode(model, real_ids(prompt_BP, prompt_mask_BP), real_ids(response_BT, mask_BT))
    truncated_B = is_end_BT.sum(1) == 0
    return Rollout(queries, text, prompt_BP, prompt_mask_BP, response_BT, mask_BT, logp_BT, truncated_B)


def truncated_importance(agent, batch, *given):
    """The policy loss of each token times min(2, pi_old / pi_engine)."""
    weight_BT = (batch.logp_BT - batch.sampling_logp_BT).exp().clamp(max=2)

    def policy_loss(**named):
        loss_BT, is_clipped_BT = formulas.policy_loss(**named)
        return weight_BT * loss_BT, is_clipped_BT

    return losses(agent, batch, *given, policy_loss=policy_loss)
