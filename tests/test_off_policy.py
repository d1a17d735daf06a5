"""What a run says when responses were drawn from another distribution than the one that is trained."""
from types import SimpleNamespace

import pytest
import torch
from toys import agent_of, bigram, settings

import cory.ppo.rollout
from cory.experiment.run import Run
from cory.ppo.rollout import collect_rollout


def test_the_gap_is_of_each_token_in_either_direction(monkeypatch):
    """Log-probabilities that are 0.5 too high and 0.5 too low, in turn, are 0.5 apart and not 0."""
    sample = cory.ppo.rollout.sample

    def shifted(*args, **kwargs):
        drawn = sample(*args, **kwargs)
        sign_T = 1.0 - 2.0 * (torch.arange(drawn.logp_BT.shape[1]) % 2)
        return drawn._replace(logp_BT=drawn.logp_BT + 0.5 * sign_T)

    model = bigram()
    monkeypatch.setattr(cory.ppo.rollout, "sample", shifted)
    rollout = collect_rollout(agent_of(model), model, ["ab", "cd"], 4, settings())
    assert rollout.sampling_gap == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("flags, warns", [
    ({}, True), ({"head_precision": "bfloat16"}, False), ({"lora": True, "load_in_4bit": True}, False)])
def test_what_rounding_may_make_is_no_warning(flags, warns, capsys):
    """0.05 nats: of bfloat16 in the body, in the head, or in a base of 4 bits, and of no float32."""
    cfg = settings(**{"dtype": "float32", "head_precision": "float32"} | flags)
    turn = SimpleNamespace(role="pioneer", rollout=SimpleNamespace(sampling_gap=0.05))
    Run.warn_if_off_policy(SimpleNamespace(cfg=cfg, warned_off_policy=False), [turn])
    assert ("sampling_gap is 0.05 nats per token: pioneer's" in capsys.readouterr().err) == warns
