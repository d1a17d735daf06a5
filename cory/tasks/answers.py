"""The answer to a GSM8K problem, in a worked solution or in a response; None where there is none."""
import re
from decimal import Decimal, InvalidOperation

# The groups of 1 234 may be separated by thin or no-break spaces or apostrophes.
NUMBER = re.compile(r"""
    ( (?<![A-Za-z0-9.)\]}%])                        # a sign that follows no word, number or bracket,
      - (?:\\?[$€£¥₹])? )?                          # and touches the number or its currency
    ( (?: \d{1,3} (?:[\u2009\u202f\u00a0'\u2019]\d{3})+ (?!\d) | \d+ )      # 1 234 or 1234,
      (?:,\d+)* (?:\.\d+)?                          # 1,234 and perhaps a fraction
      | (?<![\w.]) \.\d+ )                          # .5
    ( e[+-]?\d{1,6} (?!\w) )?                       # an exponent
    """, re.ASCII | re.IGNORECASE | re.VERBOSE)
# full-width forms, and another minus
PLAIN = str.maketrans("０１２３４５６７８９，．－−", "0123456789,.--")


def gold_answer(solution: str) -> Decimal | None:
    """The number in which a worked solution ends, after `####`."""
    match = re.search(r"####\s*(-?[0-9.,]+)\s*$", solution)
    return decimal(match[1]) if match else None


def last_number(response: str) -> Decimal | None:
    r"""The paper's rule: the last number of a response, before it asks a "Question:" of its own.

    Currency signs, units, markup and commas between digits are ignored (the commas as in lm-eval). LaTeX's
    `{,}` is a comma, its `\,` a thin space. A minus belongs to the number that it touches, unless a word or a
    number stands right before it: `-7` is -7, `5-7` and `- 7` end in 7. `1/2` ends in 2.
    """
    plain = response.translate(PLAIN).replace("{,}", ",").replace(r"\,", "\u2009")
    first = NUMBER.search(plain)
    if first is None:
        return None
    rest, _, _ = plain[first.end():].partition("Question:")
    sign, digits, exponent = NUMBER.findall(plain[:first.end()] + rest)[-1]
    return decimal(sign[:1] + re.sub("[^0-9.]", "", digits) + exponent)


def strict(response: str) -> Decimal | None:
    """OpenAI's rule (arXiv:2110.14168): the number right after the first `#### `, compared as a number."""
    match = re.search(r"#### (-?[0-9.,]+)", response)           # the pattern published with the data set
    return decimal(match[1]) if match else None


def decimal(text: str) -> Decimal | None:
    """The number without its commas, or None."""
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
