"""Agents and their reference on one frozen base."""
import copy
from itertools import permutations

import pytest
import torch
from conftest import save_model
from peft import AutoPeftModelForCausalLM
from toys import all_logits, moved, read, require_same_greedy, settings
from transformers import AutoModelForCausalLM, GenerationConfig

from cory.errors import UserError
from cory.loading import load_language_model
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import collect_rollout, encode_prompts
from cory.ppo.update import ppo_update
from cory.run.finish import save_models

PROMPTS = ["Ann has 3 eggs.", "How many?", "5 + 4 =", "a"] * 2


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    """A base whose authors generate by a rule of their own."""
    folder = save_model(request.param, tmp_path_factory.mktemp("lora") / "lm")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256, "repetition_penalty": 1.5}')
    return folder


def two_agents(folder, **changes) -> tuple[LanguageModel, list[Agent]]:
    changes = dict(lora_rank=4, num_ppo_epochs=1) | changes
    cfg = settings(**changes)
    base = load_language_model(str(folder), cfg, torch.device("cpu"))
    return base, [Agent(f"llm{i + 1}", base, cfg, i) for i in range(2)]


def prompt_logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return all_logits(model, *encode_prompts(model, PROMPTS, 6))


def require_same_logits(lm, agent: Agent) -> None:
    ids = torch.arange(20)[None]
    logits = lm.eval()(ids).logits
    torch.testing.assert_close(logits, all_logits(agent.policy, ids), atol=1e-5, rtol=1e-5)


def test_an_update_changes_the_agents_adapter_and_critic_alone(folder):
    """All are one model and start alike, exactly. Each computes its own function, whatever ran before."""
    base, (llm1, llm2) = two_agents(folder)
    models = llm1.policy, llm2.policy, base
    reference = prompt_logits(base)
    for model in models:
        assert model.lm is base.lm
        assert torch.equal(prompt_logits(model), reference)
    trained = moved(llm1).trainable_parameters()                    # A has a gradient once B is not 0
    before = copy.deepcopy(trained | dict(base.lm.named_parameters()))
    rollout = collect_rollout(llm1, PROMPTS, PROMPTS, 6)
    ppo_update(llm1, rollout, torch.arange(8.0))
    for name, p in trained.items():
        assert ".llm1." in name or name.startswith("critic.")
        assert not torch.equal(p, before[name]), name
    for name, p in base.lm.named_parameters():
        is_trained = f"lm.{name}" in trained
        assert is_trained or torch.equal(p, before[name]), name
        assert p.requires_grad == ("lora_" in name)                 # also of the adapter that is not in use
    assert torch.equal(prompt_logits(llm2.policy), reference)
    moved(llm2)
    logits = [*map(prompt_logits, models)]
    for one, other in permutations(logits, 2):
        assert (one - other).abs().max() > 1e-3
    assert torch.equal(logits[-1], reference)
    for order in permutations(zip(models, logits)):
        for model, expected in order:
            assert torch.equal(prompt_logits(model), expected)


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


def test_a_final_adapter_names_the_revision_of_its_base(tmp_path, monkeypatch):
    """peft follows it; plain transformers must be told."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    for revision, layers in {"main": 1, "v1": 2}.items():
        save_model("gpt2", cached / "snapshots" / revision, num_hidden_layers=layers)
        (cached / "refs" / revision).write_text(revision)
    _, agents = two_agents("some/model@v1", model="some/model@v1")
    save_models(tmp_path / "final", [*map(moved, agents)])
    for agent in agents:
        final = tmp_path / "final" / agent.name
        require_same_logits(AutoPeftModelForCausalLM.from_pretrained(final), agent)
        require_same_logits(AutoModelForCausalLM.from_pretrained(final, revision="v1"), agent)


def test_another_run_starts_from_an_adapter_that_was_merged_with_its_base(folder, tmp_path):
    """As docs/settings.md says. The adapters of that run name the merged model as their base."""
    _, (first, _) = two_agents(folder)
    save_models(tmp_path, [moved(first)])
    final = tmp_path / "llm1"
    with pytest.raises(UserError, match="an adapter; merge it with its base"):
        two_agents(final)
    merged = tmp_path / "merged"
    lm = AutoPeftModelForCausalLM.from_pretrained(final, dtype=torch.float32).merge_and_unload()
    lm.generation_config = GenerationConfig.from_pretrained(final)
    lm.save_pretrained(merged)
    first.policy.tokenizer.save_pretrained(merged)
    base, (second, _) = two_agents(merged)
    require_same_logits(AutoModelForCausalLM.from_pretrained(merged), first)
    require_same_logits(base.lm, first)
    save_models(tmp_path / "second", [moved(second)])
    require_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "second/llm1"), second)


def dequantize(lm, quantized_lm) -> None:
    """Gives a model in float32 the weights that another one has in 4 bits. Those of GPT-2 are transposed."""
    from bitsandbytes.functional import dequantize_4bit

    for name, p in quantized_lm.named_parameters():
        if hasattr(p, "quant_state"):
            weight = dequantize_4bit(p.data, p.quant_state).float()
            if hasattr(lm, "transformer"):
                weight = weight.T
            lm.get_parameter(name).data = weight


def adapter_gradient(agent: Agent) -> torch.Tensor:
    """The gradient of a fixed function of the hidden states."""
    prompts = encode_prompts(agent.policy, PROMPTS, 6)
    response_BT = torch.arange(48).view(8, 6)
    hidden = moved(agent).policy.response_hidden(*prompts, response_BT).float()
    factor = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden * factor).sum().backward()
    adapter = agent.policy.weights().values()
    return torch.cat([p.grad.flatten() for p in adapter])


@pytest.mark.parametrize("changes", [dict(dtype="bfloat16"), dict(load_in_4bit=True)], ids=str)
def test_adapters_on_a_rounded_base_have_the_same_gradient_but_for_rounding(changes, folder):
    """They are in float32 and start as the base, exactly. In 4 bits the gradient is compared with that of a
    float32 model with the rounded weights.
    """
    if "load_in_4bit" in changes:
        pytest.importorskip("bitsandbytes")
    rounded_base, (rounded, _) = two_agents(folder, **changes)
    plain_base, (plain, _) = two_agents(folder)
    if "load_in_4bit" in changes:
        dequantize(plain_base.lm, rounded_base.lm)
    rollout = collect_rollout(rounded, PROMPTS, PROMPTS, 6)
    assert rollout.kl_BT.abs().max() == 0
    assert {p.dtype for p in rounded.trainable_parameters().values()} == {torch.float32}
    gradient = adapter_gradient(rounded)
    expected = adapter_gradient(plain)
    assert torch.cosine_similarity(gradient, expected, 0) > 0.98
    assert 0.8 < gradient.norm() / expected.norm() < 1.25


def test_a_final_adapter_computes_in_plain_transformers_what_the_agent_does(folder, tmp_path, monkeypatch):
    """Its base is found again from any folder; by its generation_config.json it generates as evaluated."""
    monkeypatch.chdir(folder.parent)
    _, agents = two_agents("lm")
    save_models(tmp_path / "final", [moved(agent) for agent in agents])
    monkeypatch.chdir("/")
    final = tmp_path / "final" / "llm1"
    modules = read(final / "adapter_config.json")["target_modules"]
    assert modules == sorted(modules)                       # equal runs save equal files
    plain = AutoModelForCausalLM.from_pretrained(final)
    require_same_logits(plain, agents[0])
    plain.generation_config = GenerationConfig.from_pretrained(final)
    require_same_greedy(plain, agents[0].policy, PROMPTS, 12)
