"""The GSM8K task: prompts, rewards, data, and a run over real questions."""
from types import SimpleNamespace

import pytest
from conftest import byte_tokenizer, save_llama
from tokenizers.processors import ByteLevel, TemplateProcessing
from toys import error_line, require_same_runs, stopped

import cory.train as loop
import train_gsm8k
from cory.commands.evaluate import main as evaluate_main
from cory.config import Gsm8kConfig
from cory.errors import UserError
from cory.experiment.evaluation import evaluate
from cory.ppo import loading
from cory.ppo.loading import load_language_model
from cory.ppo.sampling import decode, encode_prompts, sample
from cory.tasks.gsm8k import Gsm8k


def gsm8k(problems, **changes) -> Gsm8k:
    small = dict(model=str(problems / "lm"), dataset=str(problems), batch_size=8, mini_batch_size=8,
                 gradient_accumulation_steps=1, eval_queries=8, max_response_length=12)
    cfg = Gsm8kConfig(**(small | changes))
    return Gsm8k(cfg, Gsm8k.load_data(cfg), load_language_model(cfg.model))


def template_tokenizer(template: str):
    """One whose encoding puts an end-of-text token before or behind each text."""
    tokenizer = byte_tokenizer(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<|endoftext|>", 256)])
    return tokenizer


# --- prompts ------------------------------------------------------------------------------------------------
EXAMPLE = ("Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. "
           "How many toys does he have now? Answer: Shawn started with 5 toys. If he got 2 toys each from "
           "his mom and dad, then that is 4 more toys. 5 + 4 = 9.")


def test_prompts_are_the_papers(problems):
    task = gsm8k(problems)
    assert task.pioneer_prompts(["How many?"]) == [EXAMPLE + " Question: How many? Answer:"]
    observer, = task.observer_prompts(["How many?"], [" 1 + 1 = 2.\n"])
    assert observer == EXAMPLE + " Question: How many? Reference: 1 + 1 = 2. Answer:"
    bare = gsm8k(problems, one_shot=False)
    assert bare.pioneer_prompts(["How many?"]) == ["Question: How many? Answer:"]
    assert bare.observer_prompts(["How many?"], [""]) == ["Question: How many? Reference:  Answer:"]


def test_a_chat_template_wraps_the_prompt_and_bos_is_written_once(problems, tmp_path):
    tokenizer = template_tokenizer("<|endoftext|> $A")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}")
    model = str(save_llama(tmp_path / "chat", tokenizer))
    task = gsm8k(problems, model=model, chat_template=True, one_shot=False)
    prompt, = task.pioneer_prompts(["How?"])
    assert prompt == "[user]Question: How? Answer:[assistant]"
    assert task.observer_prompts(["How?"], ["7"]) == ["[user]Question: How? Reference: 7 Answer:[assistant]"]
    ids = encode_prompts(load_language_model(model), [prompt], 5).ids_BP[0].tolist()
    assert ids.count(256) == 1 and ids[0] == 256
    # one that adds no BOS: the template's stays
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    model = str(save_llama(tmp_path / "chatml", tokenizer))
    task = gsm8k(problems, model=model, chat_template=True, one_shot=False)
    assert task.pioneer_prompts(["How?"]) == ["<|endoftext|>[user]Question: How? Answer:[assistant]"]


def test_a_response_that_grew_as_text_is_cut_for_the_observer(problems):
    """Sampled bytes that are no UTF-8 become signs of three bytes each; the prompt keeps within the context,
    and what leaves room there is not cut.
    """
    task, grown = gsm8k(problems), "\ufffd" * 12
    assert task.room >= 36 and task.cut(grown) == grown
    task.room = 12
    tokens = [len(task.tokenizer(text)["input_ids"]) for text in (grown, task.cut(grown))]
    assert tokens[0] == 36 and 8 <= tokens[1] <= 12 and task.cut("x" * 12) == "x" * 12
    run = SimpleNamespace(task=task, cfg=SimpleNamespace(knowledge_transfer=True))
    assert f"Reference: {task.cut(grown)} Answer:" in loop.prompts_for_observer(run, ["How?"], [grown])[0]
    long = "x" * 100                            # what a loop adds to a response stays
    assert f"Reference: {long} Answer:" in task.observer_prompts(["How?"], [long])[0]


# --- rewards ------------------------------------------------------------------------------------------------
def test_reward_is_1_for_the_right_number_and_metrics_count_the_rest(problems):
    task = gsm8k(problems)
    queries = task.batch(1).queries[:5]
    gold = [task.gold[q] for q in queries]
    responses = [f" so {gold[0]}.", f"#### {gold[1]}", f" {gold[2]} + 1 = {gold[2] + 1}", " none", ""]
    assert task.reward(queries, responses).tolist() == [1, 1, 0, 0, 0]
    assert task.metrics(queries, responses) == {"accuracy": 0.4, "strict_accuracy": 0.2, "unparsed": 0.4}
    strict = gsm8k(problems, checker="strict")
    assert strict.reward(queries, responses).tolist() == [0, 1, 0, 0, 0]
    assert strict.metrics(queries, responses) == {"accuracy": 0.4, "strict_accuracy": 0.2, "unparsed": 0.8}


def test_greedy_metrics_are_of_the_likeliest_answers_and_the_others_of_drawn_ones(problems, monkeypatch):
    task, seen = gsm8k(problems), []
    base = load_language_model(str(problems / "lm"))
    monkeypatch.setattr(task, "metrics", lambda queries, texts: seen.append(texts) or {})
    evaluate(base, base, task, task.cfg)
    drawn, greedy = seen
    prompts = encode_prompts(base, task.pioneer_prompts(task.held_out_queries), 12)
    likeliest = sample(base, prompts, 12, None)
    assert greedy == decode(base, likeliest.response_BT, likeliest.mask_BT) != drawn


def test_a_checker_of_ones_own_goes_by_name_and_may_return_text(problems, tmp_path, monkeypatch):
    (tmp_path / "my_checkers.py").write_text("def first(response):\n    return response.split()[0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = gsm8k(problems, checker="my_checkers:first")
    query = task.held_out_queries[0]
    responses = [f"{task.gold[query]}.0 or 5", f"x {task.gold[query]}"]
    assert task.reward([query] * 2, responses).tolist() == [1, 0]
    assert task.metrics([query] * 2, responses)["unparsed"] == 0.5


# --- data ---------------------------------------------------------------------------------------------------
def test_real_questions_load_from_every_layout(gsm8k_data, tmp_path):
    """A folder of .jsonl; the Hub's own layout, whose subset `main` lies in a folder of its name."""
    from datasets import load_dataset
    flat = Gsm8k.load_data(Gsm8kConfig(dataset=str(gsm8k_data)))
    assert [len(rows) for rows in flat] == [7473, 660, 659] and flat.validation[0].gold == 18
    for split in ("train", "test"):
        rows = load_dataset("json", data_files=str(gsm8k_data / f"{split}.jsonl"), split="train")
        for subset, some in (("main", rows), ("socratic", rows.select(range(9)))):  # the second is left alone
            folder = tmp_path / "hub" / subset
            folder.mkdir(parents=True, exist_ok=True)
            some.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    hub = Gsm8k.load_data(Gsm8kConfig(dataset=str(tmp_path / "hub")))
    assert hub == flat


# --- bad input ----------------------------------------------------------------------------------------------
ROW = '{"question": "a?", "answer": "#### 1"}\n'
BAD = {
    "no gold": (ROW + '{"question": "b?", "answer": "2"}\n', [],
                "(train), row 2': its answer does not end in '####'"),
    "two answers": (ROW + '{"question": "a?", "answer": "#### 2"}\n', [], "row 2': asks the question of"),
    "checker": (None, ["--checker", "regex"], "checker is 'regex': unknown; choose from last_number, strict"),
    "context": (None, ["--max_response_length", "600"],
                "max_response_length is 600: an observer's prompt has up to"),
    "chat": (None, ["--chat_template", "true"], "chat_template is True: the tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_exits_2_with_one_line_and_writes_nothing(case, problem_flags, tmp_path, capsys):
    content, flags, says = BAD[case]
    if content:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train.jsonl").write_text(content)
        flags = ["--dataset", str(tmp_path / "data")]
    flags = [*problem_flags, "--run_dir", str(tmp_path / "run"), *flags]
    assert says in error_line(train_gsm8k.main, flags, capsys)
    assert not (tmp_path / "run").exists()


def test_four_bits_train_resume_and_are_evaluated_on_a_cpu(problem_flags, tmp_path):
    pytest.importorskip("bitsandbytes", "0.50")
    flags = [*problem_flags, "--lora", "true", "--load_in_4bit", "true", "--num_ppo_epochs", "1"]
    whole = tmp_path / "whole"
    train_gsm8k.main([*flags, "--iterations", "2", "--run_dir", str(whole)])
    train_gsm8k.main(["--resume", "--run_dir", str(stopped(whole, tmp_path / "part"))])
    require_same_runs(whole, tmp_path / "part")
    evaluate_main([str(whole), "--samples", "1", "--k", "1"])


def test_four_bits_ask_for_bitsandbytes_and_are_nf4_on_the_gpu(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install .bitsandbytes>=0.50"):
        loading.storage_options("4bit", "cuda")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    options = loading.storage_options("4bit", "cuda")
    quantization = options["quantization_config"]
    assert quantization.load_in_4bit and quantization.bnb_4bit_quant_type == "nf4"
    assert options["device_map"] == {"": "cuda"}


def test_a_tokenizer_that_ends_every_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no EOS token, or adds it to every text"):
        load_language_model(str(save_llama(tmp_path / "m", template_tokenizer("$A <|endoftext|>"))))
