"""The GSM8K task: answer a word problem. The reward is 1 if the number in the response is right, else 0."""
import random
from decimal import Decimal
from typing import NamedTuple

from cory.config import CHECKERS, Gsm8kConfig
from cory.errors import UserError
from cory.names import find
from cory.ppo.model import LanguageModel
from cory.tasks.answers import decimal, gold_answer, last_number, strict
from cory.tasks.data import DataError, load_columns
from cory.tasks.task import Data, Task, checked_sizes

# The paper's prompts. The print does not show where their line breaks are: here every gap is one space.
EXAMPLE = ("Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. "
           "How many toys does he have now? Answer: Shawn started with 5 toys. If he got 2 toys each from "
           "his mom and dad, then that is 4 more toys. 5 + 4 = 9. ")


def pioneer_prompt(question: str, example: str = EXAMPLE) -> str:
    return f"{example}Question: {question} Answer:"


def observer_prompt(question: str, response: str, example: str = EXAMPLE) -> str:
    return f"{example}Question: {question} Reference: {response.strip()} Answer:"


class Problem(NamedTuple):
    question: str
    gold: Decimal


class Gsm8k(Task):
    """Queries are questions. Beside the checker's reward, accuracy is measured by two fixed rules."""
    columns = ["question", "answer"]
    greedy = True

    def __init__(self, cfg: Gsm8kConfig, data: Data, model: LanguageModel):
        super().__init__(cfg, data, model)
        self.gold = dict([*data.train, *data.validation, *data.test])
        self.checker = find("checker", cfg.checker, CHECKERS)
        self.example = EXAMPLE if cfg.one_shot else ""
        if cfg.chat_template and not self.tokenizer.chat_template:
            why = f"the tokenizer of {cfg.model} has none; use --chat_template false, or a chat model"
            raise UserError("chat_template", True, why)
        prompts = self.observer_prompts([*self.gold], [""] * len(self.gold))
        lengths = [len(ids) for ids in self.tokenizer(prompts)["input_ids"]]
        longest, question = max(zip(lengths, self.gold, strict=True))
        self.require_context(longest, model, "shorten the responses, use --one_shot false, or remove "
                             f"questions such as {question[:40]!r}")

    @classmethod
    def load_data(cls, cfg: Gsm8kConfig) -> Data:
        """Raises `UserError` where an answer has no number, and where one question has two answers."""
        splits, first = {}, {}
        for split, rows in load_columns(cfg.dataset, cls.columns, subset="main").items():
            splits[split] = [Problem(question, gold_answer(solution)) for question, solution in rows]
            for number, (question, gold) in enumerate(splits[split], start=1):
                place = f"{cfg.dataset} ({split}), row {number}"
                if gold is None:
                    raise DataError(place, "its answer does not end in '####' and a number; mend it")
                first_gold, other = first.setdefault(question, (gold, place))
                if first_gold != gold:
                    raise DataError(place, f"asks the question of {other} and answers otherwise; remove one")
        return checked_sizes(cfg, splits)

    def query(self, problem: Problem, rng: random.Random) -> str:
        return problem.question

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return [self.message(pioneer_prompt(query, self.example)) for query in queries]

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [self.message(observer_prompt(query, response, self.example))
                for query, response in zip(queries, responses, strict=True)]

    def message(self, text: str) -> str:
        """The text, or by `chat_template` the text as a user's message, without the template's BOS (the token
        that begins a text) where encoding adds one anyway.
        """
        if not self.cfg.chat_template:
            return text
        messages = [{"role": "user", "content": text}]
        chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        adds_bos = self.tokenizer("a")["input_ids"][0] == self.tokenizer.bos_token_id
        return chat.removeprefix(self.tokenizer.bos_token) if adds_bos else chat

    def answer_in(self, response: str) -> Decimal | None:
        """What the checker reads. A checker of your own may return its number as text, too."""
        answer = self.checker(response)
        return answer if answer is None else decimal(str(answer))

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        return [float(self.answer_in(response) == self.gold[query])
                for query, response in zip(queries, responses, strict=True)]

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """Shares right by the last number, right by OpenAI's rule, and without an answer for the checker."""
        pairs = [(response, self.gold[query]) for query, response in zip(queries, responses, strict=True)]
        shares = {"accuracy": [last_number(response) == gold for response, gold in pairs],
                  "strict_accuracy": [strict(response) == gold for response, gold in pairs],
                  "unparsed": [self.answer_in(response) is None for response in responses]}
        return {name: sum(values) / len(values) for name, values in shares.items()}
