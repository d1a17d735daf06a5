"""The IMDB task: queries, the text that is scored, and classifiers that cannot be used."""
import json
import random
import shutil
from collections import Counter

import pytest
import torch
from conftest import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from toys import BigramLM, read, settings
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    DistilBertForSequenceClassification,
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


def test_the_reward_is_the_raw_positive_logit_or_the_only_one_of_many_texts(tmp_path):
    """Which are read a part at a time."""
    one = shutil.copytree(CLASSIFIER, tmp_path / "one")
    DistilBertForSequenceClassification.from_pretrained(
        one, num_labels=1, ignore_mismatched_sizes=True).save_pretrained(one)
    texts = ["the film was good", "one bad old dog of a story"]
    for folder in (CLASSIFIER, one):
        classifier = SentimentReward(str(folder), CPU)
        ids = [classifier.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        logits = [classifier.model(row).logits[0, -1].item() for row in ids]
        assert abs(logits[0] - logits[1]) > 1e-3
        assert classifier(texts * 520) == pytest.approx(logits * 520, abs=1e-5)


SIZES = dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_labels=1, max_position_embeddings=128, initializer_range=0.5, n_embd=32, n_layer=2, n_head=4,
             d_model=32, d_inner=64, embedding_size=32, intra_bottleneck_size=32, eos_token_id=256,
             use_tpu_fourier_optimizations=False, pad_token_id=5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "xlnet", "mobilebert", "fnet", "deberta", "bert"])
def test_a_texts_reward_is_the_models_own_logit_of_it_alone(kind, side, tmp_path):
    """Whatever stands beside it, for models that read padding, too, in float32, whatever the file holds. The
    tokenizer appends EOS and names no padding, and the last token of a text has a type of its own.
    """
    names = ["input_ids", "token_type_ids"] if kind in ("xlnet", "deberta", "bert") else ["input_ids"]
    tokenizer = byte_tokenizer(eos_token=END, padding_side=side, model_input_names=names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A:0 {END}:1", special_tokens=[(END, 256)])
    torch.manual_seed(0)
    sizes = {name: x for name, x in SIZES.items() if (kind, name) != ("xlnet", "max_position_embeddings")}
    random_model = AutoModelForSequenceClassification.from_config(CONFIG_MAPPING[kind](**sizes))
    random_model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts, alone = ["good", "bad!", "a good film", "b", "one bad old dog of a story"] * 2, []
    for text in texts:
        with torch.no_grad():
            alone.append(own(**tokenizer(text, return_tensors="pt")).logits.item())
    assert max(alone) - min(alone) > 1e-3
    assert SentimentReward(str(tmp_path), CPU)(texts) == pytest.approx(alone, abs=1e-5)


def test_a_control_token_that_a_text_spells_out_is_text():
    classifier = SentimentReward(str(CLASSIFIER), CPU)
    seen, control = [], classifier.tokenizer.all_special_ids
    classifier.model.register_forward_pre_hook(
        lambda _, args, named: seen.extend(named["input_ids"].tolist()), with_kwargs=True)
    classifier([f"film {' '.join(classifier.tokenizer.all_special_tokens)}", "film"])
    spelled, plain = sorted(seen, key=len, reverse=True)
    assert control and len(spelled) > len(plain)
    assert [x for x in spelled if x in control] == [x for x in plain if x in control]


@pytest.mark.parametrize("labels", [("LABEL_0", "LABEL_1"), ("POS", "very positive")])
def test_a_classifier_without_one_positive_label_is_refused(labels, tmp_path):
    shutil.copytree(CLASSIFIER, tmp_path, dirs_exist_ok=True)
    config = read(tmp_path / "config.json") | {"id2label": dict(enumerate(labels))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="reward_model is .*: one label of its id2label must be positive"):
        SentimentReward(str(tmp_path), CPU)
