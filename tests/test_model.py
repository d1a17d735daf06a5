"""The model as a policy: templates, contexts, dropout, memory, precision."""
import pytest
import torch
from conftest import byte_tokenizer
from tokenizers.processors import TemplateProcessing
from torch.autograd.graph import saved_tensors_hooks
from toys import PROMPTS, agent_of, bigram, close, settings, tiny_gpt2
from transformers import BloomConfig, Gemma3Config, GPT2Config

from cory.config import IMDB_PRESETS, ImdbConfig, parse
from cory.loading import load_language_model
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import encode_prompts, sample
from cory.run import Run

CPU = torch.device("cpu")


def load(small, **changes) -> LanguageModel:
    return load_language_model(str(small / "lm"), settings(**changes), CPU)


# --- prompts in a chat template ---
SPECIAL = ["[gMASK]", "<sop>", "<user>", "<bot>"]
QUERY = "{{ messages[0]['content'] }}"
MASK, SOP, USER, BOT = range(257, 261)


@pytest.mark.parametrize("template, before, behind", [
    (f"[gMASK]<sop><user>{QUERY}<bot>", [MASK, SOP, USER], [BOT]),      # a prefix that is no BOS, as GLM-4's
    (f"<user>{QUERY}<bot>", [USER], [BOT]),                             # and a template without it
    (QUERY + "{% if add_generation_prompt %}<bot>{% endif %}", [], [BOT])])
def test_the_ids_of_a_chat_prompt_are_its_templates_own(template, before, behind):
    """Whatever the tokenizer puts before a plain text: here [gMASK] and <sop>."""
    tokenizer = byte_tokenizer(eos_token="<|endoftext|>", additional_special_tokens=SPECIAL)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", MASK), ("<sop>", SOP)])
    tokenizer.chat_template = template
    text = tokenizer("ab", add_special_tokens=False)["input_ids"]
    plain, chat = (LanguageModel(bigram().lm, tokenizer, "float32", on) for on in (False, True))
    assert plain.encode(["ab", "ab"]) == [[MASK, SOP, *text]] * 2
    assert chat.encode(["ab", "ab"]) == [[*before, *text, *behind]] * 2


# --- context ---
@pytest.mark.parametrize("config, length", [
    (GPT2Config(n_positions=40), 40), (BloomConfig(), None),
    (Gemma3Config(text_config={"max_position_embeddings": 77}), 77)])
def test_the_context_is_what_the_config_says(config, length):
    lm = torch.nn.Identity()
    lm.config = config
    assert LanguageModel(lm, None).context_length == length


# --- agents and their critic ---
def test_agents_start_as_copies_with_a_critic_that_says_0(small):
    base = load(small, temperature=0.5)
    one, two = (Agent(name, base, settings(), i) for i, name in enumerate(("llm1", "llm2")))
    for (name, p), q in zip(one.policy.named_parameters(), two.policy.parameters(), strict=True):
        assert torch.equal(p, q) and p.data_ptr() != q.data_ptr() and p.requires_grad, name
    assert one.policy.temperature == 0.5
    values = one.critic(None, torch.randn(2, 3, 32).bfloat16())
    assert values.dtype == torch.float32 and values.shape == (2, 3) and (values == 0).all()
    assert not any(p.requires_grad for p in base.parameters())


def test_first_weights_depend_on_seed_and_agent_alone(monkeypatch):
    """Those of an adapter and of a critic of one's own; no agent moves PyTorch's generator."""
    monkeypatch.setattr("cory.ppo.agent.Critic", lambda base: torch.nn.Linear(7, 1))

    def drawn(seed: int, index: int) -> torch.Tensor:
        base = tiny_gpt2()
        torch.manual_seed(seed + index)
        before = torch.get_rng_state()
        agent = Agent("llm1", base, settings(lora_rank=2, seed=seed), index)
        assert torch.equal(before, torch.get_rng_state())
        lora_a = next(p for name, p in agent.policy.weights().items() if "lora_A" in name)
        return torch.cat([lora_a.flatten(), agent.critic.weight.flatten()])

    one = drawn(0, 0)
    assert torch.equal(one, drawn(0, 0))
    for other in (drawn(0, 1), drawn(1, 0)):
        assert not (one == other).any()


# --- dropout and memory ---
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_recomputed_activations_give_the_same_gradient_in_less_memory(lora_rank):
    """Without dropout, and a base that shares its layers with the policy samples as before."""
    results = []
    for on in (False, True):
        base = tiny_gpt2(n_layer=3)
        prompts, response = encode_prompts(base, PROMPTS, 6), torch.full((8, 6), 3)
        policy = agent_of(base, lora_rank=lora_rank, gradient_checkpointing=on).policy
        kept = []
        with saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            hidden = policy.response_hidden(*prompts, response)
        (hidden * torch.linspace(-1, 1, hidden[0].numel()).view_as(hidden[0])).sum().backward()
        greedy = sample(base, PROMPTS, 6, None)
        gradients = [p.grad for p in policy.weights().values() if p.grad is not None]
        results.append((sum(kept), hidden, gradients, greedy.response_BT))
    (size, hidden, gradients, greedy), (size_on, hidden_on, gradients_on, greedy_on) = results
    assert size_on < size / 4 and torch.equal(hidden, hidden_on) and torch.equal(greedy, greedy_on)
    assert len(gradients) == len(gradients_on) > 10 and gradients[-1].abs().sum() > 0
    for p, q in zip(gradients, gradients_on):
        close(p, q)


# --- precision ---
def test_a_frozen_base_is_cast_once_to_the_bits_of_autocast(small, small_flags, tmp_path):
    """Matrices alone, and only after the agents have had their copies, which stay in float32."""
    model, prompts = load(small, dtype="bfloat16"), ["a film", "one"]
    response = torch.tensor([[1, 2, 3]] * 2)
    before = model.response_hidden(*encode_prompts(model, prompts, 3), response)
    model.cast_once()
    assert torch.equal(before, model.response_hidden(*encode_prompts(model, prompts, 3), response))
    run = Run(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--dtype", "bfloat16"]), tmp_path)
    run.start()
    for name, p in run.bases["base"].lm.named_parameters():
        in_a_product = name.startswith("transformer.h.") and p.dim() == 2
        assert p.dtype == (torch.bfloat16 if in_a_product else torch.float32), name
    assert {p.dtype for p in run.agents[0].policy.parameters()} == {torch.float32}
