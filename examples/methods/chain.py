"""Four agents: each reads the response of the one before, and is trained on the sum of all four rewards.

    python train_imdb.py --method examples.methods.chain:Chain
"""
from cory.train import Cory


class Chain(Cory):
    agent_names = ("llm1", "llm2", "llm3", "llm4")
    roles = ("first", "second", "third", "fourth")
