"""The model as a policy: templates, context, first weights, memory, precision."""
import math

import pytest
import torch
from conftest import byte_tokenizer
from tokenizers.processors import TemplateProcessing
from toys import agent_of, bigram, close, settings, tiny_gpt2

from cory.config import ImdbConfig, parse
from cory.loading import load_language_model
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel, Policy
from cory.ppo.sampling import encode_prompts
from cory.run.experiment import Experiment
from train_imdb import PRESETS


def test_the_ids_of_a_chat_prompt_are_its_templates_own():
    """Without what the tokenizer puts before a plain text, here <sop>, which the template may begin with."""
    special = ["<sop>", "<user>", "<bot>"]
    sop, user, bot = range(257, 260)
    tokenizer = byte_tokenizer(eos_token="<|endoftext|>", additional_special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<sop> $A", special_tokens=[("<sop>", sop)])
    tokenizer.chat_template = ("<sop><user>{{ messages[0]['content'] }}"
                               "{% if add_generation_prompt %}<bot>{% endif %}")
    text = tokenizer("ab", add_special_tokens=False)["input_ids"]
    plain, chat = (LanguageModel(bigram().lm, tokenizer, "float32", on) for on in (False, True))
    assert plain.encode(["ab", "ab"]) == [[sop, *text]] * 2
    assert chat.encode(["ab", "ab"]) == [[sop, user, *text, bot]] * 2


seven = lambda base: torch.nn.Linear(7, 1)


def test_first_weights_depend_on_seed_and_agent_alone():
    """Those of an adapter and of a critic of one's own; no agent moves PyTorch's generator."""
    def drawn(seed: int, index: int) -> torch.Tensor:
        base = tiny_gpt2()
        torch.manual_seed(seed + index)
        before = torch.get_rng_state()
        agent = Agent("llm1", base, settings(lora_rank=2, critic="test_model:seven", seed=seed), index)
        assert torch.equal(before, torch.get_rng_state())
        lora_a = next(p for name, p in agent.policy.weights().items() if "lora_A" in name)
        return torch.cat([lora_a.flatten(), agent.critic.weight.flatten()])

    one = drawn(0, 0)
    assert torch.equal(one, drawn(0, 0))
    for other in (drawn(0, 1), drawn(1, 0)):
        assert not (one == other).any()


def test_no_two_generators_start_alike():
    agents = [Agent(name, bigram(), settings(seed=seed), i) for seed in (0, 1) for i, name in enumerate("ab")]
    assert len({agent.generator().random() for agent in agents for _ in range(3)}) == 12


@pytest.mark.parametrize("name", ["logits", "logprobs"])
def test_a_policy_is_edited_for_sampling_and_training_at_once(name, monkeypatch):
    model, hidden_NH, token_N = agent_of(tiny_gpt2()).policy, torch.ones(2, 8), torch.tensor([1, 2])
    monkeypatch.setattr(Policy, name, lambda self, hidden_NH: torch.full((2, 4), 0.25).log())
    assert model.logprobs(hidden_NH)[0, 1] == pytest.approx(math.log(0.25))
    logp_N, entropy_N = model.logp_and_entropy(hidden_NH, token_N)
    close(logp_N, [math.log(0.25)] * 2)
    close(entropy_N, [math.log(4)] * 2)


def test_a_frozen_base_is_cast_once_to_the_bits_of_autocast(small, small_flags, tmp_path):
    """Matrices alone, and only after the agents have had their copies, which stay in float32."""
    model = load_language_model(str(small), settings(dtype="bfloat16"), torch.device("cpu"))
    prompts = ["a film", "one"]
    response = torch.tensor([[1, 2, 3]] * 2)
    before = model.response_hidden(*encode_prompts(model, prompts, 3), response)
    model.store_in_bfloat16()
    assert torch.equal(before, model.response_hidden(*encode_prompts(model, prompts, 3), response))
    cfg = parse(ImdbConfig, PRESETS, [*small_flags, "--dtype", "bfloat16", "--seed", "5"])
    run = Experiment(cfg, tmp_path)
    (agent, _) = run.new_agents()
    for name, p in run.bases["llm1"].lm.named_parameters():
        in_a_product = name.startswith("transformer.h.") and p.dim() == 2
        assert p.dtype == (torch.bfloat16 if in_a_product else torch.float32), name
        assert not p.requires_grad, name
    assert {p.dtype for p in agent.policy.lm.parameters()} == {torch.float32}
    assert torch.initial_seed() == 5                        # of what tasks and methods draw as they are made
