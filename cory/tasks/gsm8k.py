"""The GSM8K task: solve a word problem. The reward is 1 if the number in the response is correct, else 0."""
from decimal import Decimal
from statistics import fmean

from cory.config import CHECKERS, Gsm8kConfig
from cory.errors import UserError
from cory.names import find
from cory.ppo.model import LanguageModel
from cory.tasks.answers import decimal, gold_answer, last_number, strict
from cory.tasks.data import Data, divided, load_columns
from cory.tasks.task import Task

# The paper's prompts. It is unclear where their line breaks are: here every gap is one space.
EXAMPLE = ("Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. "
           "How many toys does he have now? Answer: Shawn started with 5 toys. If he got 2 toys each from "
           "his mom and dad, then that is 4 more toys. 5 + 4 = 9. ")


class Gsm8k(Task):
    """Queries are questions. Besides the checker's reward, accuracy is measured by two fixed rules."""
    columns = ["question", "answer"]
    greedy = True

    def __init__(self, cfg: Gsm8kConfig, data: Data, model: LanguageModel):
        self.gold = dict(sum(data, []))
        self.checker = find("checker", cfg.checker, CHECKERS)
        self.example = EXAMPLE if cfg.one_shot else ""
        super().__init__(cfg, data, model)

    @classmethod
    def load_data(cls, cfg: Gsm8kConfig) -> Data:
        """Raises `UserError` where an answer has no number, and where one question has two answers."""
        splits, known = {}, {}
        for split, rows in load_columns(cfg.dataset, cls.columns).items():
            splits[split] = [(question, gold_answer(solution)) for question, solution in rows]
            for number, (question, gold) in enumerate(splits[split], start=1):
                place = f"{cfg.dataset} ({split}), row {number}"
                if gold is None:
                    raise UserError("dataset", place, "its answer does not end in '####' and a number")
                if known.setdefault(question, gold) != gold:
                    raise UserError("dataset", place, f"its question has the answer {known[question]}, too")
        return divided(cfg, splits)

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return [f"{self.example}Question: {query} Answer:" for query in queries]

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [f"{self.example}Question: {query} Reference: {response.strip()} Answer:"
                for query, response in zip(queries, responses, strict=True)]

    def answer_in(self, response: str) -> Decimal | None:
        """What the checker reads. A checker of your own returns a number, its text, or None."""
        return decimal(str(self.checker(response)))

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        return [float(self.answer_in(response) == self.gold[query])
                for query, response in zip(queries, responses, strict=True)]

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """Shares correct by the last number, correct by OpenAI's rule, and with no answer for the checker."""
        pairs = [(response, self.gold[query]) for query, response in zip(queries, responses, strict=True)]
        return {"accuracy": fmean(last_number(response) == gold for response, gold in pairs),
                "strict_accuracy": fmean(strict(response) == gold for response, gold in pairs),
                "unparsed": fmean(self.answer_in(response) is None for response in responses)}
