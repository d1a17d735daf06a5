"""The model as a policy: templates, first weights, edits, precision."""
import math
from itertools import combinations

import pytest
import torch
from conftest import END, byte_tokenizer
from tokenizers.processors import TemplateProcessing
from toys import agent_of, bigram, close, settings, tiny_gpt2

from cory.config import ImdbConfig, parse
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel, Policy
from cory.run.experiment import Experiment
from train_imdb import PRESETS


def test_a_chat_prompt_has_the_ids_of_its_template_and_no_others():
    """The tokenizer puts <sop> before a plain text. Here the template begins with it, too."""
    special = ["<sop>", "<user>", "<bot>"]
    sop, user, bot = range(257, 260)
    tokenizer = byte_tokenizer(eos_token=END, additional_special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<sop> $A", special_tokens=[("<sop>", sop)])
    tokenizer.chat_template = (
        "<sop><user>{{ messages[0]['content'] }}{% if add_generation_prompt %}<bot>{% endif %}")
    text = tokenizer("ab", add_special_tokens=False)["input_ids"]
    plain = LanguageModel(bigram().lm, tokenizer)
    chat = LanguageModel(bigram().lm, tokenizer, chat_template=True)
    assert plain.encode(["ab"]) == [[sop, *text]]
    assert chat.encode(["ab"]) == [[sop, user, *text, bot]]


def custom_critic(base):
    return torch.nn.Linear(7, 1)


def first_weights(seed: int, index: int) -> torch.Tensor:
    base = tiny_gpt2()
    cfg = settings(lora_rank=2, critic="test_model:custom_critic", seed=seed)
    with torch.random.fork_rng():
        torch.seed()                                # PyTorch's generator is in any state
        before = torch.get_rng_state()
        agent = Agent("llm1", base, cfg, index)
        assert torch.equal(before, torch.get_rng_state())
    adapter = agent.policy.weights().items()
    lora_a = [p.flatten() for name, p in adapter if "lora_A" in name]           # B is 0
    return torch.cat([*lora_a, *agent.critic.weight])


def test_first_weights_depend_on_seed_and_agent_alone():
    """Those of an adapter and of a custom critic; no agent moves PyTorch's generator."""
    weights = [
        first_weights(seed=0, index=0),
        first_weights(seed=0, index=1),
        first_weights(seed=1, index=0)]
    assert torch.equal(weights[0], first_weights(seed=0, index=0))
    for one, other in combinations(weights, 2):
        assert (one != other).all()


def test_no_two_generators_start_alike():
    numbers = set()
    for seed in (0, 1):
        for index in (0, 1):
            agent = Agent("llm1", bigram(), settings(seed=seed), index)
            numbers |= {agent.generator().random() for _ in range(3)}
    assert len(numbers) == 12


@pytest.mark.parametrize("name", ["logits", "logprobs"])
def test_an_edit_of_a_policy_holds_in_sampling_and_in_training(name, monkeypatch):
    policy = agent_of(tiny_gpt2()).policy
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logp_NV = p.log().repeat(2, 1)
    monkeypatch.setattr(Policy, name, lambda self, hidden_NH: logp_NV)
    hidden_NH = torch.ones(2, 8)
    close(policy.logprobs(hidden_NH), logp_NV)
    logp_N, entropy_N = policy.logp_and_entropy(hidden_NH, torch.tensor([1, 2]))
    close(logp_N.exp(), [0.25, 0.125])
    # 0.5 log 2 + 0.25 log 4 + 2 * 0.125 log 8
    close(entropy_N, [1.75 * math.log(2)] * 2)


def test_a_base_stays_frozen_and_what_tasks_draw_as_they_are_made_is_seeded(small_flags, tmp_path):
    run = Experiment(parse(ImdbConfig, PRESETS, [*small_flags, "--seed", "5"]), tmp_path)
    run.new_agents()
    assert not any(p.requires_grad for p in run.bases["llm1"].lm.parameters())
    assert torch.initial_seed() == 5
