"""Two agents and the reference on one frozen base."""
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import save_gpt2
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from toys import error_line, generator, read, require_same_runs, rows, stopped, train_on
from transformers import AutoModelForCausalLM

import train_gsm8k
from cory.config import Gsm8kConfig
from cory.errors import UserError
from cory.experiment.checkpoint import checkpoints_of
from cory.ppo import minibatches, update
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import collect_rollout
from cory.ppo.sampling import encode_prompts
from cory.system.machine import settled
from cory.tasks.gsm8k import Gsm8k

PROMPTS = ["Ann has 3 eggs.", "How many?", "5 + 4 =", "Question: a? Answer:"] * 2


def config(**changes) -> Gsm8kConfig:
    small = dict(lora=True, lora_rank=4, batch_size=8, mini_batch_size=4, gradient_accumulation_steps=2,
                 learning_rate=1e-2, eval_queries=8, adap_kl_ctrl=False, kl_penalty="k1")
    return settled(replace(Gsm8kConfig(**(small | changes)), device="cpu"))


def two_agents(name, cfg):
    reference = load_language_model(str(name), precision=cfg.precision, storage=cfg.storage)
    return reference, [Agent(agent, reference, cfg, i) for i, agent in enumerate(("llm1", "llm2"))]


def hidden_of(model):
    response = torch.randint(0, 256, (8, 6), generator=generator())
    with torch.no_grad():
        return model.response_hidden(*encode_prompts(model, PROMPTS, 6), response)


def weights_of(agent) -> dict:
    return {name: p.clone() for name, p in agent.policy.trained().items()}


def train_one_step(agent, reference, cfg):
    turn = collect_rollout(agent, PROMPTS, 6)
    train_on(agent, turn, torch.arange(8.0), 1, cfg)


@pytest.fixture(params=["llama", "gpt2"])
def base(request, problems, tmp_path) -> Path:
    return problems / "lm" if request.param == "llama" else save_gpt2(tmp_path / "gpt2")


# --- one base ---
def test_one_model_is_in_memory_and_each_agent_adds_its_adapter_alone(base):
    reference, agents = two_agents(base, config())
    assert all(agent.policy.lm is reference.lm for agent in agents)
    size = sum(p.numel() for p in load_language_model(str(base)).lm.parameters())
    groups = [{group["is_critic"]: sum(p.numel() for p in group["params"])
               for group in agent.optimizer.param_groups} for agent in agents]
    adapter = groups[0][False]
    assert groups == [{False: adapter, True: 33}] * 2 and 0 < adapter < size
    assert sum(p.numel() for p in reference.lm.parameters()) == size + 2 * adapter


def test_only_the_adapter_and_the_value_head_train_and_the_base_stays_bit_identical(base):
    cfg = config()
    untouched = load_language_model(str(base)).lm.state_dict()
    reference, (one, two) = two_agents(base, cfg)
    start, other = weights_of(one), weights_of(two)
    assert all("lora_" in name and ".llm1." in name or name.startswith("value_head") for name in start)
    train_one_step(one, reference, cfg)
    for name, p in weights_of(one).items():                     # every A, every B and the head
        assert not torch.equal(p, start[name]), name
    assert all(torch.equal(p, other[name]) for name, p in weights_of(two).items())
    state = {name.replace(".base_layer", ""): p for name, p in reference.lm.state_dict().items()
             if "lora_" not in name}
    assert state.keys() == untouched.keys()
    assert all(torch.equal(p, untouched[name]) for name, p in state.items())


def test_agents_start_as_the_base_and_the_reference_stays_the_untouched_base_exactly(base):
    cfg, expected = config(), hidden_of(load_language_model(str(base)))
    reference, (one, two) = two_agents(base, cfg)
    for model in (reference, one.policy, two.policy):
        assert torch.equal(hidden_of(model), expected)
    train_one_step(one, reference, cfg)
    train_one_step(two, reference, cfg)
    models = one.policy, two.policy, reference
    first, again = ([hidden_of(model) for model in models] for _ in range(2))       # switching there and back
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and torch.equal(first[2], expected)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert (first[a] - first[b]).abs().max() > 1e-3


def test_the_reference_may_be_asked_inside_the_losses(base, monkeypatch):
    """peft freezes all adapters but the active one: the gradient must not go with it."""
    cfg, losses, gradients = config(num_ppo_epochs=1), update.losses, []
    for asks in (False, True):
        reference, (agent, _) = two_agents(base, cfg)

        def asking(*args):
            hidden_of(reference)
            return losses(*args)

        def note():
            gradients.append([p.grad.clone() for p in agent.policy.trained().values()])

        monkeypatch.setattr(update, "losses", asking if asks else losses)
        monkeypatch.setattr(agent.optimizer, "step", note)
        train_one_step(agent, reference, cfg)
    one, other = gradients
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_adapters_are_drawn_by_agent_and_seed_alone(problems):
    def drawn(seed: int, index: int) -> torch.Tensor:
        weights = weights_of(two_agents(problems / "lm", config(seed=seed))[1][index])
        return next(p for name, p in weights.items() if "lora_A" in name)

    one = drawn(seed=0, index=0)
    assert torch.equal(one, drawn(0, 0))
    assert not torch.equal(one, drawn(0, 1)) and not torch.equal(one, drawn(1, 0))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_frozen_base_in_bfloat16_keeps_adapters_head_and_losses_in_float32(shape, problems, small):
    """Both have a head that is tied to the embedding, which stays in bfloat16."""
    cfg = config(dtype="bfloat16")
    reference, (one, _) = two_agents((problems if shape == "llama" else small) / "lm", cfg)
    assert {p.dtype for p in one.policy.trained().values()} == {torch.float32}
    assert reference.lm.get_output_embeddings().weight.dtype == torch.float32
    assert reference.lm.get_input_embeddings().weight.dtype == torch.bfloat16
    assert sum(p.dtype == torch.bfloat16 for p in reference.lm.parameters()) >= 14
    turn = collect_rollout(one, PROMPTS, 6)
    assert turn.kl_BT.abs().max() == 0 and turn.sampling_gap < 2e-2
    train_one_step(one, reference, cfg)
    assert (hidden_of(one.policy).float() - hidden_of(reference).float()).abs().max() > 1e-3


@pytest.mark.parametrize("targets, wrong", [
    ("q_proj,lm_head", "lm_head"), ("embed_tokens", "embed_tokens"), ("q_proj,v_porj", "v_porj"),
    ("q_proj,foo.v_proj", "foo.v_proj")])
def test_targets_that_would_not_be_trained_as_they_are_sampled_are_refused(targets, wrong, problems):
    says = f"{wrong} names no layer that can be adapted; those of this model: down_proj, gate_proj, k_proj, "
    with pytest.raises(UserError, match=says + "o_proj, q_proj, up_proj, v_proj"):
        two_agents(problems / "lm", config(lora_targets=targets))


def test_targets_alone_are_adapted(problems):
    _, (one, _) = two_agents(problems / "lm", config(lora_targets="q_proj,self_attn.v_proj"))
    assert {name.split(".")[-4] for name in weights_of(one) if "lora_" in name} == {"q_proj", "v_proj"}


# --- whole runs ---
@pytest.fixture(scope="module")
def run(problems, problem_flags):
    """Trains with adapters on ./lm. A random model is never right: a reward by length gives it something to
    learn.
    """
    def train(folder: Path, *changes) -> list[dict]:
        lora = ["--model", "lm", "--lora", "true", "--lora_rank", "4"]
        train_gsm8k.main([*problem_flags, *lora, "--run_dir", str(folder), *changes])
        return rows(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(problems)
        patch.setattr(Gsm8k, "reward_of", lambda self, queries, responses: [len(r) / 10 for r in responses])
        yield train


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run of 3 iterations with an exchange after the second, and its metrics."""
    folder = tmp_path_factory.mktemp("lora") / "whole"
    return folder, run(folder, "--iterations", "3", "--eval_every", "2")


def test_exchange_and_resume_with_adapters_are_bit_for_bit(whole, run, tmp_path):
    folder, logged = whole
    assert logged[2]["pioneer/kl"] == logged[2]["llm1/kl"]
    assert logged[3]["pioneer/kl"] == logged[3]["llm2/kl"]
    for agent in ("llm1", "llm2"):                  # held out against the base, which is the same module
        assert logged[3][f"eval/{agent}/kl"] > 0.1 * logged[3][f"{agent}/kl"] > 0
    run(stopped(folder, tmp_path / "stopped"), "--resume", "--iterations", "3", "--eval_every", "2")
    require_same_runs(folder, tmp_path / "stopped")
    one, two = (load_file(folder / f"final/{agent}/adapter_model.safetensors") for agent in ("llm1", "llm2"))
    assert not any(torch.equal(one[k], two[k]) for k in one)


def test_final_adapters_load_in_plain_transformers_and_answer_alike(whole, problems):
    """Their base is found again from any folder."""
    folder = whole[0] / "final" / "llm2"
    written = read(folder / "adapter_config.json")
    path = written["base_model_name_or_path"]
    assert path == str((problems / "lm").resolve()) and (written["r"], written["lora_alpha"]) == (4, 32)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    saved = load_file(checkpoints_of(whole[0])[0])
    trained = next(p for name, p in saved.items() if name.startswith("llm2/weights/") and "lora_B" in name)
    assert any(torch.equal(p, trained) for name, p in plain.named_parameters() if "lora_B" in name)
    base = load_language_model(path)
    ours = LanguageModel(base.lm, base.tokenizer, adapter=load_adapter(base.lm, "llm2", folder))
    ids = torch.arange(20)[None]
    hidden = ours.body(ids, torch.ones_like(ids), ids)[0]
    torch.testing.assert_close(plain(ids).logits.log_softmax(-1), ours.logprobs(hidden))


def test_an_adapter_is_no_model_to_start_from(whole, problem_flags, tmp_path, capsys):
    """Its base would train without what the adapter learned, or be lost when only the adapter is saved."""
    flags = ["--model", str(whole[0] / "final" / "llm1"), "--run_dir", str(tmp_path)]
    line = error_line(train_gsm8k.main, [*problem_flags, *flags], capsys)
    assert "is a LoRA adapter, no model; merge it" in line


# --- long responses ---
class Elements(TorchDispatchMode):
    """Counts, while it is on, the most elements of any tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("lora", [False, True])
def test_memory_of_an_update_does_not_grow_with_vocabulary_times_length(problems, monkeypatch, lora):
    """Responses of 160 tokens over 257 words, logits of 64 tokens at a time: nothing of (T, V) is made."""
    T, chunk, vocab = 160, 64, 257
    monkeypatch.setitem(minibatches.LOGPROBS_AT_ONCE, "cpu", chunk * vocab)
    cfg = config(lora=lora, batch_size=2, mini_batch_size=1, num_ppo_epochs=1, kl_penalty="full")
    reference, (agent, _) = two_agents(problems / "lm", cfg)
    head, likely = agent.policy.logprobs, torch.zeros(vocab)
    likely[256] = -20.0  # never ends
    monkeypatch.setattr(agent.policy, "logprobs", lambda hidden: (head(hidden) + likely).log_softmax(-1))
    with Elements() as counted:
        turn = collect_rollout(agent, ["a", "b"], T)
        train_on(agent, turn, torch.tensor([0.0, 1.0]), 1, cfg)
    assert turn.mask_BT.sum() == 2 * T and counted.largest < T * vocab / 2
