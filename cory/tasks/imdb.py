"""The IMDB task: continue the opening of a review so that a sentiment classifier finds it positive."""
import random
from functools import partial
from typing import Callable

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cory.config import ImdbConfig
from cory.errors import UserError
from cory.loading import load_weights, model_errors
from cory.ppo.model import LanguageModel
from cory.tasks.task import Data, Task

OBSERVER_TEMPLATE = 'I can make this sentence "{query}{response}" more positive: {query}'     # released code


class SentimentReward:
    """The raw logit of a classifier's positive class, one per text; unbounded."""

    def __init__(self, name: str, device: torch.device):
        with model_errors("reward_model", name):
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self.model = load_weights(AutoModelForSequenceClassification, name)
        refused = partial(UserError, "reward_model", name)
        if self.tokenizer.pad_token is None:
            raise refused("its tokenizer has no padding token to score texts together; set pad_token")
        self.model.eval().requires_grad_(False).to(device)
        labels = {index: str(label) for index, label in self.model.config.id2label.items()}
        positive = [index for index, label in labels.items() if label.lower().startswith("pos")]
        if len(positive) != 1:
            raise refused(f"needs one label that begins 'pos'; labels found: {', '.join(labels.values())}")
        self.positive = positive[0]

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> list[float]:
        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        batch = batch.to(self.model.device)
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, self.positive].tolist()


class Imdb(Task):
    """Queries are the first few tokens of reviews; the reward is `reward_model([query + response, ...])`."""

    def __init__(self, cfg: ImdbConfig, data: Data, model: LanguageModel, reward_model: Callable = None):
        super().__init__(cfg, data, model)
        template = len(self.tokenizer(OBSERVER_TEMPLATE)["input_ids"])
        longest = template + 2 * (cfg.max_query_length + cfg.max_response_length)
        if longest > model.context_length:
            way_out = (f"an observer's prompt and response can reach {longest} tokens, the context has "
                       f"{model.context_length}; shorten queries or responses")
            raise UserError("max_response_length", cfg.max_response_length, way_out)
        self.reward_model = reward_model or SentimentReward(cfg.reward_model, model.device)

    def query(self, review: str, rng: random.Random) -> str:
        """The first min_query_length .. max_query_length tokens of a review, drawn uniformly, both included.

        DIFFERS: the released code leaves the maximum out, and drops reviews of up to 100 or 200 characters.
        """
        n = rng.randint(self.cfg.min_query_length, self.cfg.max_query_length)
        opening = review[:64 * self.cfg.max_query_length]       # enough; whole reviews would cost minutes
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [OBSERVER_TEMPLATE.format(query=query, response=self.cut(response))
                for query, response in zip(queries, responses, strict=True)]

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        texts = [query + response for query, response in zip(queries, responses, strict=True)]
        return self.reward_model(texts)
