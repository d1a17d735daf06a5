"""llm2 has another model and learning rate. Agents exchange only text, so tokenizers may differ, too. llm2's
base is logged as `base_llm2`; compare each agent with the base that it started from.

    python train_imdb.py --method examples.methods.differ:Differ
"""
from dataclasses import replace

from cory.train import Cory


class Differ(Cory):
    @staticmethod
    def agent_config(cfg, name):
        """Agents may differ in the settings that are made by `agent_setting`, see cory/config.py."""
        if name == "llm2":
            return replace(cfg, model="bundled:gsm8k/lm", learning_rate=5e-4)
        return cfg
