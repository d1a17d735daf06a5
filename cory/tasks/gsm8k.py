"""The GSM8K task: answer a word problem; the reward is 1 if the number in the response is right, else 0."""
import random
from decimal import Decimal
from typing import NamedTuple

from cory.tasks.answers import CHECKERS, gold_answer, last_number, strict
from cory.config import Gsm8kConfig
from cory.tasks.data import load_columns
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.tasks.task import Data, Task, checked_sizes

# The paper's prompts. Its line breaks are not to be recovered from the print: here every gap is one space.
EXAMPLE = ("Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he have now? "
           "Answer: Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = 9. ")


def pioneer_prompt(question: str, example: str = EXAMPLE) -> str:
    return f"{example}Question: {question} Answer:"


def observer_prompt(question: str, response: str, example: str = EXAMPLE) -> str:
    return f"{example}Question: {question} Reference: {response.strip()} Answer:"


class Problem(NamedTuple):
    question: str
    gold: Decimal


class Gsm8k(Task):
    """Queries are questions; two rewards beside the checker's are measured: the last number and OpenAI's strict rule."""
    greedy = True

    def __init__(self, cfg: Gsm8kConfig, data: Data, model: LanguageModel):
        self.tokenizer, self.gold = model.tokenizer, {p.question: p.gold for p in [*data.train, *data.held_out]}
        self.example = EXAMPLE if cfg.one_shot else ""
        if cfg.chat_template and not self.tokenizer.chat_template:
            raise UserError("chat_template", True, f"the tokenizer of {cfg.model} has none; use --chat_template false, or a chat model")
        super().__init__(cfg, data)
        lengths = {q: len(ids) for q, ids in zip(self.gold, self.tokenizer(self.observer_prompts([*self.gold], [""] * len(self.gold)))["input_ids"])}
        longest = max(lengths, key=lengths.get)
        if lengths[longest] + 2 * cfg.max_response_length > model.context_length:
            raise UserError("max_response_length", cfg.max_response_length, f"an observer's prompt has up to {lengths[longest]} tokens and the "
                            f"pioneer's response, its own comes on top, and the model's context has {model.context_length}; shorten the responses, "
                            f"use --one_shot false, or remove questions such as {longest[:40]!r}")

    @staticmethod
    def load_data(cfg: Gsm8kConfig) -> Data:
        splits, first = {}, {}
        for split, rows in load_columns(cfg.dataset, ["question", "answer"], subset="main").items():
            splits[split] = []
            for number, (question, solution) in enumerate(rows, start=1):
                place, gold = f"{cfg.dataset} ({split}), row {number}", gold_answer(solution)
                if gold is None:
                    raise UserError("dataset", place, "its answer does not end in '####' and a number; mend or remove the row")
                if first.setdefault(question, (gold, place))[0] != gold:
                    raise UserError("dataset", place, f"asks the question of {first[question][1]} and has another answer; remove one of them")
                splits[split].append(Problem(question, gold))
        return checked_sizes(cfg, splits)

    def query(self, problem: Problem, rng: random.Random) -> str:
        return problem.question

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return [self.message(pioneer_prompt(query, self.example)) for query in queries]

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [self.message(observer_prompt(query, self.cut(response), self.example)) for query, response in zip(queries, responses)]

    def message(self, text: str) -> str:
        """The text itself, or as a user's message by the chat template, whose BOS is left out where encoding adds one."""
        if not self.cfg.chat_template:
            return text
        chat = self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        adds_bos = self.tokenizer("a")["input_ids"][0] == self.tokenizer.bos_token_id
        return chat.removeprefix(self.tokenizer.bos_token) if adds_bos else chat

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        checker = CHECKERS[self.cfg.checker]
        return [float(checker(response) == self.gold[query]) for query, response in zip(queries, responses)]

    def figures(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """accuracy, strict_accuracy: by the last number, by OpenAI's rule. unparsed: share in which the checker finds no answer."""
        def share(right) -> float:
            return sum(map(right, responses, (self.gold[query] for query in queries))) / len(queries)

        return {"accuracy": share(lambda response, gold: last_number(response) == gold),
                "strict_accuracy": share(lambda response, gold: strict(response) == gold),
                "unparsed": share(lambda response, gold: CHECKERS[self.cfg.checker](response) is None)}
