"""The Hub's own layouts, from a Hub on this machine that ../shared/vcuda imitates."""
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import save_small
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from cory.errors import UserError
from cory.system.hub import require_hub_name, with_revision
from cory.tasks.data import load_columns

ROOT = Path(__file__).parents[1]
FAKE = ROOT.parent / "shared" / "vcuda" / "fakehub.py"
COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
pytestmark = pytest.mark.skipif(not FAKE.exists(), reason="no imitated Hub at ../shared/vcuda")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Environment of a process that takes the imitated Hub for the real one, and the file of its requests."""
    root = tmp_path_factory.mktemp("hub")
    save_small(root)
    (root / "lm").rename(root / "gpt2")
    (root / "classifier").rename(root / "distilbert")
    lm = AutoModelForCausalLM.from_pretrained(root / "gpt2")
    (root / "gpt2/model.safetensors").unlink()
    lm.save_pretrained(root / "gpt2", max_shard_size="40KB")
    assert len([*(root / "gpt2").glob("model-*.safetensors")]) > 1
    splits = {"train": "train-00000-of-00001", "test": "test-00000-of-00001"}
    for name, folder, columns in (("imdb", "plain_text", ["text"]),
                                  ("gsm8k", "main", ["question", "answer"])):
        (root / name / folder).mkdir(parents=True)
        for split, file in splits.items():
            openings = [json.loads(line)["text"] for line in (root / f"openings/{split}.jsonl").open()]
            frame = pd.DataFrame({column: [f"{text} #### 1" for text in openings] for column in columns})
            frame.to_parquet(root / name / folder / f"{file}.parquet")
        files = "".join(f"  - split: {split}\n    path: {folder}/{file}.parquet\n"
                        for split, file in splits.items())
        card = f"---\nconfigs:\n- config_name: {folder}\n  data_files:\n{files}---\n"
        (root / name / "README.md").write_text(card)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    requests = root / "requests"
    with requests.open("w") as file:
        server = subprocess.Popen([sys.executable, str(FAKE), str(port), str(root)], stderr=file)
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0",
                   "HF_HOME": str(root / "home"), "HF_HUB_DISABLE_XET": "1"}
    for _ in range(100):
        with socket.socket() as tried:
            if not tried.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    yield environment, requests
    server.kill()


OF_THE_HUB = """
import sys, train_imdb
from cory.tasks.data import load_columns
from cory.ppo.loading import load_language_model
train_imdb.main(sys.argv[1:])
print(*load_columns('openai/gsm8k', ['question', 'answer'], subset='main'))
load_language_model('meta-llama/Llama-2-7b-chat-hf')
"""


def test_models_and_data_of_the_hub_at_a_commit_a_subset_and_a_gated_model(hub, small_flags, tmp_path):
    """Sharded weights and parquet; each at the commit that is asked for."""
    environment, requests = hub
    flags = [*small_flags, "--iterations", "1", "--run_dir", str(tmp_path / "r"), "--model", f"gpt2@{COMMIT}",
             "--reward_model", f"lvwerra/distilbert-imdb@{COMMIT}", "--dataset", f"stanfordnlp/imdb@{COMMIT}"]
    done = subprocess.run([sys.executable, "-c", OF_THE_HUB, *flags], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "train test", done.stderr
    assert "is gated: accept its licence on the Hub and log in" in done.stderr
    asked = requests.read_text()
    for file in ("gpt2/resolve/{}/model-00001", "distilbert-imdb/resolve/{}/model.safetensors"):
        assert file.format(COMMIT) in asked and file.format("main") not in asked
    assert f"stanfordnlp/imdb/resolve/{COMMIT}" in asked or f"stanfordnlp/imdb/revision/{COMMIT}" in asked


def test_a_path_may_hold_an_at(tmp_path):
    assert with_revision("gpt2") == ("gpt2", None) and with_revision("a/b@v1") == ("a/b", "v1")
    (tmp_path / "x@y").mkdir()
    assert with_revision(str(tmp_path / "x@y")) == (str(tmp_path / "x@y"), None)
    assert constants.HF_HUB_OFFLINE         # of these tests' own process
    for name in (f"{tmp_path}/x@y@v1", "gpt2@"):
        with pytest.raises(UserError, match="only a name of the Hub can have a revision"):
            require_hub_name("model", name)
    with pytest.raises(UserError, match="needs the Hub for its revision; .* `hf download a/b --revision v1"):
        load_columns("a/b@v1", ["text"])
