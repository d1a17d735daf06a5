"""A task on your data: continue an opening so that a given word occurs. The first command writes some data.

    python -m examples.tasks.mention
    python train_imdb.py --method cory --task examples.tasks.mention:Mention --dataset runs/mention.jsonl
"""
import json
from pathlib import Path

from cory.tasks.data import load_columns
from cory.tasks.task import Task


class Mention(Task):
    columns = ["opening", "word"]           # what is read from each row

    def query(self, row, rng):
        """It must contain all that the reward depends on: the reward sees only the query and the response."""
        opening, word = row
        return f"{word}: {opening}"

    def observer_prompts(self, queries, responses):
        return [f"{query}{text} Or: {query}" for query, text in zip(queries, responses, strict=True)]

    def compute_rewards(self, queries, responses):
        rewards = []
        for query, text in zip(queries, responses, strict=True):
            word, _, _ = query.partition(":")
            rewards.append(float(word in text.lower()))
        return rewards


def main():
    openings = load_columns("bundled:imdb/openings", ["text"])["train"]
    words = ["good", "story", "time"]
    Path("runs").mkdir(exist_ok=True)
    with open("runs/mention.jsonl", "w") as file:
        for i, text in enumerate(openings):
            opening = " ".join(text.split()[:4])
            row = {"opening": opening, "word": words[i % 3]}
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
