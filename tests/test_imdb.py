"""The IMDB task: queries, the text that is scored, and classifiers that cannot be used."""
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import BigramLM, read, settings
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)

from cory.config import ASSETS
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.ppo.sampling import decode
from cory.tasks.data import Data
from cory.tasks.imdb import Imdb, SentimentReward

CPU, END, CLASSIFIER = torch.device("cpu"), "<|endoftext|>", ASSETS / "imdb/classifier"
BYTES = byte_tokenizer().backend_tokenizer
# Of Llama-2's kind: decoding drops the space that a text begins with.
WORDS = ("▁a", "▁story", "▁of", "▁wonder", "ful", END)
LLAMA = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], 5))
LLAMA.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
LLAMA.decoder = decoders.Metaspace(prepend_scheme="first")


def imdb(train, test, raw=BYTES, reward_model=len, **changes) -> tuple[Imdb, LanguageModel]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END)
    model = LanguageModel(BigramLM(torch.eye(len(tokenizer))), tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cory.tasks.imdb.SentimentReward", lambda *_: reward_model)
        return Imdb(settings(**changes), Data(train, [], test), model), model


def test_held_out_queries_are_as_long_as_those_of_training():
    train, test = ([f"the film was {verdict} {i}" for i in range(600)] for verdict in ("good", "bad"))
    task, _ = imdb(train, test, batch_size=600, mini_batch_size=600, eval_queries=600)
    for queries in (task.held_out_queries, task.batch(1)[0]):
        lengths = Counter(map(len, queries))                    # 600 draws from 2 .. 8: 86 expected of each
        assert sorted(lengths) == [*range(2, 9)] and all(52 < n < 120 for n in lengths.values())
        assert all("the film was".startswith(query) for query in queries)


@pytest.mark.parametrize("raw", [BYTES, LLAMA], ids=["bytes", "llama"])
@pytest.mark.parametrize("opening", ["a story", "a story of wonder"])
def test_query_and_response_are_joined_as_the_model_wrote_them(raw, opening):
    review, n, scored = "a story of wonderful", len(raw.encode(opening).ids), []
    task, model = imdb([review], [review], raw, lambda texts: scored.extend(texts) or [0.0],
                       min_query_length=n, max_query_length=n, eval_queries=1)
    query = task.query(review, random.Random(0))
    response, = decode(model, model.encode([query]), [raw.encode(review).ids[n:]])
    task.reward([query], [response])
    assert query == opening and scored == [review]
    expected = f'I can make this sentence "{review}" more positive: {opening}'
    assert task.observer_prompts([query], [response]) == [expected]


def test_the_reward_is_the_raw_positive_logit_or_the_only_one_whatever_stands_beside(tmp_path):
    """A decoder must find where a text ends, whatever its config calls padding, and positions count from the
    left. Many texts are read a part at a time.
    """
    torch.manual_seed(0)
    GPT2ForSequenceClassification(GPT2Config(
        vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2, initializer_range=0.3, pad_token_id=5,
        id2label={0: "neg", 1: "pos"})).bfloat16().save_pretrained(tmp_path)
    byte_tokenizer(eos_token=END, padding_side="left").save_pretrained(tmp_path)        # padding is END, 256
    one = shutil.copytree(CLASSIFIER, tmp_path / "one")
    DistilBertForSequenceClassification.from_pretrained(
        one, num_labels=1, ignore_mismatched_sizes=True).save_pretrained(one)
    texts = ["the film was good", "one bad old dog of a story"]
    for folder in (CLASSIFIER, tmp_path, one):
        classifier = SentimentReward(str(folder), CPU)
        assert classifier.model.dtype == torch.float32
        ids = [classifier.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        logits = [classifier.model(row).logits[0, -1].item() for row in ids]
        assert abs(logits[0] - logits[1]) > 1e-3
        assert classifier(texts * 260) == pytest.approx(logits * 260, abs=1e-5)


def save_classifier(kind: str, folder: Path, **changes) -> str:
    """A random one of two layers, over bytes."""
    sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, id2label={0: "neg", 1: "pos"})
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIG_MAPPING[kind](**sizes | changes))
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.2)                          # so that every part of it is felt
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


DEPENDS = {             # on the texts beside a text
    "xlnet": dict(d_model=32, n_layer=2, n_head=4), "mobilebert": dict(embedding_size=32), "canine": {},
    "convbert": dict(embedding_size=32), "fnet": {}, "nystromformer": {}}


@pytest.mark.parametrize("kind", DEPENDS)
def test_a_classifier_that_looks_at_the_texts_beside_a_text_is_refused(kind, tmp_path):
    with pytest.raises(UserError, match="its logit of a text is .* alone and .* beside a longer one"):
        SentimentReward(save_classifier(kind, tmp_path, **DEPENDS[kind]), CPU)


def test_a_decoder_whose_config_is_nested_and_names_no_padding_finds_the_end_of_a_text(tmp_path):
    text = dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=None)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  image_size=28, patch_size=14)
    folder = save_classifier("gemma3", tmp_path, text_config=text, vision_config=vision)
    classifier = SentimentReward(folder, CPU)
    assert classifier(["good", "a good film"])[0] == pytest.approx(classifier(["good"])[0], abs=1e-4)


def test_of_a_long_text_the_beginning_is_scored_and_the_share_is_a_metric(tmp_path):
    """In the classifier's own tokens: here bytes, of which RoBERTa has 66 - 2 positions."""
    folder = save_classifier("roberta", tmp_path, max_position_embeddings=66, pad_token_id=1)
    classifier = SentimentReward(folder, CPU, max_tokens=64)
    task, _ = imdb(["a"], ["a"], reward_model=classifier, eval_queries=1)
    fits, good, bad = 60 * "a", 60 * "a" + " good", 60 * "a" + " bad"
    rewards = task.reward(4 * ["film"], [fits, good, bad, fits[1:]]).tolist()
    assert rewards[:3] == pytest.approx([rewards[0]] * 3, abs=1e-5) and abs(rewards[3] - rewards[0]) > 1e-3
    assert task.metrics(4 * ["film"], [fits, good, bad, fits]) == {"reward_truncated": 0.5}
    assert task.metrics(["film"], [fits]) == {"reward_truncated": 0}
    with pytest.raises(UserError, match="takes 64 tokens; a query with its response can have 65"):
        SentimentReward(folder, CPU, max_tokens=65)


def test_a_control_token_that_a_text_spells_out_is_text():
    classifier = SentimentReward(str(CLASSIFIER), CPU)
    control, plain = classifier.tokenizer.all_special_ids, classifier.encode(["film"])["input_ids"][0]
    spelled, = classifier.encode([f"film {' '.join(classifier.tokenizer.all_special_tokens)}"])["input_ids"]
    assert control and len(spelled) > len(plain)
    assert [x for x in spelled if x in control] == [x for x in plain if x in control]


@pytest.mark.parametrize("file, changes, says", [
    ("tokenizer_config.json", {"model_max_length": 24}, "takes 22 tokens; .* can have 23"),
    ("config.json", {"id2label": {0: "LABEL_0", 1: "LABEL_1"}}, "must have the word 'positive'"),
    ("config.json", {"id2label": {0: "OK", 1: "POSSIBLY SPAM"}}, "must have the word 'positive'"),
    ("config.json", {"id2label": {0: "POS", 1: "very positive"}}, "must have the word 'positive'")])
def test_a_classifier_that_cannot_be_used_is_refused(file, changes, says, tmp_path):
    shutil.copytree(CLASSIFIER, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(json.dumps(read(tmp_path / file) | changes))
    with pytest.raises(UserError, match=f"reward_model is .*{says}"):
        SentimentReward(str(tmp_path), CPU, max_tokens=23)
