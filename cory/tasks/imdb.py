"""The IMDB task: continue the opening of a review so that a sentiment classifier finds it positive."""
import random

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cory.config import ImdbConfig
from cory.tasks.data import load_columns
from cory.errors import UserError
from cory.ppo.model import LanguageModel, load_weights, model_errors
from cory.tasks.task import Data, Task, checked_sizes

OBSERVER_TEMPLATE = 'I can make this sentence "{query}{response}" more positive: {query}'      # the released code's words


class SentimentReward:
    """The raw logit of a classifier's positive class, one per text; unbounded."""

    def __init__(self, name: str, device: torch.device):
        with model_errors("reward_model", name):
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self.model = load_weights(AutoModelForSequenceClassification, name)
        if self.tokenizer.pad_token is None:
            raise UserError("reward_model", name, "its tokenizer has no padding token to score texts together; set pad_token")
        self.model.eval().requires_grad_(False).to(device)
        labels = {index: str(label) for index, label in self.model.config.id2label.items()}
        positive = [index for index, label in labels.items() if label.lower().startswith("pos")]
        if len(positive) != 1:
            raise UserError("reward_model", name, "needs one label that begins with 'pos'; labels found: "
                            f"{', '.join(labels.values())}")
        self.positive = positive[0]

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> list[float]:
        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.model.device)
        return self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, self.positive].tolist()


class Imdb(Task):
    """Queries are the first few tokens of reviews; the reward is `reward_model(query + response)`, any callable texts -> floats."""

    def __init__(self, cfg: ImdbConfig, data: Data, model: LanguageModel, reward_model=None):
        self.tokenizer, self.reward_model = model.tokenizer, reward_model or SentimentReward(cfg.reward_model, model.device)
        template = len(self.tokenizer(OBSERVER_TEMPLATE)["input_ids"])
        longest = template + 2 * (cfg.max_query_length + cfg.max_response_length)
        if longest > model.context_length:
            raise UserError("max_response_length", cfg.max_response_length, f"an observer's prompt and response can reach {longest} "
                            f"tokens, the model's context has {model.context_length}; shorten queries or responses")
        super().__init__(cfg, data)

    @staticmethod
    def load_data(cfg: ImdbConfig) -> Data:
        return checked_sizes(cfg, {split: [text for text, in rows] for split, rows in load_columns(cfg.dataset, ["text"]).items()})

    def query(self, review: str, rng: random.Random) -> str:
        """The first min_query_length .. max_query_length tokens of a review, drawn uniformly, both ends included.

        DIFFERS: the released code's sampler leaves the maximum out, and it drops reviews of up to 100 or 200 characters.
        """
        n = rng.randint(self.cfg.min_query_length, self.cfg.max_query_length)
        opening = review[:64 * self.cfg.max_query_length]           # long enough: tokenizing whole reviews would cost minutes
        return self.tokenizer.decode(self.tokenizer(opening, add_special_tokens=False)["input_ids"][:n], clean_up_tokenization_spaces=False)

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return queries

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [OBSERVER_TEMPLATE.format(query=query, response=self.cut(response)) for query, response in zip(queries, responses)]

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        return self.reward_model([query + response for query, response in zip(queries, responses)])
