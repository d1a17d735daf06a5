"""The whole loop against itself without its optimisations.

Rows as they come, plain autograd, PyTorch's own products, the library's cache. That the head's chunks and
dropped rows change nothing is held in test_update.py and test_sampling.py.
"""

import json

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from cory.config import IMDB_PRESETS, ImdbConfig
from cory.experiment.flags import parse
from cory.ppo import formulas, minibatches, rollout, sampling, update
from cory.train import train


def plain_gradient(agent, batch, step_tokens, seen):
    """`add_gradient` as one would write it first: log-probabilities of all tokens at once, and autograd."""
    cfg = agent.cfg
    real = batch.mask_BT.bool()
    hidden = agent.policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT)
    logp_NV = agent.policy.logprobs(hidden)[real]
    logp, value = formulas.token_logprobs(logp_NV, batch.response_BT[real]), agent.policy.values(hidden)[real]
    old_logp, returns = batch.logp_BT[real], batch.return_BT[real]
    policy_loss = formulas.policy_loss(logp, old_logp, batch.advantage_BT[real], cfg.cliprange)
    value_loss = formulas.value_loss(value, batch.value_BT[real], returns, cfg.cliprange_value)
    ((policy_loss + cfg.vf_coef * value_loss).sum() / step_tokens).backward()
    measured = {"policy_loss": policy_loss, "value_loss": value_loss, "critic_error": value - returns,
                "entropy": -(logp_NV.exp() * logp_NV).sum(-1),
                "clip_fraction": ((logp - old_logp).exp() - 1).abs() > cfg.cliprange,
                "approx_kl": formulas.kl_k3(old_logp, logp)}
    for name, x in measured.items():
        seen[name].append(x.detach())


class LibraryCache(DynamicLayer):
    """The library's own, which copies everything for each token."""

    def keep(self, rows, first):
        self.keys, self.values = self.keys[rows, :, first:], self.values[rows, :, first:]


def curves(flags, run_dir):
    train(parse(ImdbConfig, IMDB_PRESETS, [*flags, "--run_dir", str(run_dir)]))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_curves_are_those_of_the_plain_version(small_flags, tmp_path, monkeypatch):
    shorter = "--iterations 12 --eval_every 6 --save_every 0 --sample_rows 0 --learning_rate 1e-4"
    flags = [*small_flags, *shorter.split()]
    monkeypatch.setitem(minibatches.TOKENS_AT_ONCE, "cpu", 128)  # so that there is something to cut
    fast = curves([*flags, "--cpu_matmul", "onednn"], tmp_path / "fast")
    monkeypatch.setattr(update, "add_gradient", plain_gradient)
    monkeypatch.setattr(sampling, "GrowingLayer", LibraryCache)
    for module in (rollout, minibatches):
        monkeypatch.setattr(module, "by_length", lambda _, mask,
                            size: list(torch.arange(len(mask)).split(size)))
    plain = curves([*flags, "--cpu_matmul", "pytorch"], tmp_path / "plain")
    assert len(fast) == len(plain) == 13
    compared = 0
    for a, b in zip(fast, plain):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            if isinstance(a[key], float) and "sampling_gap" not in key:     # a jump: a sampled token flipped
                assert a[key] == pytest.approx(b[key], abs=1e-4, rel=1e-4), (a["iteration"], key)
                compared += 1
    assert compared > 270
    assert any(row["pioneer/kl"] > 0.05 for row in plain[1:])  # the policies have moved
