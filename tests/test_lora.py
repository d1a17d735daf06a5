"""Agents and their reference on one frozen base."""
from itertools import permutations

import pytest
import torch
from conftest import save_model
from peft import AutoPeftModelForCausalLM
from toys import all_logits, moved, read, settings
from transformers import AutoModelForCausalLM, GenerationConfig

from cory.loading import load_language_model
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import collect_rollout, encode_prompts, sample_tokens
from cory.ppo.update import ppo_update
from cory.run.finish import save_models

CPU, PROMPTS = torch.device("cpu"), ["Ann has 3 eggs.", "How many?", "5 + 4 =", "a"] * 2


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    """A base whose authors generate by a rule of their own."""
    folder = save_model(request.param, tmp_path_factory.mktemp("lora") / "lm")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256, "repetition_penalty": 1.5}')
    return folder


def two_agents(folder, **changes) -> tuple[LanguageModel, list[Agent]]:
    cfg = settings(**dict(lora_rank=4, num_ppo_epochs=1) | changes)
    base = load_language_model(str(folder), cfg, CPU)
    return base, [Agent(name, base, cfg, i) for i, name in enumerate(("llm1", "llm2"))]


def logits_of(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return all_logits(model, *encode_prompts(model, PROMPTS, 6))


def require_same_logits(lm, agent: Agent) -> None:
    ids = torch.arange(20)[None]
    expected = all_logits(agent.policy, ids)
    torch.testing.assert_close(lm.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_step_moves_the_adapter_and_the_critic_and_nothing_else(folder):
    """All are one model and start alike, exactly. Each computes its own function, whatever ran before."""
    base, (one, two) = two_agents(folder)
    assert one.policy.lm is two.policy.lm is base.lm
    models = one.policy, two.policy, base
    reference = logits_of(base)
    assert all(torch.equal(logits_of(model), reference) for model in models)
    trained = moved(one).trainable_parameters()                     # A has a gradient once B is not 0
    before = {name: p.detach().clone() for name, p in {**dict(base.lm.named_parameters()), **trained}.items()}
    ppo_update(one, collect_rollout(one, PROMPTS, PROMPTS, 6), torch.arange(8.0))
    assert not any(torch.equal(p, before[name]) for name, p in trained.items())
    assert all("lora_" in name and ".llm1." in name or name.startswith("critic.") for name in trained)
    for name, p in base.lm.named_parameters():
        assert torch.equal(p, before[name]) != (f"lm.{name}" in trained), name
        assert p.requires_grad == ("lora_" in name)                 # also of the adapter that is not in use
    assert torch.equal(logits_of(two.policy), reference)
    mine, yours = logits_of(one.policy), logits_of(moved(two).policy)
    assert (mine - reference).abs().max() > 1e-3 and (yours - mine).abs().max() > 1e-3
    for order in permutations(zip(models, (mine, yours, reference))):
        assert all(torch.equal(logits_of(model), expected) for model, expected in order)


def test_a_frozen_adapter_stays_frozen_and_pending_backward_passes_work(folder):
    base, agents = two_agents(folder)
    ids = torch.arange(20)[None]
    logits = [all_logits(moved(agent).policy, ids) for agent in agents]
    base.activate()
    for agent, x in zip(agents, logits):                    # another adapter, or none, is in use by now
        x.sum().backward()
        assert all(p.grad is not None for p in agent.policy.weights().values())
    one, two = (agent.policy for agent in agents)
    for p in two.weights().values():
        p.requires_grad_(False)
    before = {name: p.requires_grad for name, p in base.lm.named_parameters()}
    for model in (one, two, base, two, one):
        model.activate()
        assert before == {name: p.requires_grad for name, p in base.lm.named_parameters()}


def dequantize(lm, low) -> None:
    """Gives a model in float32 the weights that another one has in 4 bits. GPT-2's own are transposed."""
    from bitsandbytes.functional import dequantize_4bit

    for name, p in low.named_parameters():
        if hasattr(p, "quant_state"):
            weight = dequantize_4bit(p.data, p.quant_state).float()
            lm.get_parameter(name).data = weight.T if hasattr(lm, "transformer") else weight


def test_a_final_adapter_names_the_revision_of_its_base(tmp_path, monkeypatch):
    """peft follows it; plain transformers must be told."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision in ("main", "v1"):
        snapshot = tmp_path / "models--some--model/snapshots" / revision
        save_model("gpt2", snapshot, num_hidden_layers=len(revision))
        (ref := tmp_path / "models--some--model/refs" / revision).parent.mkdir(exist_ok=True)
        ref.write_text(revision)
    _, agents = two_agents("some/model@v1", model="some/model@v1")
    save_models(tmp_path / "final", [*map(moved, agents)])
    for agent in agents:
        final = tmp_path / "final" / agent.name
        require_same_logits(AutoPeftModelForCausalLM.from_pretrained(final), agent)
        require_same_logits(AutoModelForCausalLM.from_pretrained(final, revision="v1"), agent)


@pytest.mark.parametrize("rounded", [dict(dtype="bfloat16"), dict(load_in_4bit=True)], ids=str)
def test_adapters_on_a_rounded_base_have_the_same_gradient_but_for_rounding(rounded, folder):
    """They are in float32 and start as the base, exactly. In 4 bits, it is that of the rounded weights."""
    if "load_in_4bit" in rounded:
        pytest.importorskip("bitsandbytes")
    low, plain = two_agents(folder, **rounded), two_agents(folder)
    if "load_in_4bit" in rounded:
        dequantize(plain[0].lm, low[0].lm)
    gradients = []
    for _, (one, _) in (low, plain):
        rollout, trained = collect_rollout(one, PROMPTS, PROMPTS, 6), one.trainable_parameters()
        assert rollout.kl_BT.abs().max() == 0 and {p.dtype for p in trained.values()} == {torch.float32}
        prompts, response = encode_prompts(one.policy, PROMPTS, 6), torch.arange(48).view(8, 6)
        hidden = moved(one).policy.response_hidden(*prompts, response).float()
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trained.values() if p.grad is not None]))
    one, other = gradients
    assert torch.cosine_similarity(one, other, 0) > 0.98 and 0.8 < one.norm() / other.norm() < 1.25


def test_a_final_adapter_computes_in_plain_transformers_what_the_agent_does(folder, tmp_path, monkeypatch):
    """Its base is found again from any folder; by its generation_config.json it generates as evaluated."""
    monkeypatch.chdir(folder.parent)
    _, agents = two_agents("lm")
    save_models(tmp_path / "final", [moved(agent) for agent in agents])
    monkeypatch.chdir("/")
    final = tmp_path / "final" / "llm1"
    modules = read(final / "adapter_config.json")["target_modules"]
    assert modules == sorted(modules)                       # by which two runs' files are equal
    plain = AutoModelForCausalLM.from_pretrained(final)
    require_same_logits(plain, agents[0])
    plain.generation_config = GenerationConfig.from_pretrained(final)
    padded, mask = encode_prompts(agents[0].policy, PROMPTS, 12)
    generated = plain.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=12)
    greedy = sample_tokens(agents[0].policy, PROMPTS, PROMPTS, 12, None)
    assert torch.equal(generated[:, -12:] * greedy.mask_BT.long(), greedy.response_BT)
