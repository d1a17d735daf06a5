"""The GSM8K task: prompts, the room that a context leaves, rewards, and the answers in its data."""
import json

import pytest
import torch

from cory.config import Gsm8kConfig
from cory.errors import UserError
from cory.loading import load_language_model
from cory.ppo.sampling import encode_prompts
from cory.tasks.gsm8k import EXAMPLE, Gsm8k


@pytest.fixture(scope="module")
def base(problems):
    return load_language_model(str(problems / "lm"), Gsm8kConfig(), torch.device("cpu"))


@pytest.fixture
def gsm8k(base, problems):
    def task(**changes) -> Gsm8k:
        small = dict(dataset=str(problems), batch_size=8, mini_batch_size=8, gradient_accumulation_steps=1,
                     eval_queries=8, max_response_length=12)
        cfg = Gsm8kConfig(**(small | changes))
        return Gsm8k(cfg, Gsm8k.load_data(cfg), base)
    return task


def test_prompts_are_the_papers(gsm8k):
    task, bare = gsm8k(), gsm8k(one_shot=False)
    assert task.pioneer_prompts(["How many?"]) == [EXAMPLE + "Question: How many? Answer:"]
    observer, = task.observer_prompts(["How many?"], [" 1 + 1 = 2.\n"])
    assert observer == EXAMPLE + "Question: How many? Reference: 1 + 1 = 2. Answer:"
    assert bare.pioneer_prompts(["How many?"]) == ["Question: How many? Answer:"]


@pytest.mark.parametrize("chat", [False, True])
def test_the_context_holds_the_longest_prompt_and_two_responses_however_long(chat, gsm8k, base, monkeypatch):
    """Sampled bytes that are no UTF-8 become signs of three bytes each. What leaves room is not cut."""
    monkeypatch.setattr(base, "chat_template", chat)
    monkeypatch.setattr(base.tokenizer, "chat_template", "[{{ messages[0].content }}]")
    question = "Ann has 10 train eggs and gets 10 more. How many?"
    prompt, = gsm8k().observer_prompts([question], [""])
    most = (1024 - len(prompt) - 2 * chat - 8) // 2
    task = gsm8k(max_response_length=most)
    prompts = task.observer_prompts([question], [task.cut("\ufffd" * most)])
    assert encode_prompts(base, prompts, most).ids_BP.shape[1] > 1010 - most
    assert task.cut("x" * most) == "x" * most
    with pytest.raises(UserError, match=f"max_response_length is {most + 1}: .*context of 1024"):
        gsm8k(max_response_length=most + 1)


def test_reward_is_1_for_the_right_number_and_metrics_count_the_rest(gsm8k):
    task, strict, text = (gsm8k(checker=name) for name in ("last_number", "strict", "builtins:str"))
    queries = task.batch(1).queries[:5]
    gold = [task.gold[query] for query in queries]
    responses = [f" so {gold[0]}.", f"#### {gold[1]}", f" {gold[2]} + 1 = {gold[2] + 1}", " none", ""]
    assert task.reward(queries, responses).tolist() == [1, 1, 0, 0, 0]
    assert task.metrics(queries, responses) == {"accuracy": 0.4, "strict_accuracy": 0.2, "unparsed": 0.4}
    assert strict.reward(queries, responses).tolist() == [0, 1, 0, 0, 0]
    assert strict.metrics(queries, responses) == {"accuracy": 0.4, "strict_accuracy": 0.2, "unparsed": 0.8}
    assert text.reward(queries[:2], [f"{gold[0]}.0", f"x {gold[1]}"]).tolist() == [1, 0]


@pytest.mark.parametrize("question, answer, says", [
    ("b?", "2", "does not end in '####'"), ("a?", "#### 2", "has the answer 1, too")])
def test_a_question_has_one_answer_and_that_is_a_number(question, answer, says, tmp_path):
    rows = [{"question": "a?", "answer": "#### 1"}, {"question": question, "answer": answer}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=f"row 2': its .*{says}"):
        Gsm8k.load_data(Gsm8kConfig(dataset=str(tmp_path)))
