"""Reading the answer to a GSM8K problem, from the data set's worked solutions and from what a model wrote.

Numbers are `Decimal` and compared as numbers, never as text. A checker returns a response's answer, or None
where it finds none: that scores 0 and is counted. `--checker` names one.
"""
import re
from decimal import Decimal, InvalidOperation

# The groups of 1 234 may be parted by thin or no-break spaces or apostrophes.
NUMBER = re.compile(r"""
    ( (?<![A-Za-z0-9.)\]}%])                        # a sign that follows no word, number or bracket,
      - (?:\\?[$€£¥₹])? )?                          # and touches the number or its currency
    ( (?: \d{1,3} (?:[\u2009\u202f\u00a0'\u2019]\d{3})+ (?!\d) | \d+ )      # 1 234 or 1234,
      (?:,\d+)* (?:\.\d+)?                          # 1,234 and perhaps a fraction
      | (?<![\w.]) \.\d+ )                          # .5
    ( e[+-]?\d{1,6} (?!\w) )?                       # an exponent
    """, re.ASCII | re.IGNORECASE | re.VERBOSE)
STRICT = re.compile(r"#### (-?[0-9.,]+)")           # the pattern published with the data set

# Full-width forms and the typographic minus.
PLAIN = str.maketrans("０１２３４５６７８９，．－−", "0123456789,.--")


def gold_answer(solution: str) -> Decimal | None:
    """The number after the last `####` of a worked solution; None if no lone number follows one."""
    _, mark, number = solution.rpartition("####")
    return decimal(number.strip()) if mark else None


def last_number(response: str) -> Decimal | None:
    r"""The paper's rule: the last number of a response, before it asks a "Question:" of its own.

    Currency signs, units, percent signs, full stops and markup are left out: `$1,234.` is 1234, `5%` is 5,
    `1e3` is 1000. So are all commas between digits, as in lm-eval: `1,23,456` is 123456. LaTeX's `{,}` is a
    comma, its `\,` a thin space. An ordinary space parts numbers: `3 234` ends in 234. A minus belongs to the
    number that it touches, unless a word or a number stands right before it: `-7` is -7, `5-7` and `- 7` end
    in 7. `1/2` is 1 and 2, `12:30` is 12 and 30. `NaN` and `inf` are no numbers.
    """
    plain = response.translate(PLAIN).replace("{,}", ",").replace(r"\,", "\u2009")
    first = NUMBER.search(plain)
    if first is None:
        return None
    rest, _, _ = plain[first.end():].partition("Question:")
    sign, digits, exponent = NUMBER.findall(plain[:first.end()] + rest)[-1]
    return decimal(sign[:1] + re.sub("[^0-9.]", "", digits) + exponent)


def strict(response: str) -> Decimal | None:
    """OpenAI's rule (arXiv:2110.14168): the number right behind the first `#### `, compared as a number."""
    match = STRICT.search(response)
    return decimal(match[1]) if match else None


def decimal(text: str) -> Decimal | None:
    """A finite number without its commas, or None."""
    try:
        value = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
