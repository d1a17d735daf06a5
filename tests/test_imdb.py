"""The IMDB task: queries, the text that is scored, and classifiers that cannot be used."""
import json
import random
import shutil
from collections import Counter

import pytest
import torch
from conftest import END, byte_tokenizer
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

CPU = torch.device("cpu")
CLASSIFIER = ASSETS / "imdb/classifier"
BYTES = byte_tokenizer().backend_tokenizer
# Of Llama-2's kind: decoding drops the space that a text begins with.
WORDS = ("▁a", "▁story", "▁of", "▁wonder", "ful", END)
LLAMA = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], 5))
LLAMA.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
LLAMA.decoder = decoders.Metaspace(prepend_scheme="first")


def language_model(backend: Tokenizer) -> LanguageModel:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    return LanguageModel(BigramLM(torch.eye(len(tokenizer))), tokenizer)


def imdb(reviews: list[str], model: LanguageModel, **changes) -> Imdb:
    """A task that gives the scored texts themselves as rewards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cory.tasks.imdb.SentimentReward", lambda *_: list)
        return Imdb(settings(**changes), Data(reviews, [], reviews), model)


def test_held_out_queries_are_as_long_as_those_of_training():
    """Lengths are drawn from 2 .. 8: of 600 draws, 86 are expected of each."""
    reviews = [f"the film was {i}" for i in range(600)]
    task = imdb(reviews, language_model(BYTES), batch_size=600, mini_batch_size=600, eval_queries=600)
    training_queries, _ = task.batch(1)
    for queries in (task.held_out_queries, training_queries):
        lengths = Counter(len(query) for query in queries)
        assert lengths.keys() == {*range(2, 9)}
        assert min(lengths.values()) > 52
        assert max(lengths.values()) < 120
        assert all("the film was".startswith(query) for query in queries)


@pytest.mark.parametrize("backend", [BYTES, LLAMA], ids=["bytes", "llama"])
@pytest.mark.parametrize("opening", ["a story", "a story of wonder"])
def test_query_and_response_are_joined_as_the_model_wrote_them(backend, opening):
    review = "a story of wonderful"
    n = len(backend.encode(opening).ids)
    model = language_model(backend)
    task = imdb([review], model, min_query_length=n, max_query_length=n, eval_queries=1)
    query = task.query(review, random.Random(0))
    assert query == opening
    rest = backend.encode(review).ids[n:]
    responses = decode(model, model.encode([query]), [rest])
    assert task.compute_rewards([query], responses) == [review]
    prompt = f'I can make this sentence "{review}" more positive: {opening}'
    assert task.observer_prompts([query], responses) == [prompt]


def test_the_reward_is_the_raw_positive_logit_or_the_only_one_of_many_texts(tmp_path):
    """The many texts are read a part at a time."""
    one_label = shutil.copytree(CLASSIFIER, tmp_path / "one")
    torch.manual_seed(0)
    model = DistilBertForSequenceClassification.from_pretrained(
        one_label, num_labels=1, ignore_mismatched_sizes=True)
    model.save_pretrained(one_label)
    texts = ["the film was good", "one bad old dog of a story"]
    for folder in (CLASSIFIER, one_label):
        classifier = SentimentReward(str(folder), CPU)
        logits = []
        for text in texts:
            ids = classifier.tokenizer(text, return_tensors="pt")["input_ids"]
            logits.append(classifier.model(ids).logits[0, -1].item())
        assert abs(logits[0] - logits[1]) > 1e-3
        assert classifier(texts * 520) == pytest.approx(logits * 520, abs=1e-5)


# Each architecture takes the names that it knows.
SIZES = dict(
    vocab_size=257, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_labels=1,
    n_embd=32, n_layer=2, n_head=4, d_model=32, d_inner=64,
    embedding_size=32, intra_bottleneck_size=32,
    initializer_range=0.5, eos_token_id=256, pad_token_id=5,
    use_tpu_fourier_optimizations=False)
WITH_TOKEN_TYPES = ("xlnet", "deberta", "bert")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "xlnet", "mobilebert", "fnet", "deberta", "bert"])
def test_a_texts_reward_is_the_logit_of_that_text_alone(kind, side, tmp_path):
    """It does not depend on the other texts of a batch, even for models that read padding. It is computed in
    float32 even if the file is in bfloat16. The tokenizer appends EOS and names no padding, and the last
    token of a text has a type of its own.
    """
    names = ["input_ids"]
    if kind in WITH_TOKEN_TYPES:
        names.append("token_type_ids")
    tokenizer = byte_tokenizer(eos_token=END, padding_side=side, model_input_names=names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A:0 {END}:1", special_tokens=[(END, 256)])
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    random_model = AutoModelForSequenceClassification.from_config(CONFIG_MAPPING[kind](**SIZES))
    random_model.bfloat16().save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = ["good", "bad!", "a good film", "b", "one bad old dog of a story"]
    logits = []
    for text in texts:
        with torch.no_grad():
            logits.append(model(**tokenizer(text, return_tensors="pt")).logits.item())
    assert max(logits) - min(logits) > 1e-3
    classifier = SentimentReward(str(tmp_path), CPU)
    assert classifier(texts * 2) == pytest.approx(logits * 2, abs=3e-5)


def test_a_control_token_that_a_text_spells_out_is_text():
    classifier = SentimentReward(str(CLASSIFIER), CPU)
    rows = []

    def record(model, args, kwargs):
        rows.extend(kwargs["input_ids"].tolist())
    classifier.model.register_forward_pre_hook(record, with_kwargs=True)
    spelled_out = " ".join(classifier.tokenizer.all_special_tokens)
    classifier(["film", f"film {spelled_out}"])
    control = {*classifier.tokenizer.all_special_ids}
    plain, spelled = sorted(rows, key=len)
    assert len(plain) < len(spelled)
    plain_control = [x for x in plain if x in control]
    assert plain_control
    assert [x for x in spelled if x in control] == plain_control


@pytest.mark.parametrize("labels", [("LABEL_0", "LABEL_1"), ("POS", "very positive")])
def test_a_classifier_without_one_positive_label_is_refused(labels, tmp_path):
    shutil.copytree(CLASSIFIER, tmp_path, dirs_exist_ok=True)
    config = read(tmp_path / "config.json")
    config["id2label"] = dict(enumerate(labels))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="reward_model is .*: one label of its id2label must be positive"):
        SentimentReward(str(tmp_path), CPU)
