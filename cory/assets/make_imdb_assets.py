"""Train what the `tiny` IMDB preset ships: a language model, a sentiment classifier, and review openings.

    python -m cory.assets.make_imdb_assets lm         --dataset stanfordnlp/imdb --out build/imdb
    python -m cory.assets.make_imdb_assets classifier --dataset stanfordnlp/imdb --out build/imdb
    python -m cory.assets.make_imdb_assets openings   --out build/imdb

`--dataset` is a local folder or a Hub name (stanfordnlp/imdb) with the columns `text` and `label`. Models
are fitted on the train split alone; the test split only measures. The openings are sampled from the
language model, so that no row of the data set is shipped. The two training stages write their options and
the figures they reached into `training.json`.

The shipped models were made with `lm --minutes 48 --rows 24 --lr 3e-3` and `classifier --minutes 7
--width 192 --layers 2 --lr 1e-3` on 2 CPU cores that also did other work. A schedule in minutes makes
the number of steps depend on the machine; to repeat a number of steps, pass `--steps` and a large
`--minutes`.

    python -m cory.assets.make_imdb_assets classifier --start build/smollm2 --layers 16 --rows 6 \
        --minutes 24 --lr 6e-4 --out build/smollm2

makes a better classifier of a language model: its first layers and a new head, trained by LoRA.
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from cory.assets.pretraining import EOS, byte_level_tokenizer, fit, save

CONTEXT = 256  # tokens the language model sees
LABELS = dict(id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})


def reviews(dataset: str, split: str) -> tuple[list[str], list[int]]:
    rows = load_dataset(dataset, split=split)
    return [" ".join(text.replace("<br />", " ").split()) for text in rows["text"]], list(rows["label"])


# --- language model ---
def lm_batches(documents: list[list[int]], rows: int, rng: random.Random):
    """Rows of CONTEXT tokens: half begin where a review begins (queries do), half anywhere in the stream."""
    stream, starts = [], []
    for document in rng.sample(documents, len(documents)):
        starts.append(len(stream))
        stream += document  # each ends in EOS
    stream = torch.tensor(stream)
    starts = [s for s in starts if s + CONTEXT + 1 <= len(stream)]
    while True:
        at = rng.sample(starts, rows // 2) + [
            rng.randrange(len(stream) - CONTEXT - 1) for _ in range(rows - rows // 2)
        ]
        yield torch.stack([stream[i : i + CONTEXT + 1] for i in at])


def lm_loss(model, tokens):
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_lm(args):
    texts, _ = reviews(args.dataset, "train")
    tokenizer = byte_level_tokenizer(texts, args.vocab, CONTEXT)
    eos = tokenizer.eos_token_id
    documents = [
        ids + [eos] for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ]
    print(f"{sum(map(len, documents)):,} tokens in {len(documents):,} reviews", flush=True)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 64,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=eos,
        eos_token_id=eos,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    print(f"{model.num_parameters():,} parameters", flush=True)
    info = fit(
        model,
        lm_batches(documents, args.rows, random.Random(args.seed)),
        lm_loss,
        args.steps,
        args.lr,
        0.1,
        args.minutes,
    )

    held_out = [
        ids + [eos]
        for ids in tokenizer(reviews(args.dataset, "test")[0], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
    ]
    model.eval()
    losses = []
    with torch.no_grad():
        for i, tokens in zip(range(40), lm_batches(held_out, 32, random.Random(0))):
            losses.append(lm_loss(model, tokens).item())
    info.update(
        held_out_loss_nats=round(sum(losses) / len(losses), 4),
        parameters=model.num_parameters(),
        train_tokens_seen=info["steps"] * args.rows * CONTEXT,
    )
    info["held_out_perplexity"] = round(math.exp(info["held_out_loss_nats"]), 2)
    model.config.use_cache = True
    save(model, tokenizer, Path(args.out) / "lm", info, vars(args))


# --- sentiment classifier ---
def train_wordpiece(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    piece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    piece.normalizer = normalizers.BertNormalizer(lowercase=True)
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.decoder = decoders.WordPiece()
    piece.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special))
    piece.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=piece,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
    )


def snippet_batches(documents, labels, rng: random.Random, rows: int, tokenizer):
    """Seven batches in eight: snippets of 8 to 32 tokens, half of them a review's opening. One in eight:
    128 to 384 tokens.
    """
    for count in iter(int, 1):
        long = rng.random() < 0.125
        picked = rng.choices(range(len(documents)), k=rows * 2 // 3 if long else rows * 8)
        length = rng.randint(128, 384) if long else rng.randint(8, 32)
        yield crops(documents, picked, length, rng, tokenizer), torch.tensor([labels[i] for i in picked])


def crops(documents, picked, length, rng, tokenizer):
    """Token ids of `length` tokens of each text, padded; half of the crops start where the text does."""
    rows = []
    for i in picked:
        start = 0 if rng.random() < 0.5 else rng.randrange(max(1, len(documents[i]) - length))
        rows.append(documents[i][start : start + length])
    special = tokenizer("")["input_ids"]  # [CLS] and [SEP], or none
    rows = [special[:1] + row + special[1:] for row in rows]
    width = max(map(len, rows))
    return torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])


def small_classifier(texts, args):
    tokenizer = train_wordpiece(texts, args.vocab)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        dim=args.width,
        n_layers=args.layers,
        n_heads=args.width // 64,
        hidden_dim=4 * args.width,
        max_position_embeddings=512,
        dropout=0.1,
        attention_dropout=0.0,
        seq_classif_dropout=0.3,
        activation="relu",
        **LABELS,
    )
    return tokenizer, DistilBertForSequenceClassification(config)


def classifier_of_language_model(args):
    tokenizer = AutoTokenizer.from_pretrained(args.start)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.start,
        num_hidden_layers=args.layers,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
        **LABELS,
    )
    model.score.float()
    return tokenizer, get_peft_model(
        model, LoraConfig(TaskType.SEQ_CLS, r=16, lora_alpha=32, target_modules="all-linear")
    )


def make_classifier(args):
    texts, labels = reviews(args.dataset, "train")
    tokenizer, model = classifier_of_language_model(args) if args.start else small_classifier(texts, args)
    encode = lambda batch: tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
    documents = encode(texts)
    print(f"{model.num_parameters():,} parameters", flush=True)

    def scores(tokens):
        return model(tokens, attention_mask=(tokens != tokenizer.pad_token_id).long()).logits.float()

    def loss_of(model, batch):
        tokens, target = batch
        if not args.start:
            keep = torch.rand(tokens.shape) > 0.1  # drop words, so that no single one decides
            tokens = torch.where(keep | (tokens < 4), tokens, 1)
        return F.cross_entropy(scores(tokens), target)

    rng = random.Random(args.seed)
    model.train()
    info = fit(
        model,
        snippet_batches(documents, labels, rng, args.rows, tokenizer),
        loss_of,
        args.steps,
        args.lr,
        0.1,
        args.minutes,
    )
    if args.start:
        model = model.merge_and_unload()

    test_texts, test_labels = reviews(args.dataset, "test")
    pick = random.Random(0).sample(range(len(test_texts)), 2000)
    documents, labels = encode([test_texts[i] for i in pick]), [test_labels[i] for i in pick]
    model.eval()
    accuracy = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bool(args.start)):
        for name, length in (("8", 8), ("16", 16), ("32", 32), ("510", 510)):
            right = 0
            for i in range(0, len(pick), 100):
                tokens = crops(documents, range(i, i + 100), length, random.Random(i), tokenizer)
                right += (scores(tokens).argmax(1) == torch.tensor(labels[i : i + 100])).sum().item()
            accuracy[name] = right / len(pick)
    info.update(held_out_accuracy_by_tokens=accuracy, parameters=model.num_parameters())
    save(model, tokenizer, Path(args.out) / "classifier", info, vars(args))


# --- openings ---
@torch.no_grad()
def make_openings(args):
    """Sample review openings from the language model (temperature 0.9); train and held-out share no first
    8 tokens.
    """
    folder = Path(args.out)
    lm = AutoModelForCausalLM.from_pretrained(folder / "lm")
    tokenizer = AutoTokenizer.from_pretrained(folder / "lm")
    start = tokenizer([EOS] * 512, return_tensors="pt")["input_ids"]  # a review begins where another ended
    torch.manual_seed(args.seed)
    seen, openings = set(), []
    while len(openings) < args.count:
        drawn = lm.generate(start, do_sample=True, temperature=0.9, top_k=0, max_new_tokens=24)[:, 1:]
        for text, ids in zip(tokenizer.batch_decode(drawn, skip_special_tokens=True), drawn):
            text = text.strip()
            key = tuple(tokenizer(text)["input_ids"][:8])
            is_whole = (ids != tokenizer.eos_token_id).all() and len(key) == 8 and "\ufffd" not in text
            if is_whole and key not in seen:
                seen.add(key)
                openings.append(text)
        print(f"{len(openings)} openings", flush=True)
    folder = folder / "openings"
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", openings[args.held_out : args.count]), ("test", openings[: args.held_out])):
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in rows)
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["lm", "classifier", "openings"])
    parser.add_argument(
        "--dataset", default="stanfordnlp/imdb", help="local folder or Hub name with columns text and label"
    )
    parser.add_argument("--start", help="language model that the classifier starts from")
    parser.add_argument("--out", default="build/imdb", help="folder the trained assets are written to")
    parser.add_argument(
        "--minutes", type=float, default=60, help="longest training time; the schedule shrinks to it"
    )
    parser.add_argument("--steps", type=int, default=100_000, help="most optimizer steps")
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--vocab", type=int, default=8192, help="vocabulary size")
    parser.add_argument("--rows", type=int, default=48, help="rows of 256 tokens in a language-model batch")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--count", type=int, default=12_000, help="openings in all")
    parser.add_argument("--held_out", type=int, default=2_000, help="openings of the test split")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    {"lm": make_lm, "classifier": make_classifier, "openings": make_openings}[args.stage](args)


if __name__ == "__main__":
    main()
