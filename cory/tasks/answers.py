"""Reading the answer to a GSM8K problem, from the data set's worked solutions and from whatever a model wrote.

Numbers are `Decimal` and compared as numbers, never as text. A checker reads a response and returns its answer, or None where it finds
none: such a response scores 0 and is counted. `CHECKERS` names them; to add one, write the function and enter it there.
"""
import re
from decimal import Decimal, InvalidOperation
from typing import Callable

NUMBER = re.compile(r"""
    ((?<![A-Za-z0-9.)\]}%]) - (?:\\?[$€£¥₹])?)?                      # a sign: touches the number, follows no word, number or bracket
    ( (?: \d{1,3} (?:,\d{3})+ (?!\d) | \d+ ) (?: \.\d+ )?           # 1,234 or 1234, with or without a fraction
      | (?<![\w.]) \.\d+ )                                          # .5
    ( e[+-]?\d{1,6} (?!\w) )?                                       # an exponent
    """, re.ASCII | re.IGNORECASE | re.VERBOSE)
STRICT = re.compile(r"#### (-?[0-9.,]+)")                           # the pattern published with the data set
PLAIN = str.maketrans("０１２３４５６７８９，．－−", "0123456789,.--")     # full-width forms, and the typographic minus


def gold_answer(solution: str) -> Decimal | None:
    """The number after the last `####` of a worked solution, commas removed. None if there is no mark, or no lone number behind it."""
    _, mark, last = solution.rpartition("####")
    return decimal(last.strip()) if mark else None


def last_number(response: str) -> Decimal | None:
    """The paper's rule: the last number of a response, of which whatever follows a newly started "Question:" is cut off.

    A currency sign before, a unit, percent sign, full stop or markup behind and commas between groups of three do not matter:
    `$1,234.` is 1234, `5%` is 5, `1e3` is 1000. A minus belongs to the number that it touches, unless a word or a number stands right
    before it: `-7` is -7, while `5-7` and `- 7` (a dash) end in 7. `1/2` is the two numbers 1 and 2, `12:30` is 12 and 30. `NaN` and `inf`
    are no numbers.
    """
    found = list(NUMBER.finditer(own_part(response).translate(PLAIN).replace("{,}", ",")))      # LaTeX writes 1{,}234
    if not found:
        return None
    sign, digits, exponent = found[-1].groups(default="")
    return decimal(sign[:1] + digits + exponent)


def strict(response: str) -> Decimal | None:
    """The number right behind the first `#### `; any other form is no answer. OpenAI's rule for GSM8K (arXiv:2110.14168), but compared as
    a number like everything here: `#### 42.` is 42."""
    found = STRICT.search(own_part(response))
    return decimal(found[1]) if found else None


CHECKERS: dict[str, Callable[[str], Decimal | None]] = {"last_number": last_number, "strict": strict}


def own_part(response: str) -> str:
    """A response up to where it starts to ask a question of its own."""
    return response.partition("Question:")[0]


def decimal(text: str) -> Decimal | None:
    """A finite number without its commas, or None."""
    try:
        value = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
