"""The IMDB task: continue the opening of a review so that a sentiment classifier finds it positive."""
import math
import random
from typing import Callable

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from cory.config import ImdbConfig
from cory.ppo.loading import load_pretrained, model_errors
from cory.ppo.model import LanguageModel
from cory.tasks.task import Data, Task

OBSERVER_TEMPLATE = 'I can make this sentence "{query}{response}" more positive: {query}'     # released code


class SentimentReward:
    """The raw logit of a classifier's positive class, one per text; unbounded. Raises `UserError` for one
    that cannot take texts of `longest` tokens, or that scores a text otherwise beside a longer one.
    """

    def __init__(self, name: str, device: torch.device, longest: int = 0):
        with model_errors("reward_model", name) as refused:
            self.model, self.tokenizer = load_pretrained(refused, AutoModelForSequenceClassification, name)
            if self.tokenizer.pad_token is None:
                raise refused("its tokenizer has no padding token to score texts together; set pad_token")
            self.positive = positive_label(refused, self.model.config)
            positions = getattr(self.model.config, "max_position_embeddings", None) or 10**9
            self.limit = min(positions, self.tokenizer.model_max_length)
            need = longest + self.tokenizer.num_special_tokens_to_add()
            if self.limit < need:
                raise refused(f"takes {self.limit} tokens, and a query with its response can have {need}; "
                              "lower --max_query_length or --max_response_length, or name another")
            self.model.eval().requires_grad_(False).to(device)
            together, alone = self(["good", "a bad film " * (need + 8)])[0], self(["good"])[0]
            if not math.isclose(together, alone, rel_tol=1e-2, abs_tol=1e-2):       # nor are NaN or infinity
                raise refused(f"scores a text {together} beside a longer one and {alone} alone; set "
                              "pad_token_id in its config.json to the tokenizer's, or load other weights")

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> list[float]:
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=self.limit,
                               return_tensors="pt")
        batch = batch.to(self.model.device)
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, self.positive].tolist()


def positive_label(refused: Callable, config: PretrainedConfig) -> int:
    labels = {index: str(label) for index, label in config.id2label.items()}
    positive = [index for index, label in labels.items() if label.lower().startswith("pos")]
    if len(positive) != 1 or sorted(labels) != [*range(len(labels))]:
        raise refused(f"needs labels 0, 1, ... in its config.json, one of which begins 'pos', and has "
                      f"{str(labels)[:200]}")
    return positive[0]


class Imdb(Task):
    """Queries are the first few tokens of reviews; the reward is `reward_model([query + response, ...])`."""

    def __init__(self, cfg: ImdbConfig, data: Data, model: LanguageModel, reward_model: Callable = None):
        super().__init__(cfg, data, model)
        template = len(self.tokenizer(OBSERVER_TEMPLATE)["input_ids"])
        self.require_context(template + 2 * cfg.max_query_length, model, "shorten queries or responses")
        longest = cfg.max_query_length + cfg.max_response_length
        self.reward_model = reward_model or SentimentReward(cfg.reward_model, model.device, longest)

    def query(self, review: str, rng: random.Random) -> str:
        """The first min_query_length .. max_query_length tokens of a review, drawn uniformly, both included.

        DIFFERS: the released code leaves the maximum out, and drops reviews of up to 100 or 200 characters.
        """
        n = rng.randint(self.cfg.min_query_length, self.cfg.max_query_length)
        opening = review[:64 * self.cfg.max_query_length]       # enough; whole reviews would cost minutes
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)

    def is_seen_in_training(self, query: str) -> bool:
        """Whether a training review begins with the query."""
        return any(review.startswith(query) for review in self.train)

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [OBSERVER_TEMPLATE.format(query=query, response=response)
                for query, response in zip(queries, responses, strict=True)]

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        texts = [query + response for query, response in zip(queries, responses, strict=True)]
        return self.reward_model(texts)
