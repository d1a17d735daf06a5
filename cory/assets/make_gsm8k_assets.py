"""Make what the `tiny` GSM8K preset ships: word problems, and a small Llama-architecture model half
taught to solve them.

    python -m cory.assets.make_gsm8k_assets problems --out build/gsm8k
    python -m cory.assets.make_gsm8k_assets lm       --out build/gsm8k

The model is fitted on problems of the training share (`cory.assets.word_problems`), in the prompts of
`cory.tasks.gsm8k` without an example, with the loss on answers alone. It stops part of the way, where it
calculates well and reads poorly, and half of the answers it learns from are the bare number without the
working, which it can seldom guess: reinforcement learning has to find out that working pays, and to read.
A share of the prompts carries a reference, right or with a mistake in it, so that the observer's prompt
is not strange to the model, as it is not to one of ordinary size. Nothing here was fitted on GSM8K
itself.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from cory.assets.pretraining import byte_level_tokenizer, fit, save
from cory.assets.word_problems import Problem, problem, wrong_answer
from cory.config import Gsm8kConfig
from cory.machine.device import prepare_device

CONTEXT = 2048  # tokens; rotary positions cost no weights


def make_problems(args):
    folder = Path(args.out) / "problems"
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("test", args.test)):
        rng = random.Random(f"{split} {args.seed}")
        rows = {
            made.question: made for made in (problem(rng, split == "test") for _ in range(2 * count))
        }  # no question twice
        (folder / f"{split}.jsonl").write_text(
            "".join(
                json.dumps({"question": made.question, "answer": made.answer}) + "\n"
                for made in list(rows.values())[:count]
            )
        )


def batches(tokenizer, rows: int, rng: random.Random, sums_first: int, worked: float, mix: list[float],
            right: float):
    """((B, L) token ids padded with EOS, (B, L) mask: 1 = token that is learned: those of an answer, its
    EOS included).

    Each batch is of one kind: bare problems, problems with a reference, or plain sums, which teach
    arithmetic at fewer tokens. The first `sums_first` batches are sums alone: what is left to learn is
    then reading. `mix` is how many batches of each kind there are to how many of the others. A share `right`
    of the references is right.
    """
    eos = tokenizer.eos_token_id
    told = lambda answer: answer if rng.random() < worked else answer[answer.index("####") :]
    for count in itertools.count():
        kind = (
            "sums"
            if count < sums_first
            else rng.choices(("bare", "reference", "sums"), weights=mix)[0]
        )
        if kind == "sums":
            prompts, answers = (
                [""] * rows,
                [" ".join(sums_of(problem(rng, held_out=False)) for _ in range(3)) for _ in range(rows)],
            )
        else:
            made = [problem(rng, held_out=False) for _ in range(rows)]
            if kind == "bare":
                prompts, answers = (
                    [pioneer_prompt(m.question) for m in made],
                    [told(m.answer) for m in made],
                )
            else:
                references = [told(m.answer if rng.random() < right else wrong_answer(rng, m)) for m in made]
                prompts, answers = (
                    [observer_prompt(m.question, r) for m, r in zip(made, references)],
                    [m.answer for m in made],
                )
        prompts = tokenizer(prompts)["input_ids"]
        answers = [
            ids + [eos] * (kind != "sums")
            for ids in tokenizer([" " + answer for answer in answers])["input_ids"]
        ]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers))
        ids = torch.tensor([p + a + [eos] * (width - len(p) - len(a)) for p, a in zip(prompts, answers)])
        mask = torch.tensor(
            [[0] * len(p) + [1] * len(a) + [0] * (width - len(p) - len(a)) for p, a in zip(prompts, answers)]
        )
        yield ids, mask


def sums_of(made: Problem) -> str:
    return made.answer.split(" ####")[0]


def loss_of(model, batch):
    ids, mask = batch
    hidden = model.model(ids[:, :-1]).last_hidden_state[mask[:, 1:].bool()]
    return F.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][mask[:, 1:].bool()])


def pioneer_prompt(question: str) -> str:
    """As in `cory.tasks.gsm8k` without the worked example; likewise the other."""
    return f"Question: {question} Answer:"


def observer_prompt(question: str, reference: str) -> str:
    return f"Question: {question} Reference: {reference.strip()} Answer:"


def new_model(args, rng: random.Random):
    """A Llama of random weights, and a tokenizer for problems and their prompts."""
    seen = [problem(rng, held_out=False) for _ in range(20_000)]
    tokenizer = byte_level_tokenizer(
        [f"{observer_prompt(m.question, wrong_answer(rng, m))} {m.answer}" for m in seen],
        args.vocab,
        CONTEXT,
        single_digits=True,
    )
    eos = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=int(args.width * 8 / 3) // 32 * 32,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        max_position_embeddings=CONTEXT,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=None,
        tie_word_embeddings=True,
        initializer_range=args.width**-0.5 / 2,
    )
    return LlamaForCausalLM(config), tokenizer


def make_lm(args):
    rng = random.Random(args.seed)
    model, tokenizer = new_model(args, rng)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    model.train()
    info = fit(
        model,
        batches(tokenizer, args.rows, rng, args.sums_first, args.worked, args.mix, args.right),
        loss_of,
        args.steps,
        args.lr,
        0.1,
        args.minutes,
        decay=0.0,
    )
    info["parameters"] = model.num_parameters()
    save(model, tokenizer, Path(args.out) / "lm", info, vars(args))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["problems", "lm"])
    parser.add_argument("--out", default="build/gsm8k", help="folder the assets are written to")
    parser.add_argument("--train", type=int, default=4000, help="training problems")
    parser.add_argument("--test", type=int, default=1000, help="held-out problems")
    parser.add_argument("--steps", type=int, default=940, help="optimizer steps: part of the way")
    parser.add_argument("--minutes", type=float, default=30, help="longest training time")
    parser.add_argument("--width", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--vocab", type=int, default=1024, help="vocabulary size")
    parser.add_argument("--rows", type=int, default=64, help="problems in a batch")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument(
        "--sums_first", type=int, default=600, help="batches of plain sums before the first problem"
    )
    parser.add_argument(
        "--worked",
        type=float,
        default=0.5,
        help="share of answers that show their working; the others are the number alone",
    )
    parser.add_argument(
        "--mix",
        nargs=3,
        type=float,
        default=[4, 2, 2],
        help="batches of bare problems, of problems with a reference, and of sums, to each other",
    )
    parser.add_argument("--right", type=float, default=0.5, help="share of the references that are right")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    prepare_device(Gsm8kConfig(), torch.device("cpu"))
    {"problems": make_problems, "lm": make_lm}[args.stage](args)


if __name__ == "__main__":
    main()
