"""How an answer is read, by OpenAI's rule (arXiv:2110.14168): it is the number after the first `#### `. The
metric `accuracy` still goes by the last number.

    python train_gsm8k.py --method cory --checker examples.parts.checker:after_hashes
"""
import re


def after_hashes(response):
    """The answer, as a number or its text, or None."""
    found = re.search(r"#### (-?[0-9.,]+)", response)
    if found is None:
        return None
    return found[1]
