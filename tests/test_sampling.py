"""The sampling loop: what is masked, what distribution is drawn from, what crosses as text."""
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from toys import LETTERS, agent_of, bigram, generator, settings

from cory.errors import UserError
from cory.experiment.run import Run
from cory.ppo import cache, rollout, sampling
from cory.ppo.cache import GrowingLayer
from cory.ppo.loading import load_language_model
from cory.ppo.rollout import collect_rollout
from cory.ppo.sampling import decode, draw, encode_prompts, sample, sampling_logprobs
from cory.ppo.update import make_experience


def path_model(*letters: str) -> torch.Tensor:
    """Logits of a bigram that surely walks along the letters; "." is EOS."""
    logits = torch.full((7, 7), -200.0)
    logits[:, 6] = -100.0
    for a, b in zip(letters, letters[1:]):
        logits[LETTERS.index(a), LETTERS.index(b)] = 200.0
    return logits


def sampled(model, prompts: list[str], limit: int, rng=None):
    return sample(model, encode_prompts(model, prompts, limit), limit, rng)


def rescored(model, prompts: list[str], limit: int, drawn):
    """The log-probabilities of sampled tokens by one forward pass over whole rows."""
    hidden = model.response_hidden(*encode_prompts(model, prompts, limit), drawn.response_BT)
    return model.logprobs(hidden).gather(-1, drawn.response_BT[..., None]).squeeze(-1) * drawn.mask_BT


@pytest.fixture
def model(small):
    return load_language_model(str(small / "lm"))


# --- prompts, masks, texts ---
@pytest.mark.parametrize("prompt, limit, ids, text", [
    ("a", 5, [1, 2, 6], "bc"),          # the first EOS is a real token of the response, not of its text
    ("aba", 2, [1, 2], "bc"),           # cut by the limit before EOS
    (".a", 4, [1, 2, 6], "bc"),         # an EOS inside a prompt survives and stops nothing
    ("c", 3, [6], "")])                 # a response that is nothing but EOS still has one token
def test_mask_and_text_of_responses(prompt, limit, ids, text):
    model = bigram(path_model(*"abc."))
    prompts = encode_prompts(model, [prompt], limit)
    assert prompts.ids_BP.tolist() == [[LETTERS.index(letter) for letter in prompt]]
    assert prompts.mask_BP.min() == 1
    drawn = sample(model, prompts, limit, generator())
    assert drawn.response_BT.tolist() == [ids] and drawn.mask_BT.tolist() == [[1] * len(ids)]
    assert decode(model, drawn.response_BT, drawn.mask_BT) == [text]


def test_rows_that_end_early_are_padded_behind_their_eos_and_the_pad_is_masked():
    drawn = sampled(bigram(path_model(*"abcdef.")), ["f", "d", "a"], 4, generator())
    assert drawn.response_BT.tolist() == [[6, 6, 6, 6], [4, 5, 6, 6], [1, 2, 3, 4]]
    assert drawn.mask_BT.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert (drawn.sampling_logp_BT[drawn.mask_BT == 0] == 0).all()


def test_prompts_beyond_the_context_or_empty_are_refused_with_numbers(model):
    with pytest.raises(UserError, match="155 tokens \\+ 6 of response exceed the model's context of 160"):
        encode_prompts(model, ["x" * 155], 6)
    encode_prompts(model, ["x" * 154], 6)
    with pytest.raises(UserError, match="no tokens"):
        encode_prompts(model, ["a", ""], 6)


def test_a_tokenizers_bos_stands_before_the_prompt():
    """Llama's does; the response then follows it."""
    model = bigram()
    model.tokenizer = byte_tokenizer(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    b, c = model.tokenizer("bc", add_special_tokens=False)["input_ids"]
    prompts = encode_prompts(model, ["ab", "c"], 3)
    assert prompts.ids_BP[:, -1].tolist() == [b, c]
    assert prompts.ids_BP[0, 0] == prompts.ids_BP[1, 1] == 256
    assert prompts.mask_BP.tolist() == [[1, 1, 1], [0, 1, 1]]


def test_every_end_of_turn_that_the_model_knows_ends_a_response(model):
    """A chat model may end its turn with another token than its tokenizer's EOS; its generation_config
    lists both.
    """
    assert model.end_ids == [256]
    model.lm.generation_config.eos_token_id = 0
    assert model.end_ids == [0, 256]
    model.lm.generation_config.eos_token_id = [256, 7]
    assert model.end_ids == [7, 256]
    model.logprobs = lambda hidden: torch.full((len(hidden), 257), -9.0).index_fill(1, torch.tensor([7]), 0.0)
    drawn = sampled(model, ["ab"], 5)
    assert drawn.response_BT.tolist() == [[7]] and drawn.mask_BT.tolist() == [[1.0]]


def test_only_text_crosses_and_ids_are_never_made_again_from_it(model):
    """Sampled bytes that are no UTF-8, and EOS, change the text; the ids trained on stay those sampled."""
    ids = torch.tensor([[0xC3, 256, 256]])
    assert "<|endoftext|>" not in decode(model, ids, torch.tensor([[1.0, 1.0, 0.0]]))[0]
    turn = collect_rollout(agent_of(model), ["ab"] * 8, 8)
    again = sampled(agent_of(model).policy, ["ab"] * 8, 8, agent_of(model).generator)
    assert torch.equal(turn.response_BT, again.response_BT)
    assert any("\ufffd" in text for text in turn.text)      # the text alone could not give the bytes back


# --- what is drawn ---
def test_draw_follows_the_distribution_and_never_takes_what_has_probability_zero():
    p = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    n = 100_000
    token = draw(p.log().expand(n, 6), torch.rand(n, generator=generator()))
    share = torch.bincount(token, minlength=6) / n
    assert ((share - p).abs() <= 3 * (p * (1 - p) / n).sqrt()).all() and share[p == 0].sum() == 0
    extremes = torch.tensor([0.0, 1 - 2**-24, 1.0])         # even a uniform number that rounds to 1
    assert draw(p.log().expand(3, 6), extremes).tolist() == [1, 4, 4]


def test_tokens_of_very_small_probability_are_drawn_as_often_as_they_should():
    """24 bits would never draw them: p = 3e-9 each for 100 tokens, beside one that takes the rest."""
    p = torch.full((101,), 3e-9, dtype=torch.float64)
    p[0] = 1 - 100 * 3e-9
    uniform = 1 - 3e-9 * (torch.arange(100, dtype=torch.float64) + 0.5)     # the middle of each share
    tokens = draw(p.log().float().expand(100, 101), uniform).tolist()
    assert len(set(tokens)) > 80 and 0 not in tokens[:80]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_kept_while_sampling_equal_those_recomputed(small, temperature):
    base = load_language_model(str(small / "lm"), temperature)
    agent = agent_of(base, temperature=temperature, mini_batch_size=2)
    prompts = ["a", "some longer prompt", "xy", "z" * 30]
    turn = collect_rollout(agent, prompts * 2, 12)
    drawn = sampled(agent.policy, prompts, 12, generator())
    assert turn.sampling_gap < 1e-5 and drawn.sampling_logp_BT.min() < -1     # it is sure of nothing
    scored = rescored(base, prompts, 12, drawn)
    torch.testing.assert_close(drawn.sampling_logp_BT, scored, atol=1e-4, rtol=1e-4)


def test_greedy_takes_the_likeliest_token_and_no_random_number():
    logits = torch.zeros(7, 7)
    logits[0, 3], logits[3, 4], logits[4, 6] = 1.0, 0.5, 0.5    # a -> d -> e -> EOS, each a little likelier
    model = bigram(logits)
    drawn = sampled(model, ["a", "d"], 9)
    assert decode(model, drawn.response_BT, drawn.mask_BT) == ["de", "e"]


@pytest.mark.parametrize("rng", [None, generator()], ids=["greedy", "drawn"])
def test_a_nan_is_said_before_anything_is_drawn_from_it(rng):
    logits = torch.zeros(7, 7)
    logits[0, 3] = float("nan")
    with pytest.raises(UserError, match="log-probability is nan"):
        sampled(bigram(logits), ["b", "a"], 3, rng)


# --- rows that have ended ---
def test_finished_rows_are_dropped_and_the_rest_computed_as_before(model):
    """Counted, not timed: what the body computes falls with the rows that run; and nobody notices."""
    head, likely = model.logprobs, torch.zeros(257)
    likely[256] = 3.0  # EOS at about one token in 13, so that rows end all the time
    model.logprobs = lambda hidden: (head(hidden) + likely).log_softmax(-1)
    texts = ["a", "some longer prompt", "z" * 30, "one story", "xy"] * 8
    rows, body = [], model.body
    model.body = lambda ids, *rest: rows.append(len(ids)) or body(ids, *rest)
    drawn = sampled(model, texts, 40, generator())
    lengths = drawn.mask_BT.sum(1)
    assert len(rows) == lengths.max() > 10 and rows[0] == 40 and rows[-1] < 10
    for step, computed in enumerate(rows):  # at most a quarter of what is computed has ended
        running = int((lengths > step).sum())
        assert running <= computed <= max(running / 0.75, running + 1)
    scored = rescored(model, texts, 40, drawn)
    torch.testing.assert_close(drawn.sampling_logp_BT, scored, atol=1e-4, rtol=1e-4)


def test_each_row_keeps_its_own_random_numbers_when_others_are_dropped(model, monkeypatch):
    """Row b draws with the b-th of the B numbers of each step, whoever has ended before it."""
    seen, tokens = [], iter([[256, 1, 2, 3], [1, 2, 256], [5, 5], [5, 5]])      # row 0 ends, then row 3

    def scripted(logp, uniform):
        seen.append(uniform)
        return torch.tensor(next(tokens))

    monkeypatch.setattr(sampling, "draw", scripted)
    sampled(model, ["a", "b", "c", "d"], 4, generator(3))
    expected = torch.rand(4, 4, generator=generator(3), dtype=torch.float64)
    for step, rows in enumerate(([0, 1, 2, 3], [1, 2, 3], [1, 2], [1, 2])):
        assert torch.equal(seen[step], expected[step, rows])


def test_the_cache_writes_a_token_into_its_place_and_copies_seldom():
    layer, copies = GrowingLayer(), 0
    keys = torch.randn(3, 2, 200, 4)
    layer.update(keys[:, :, :50], -keys[:, :, :50])
    for t in range(50, 200):
        before = layer.buffers[0].data_ptr()
        k, v = layer.update(keys[:, :, t:t + 1], -keys[:, :, t:t + 1])
        copies += layer.buffers[0].data_ptr() != before
    assert torch.equal(k, keys) and torch.equal(v, -keys) and layer.get_seq_length() == 200 and copies <= 4
    layer.keep(torch.tensor([True, False, True]), 30)
    k, v = layer.update(keys[:2, :, :1], -keys[:2, :, :1])
    expected = torch.cat([keys[[0, 2], :, 30:], keys[:2, :, :1]], dim=2)
    assert torch.equal(k, expected) and torch.equal(v, -expected)


# --- looks at the rows, between which nothing waits for a GPU ---
class Counted(TorchDispatchMode):
    """Operations that make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [7, 100])
def test_looks_at_the_rows_are_as_rare_as_one_likes_and_change_nothing(model, monkeypatch, steps):
    model.lm.transformer.ln_f.bias.data += 0.5
    model.lm.transformer.wte.weight.data[256] = 0.25            # raises the EOS logit by 4
    drawn, states = [], []
    for every in (1, steps):
        monkeypatch.setitem(sampling.STEPS_BETWEEN_LOOKS, "cpu", every)
        rng = generator()
        drawn.append(sampled(model, ["a", "some longer prompt", "z" * 30] * 4, 30, rng))
        states.append(rng.get_state())
    one, many = drawn
    assert 1 < one.mask_BT.sum(1).min() + 1 < one.mask_BT.shape[1]       # rows end at different times
    assert torch.equal(one.response_BT, many.response_BT) and torch.equal(one.mask_BT, many.mask_BT)
    torch.testing.assert_close(one.sampling_logp_BT, many.sampling_logp_BT)
    plain = generator()                                         # as if no step too many had been made
    torch.rand(one.mask_BT.shape[1], 12, generator=plain, dtype=torch.float64)
    assert all(torch.equal(state, plain.get_state()) for state in states)


def test_nothing_between_two_looks_waits_for_a_gpu(model, monkeypatch):
    """Counted on a CPU: `.item()`, `int(...)`, `if tensor`, and indexing by truth values."""
    class OnGpu(GrowingLayer):
        is_compileable = property(lambda self: True, lambda self, value: None)

    monkeypatch.setattr(cache, "GrowingLayer", OnGpu)
    monkeypatch.setitem(sampling.STEPS_BETWEEN_LOOKS, "cpu", 100)
    waits = {}
    for tokens in (3, 20):
        with Counted() as counted:
            sampled(model, ["a", "some longer prompt"] * 4, tokens, generator())
        waits[tokens] = counted.waits
    assert waits[3] == waits[20] and len(waits[3]) <= 4


# --- another distribution than the policy ---
def test_top_p_and_temperature_against_arithmetic():
    logp = torch.tensor([[0.2, 0.5, 0.3]]).log()
    # squares 0.04, 0.25, 0.09 over their sum 0.38
    cold = sampling_logprobs(logp, settings(sampling_temperature=0.5)).exp()
    assert cold[0].tolist() == pytest.approx([4 / 38, 25 / 38, 9 / 38])
    # 0.5 alone does not hold 0.6, and with 0.3 it does
    assert sampling_logprobs(logp, settings(top_p=0.6)).exp()[0].tolist() == pytest.approx([0, 5 / 8, 3 / 8])
    # the likeliest token stays, however small top_p
    assert sampling_logprobs(logp, settings(top_p=1e-9)).exp()[0].tolist() == [0, 1, 0]
    assert sampling_logprobs(logp, settings()) is logp


def test_what_is_recorded_is_what_was_drawn_from():
    """Draws by top_p and temperature: never a token that is left out; the log-probability is log q; the gap
    is that to the policy; the weights of the tokens are min(pi / q, cap).
    """
    agent = agent_of(bigram(seed=1))
    agent.cfg = settings(sampling_temperature=0.7, top_p=0.8, importance_cap=1.2, advantage="reinforce",
                         whiten_advantages="false", init_kl_coef=0.0)
    turn = collect_rollout(agent, ["a"] * 64, 3)
    logp_UV = agent.policy.lm.head.weight.T.log_softmax(-1)
    q_UV = sampling_logprobs(logp_UV, agent.cfg)
    before_BT = torch.cat([turn.prompt_BP, turn.response_BT[:, :-1]], 1)
    real = turn.mask_BT.bool()
    logp_N, q_N = (x_UV[before_BT[real], turn.response_BT[real]] for x_UV in (logp_UV, q_UV))
    torch.testing.assert_close(turn.sampling_logp_BT[real], q_N)
    torch.testing.assert_close(turn.logp_BT[real], logp_N)
    assert turn.sampling_gap == pytest.approx((q_N - logp_N).abs().mean().item(), rel=1e-4)
    advantage_BT = make_experience(turn, torch.ones(64), 0.0, agent.cfg).advantage_BT
    torch.testing.assert_close(advantage_BT[real], (logp_N - q_N).exp().clamp(max=1.2))
    assert 0.3 < advantage_BT[real].min() < 1 and q_UV.isinf().any()


# --- the gap between sampling and scoring ---
def test_the_gap_is_of_each_token_in_either_direction(monkeypatch):
    """Log-probabilities that are 0.5 too high and 0.5 too low, in turn, are 0.5 apart and not 0."""
    sample = rollout.sample

    def shifted(*args, **kwargs):
        drawn = sample(*args, **kwargs)
        sign_T = 1.0 - 2.0 * (torch.arange(drawn.sampling_logp_BT.shape[1]) % 2)
        return drawn._replace(sampling_logp_BT=drawn.sampling_logp_BT + 0.5 * sign_T)

    model = bigram()
    monkeypatch.setattr(rollout, "sample", shifted)
    turn = collect_rollout(agent_of(model), ["ab", "cd"], 4)
    assert turn.sampling_gap == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("flags, warns", [
    ({}, True), ({"importance_cap": 2.0}, False),
    ({"head_precision": "bfloat16"}, False),
    ({"lora": True, "load_in_4bit": True}, False)])
def test_what_rounding_may_make_is_no_warning(flags, warns, capsys):
    """0.05 nats: of bfloat16 in the body, in the head, or in a base of 4 bits, and of no float32."""
    cfg = settings(**{"dtype": "float32", "head_precision": "float32"} | flags)
    turn = SimpleNamespace(role="pioneer", rollout=SimpleNamespace(sampling_gap=0.05),
                           agent=SimpleNamespace(cfg=cfg))
    Run.warn_if_off_policy(SimpleNamespace(cfg=cfg, warned_off_policy=False), [turn])
    assert ("sampling_gap is 0.05 nats per token: pioneer's" in capsys.readouterr().err) == warns
