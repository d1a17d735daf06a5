"""Reading answers: every form that correctness.md lists, and every gold answer of the real data."""
import json
from decimal import Decimal

import pytest

from cory.tasks.answers import gold_answer, last_number, strict

ANSWERS = [                         # response, the last number, OpenAI's strict rule
    ("42.", 42, None), ("$42", 42, None), ("1,234", 1234, None), ("-7", -7, None),
    ("- 7", 7, None),               # a dash
    ("5-7", 7, None), ("5 - 7 = -2", -2, None), ("-$7.50", "-7.5", None), ("(-7)", -7, None),
    ("−7", -7, None), ("3.50", "3.5", None), ("007", 7, None), ("5%", 5, None), (".5", "0.5", None),
    ("1.2.3", 3, None), ("#### 42", 42, 42), ("#### -1,234", -1234, -1234), ("#### $42", 42, None),
    ("####42", 42, None), ("#### 42 apples.", 42, 42), ("#### 4 or rather #### 5", 5, 4),
    ("#### 1.2.3", 3, None), ("**42**", 42, None), (r"\boxed{42}", 42, None), ("42 apples.", 42, None),
    ("1/2", 2, None),               # two numbers
    ("1e3", 1000, None), ("1E-2", "0.01", None), ("2eggs", 2, None), ("12:30", 30, None),
    ("x = 4, so 4 dozen", 4, None), ("", None, None), ("no number", None, None),
    ("9" * 400, Decimal("9" * 400), None), ("5 + 4 = 9.", 9, None), ("４２", 42, None),
    ("１，２３４", 1234, None), ("5²", 5, None), ("15", 15, None),
    ("NaN", None, None), ("inf", None, None),
    ("-inf", None, None), ("1,23", 123, None), ("1234,567", 1234567, None), ("12,345,678", 12345678, None),
    ("1,000,00", 100000, None),
    ("1,23,456", 123456, None), ("1, 2", 2, None), ("So 9. Question: Ann has 3. Answer: 7", 9, None),
    ("#### 9\nQuestion: b? #### 7", 9, 9), ("Question: 5 #### 7", 7, 7),
    ("To answer the Question: 2 + 3 = 5. #### 5", 5, 5), ("So 9. Question: b? #### 7", 9, 7),
    ("Question: how many? Answer: 4. Question: 5?", 4, None),
    ("The answer is...42", 42, None), ("_-7_", -7, None), ("10%-15%", 15, None),
    (r"\frac{14}{2}-7", 7, None), ("-¥7", -7, None), (r"-\$7", -7, None),
    ("1e1000", Decimal("1e1000"), None), ("1{,}234", 1234, None), ("#### 42.", 42, 42),
    ("#### 042", 42, 42), ("$1,234.", 1234, None), ("covid-19", 19, None), ("a\x00\x07 12\ufffd", 12, None),
]
SEPARATORS = {"LaTeX": r"\,", "thin": "\u2009", "narrow no-break": "\u202f", "no-break": "\u00a0",
              "apostrophe": "'", "typographic apostrophe": "\u2019"}


@pytest.mark.parametrize("response, last, marked", ANSWERS, ids=lambda x: str(x)[:20])
def test_answers_are_read_as_numbers(response, last, marked):
    assert last_number(response) == (None if last is None else Decimal(last))
    assert strict(response) == (None if marked is None else Decimal(marked))


@pytest.mark.parametrize("sep", SEPARATORS.values(), ids=SEPARATORS)
def test_thousands_are_parted_in_groups_of_three_as_by_commas(sep):
    forms = {f"1{sep}234": 1234, f"so -$12{sep}345{sep}678.50 left": "-12345678.5",
             f"1{sep}23": 23, f"1234{sep}567": 567, f"1{sep}2345": 2345, f"5{sep}": 5, f"1{sep}{sep}234": 234,
             f"3{sep}+{sep}234": 234, f"year{sep}7": 7}
    for response, last in forms.items():
        assert last_number(response) == Decimal(last), response


@pytest.mark.parametrize("space", [" ", "\n", "\t", ", "])
def test_ordinary_white_space_parts_no_thousands(space):
    assert last_number(f"3{space}234") == 234


@pytest.mark.parametrize("solution, gold", [
    ("5 + 4 = 9. #### 9", 9), ("#### 1,000,000", 1000000), ("#### -3", -3), ("#### 0.5", "0.5"), ("9", None),
    ("####", None), ("#### nine", None), ("#### 3 4", None), ("#### 1 #### 2", 2), ("#### NaN", None)])
def test_gold_answers(solution, gold):
    assert gold_answer(solution) == (None if gold is None else Decimal(gold))


def test_every_real_gold_answer_parses(gsm8k_data):
    files = [gsm8k_data / f"{split}.jsonl" for split in ("train", "test")]
    solutions = [json.loads(line)["answer"] for file in files for line in file.open()]
    gold = [gold_answer(s) for s in solutions]
    assert len(gold) == 8792 and None not in gold
    # as many as the data's README counts
    assert sum("," in s.rpartition("####")[2] for s in solutions) == 93 and sum(g < 0 for g in gold) == 5
    assert all(last_number(s) == strict(s) == g for s, g in zip(solutions, gold, strict=True))
