"""The GSM8K task: prompts, the room that a context leaves, rewards, and slips in its data."""
import pytest
import torch
from toys import error_line

import train_gsm8k
from cory.config import Gsm8kConfig
from cory.loading import load_language_model
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


def test_a_chat_template_belongs_to_the_encoder_and_its_tokens_take_of_the_room(gsm8k, base, monkeypatch):
    """A context of 1024 bytes holds the longest prompt, the pioneer's response and one of 12 bytes."""
    plain, question = gsm8k(), "Ann has 10 train eggs and gets 10 more. How many?"
    prompt, = plain.observer_prompts([question], [""])
    assert plain.room == 1024 - len(prompt) - 12
    monkeypatch.setattr(base, "chat_template", True)
    monkeypatch.setattr(base.tokenizer, "chat_template", "[{{ messages[0].content }}]")
    task = gsm8k(chat_template=True)
    assert task.observer_prompts([question], [""]) == [prompt] and task.room == plain.room - len("[]")


def test_a_response_that_grew_as_text_is_cut_for_the_observer(gsm8k):
    """Sampled bytes that are no UTF-8 become signs of three bytes each. What leaves room is not cut."""
    task, grown = gsm8k(), "\ufffd" * 12
    assert task.cut(grown) == grown
    task.room = 12
    assert 8 <= len(task.cut(grown).encode()) <= 12 and task.cut("x" * 12) == "x" * 12


def test_reward_is_1_for_the_right_number_and_metrics_count_the_rest(gsm8k):
    task, strict, own = (gsm8k(checker=name) for name in ("last_number", "strict", "builtins:str"))
    queries = task.batch(1).queries[:5]
    gold = [task.gold[query] for query in queries]
    responses = [f" so {gold[0]}.", f"#### {gold[1]}", f" {gold[2]} + 1 = {gold[2] + 1}", " none", ""]
    assert task.reward(queries, responses).tolist() == [1, 1, 0, 0, 0]
    assert task.metrics(queries, responses) == {"accuracy": 0.4, "strict_accuracy": 0.2, "unparsed": 0.4}
    assert strict.reward(queries, responses).tolist() == [0, 1, 0, 0, 0]
    assert strict.metrics(queries, responses) == {"accuracy": 0.4, "strict_accuracy": 0.2, "unparsed": 0.8}
    # a checker of one's own may return its number as text
    assert own.reward(queries[:2], [f"{gold[0]}.0", f"x {gold[1]}"]).tolist() == [1, 0]


ROW = '{"question": "a?", "answer": "#### 1"}\n'


@pytest.mark.parametrize("content, flags, says", [
    (ROW + '{"question": "b?", "answer": "2"}\n', "", "(train), row 2': its answer does not end in"),
    (ROW + '{"question": "a?", "answer": "#### 2"}\n', "", "(train), row 2': its question has the answer 1"),
    ("", "--checker regex", "checker is 'regex': unknown"),
    ("", "--max_response_length 600", "max_response_length is 600: "),
    ("", "--chat_template true", "has no chat template")])
def test_a_slip_is_one_line(content, flags, says, problem_flags, tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text(content)
    flags = ["--run_dir", tmp_path / "run"] + (["--dataset", tmp_path] if content else flags.split())
    assert says in error_line(train_gsm8k.main, problem_flags + flags, capsys)
