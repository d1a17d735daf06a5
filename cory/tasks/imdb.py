"""The IMDB task: continue the opening of a review so that a sentiment classifier finds it positive."""
from collections import defaultdict

import torch
from transformers import AutoModelForSequenceClassification

from cory.errors import UserError
from cory.loading import load_pretrained
from cory.tasks.task import Task


class SentimentReward:
    """The raw logit of a classifier's positive class, or the only one of a reward model, in float32."""

    def __init__(self, name: str, device: torch.device):
        model, self.tokenizer = load_pretrained(AutoModelForSequenceClassification, name, dtype=torch.float32)
        labels = {index: str(label).lower() for index, label in model.config.id2label.items()}
        positive = [index for index, label in labels.items() if "pos" in label]
        if len(labels) == 1:
            positive = [0]
        if len(positive) != 1:
            raise UserError("reward_model", name, f"one label of its id2label must be positive, of {labels}")
        config = model.config.get_text_config()
        if config.pad_token_id is None:             # without one, decoders refuse batches
            config.pad_token_id = -1                # a token that no text has
        self.model = model.to(device)
        self.positive = positive[0]

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> list[float]:
        """Texts of equal length are read together, since some models would read padding, too."""
        # a control token that a text spells out, as `[SEP]`, is read as text
        encoded = self.tokenizer(texts, split_special_tokens=True)
        by_length = defaultdict(list)
        for i, ids in enumerate(encoded["input_ids"]):
            by_length[len(ids)].append(i)
        rewards = torch.zeros(len(texts))
        for same in by_length.values():
            for start in range(0, len(same), 512):          # `evaluate` asks for many at once
                rows = same[start:start + 512]
                batch = {}
                for name, values in encoded.items():
                    chosen = [values[i] for i in rows]
                    batch[name] = torch.tensor(chosen, device=self.model.device)
                logits = self.model(**batch).logits
                rewards[rows] = logits[:, self.positive].cpu()
        return rewards.tolist()


class Imdb(Task):
    """Queries are the first few tokens of reviews; the reward is `reward_model([query + response, ...])`."""

    def __init__(self, cfg, data, model):
        super().__init__(cfg, data, model)
        self.reward_model = SentimentReward(cfg.reward_model, model.device)

    def query(self, review, rng):
        """The first min_query_length .. max_query_length tokens of a review, drawn uniformly, inclusive.
        DIFFERS: the released code excludes the maximum, and drops reviews of up to 100 or 200 characters.
        """
        n = rng.randint(self.cfg.min_query_length, self.cfg.max_query_length)
        opening = review[:64 * self.cfg.max_query_length]       # enough; whole reviews would cost minutes
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)

    def observer_prompts(self, queries, responses):
        return [f'I can make this sentence "{query}{response}" more positive: {query}'      # released code
                for query, response in zip(queries, responses, strict=True)]

    def compute_rewards(self, queries, responses):
        texts = [query + response for query, response in zip(queries, responses, strict=True)]
        return self.reward_model(texts)
