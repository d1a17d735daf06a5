"""The GSM8K task: solve a word problem. The reward is 1 if the number in the response is correct, else 0."""
import re
from decimal import Decimal, InvalidOperation
from statistics import fmean

from cory.errors import UserError
from cory.tasks.data import complete_splits, load_columns
from cory.tasks.task import Task

# The paper's prompts. It is unclear where their line breaks are: here every gap is one space.
EXAMPLE = ("Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. "
           "How many toys does he have now? Answer: Shawn started with 5 toys. If he got 2 toys each from "
           "his mom and dad, then that is 4 more toys. 5 + 4 = 9. ")


class Gsm8k(Task):
    columns = ["question", "answer"]
    greedy = True

    def __init__(self, cfg, data, model):
        self.gold = dict(data.train + data.validation + data.test)      # the answer to each question
        self.checker = cfg.resolve("checker")
        self.example = EXAMPLE if cfg.one_shot else ""
        super().__init__(cfg, data, model)

    @classmethod
    def load_data(cls, cfg):
        splits = load_columns(cfg.dataset, cls.columns)
        for split, rows in splits.items():
            splits[split] = [(question, gold_answer(solution, cfg.dataset)) for question, solution in rows]
        return complete_splits(splits)

    def pioneer_prompts(self, queries):
        return [f"{self.example}Question: {query} Answer:" for query in queries]

    def observer_prompts(self, queries, responses):
        return [f"{self.example}Question: {query} Reference: {without_thought(response).strip()} Answer:"
                for query, response in zip(queries, responses, strict=True)]

    def read_answer(self, response: str) -> Decimal | None:
        """The number that `--checker` reads in a response, or None; not whether it is right."""
        answer = self.checker(response)
        if answer is None:
            return None
        return decimal(str(answer))

    def compute_rewards(self, queries, responses):
        return [float(self.read_answer(response) == self.gold[query])
                for query, response in zip(queries, responses, strict=True)]

    def metrics(self, queries, responses):
        """The share of responses that have no answer for the checker."""
        return {"unparsed": fmean(self.read_answer(response) is None for response in responses)}


# --- the answer in a worked solution or in a response; None where there is none ---
CURRENCY = r"[$\u00a2-\u00a5\u20a0-\u20cf]"
SIGN = rf"(?<![A-Za-z0-9.)\]}}%])-{CURRENCY}?"         # follows no word, number or bracket; -7 or -$7
DIGITS = r"\d+(?:,\d+)*(?:\.\d+)?|(?<![\w.])\.\d+"    # 1,234.5 or .5
NUMBER = re.compile(f"(?:{SIGN})?(?:{DIGITS})", re.ASCII)

# What is left out of a response: LaTeX's spaces anywhere, other separators where they part thousands, that is
# after one to three digits and before three.
LATEX = r"\{,\}|\\,|\\! *"                            # 1{,}234 or 1\,234 or 1,\! 234
THOUSANDS = r"(?<=\d)(?<!\d{4})(?:\\[;: ]|[\u00a0\u2007-\u200a\u202f'\u2019])(?=\d{3}(?!\d))"
TO_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}       # full width: ７ is 7
TO_ASCII |= dict.fromkeys((0x2010, 0x2011, 0x2013, 0x2212, 0xFE63), "-")


def gold_answer(solution: str, dataset: str) -> Decimal:
    """The number in which a worked solution ends, after `####`."""
    found = re.search(r"####\s*(-?[0-9,]*\.?[0-9]+)\s*$", str(solution))
    if not found:
        raise UserError(f"an answer in {dataset}", solution, "must end in #### and a number")
    return decimal(found[1])


def last_number(response: str) -> Decimal | None:
    """The paper's rule: the last number of a response. What follows a "Question:" after its first number is
    ignored.

    Currency signs, units, markup and commas between digits are ignored (the commas as in lm-eval), as are
    other thousands separators: LaTeX's, no-break and thin spaces, apostrophes. A minus belongs to the number
    that it touches, unless a word or a number stands right before it: `-7` is -7, `5-7` and `- 7` end in 7.
    `1/2` ends in 2, and `5e3` in 3.
    """
    ascii_text = response.translate(TO_ASCII)
    plain = re.sub(f"{LATEX}|{THOUSANDS}", "", ascii_text).replace(r"\$", "$")
    first = NUMBER.search(plain)
    if first is None:
        return None
    rest, _, _ = plain[first.end():].partition("Question:")
    numbers = NUMBER.findall(plain[:first.end()] + rest)
    return decimal(numbers[-1])


def final_answer(response: str) -> Decimal | None:
    """For chat models: the last number in the last `\\boxed{}`, or the one right after the last `####`. A
    response without them, such as one that was cut off as it reasoned, has no answer.
    """
    answer = without_thought(response).translate(TO_ASCII)
    marked = re.findall(r"\\boxed(\{(?:[^{}]|\{[^{}]*\})*\})|####\s*([-*\\$.]*\d[\d.,]*)", answer)
    if not marked:
        return None
    return last_number("".join(marked[-1]))


def without_thought(response: str) -> str:
    """What follows `</think>`: nothing if the thought has no end, and all if there is no thought."""
    _, end, rest = response.rpartition("</think>")
    if "<think>" in response and not end:
        return ""
    return rest


def decimal(text: str) -> Decimal | None:
    """The number without its commas and currency sign, or None."""
    try:
        return Decimal(re.sub(f",|{CURRENCY}", "", text))
    except InvalidOperation:
        return None
