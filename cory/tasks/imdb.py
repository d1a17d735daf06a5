"""The IMDB task: continue the opening of a review so that a sentiment classifier finds it positive."""
import random
import re
from statistics import fmean

import torch
from transformers import AutoModelForSequenceClassification

from cory.config import LARGEST, ImdbConfig
from cory.loading import TEXT, digest, load_pretrained, model_errors
from cory.ppo.model import LanguageModel
from cory.tasks.data import Data
from cory.tasks.task import Task


class SentimentReward:
    """The raw logit of a classifier's positive class, or the only one of a reward model, in float32. It reads
    `max_length` tokens of a text at most.
    """

    def __init__(self, name: str, device: torch.device, max_tokens: int = 0):
        with model_errors("reward_model", name):
            model, self.tokenizer = load_pretrained(AutoModelForSequenceClassification, name,
                                                    dtype=torch.float32)
            labels = model.config.id2label
            positive = [index for index, label in labels.items() if len(labels) == 1
                        or re.search(r"(?<![a-z])pos(itive)?(?![a-z])", str(label), re.IGNORECASE)]
            if len(positive) != 1:
                raise ValueError(f"one label must have the word 'positive' or 'pos', of {str(labels)[:200]}; "
                                 "name them in id2label of its config.json")
            self.max_length = min(self.tokenizer.model_max_length, positions_of(model))
            limit = self.max_length - self.tokenizer.num_special_tokens_to_add()
            if limit < max_tokens:
                raise ValueError(f"takes {limit} tokens; a query with its response can have {max_tokens}: "
                                 "lower --max_query_length or --max_response_length")
            self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
            self.tokenizer.padding_side = "right"                   # a text's positions are then its own
            for config in (model.config, model.config.get_text_config()):
                config.pad_token_id = self.tokenizer.pad_token_id   # by which a decoder finds a text's end
            self.model, self.positive = model.to(device), positive[0]
            texts = ["good", TEXT, 9 * TEXT]
            for text, beside in zip(texts, self(texts), strict=True):
                alone, = self([text])
                if not abs(alone - beside) < 0.02:
                    raise ValueError(f"its logit of a text is {alone:.3g} alone and {beside:.3g} beside a "
                                     "longer one, as it does not ignore padding on the right; take another "
                                     "kind of model")

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> list[float]:
        rewards = []
        for start in range(0, len(texts), 512):             # `evaluate` asks for many at once
            batch = self.encode(texts[start:start + 512], padding=True, return_tensors="pt", truncation=True,
                                max_length=self.max_length, return_token_type_ids=False)
            batch = batch.to(self.model.device)
            rewards += self.model(**batch).logits[:, self.positive].tolist()
        return rewards

    def encode(self, texts: list[str], **options):
        """Token ids, in which a control token that a text spells out, as `[SEP]`, is read as text."""
        return self.tokenizer(texts, split_special_tokens=True, **options)

    def truncated(self, texts: list[str]) -> float:
        """The share of texts that are longer than the classifier takes."""
        return fmean(len(ids) > self.max_length for ids in self.encode(texts)["input_ids"])


def positions_of(model: torch.nn.Module) -> int:
    """The number of tokens that a classifier has positions for: RoBERTa's kind leaves the first ones out."""
    size = getattr(model.config.get_text_config(), "max_position_embeddings", None) or -1
    unused = [module.padding_idx + 1 for name, module in model.named_modules()
              if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None]
    return size - max(unused, default=0) if size > 0 else LARGEST       # XLNet's is -1: any number


class Imdb(Task):
    """Queries are the first few tokens of reviews; the reward is `reward_model([query + response, ...])`."""

    def __init__(self, cfg: ImdbConfig, data: Data, model: LanguageModel):
        super().__init__(cfg, data, model)
        max_tokens = cfg.max_query_length + cfg.max_response_length
        self.reward_model = SentimentReward(cfg.reward_model, model.device, max_tokens)

    def digests(self) -> dict[str, str]:
        classifier = self.reward_model
        about = classifier.encode([TEXT])["input_ids"], classifier.positive, classifier.max_length
        return super().digests() | {"reward_model": digest(classifier.model.parameters(), about)}

    def query(self, review: str, rng: random.Random) -> str:
        """The first min_query_length .. max_query_length tokens of a review, drawn uniformly, inclusive.
        DIFFERS: the released code excludes the maximum, and drops reviews of up to 100 or 200 characters.
        """
        n = rng.randint(self.cfg.min_query_length, self.cfg.max_query_length)
        opening = review[:64 * self.cfg.max_query_length]       # enough; whole reviews would cost minutes
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        return [f'I can make this sentence "{query}{response}" more positive: {query}'      # released code
                for query, response in zip(queries, responses, strict=True)]

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float]:
        return self.reward_model(joined(queries, responses))

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """The share of texts that are cut before they are scored."""
        return {"reward_truncated": self.reward_model.truncated(joined(queries, responses))}


def joined(queries: list[str], responses: list[str]) -> list[str]:
    """The texts that are scored."""
    return [query + response for query, response in zip(queries, responses, strict=True)]
