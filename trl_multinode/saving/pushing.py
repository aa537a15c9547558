"""`CheckedHub`: the two calls that transformers' Trainer makes of `HfApi`, with wrong files never sent and failed
pushes tried again, then told with the command that repeats them.

What huggingface_hub 1.33 tries again by itself: the list of files and their uploads, five times in 23 s, after 408,
429, 5xx or a cut connection. Not the commit, nor the creation of a repository. It has no timeout.
"""

import copy
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session

from ..errors import HubPushError

WAITS_S = (1.0, 4.0, 16.0)  # between the tries of one push
LIMIT_S = 600.0  # after the beginning of the first that failed, no other one begins
STALL_S = 300.0  # without a byte of an answer; huggingface_hub would wait for ever
# Conflicts too (409, 412): another commit came first, and the next try starts from it
WORTH_ANOTHER_TRY = (408, 409, 412, 425, 429, 500, 502, 503, 504)
LONGEST_REASON = 300  # characters of a server's answer in a message
CURES = {
    401: "Log in with `hf auth login`, or give a token that may write in `HF_TOKEN` or `hub_token`.",
    403: "Give a token that may write to this repository in `HF_TOKEN` or `hub_token`.",
    404: "Look at `hub_model_id` and `hub_revision`, and whether the token may see the repository.",
    409: "Something else commits to this repository; wait for it.",
}
NOT_PUSHED = ["_*", "checkpoint-*"]  # as transformers has it
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Of one trainer's pushes."""

    where: str  # "node 0, rank 0"
    output_dir: Path
    must_succeed: bool
    token: str | None  # `hub_token`
    check: Callable[[Path], None]  # raises `SavedWeightsError`


class CheckedHub:
    """
    Stands in for `HfApi` while the Trainer pushes. Only the main process has one.

    Args:
        api (`HfApi`):
            What it asks in turn.
        settings ([`Settings`]):
            Of the trainer.

    Raises (from its methods):
        `SavedWeightsError`: before anything is sent, if the weights in a folder are not the trained model.
        `HubPushError`: after the last try, from `create_repo`, and from pushes if they must succeed (of a push in the
        background its `Future` has it); without, the same message is printed at once.
    """

    def __init__(self, api, settings: Settings):
        self._api = api
        self._settings = settings

    def create_repo(self, repo_id: str, *, token: str | None = None, **keywords: Any):
        token = token or self._settings.token
        push = {"repo_id": repo_id, "folder_path": self._settings.output_dir, "ignore_patterns": NOT_PUSHED}
        try:
            return self._try_often(lambda: self._api.create_repo(repo_id, token=token, **keywords), token)
        except HubPushError as error:
            raise HubPushError(
                f"{self._settings.where}: the repository {repo_id} could not be created or found: {error} Nothing is "
                f"lost: the model is saved in {self._settings.output_dir}, and every push tries again. Once it is "
                f"saved, you can push with `trainer.push_to_hub()`, or from a shell:\n    {command(push)}"
            ) from None

    def upload_folder(self, *, run_as_future: bool = False, token: str | None = None, **push: Any):
        """The Trainer's keywords. Returns what `HfApi.upload_folder` returns, or `None` after a failure."""
        if push["repo_id"] is None:
            return None  # its creation failed, and that was told
        self._settings.check(Path(push["folder_path"]))
        push["token"] = token or self._settings.token
        return self._api.run_as_future(self._push, push, True) if run_as_future else self._push(push)

    def _push(self, push: dict[str, Any], in_background: bool = False):
        try:  # a copy, because huggingface_hub adds patterns of its own to the list at every try
            return self._try_often(lambda: self._api.upload_folder(**copy.deepcopy(push)), push["token"])
        except HubPushError as error:
            failure = HubPushError(
                f"{self._settings.where}: the push of {push['folder_path']} to {push['repo_id']} "
                f"({push['commit_message']!r}) failed: {error} Nothing is lost: the files are in that folder. Push "
                f"them again with `trainer.push_to_hub()`, or from a shell:\n    {command(push)}"
            )
        if in_background or not self._settings.must_succeed:
            tell(failure)
        if self._settings.must_succeed:
            raise failure
        return None

    def _try_often(self, action: Callable[[], T], token: str | None) -> T:
        """Raises `HubPushError` with the reason alone."""
        start, waits = time.monotonic(), iter(WAITS_S)
        tries = 0
        while True:
            tries += 1
            try:
                limit_silence()
                return action()
            except Exception as error:  # whatever it was, the run goes on and the files are there
                reason = hide(describe(error), token, self._settings.token, get_token())
                wait = next(waits, None) if is_passing(error) else None
                seconds = time.monotonic() - start
                if wait is None or seconds + wait > LIMIT_S:
                    raise HubPushError(
                        f"{reason} ({counted(tries)} in {seconds:.0f} s). {cure(error)}".strip()
                    ) from None
            tell(f"{self._settings.where}: the Hub did not take a request: {reason}. Trying again in {wait:g} s.")
            time.sleep(wait)


def command(push: dict[str, Any]) -> str:
    """What a user types to push the same again; the token is not in it."""
    words = ["hf", "upload", push["repo_id"], str(push["folder_path"]), push.get("path_in_repo") or "."]
    for pattern in push.get("ignore_patterns") or ():
        words += ["--exclude", pattern]
    if push.get("revision"):
        words += ["--revision", push["revision"]]
    if push.get("commit_message"):
        words += ["--commit-message", push["commit_message"]]
    return shlex.join(words)


def tell(what: object) -> None:
    print(f"[trl_multinode] {what}", flush=True)


def counted(tries: int) -> str:
    return "1 try" if tries == 1 else f"{tries} tries"


def limit_silence() -> None:
    """Of the client that all calls of huggingface_hub share, unless somebody has limited it already."""
    session = get_session()
    if session.timeout == httpx.Timeout(None):
        session.timeout = httpx.Timeout(STALL_S)


# ---- errors ---------------------------------------------------------------------------------------------------------


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An upload's own error comes wrapped ("Error while uploading 'model.safetensors' to the Hub.")."""
    while error is not None:
        yield error
        error = error.__cause__


def status_of(error: BaseException) -> int | None:
    return next((one.response.status_code for one in causes(error) if isinstance(one, HfHubHTTPError)), None)


def is_passing(error: BaseException) -> bool:
    """Whether another try may find it gone: the server's own trouble, a conflict, the network."""
    cut = any(isinstance(one, httpx.TransportError) for one in causes(error))
    return cut or status_of(error) in WORTH_ANOTHER_TRY


def describe(error: BaseException) -> str:
    root = next((one for one in causes(error) if isinstance(one, HfHubHTTPError | httpx.TransportError)), error)
    text = re.sub(r"For more information check: \S+", "", str(root))
    text = " ".join(text.split()).rstrip(".")
    text = text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + "..."
    return f"{type(root).__name__}: {text}"


def cure(error: BaseException) -> str:
    return CURES.get(status_of(error) or 0, "")


def hide(text: str, *secrets: str | None) -> str:
    """Without tokens, and without the queries of addresses, which hold signatures of the storage."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\"]*", r"\1?***", text)
