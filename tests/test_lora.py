"""Two agents and the reference on one frozen base."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import save_gpt2
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import train_gsm8k
from cory.config import Gsm8kConfig
from cory.errors import UserError
from cory.experiment.checkpoint import checkpoints_of
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import collect_rollout
from cory.ppo.sampling import encode_prompts
from cory.ppo.update import ppo_update
from cory.system.machine import settled
from cory.tasks.gsm8k import Gsm8k

PROMPTS = ["Ann has 3 eggs.", "How many?", "5 + 4 =", "Question: a? Answer:"] * 2


def config(**changes) -> Gsm8kConfig:
    cfg = Gsm8kConfig(
        **{
            **dict(
                lora=True,
                lora_rank=4,
                batch_size=8,
                mini_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                eval_queries=8,
                adap_kl_ctrl=False,
                kl_penalty="k1",
            ),
            **changes,
        }
    )
    return settled(replace(cfg, device="cpu"))


def two_agents(name, cfg):
    reference = load_language_model(str(name), precision=cfg.precision, storage=cfg.storage)
    return reference, [Agent(agent, reference, cfg, i) for i, agent in enumerate(("llm1", "llm2"))]


def hidden_of(model, seed=0):
    response = torch.randint(0, 256, (8, 6), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model.response_hidden(*encode_prompts(model, PROMPTS, 6), response)


def trained(agent, reference, cfg, prompts=PROMPTS):
    """One PPO step towards long responses."""
    turn = collect_rollout(agent, reference, prompts, 6, cfg)
    ppo_update(agent, turn, torch.arange(8.0), 1, cfg)


@pytest.fixture(params=["llama", "gpt2"])
def base(request, problems, tmp_path) -> Path:
    return problems / "lm" if request.param == "llama" else save_gpt2(tmp_path / "gpt2")


def test_only_the_adapter_and_the_value_head_train_and_the_base_stays_bit_identical(base):
    cfg = config()
    untouched = load_language_model(str(base)).lm.state_dict()
    reference, (one, two) = two_agents(base, cfg)
    before = {name: p.clone() for name, p in two.policy.trained().items()}
    start = {name: p.clone() for name, p in one.policy.trained().items()}
    trained(one, reference, cfg)
    assert all("lora_" in name and ".llm1." in name or name.startswith("value_head") for name in start)
    assert all(
        not torch.equal(p, start[name]) for name, p in one.policy.trained().items()
    )  # every A, every B and the head
    assert all(torch.equal(p, before[name]) for name, p in two.policy.trained().items())
    now = {
        name.replace(".base_layer", ""): p
        for name, p in reference.lm.state_dict().items()
        if "lora_" not in name
    }
    assert now.keys() == untouched.keys() and all(torch.equal(now[name], p) for name, p in untouched.items())


def test_agents_start_as_the_base_and_the_reference_stays_the_untouched_base_exactly(base):
    cfg, untouched = config(), load_language_model(str(base))
    reference, (one, two) = two_agents(base, cfg)
    expected = hidden_of(untouched)
    assert all(torch.equal(hidden_of(model), expected) for model in (reference, one.policy, two.policy))
    trained(one, reference, cfg)
    trained(two, reference, cfg)
    outputs = [
        hidden_of(model) for model in (one.policy, reference, two.policy, one.policy, two.policy, reference)
    ]
    assert torch.equal(outputs[1], expected) and torch.equal(outputs[5], expected)
    assert torch.equal(outputs[0], outputs[3]) and torch.equal(
        outputs[2], outputs[4]
    )  # switching there and back
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert (outputs[a] - outputs[b]).abs().max() > 1e-3


def test_the_reference_may_be_asked_inside_the_losses(base, monkeypatch):
    """peft freezes all adapters but the active one: the gradient must not go with it."""
    from cory.ppo import update

    gradients, losses = [], update.losses
    for asks in (False, True):
        reference, (agent, _) = two_agents(base, config())

        def asking(*args):
            reference.response_hidden(*encode_prompts(reference, PROMPTS, 6), torch.zeros(8, 2).long())
            return losses(*args)

        monkeypatch.setattr(update, "losses", asking if asks else losses)
        monkeypatch.setattr(agent.optimizer, "step", lambda agent=agent: gradients.append(
            {name: p.grad.clone() for name, p in agent.policy.trained().items() if p.grad is not None}))
        trained(agent, reference, config())
    first, second = gradients[0], gradients[len(gradients) // 2]
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_one_model_is_in_memory_and_each_agent_adds_its_adapter_alone(base):
    cfg = config()
    reference, agents = two_agents(base, cfg)
    assert all(agent.policy.lm is reference.lm for agent in agents)
    size = sum(p.numel() for p in load_language_model(str(base)).lm.parameters())
    own = [
        sum(p.numel() for name, p in agent.policy.trained().items() if name.startswith("lm."))
        for agent in agents
    ]
    assert own[0] == own[1] < size and sum(p.numel() for p in reference.lm.parameters()) == size + sum(own)
    groups = {group["is_critic"]: sum(p.numel() for p in group["params"])
              for group in agents[0].optimizer.param_groups}
    assert groups == {False: own[0], True: 33}


def test_adapters_are_drawn_by_agent_and_seed_alone(problems):
    a = {
        name: two_agents(problems / "lm", config(seed=seed))[1][i].policy.trained()
        for name, seed, i in (("one", 0, 0), ("again", 0, 0), ("two", 0, 1), ("seed", 1, 0))
    }
    first = {name: next(p for path, p in weights.items() if "lora_A" in path) for name, weights in a.items()}
    assert (
        torch.equal(first["one"], first["again"])
        and not torch.equal(first["one"], first["two"])
        and not torch.equal(first["one"], first["seed"])
    )


def test_a_frozen_base_in_bfloat16_keeps_adapters_head_and_losses_in_float32(problems):
    cfg = config(dtype="bfloat16")
    reference, (one, two) = two_agents(problems / "lm", cfg)
    assert {p.dtype for p in one.policy.trained().values()} == {torch.float32}
    assert reference.lm.get_output_embeddings().weight.dtype == torch.float32
    assert sum(p.dtype == torch.bfloat16 for p in reference.lm.parameters()) >= 14
    turn = collect_rollout(one, reference, PROMPTS, 6, cfg)
    assert turn.kl_BT.abs().max() == 0 and turn.sampling_gap < 2e-2
    trained(one, reference, cfg)
    assert (hidden_of(one.policy).float() - hidden_of(reference).float()).abs().max() > 1e-3


def run(flags, folder, *changes):
    train_gsm8k.main([*flags, "--lora", "true", "--lora_rank", "4", "--run_dir", str(folder), *changes])
    return [
        {k: v for k, v in json.loads(line).items() if k != "seconds"}
        for line in (folder / "metrics.jsonl").open()
    ]


@pytest.fixture
def reward_by_length(monkeypatch):
    """A random model is never right; this reward gives it something to learn."""
    monkeypatch.setattr(
        Gsm8k, "reward_of", lambda self, queries, responses: [len(response) / 10 for response in responses]
    )


def test_exchange_and_resume_with_adapters_are_bit_for_bit(problem_flags, tmp_path, reward_by_length):
    """5 iterations with exchanges after 2 and 4, in one go and stopped after 3."""
    whole = run(problem_flags, tmp_path / "whole")
    assert (
        whole[3]["pioneer/kl"] == whole[3]["llm2/kl"]
        and whole[5]["pioneer/kl"] == whole[5]["llm1/kl"] != whole[5]["llm2/kl"]
    )
    for agent in ("llm1", "llm2"):                  # held out against the base, which is the same module
        assert whole[5][f"eval/{agent}/kl"] > 0.1 * whole[5][f"{agent}/kl"] > 0
    run(problem_flags, tmp_path / "parts", "--iterations", "3")
    resumed = run(problem_flags, tmp_path / "parts", "--resume", "--iterations", "5")
    assert resumed == whole
    for agent in ("llm1", "llm2"):
        one, two = (
            load_file(tmp_path / name / "final" / agent / "adapter_model.safetensors")
            for name in ("whole", "parts")
        )
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(
        *(
            next(iter(load_file(tmp_path / "whole" / "final" / a / "adapter_model.safetensors").values()))
            for a in ("llm1", "llm2")
        )
    )


def test_cory_without_its_three_ideas_is_ppo_with_adapters_too(problem_flags, tmp_path, reward_by_length):
    ppo = run(problem_flags, tmp_path / "ppo", "--method", "ppo", "--iterations", "3")
    bare = run(
        problem_flags,
        tmp_path / "bare",
        "--knowledge_transfer",
        "false",
        "--partner_reward",
        "0",
        "--role_exchange_every",
        "0",
        "--iterations",
        "3",
    )
    assert all(b[k] == v for a, b in zip(ppo, bare) for k, v in a.items() if k != "roles")


def test_final_adapters_load_in_plain_transformers_and_answer_alike(
    problem_flags, tmp_path, reward_by_length
):
    from transformers import AutoModelForCausalLM

    run(problem_flags, tmp_path / "r", "--iterations", "2")
    folder = tmp_path / "r" / "final" / "llm2"
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    saved = load_file(checkpoints_of(tmp_path / "r")[0])
    assert any(
        torch.equal(p, saved[next(k for k in saved if k.startswith("llm2/weights/") and "lora_B" in k)])
        for name, p in plain.named_parameters()
        if "lora_B" in name
    )
    base = load_language_model(
        json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    ours, ids = (
        LanguageModel(base.lm, base.tokenizer, adapter=load_adapter(base.lm, "llm2", folder)),
        torch.arange(20)[None],
    )
    hidden = ours.body(ids, torch.ones_like(ids), torch.arange(20)[None])[0]
    torch.testing.assert_close(plain(ids).logits.log_softmax(-1), ours.logprobs(hidden))


def test_the_base_is_found_again_from_any_folder(problem_flags, problems, tmp_path, monkeypatch):
    monkeypatch.chdir(problems)
    run(problem_flags, tmp_path / "r", "--model", "lm", "--iterations", "1")
    config = json.loads((tmp_path / "r" / "final" / "llm1" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((problems / "lm").resolve())


def test_an_adapter_is_no_model_to_start_from(problem_flags, tmp_path, capsys):
    """Its base would train without what the adapter learned, or be lost when only the adapter is saved."""
    run(problem_flags, tmp_path / "r", "--iterations", "1")
    with pytest.raises(SystemExit):
        run(problem_flags, tmp_path / "s", "--model", str(tmp_path / "r" / "final" / "llm1"))
    assert "is a LoRA adapter, no model; merge it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "targets, wrong",
    [("q_proj,lm_head", "lm_head"), ("embed_tokens", "embed_tokens"), ("q_proj,v_porj", "v_porj")],
)
def test_targets_that_would_not_be_trained_as_they_are_sampled_are_refused(targets, wrong, problems):
    with pytest.raises(UserError, match=f"{wrong} names no layer that can be adapted; those of this "
                       "model: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",):
        two_agents(problems / "lm", config(lora_targets=targets))
    _, (one, _) = two_agents(problems / "lm", config(lora_targets="q_proj,v_proj"))
    assert {name.split(".")[-4] for name in one.policy.trained() if "lora_" in name} == {"q_proj", "v_proj"}


# --- long responses ---
class Elements(TorchDispatchMode):
    """Counts, while it is on: the most elements of any tensor that an operation returned, and of all
    tensors with V columns that the graph keeps for a backward pass at one time.
    """

    def __init__(self, vocab: int):
        super().__init__()
        self.vocab, self.largest, self.kept, self.most_kept = vocab, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out

    def keep(self, x):
        if x.shape[-1:] == (self.vocab,) and not isinstance(x, torch.nn.Parameter):
            self.kept += x.numel()
            self.most_kept = max(self.most_kept, self.kept)
            kept = Kept(x)
            weakref.finalize(kept, self.drop, x.numel())
            return kept
        return x

    def drop(self, n):
        self.kept -= n


class Kept:
    """A tensor in the graph, whose going can be told."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("lora", [False, True])
def test_memory_of_an_update_does_not_grow_with_vocabulary_times_length(problems, monkeypatch, lora):
    """Responses of 256 tokens over 257 words, logits of 64 tokens at a time: nothing of (T, V) is made,
    and of them one tensor is kept.
    """
    import cory.ppo.minibatches

    chunk, vocab = 64, 257
    monkeypatch.setitem(cory.ppo.minibatches.LOGPROBS_AT_ONCE, "cpu", chunk * vocab)
    cfg = config(lora=lora, batch_size=2, mini_batch_size=1, num_ppo_epochs=1, kl_penalty="full")
    reference, (agent, _) = two_agents(problems / "lm", cfg)
    head, likely = agent.policy.logprobs, torch.zeros(vocab)
    likely[256] = -20.0  # never ends
    monkeypatch.setattr(agent.policy, "logprobs", lambda hidden: (head(hidden) + likely).log_softmax(-1))
    counted = Elements(vocab)
    with (
        counted,
        torch.autograd.graph.saved_tensors_hooks(
            counted.keep, lambda x: x.tensor if isinstance(x, Kept) else x
        ),
    ):
        turn = collect_rollout(agent, reference, ["a", "b"], 256, cfg)
        ppo_update(agent, turn, torch.tensor([0.0, 1.0]), 1, cfg)
    assert turn.mask_BT.sum() == 512 and counted.largest < 256 * vocab / 2
    assert 0 < counted.most_kept <= chunk * vocab  # pi, which its gradient is written over
