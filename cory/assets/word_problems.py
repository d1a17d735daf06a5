"""Arithmetic word problems in GSM8K's format, made by drawing sentences: the bundled default of
`train_gsm8k.py`.

A problem is an opening, some steps and a question, and takes two to four sums. Its *template* is the list
of its sentence patterns with names, things and numbers left blank, and its *numbers* are those in the
question. Both are divided by a hash into a training and a held-out share: no held-out problem has a
template, or a list of numbers, that any training problem has. What the two shares do have in common is
single sentences.
"""

import random
import zlib
from typing import NamedTuple

NAMES = ("Ada Ben Cara Dan Eva Finn Gina Hugo Ida Jack Kim Leo Mia Noah Olga Paul Rosa Sam Tara Umar "
         "Vera Will Zoe Amir Bella Carl Dora Emil Fay Gus").split()
THINGS = ("apples pears eggs books pens coins stamps cards shells beads balls buttons cakes cookies "
          "flowers candles cups plates shirts socks toys stones tickets stickers marbles lemons carrots "
          "nuts boxes bags").split()

OPENINGS = [  # (sentence, sum over its numbers a and b, or None for a plain start)
    ("{N} has {a} {o}.", None),
    ("There are {a} {o} on a table, and they belong to {N}.", None),
    ("{N} starts the day with {a} {o}.", None),
    ("In a drawer {N} keeps {a} {o}.", None),
    ("{N} has {a} red {o} and {b} blue {o}.", "+"),
    ("{N} finds {a} {o} at home and {b} {o} at school.", "+"),
    ("{N} buys {a} {o} on Monday and {b} {o} on Friday.", "+"),
    ("{N} has {a} packs with {b} {o} in each pack.", "*"),
    ("On each of {a} shelves {N} puts {b} {o}.", "*"),
    ("Every day for {a} days {N} makes {b} {o}.", "*"),
]
STEPS = {
    "+": [
        "{N} gets {n} more {o} from {M}.",
        "Then {M} gives {N} another {n} {o}.",
        "After lunch {N} buys {n} {o}.",
        "Next {N} finds {n} {o}.",
        "{N} wins {n} {o} in a game.",
        "A friend brings {n} more {o}.",
        "Later {n} {o} are added.",
        "For a birthday {N} receives {n} {o}.",
    ],
    "-": [
        "{N} gives {n} {o} to {M}.",
        "Then {n} of the {o} are lost.",
        "{N} sells {n} {o}.",
        "After that {M} takes {n} {o} away.",
        "{N} breaks {n} of the {o}.",
        "Next {N} throws away {n} {o}.",
        "{n} {o} are left at the shop.",
        "At night a thief steals {n} {o}.",
    ],
    "*": [
        "Then the number of {o} grows to {n} times as many.",
        "{M} makes it {n} times as many {o}.",
        "By the next week {N} has {n} times that number.",
        "The {o} are multiplied by {n}.",
    ],
    "/": [
        "{N} divides the {o} evenly into {n} piles and keeps one pile.",
        "The {o} are shared equally among {n} children, and {N} is one of them.",
        "Only one out of every {n} {o} is kept.",
        "{N} puts the {o} into {n} equal bags and takes one bag.",
    ],
}
QUESTIONS = [
    "How many {o} does {N} have now?",
    "How many {o} are there in the end?",
    "What is the number of {o} at the end?",
    "How many {o} is that?",
    "In the end, how many {o} does {N} have?",
]
LARGEST = 99  # no value on the way is larger


class Problem(NamedTuple):
    question: str
    answer: str  # "12 + 7 = 19. 19 - 4 = 15. #### 15"
    template: str  # the question's sentences with their blanks
    numbers: tuple[int, ...]  # of the question, in order

    @property
    def held_out_template(self) -> bool:
        return zlib.crc32(self.template.encode()) % 4 == 0

    @property
    def held_out_numbers(self) -> bool:
        return zlib.crc32(repr(self.numbers).encode()) % 4 == 0


def problem(rng: random.Random, held_out: bool) -> Problem:
    """A random problem of one share: both its template and its numbers belong to it."""
    while True:
        made = draw_problem(rng)
        if made and made.held_out_template == made.held_out_numbers == held_out:
            return made


def draw_problem(rng: random.Random) -> Problem | None:
    """A random problem, or None if its numbers do not work out."""
    opening, operation = rng.choice(OPENINGS)
    steps = rng.randint(2, 4)
    patterns, numbers, sums = [opening], [], []
    if operation == "*":
        numbers = [rng.randint(2, 9), rng.randint(2, 9)]
        value = numbers[0] * numbers[1]
    elif operation == "+":
        numbers = [rng.randint(3, 40), rng.randint(3, 40)]
        value = sum(numbers)
    else:
        numbers = [value := rng.randint(4, 60)]
    if operation:
        sums.append(f"{numbers[0]} {operation} {numbers[1]} = {value}.")
    while len(sums) < steps:
        kind = rng.choice("++--*/")
        n = rng.randint(2, 5) if kind in "*/" else rng.randint(2, 40)
        if kind == "/" and value % n:
            n = next((d for d in (2, 3, 5, 4) if value % d == 0), 0)
        after = {"+": value + n, "-": value - n, "*": value * n, "/": value // n if n else 0}[kind]
        if not 2 <= after <= LARGEST or n == 0:
            return None
        sums.append(f"{value} {kind} {n} = {after}.")
        patterns.append(rng.choice([sentence for sentence in STEPS[kind] if sentence not in patterns]))
        numbers.append(n)
        value = after
    patterns.append(rng.choice(QUESTIONS))
    name, other = rng.sample(NAMES, 2)
    thing, left = rng.choice(THINGS), iter(numbers)
    said = []
    for pattern in patterns:
        blanks = {blank: next(left) for blank in "abn" if f"{{{blank}}}" in pattern}
        said.append(pattern.format(N=name, M=other, o=thing, **blanks))
    return Problem(" ".join(said), f"{' '.join(sums)} #### {value}", " ".join(patterns), tuple(numbers))


def wrong_answer(rng: random.Random, made: Problem) -> str:
    """A worked answer with one sum read or calculated wrongly, carried on from there without another
    mistake: to a wrong end, because each further sum takes different values to different values.
    """
    while not (answer := answer_with_a_mistake(rng, made.answer)):
        pass
    return answer


def answer_with_a_mistake(rng: random.Random, answer: str) -> str | None:
    """None if a division behind the mistake does not come out even."""
    sums = answer.split(" #### ")[0].removesuffix(".").split(". ")
    at, value, said = rng.randrange(len(sums)), None, []
    for i, line in enumerate(sums):
        a, operation, b, _, result = line.split()
        left, right = int(a) if value is None else value, int(b)
        if i == at and rng.random() < 0.5:  # reads the step wrongly
            operation = rng.choice([o for o in "+-*/" if o != operation])
        if operation == "/" and left % right:
            return None
        value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operation]
        if i == at and str(value) == result:  # or calculates it wrongly
            value += rng.choice([-10, -2, -1, 1, 2, 10])
        said.append(f"{left} {operation} {right} = {value}.")
    return f"{' '.join(said)} #### {value}"
