"""The GSM8K task: prompts, rewards, the answers in its data, and the forms in which models write numbers."""
import json
import re

import pytest
from toys import bigram

import train_gsm8k
from cory.config import Gsm8kConfig, parse
from cory.errors import UserError
from cory.tasks.gsm8k import EXAMPLE, Gsm8k, final_answer, gold_answer, last_number


def gsm8k(**changes) -> Gsm8k:
    cfg = Gsm8kConfig(dataset="bundled:gsm8k/problems", **changes)
    return Gsm8k(cfg, Gsm8k.load_data(cfg), bigram())


def test_prompts_are_the_papers():
    task = gsm8k()
    assert task.pioneer_prompts(["How many?"]) == [EXAMPLE + "Question: How many? Answer:"]
    (observer,) = task.observer_prompts(["How many?"], [" 1 + 1 = 2.\n"])
    assert observer == EXAMPLE + "Question: How many? Reference: 1 + 1 = 2. Answer:"
    (after_thought,) = task.observer_prompts(["How many?"], ["<think>\n2?\n</think>\n\n1."])
    assert after_thought == EXAMPLE + "Question: How many? Reference: 1. Answer:"
    without_example = gsm8k(one_shot=False)
    assert without_example.pioneer_prompts(["How many?"]) == ["Question: How many? Answer:"]


def test_the_reward_is_1_for_the_right_number():
    task = gsm8k()
    queries = task.batch(1)[0][:4]
    gold = [task.gold[query] for query in queries]
    responses = [f" so {gold[0]}.", f" {gold[1]} + 1 = {gold[1] + 1}", " none", ""]
    assert task.reward(queries, responses).tolist() == [1, 0, 0, 0]
    assert task.metrics(queries, responses) == {"unparsed": 0.5}
    whole_text = gsm8k(checker="builtins:str")
    assert whole_text.metrics(queries, responses) == {"unparsed": 1.0}
    numbers = [f"{gold[0]}.0", f"x {gold[1]}"]
    assert whole_text.reward(queries[:2], numbers).tolist() == [1, 0]


def test_with_the_preset_chat_a_model_marks_its_answer_and_does_not_think():
    cfg = parse(Gsm8kConfig, train_gsm8k.PRESETS, ["--preset", "chat"])
    assert cfg.max_response_length == 512
    assert json.loads(cfg.chat_template_kwargs) == {"enable_thinking": False}
    assert r"\boxed{}" in cfg.system_prompt
    assert cfg.resolve("checker") is final_answer


LAST_NUMBERS = {
    # decimals, separators, units and markup
    "$1,234.": 1234, "12,345,678": 12345678, "1,23,456": 123456,
    "3.50": 3.5, ".5": 0.5, "1.2.3": 3,
    "007": 7, "5%": 5, "2eggs": 2,
    "**42**": 42, r"\boxed{42}": 42, "5²": 5,
    "5 + 4 = 9.": 9, "The answer is...42": 42, "9" * 400: 10**400 - 1,
    # a minus that is a sign
    r"-\$7": -7, "-€7.50": -7.5, "-¥1,000": -1000,
    "−7": -7, "‐7": -7, "‑7": -7, "–7": -7, "﹣7": -7,
    "(-7)": -7, "_-7_": -7,
    # a minus that is none
    "- 7": 7, "5-7": 7, "5–7": 7, "(3)-7": 7,
    "10%-15%": 15, r"\frac{14}{2}-7": 7, "covid-19": 19,
    # two numbers
    "1/2": 2, "12:30": 30, "1, 2": 2,
    "3 234": 234, "3\n234": 234,
    "2019\u00a0500": 500, "5\u00a012": 12,
    # thousands
    "1{,}234": 1234, r"10\,000": 10000, r"\boxed{10,\!000}": 10000,
    r"11,\! 111": 11111, r"2\;500": 2500, r"5,\;700": 700,
    "2\u00a0500": 2500, "2\u2009500": 2500,
    "1\u202f234\u202f567": 1234567, "1'234": 1234,
    # other digits and characters
    "－３": -3, "＄１，２３４": 1234, "5 of ٤": 5,
    "\x07 12\ufffd": 12, "": None, "NaN": None,
    # questions, and answers as in the data
    "Question: how many? Answer: 4. Question: 5?": 4,
    "5 Question: a 7 Question: 9": 5,
    "To answer the Question: 2 + 3 = 5. #### 5": 5,
    "#### -1,234": -1234, "####42 apples.": 42,
}


@pytest.mark.parametrize("response", LAST_NUMBERS)
def test_the_last_number_of_a_response(response):
    assert last_number(response) == LAST_NUMBERS[response]


FINAL_ANSWERS = {
    r"\boxed{18} dollars for 7 days": 18,
    r"$\boxed{\text{\$}1{,}234 \text{ a day}}$ (9 x 2)": 1234,
    r"\boxed{1} or \boxed{2}": 2,
    "2 + 2\n#### 4\nThat is 5.": 4,
    r"\boxed{3} #### $-4": -4,
    r"#### **\$18** (9 x 2)": 18,
    "#### \u22125": -5,
    r"<think>\boxed{1}</think> 2": None,
    r"<think>So 9 + 9 = \boxed{18}": None,
    r"the answer is \boxed{1": None,
    r"\boxed{no}": None,
    "5": None,
    "\\boxed{18}\n#### Check": 18,
    "#### Step 2: we add": None,
    "\\boxed{7}\n#### **Check**": 7,
}


@pytest.mark.parametrize("response", FINAL_ANSWERS)
def test_the_final_answer_of_a_chat_model_is_the_one_that_it_marks(response):
    assert final_answer(response) == FINAL_ANSWERS[response]


GOLD_ANSWERS = {
    "5 + 4 = 9. #### 9": 9, "#### 1,000,000": 1000000,
    "#### -3": -3, "#### 0.5": 0.5, "#### 1 #### 2": 2,
}


@pytest.mark.parametrize("solution", GOLD_ANSWERS)
def test_the_gold_answer_of_a_solution(solution):
    assert gold_answer(solution, "data") == GOLD_ANSWERS[solution]


@pytest.mark.parametrize("answer", ["9", "####", "#### 1.234.567", "#### $18", "#### 18%", "#### 1/2", 9,
                                    None])
def test_an_answer_that_cannot_be_read_is_named(answer, tmp_path):
    """Responses without a number would otherwise be right."""
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": answer}))
    with pytest.raises(UserError, match=re.escape(f"an answer in {file} is {answer!r}: must end in ####")):
        Gsm8k.load_data(Gsm8kConfig(dataset=str(file)))
