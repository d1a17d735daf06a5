"""Hugging Face's Hub and libraries: names that are no local path, a Hub that does not answer, and what the
libraries print and raise.
"""
import os
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress

from huggingface_hub import constants, get_session
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.utils import logging as transformers_logging

from cory.errors import UserError, printable

# Seconds to wait for the first answer and for later ones: 10, or what the environment sets.
FIRST, LATER = constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT

asked: set[str] = set()         # endpoints that were asked in this process


def with_revision(name: str) -> tuple[str, str | None]:
    """`gpt2@REVISION` as (`gpt2`, `REVISION`): a commit, a branch or a tag of the Hub. Without one, and for a
    path that is there, (`name`, None).
    """
    place, at, revision = name.rpartition("@")
    return (place, revision) if at and not os.path.lexists(name) else (name, None)


def require_hub_name(field: str, name: str) -> None:
    """A name that is nothing here can be one of the Hub's. Raises `UserError` for a mistyped path."""
    folder, way_out = os.path.dirname(name), "no such file or folder; mend the path"
    if os.path.lexists(name):
        raise UserError(field, name, "is a link to nothing, or to itself; mend the link")
    place, revision = with_revision(name)
    if revision is not None and (os.path.exists(place) or not revision):
        raise UserError(field, name, "only a name of the Hub can have a revision; leave out the @")
    try:
        validate_repo_id(place)
    except HFValidationError as error:
        raise UserError(field, name[:200], way_out) from error
    if name.endswith((".jsonl", ".json", ".csv", ".parquet", ".safetensors")):
        raise UserError(field, name, way_out)
    if os.path.isdir(folder):
        raise UserError(field, name, f"{way_out}, or take it from the Hub in a place without a {folder}/")


def reach(name: str) -> None:
    """Before a library asks the Hub for what may be a name of it: asks whether it answers, once a process.

    If not, its libraries are offline from then on: they find what they have cached, and wait no more. Their
    own limits do not cover every request: some would wait for ever.
    """
    if os.path.exists(name) or constants.is_offline_mode() or constants.ENDPOINT in asked:
        return
    asked.add(constants.ENDPOINT)
    print(f"waiting for the Hub ({name}), at most {FIRST + 5} s", flush=True)
    if answers(FIRST):
        bound(LATER)
    else:
        go_offline()


def answers(seconds: float) -> bool:
    """Whether the Hub answers in time. In a thread: nothing else ends the look-up of its address."""
    answer = []

    def ask():
        with suppress(Exception):
            answer.append(get_session().head(constants.ENDPOINT, timeout=seconds).status_code)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answer) and answer[0] not in (502, 503, 504)        # of a proxy that cannot reach it


def bound(seconds: float) -> None:
    """Later requests wait no longer than that; one tried again after such a silence finds itself offline."""
    unanswered = []             # when each request after the last answer began

    def begin(request):
        unanswered.append(time.monotonic())
        if unanswered[-1] - unanswered[0] >= seconds:
            go_offline()
        request.extensions["timeout"] = dict.fromkeys(request.extensions["timeout"], seconds)

    hooks = get_session().event_hooks
    hooks["request"].insert(0, begin)
    hooks["response"].append(lambda response: unanswered.clear())


def go_offline() -> None:
    constants.HF_HUB_OFFLINE = True                 # of huggingface_hub and transformers, which ask it
    if "datasets" in sys.modules:                   # copies it when it is imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


@contextmanager
def quiet():
    """Without the libraries' reports of many lines: what goes wrong is raised, and said in one."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(100)             # above CRITICAL: nothing
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers_logging.set_verbosity(level)


def short_message(error: Exception) -> str:
    """An error of a library in one short line."""
    return printable(f"{type(error).__name__}: {error}")[:240]
