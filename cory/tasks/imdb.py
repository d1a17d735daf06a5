"""The IMDB task: continue the opening of a review so that a sentiment classifier finds it positive."""
import random
from typing import Callable

import torch
from transformers import AutoModelForSequenceClassification

from cory.config import ImdbConfig
from cory.loading import load_pretrained, model_errors
from cory.ppo.model import LanguageModel, context_length
from cory.tasks.data import Data
from cory.tasks.task import Task

OBSERVER_TEMPLATE = 'I can make this sentence "{query}{response}" more positive: {query}'     # released code


class SentimentReward:
    """The raw logit of a classifier's positive class, one per text; unbounded. Raises `UserError` for one
    that cannot take texts of `max_tokens` tokens, or that scores a text otherwise beside a longer one.
    """

    def __init__(self, name: str, device: torch.device, max_tokens: int = 0):
        with model_errors("reward_model", name):
            self.model, self.tokenizer = load_pretrained(AutoModelForSequenceClassification, name)
            self.model.eval().requires_grad_(False).to(device)
            labels = {index: str(label).lower() for index, label in self.model.config.id2label.items()}
            positive = [index for index, label in labels.items() if label.startswith("pos")]
            if len(positive) != 1:
                raise ValueError(f"one label must begin with 'pos'; its config.json has {str(labels)[:200]}")
            self.positive = positive[0]
            self.max_length = min(context_length(self.model.config) or 10**9, self.tokenizer.model_max_length)
            need = max_tokens + self.tokenizer.num_special_tokens_to_add()
            if self.max_length < need:
                raise ValueError(f"takes {self.max_length} tokens, and a query with its response can have "
                                 f"{need}; lower --max_query_length or --max_response_length")
            together, alone = self(["good", "a bad film " * (need + 8)])[0], self(["good"])[0]
            if not abs(together - alone) < 0.01 * max(1, abs(alone)):
                raise ValueError(f"scores a text {together:.3f} beside a longer one and {alone:.3f} alone; "
                                 "set pad_token_id in its config.json to the tokenizer's")

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> list[float]:
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length,
                               return_tensors="pt").to(self.model.device)
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, self.positive].tolist()


class Imdb(Task):
    """Queries are the first few tokens of reviews; the reward is `reward_model([query + response, ...])`."""

    def __init__(self, cfg: ImdbConfig, data: Data, model: LanguageModel, reward_model: Callable = None):
        super().__init__(cfg, data, model)
        (template,) = model.encode([OBSERVER_TEMPLATE])
        self.require_context(len(template) + 2 * cfg.max_query_length, "shorten queries or responses")
        max_tokens = cfg.max_query_length + cfg.max_response_length
        self.reward_model = reward_model or SentimentReward(cfg.reward_model, model.device, max_tokens)

    def query(self, review: str, rng: random.Random) -> str:
        """The first min_query_length .. max_query_length tokens of a review, drawn uniformly, both included.

        DIFFERS: the released code leaves the maximum out, and drops reviews of up to 100 or 200 characters.
        """
        n = rng.randint(self.cfg.min_query_length, self.cfg.max_query_length)
        opening = review[:64 * self.cfg.max_query_length]       # enough; whole reviews would cost minutes
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [OBSERVER_TEMPLATE.format(query=query, response=response)
                for query, response in zip(queries, responses, strict=True)]

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        texts = [query + response for query, response in zip(queries, responses, strict=True)]
        return self.reward_model(texts)
