"""`CheckedHub` wraps the two `HfApi` methods that transformers' Trainer calls. It never sends wrong files, retries
after transient errors, and reports a failed push with the command that repeats it.

huggingface_hub 1.33 itself retries the listing of files and their uploads, five times in 23 s, after status 408, 429,
5xx or a cut connection. It retries neither the commit nor the creation of a repository, and it has no timeout.
"""

import copy
import re
import shlex
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi, RepoUrl, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session
from packaging.version import Version

from ..errors import HubPushError
from ..run.reporter import report

# huggingface_hub 2 sends its requests through httpx2, which has classes of its own under httpx's names
httpx = import_module("httpx2" if Version(huggingface_hub.__version__).major >= 2 else "httpx")

WAITS_S = (1.0, 4.0, 16.0)  # between the tries of one push
LIMIT_S = 600.0  # no try starts later than this after the start of the first
STALL_S = 300.0  # timeout without a byte of an answer; huggingface_hub would wait forever
# Includes the conflicts 409 and 412: another commit came first, and the next try starts from it.
WORTH_ANOTHER_TRY = (408, 409, 412, 425, 429, 500, 502, 503, 504)
# Errors without a status after which the next try may succeed. huggingface_hub also lists the checkpoints, and one of
# them may be deleted at that moment.
PASSING = httpx.TransportError | FileNotFoundError
LONGEST_REASON = 300  # maximum characters of a server's answer in a message
CURES = {
    401: "Log in with `hf auth login`, or give a token that may write in `HF_TOKEN` or `hub_token`.",
    403: "Give a token that may write to this repository in `HF_TOKEN` or `hub_token`.",
    404: "Check `hub_model_id` and `hub_revision`, and that the token may read the repository.",
    409: "Another process commits to this repository; wait for it.",
}
NOT_PUSHED = ["_*", "checkpoint-*"]  # the patterns of transformers' Trainer
T = TypeVar("T")


@dataclass(frozen=True, repr=False)  # its text would have the token
class CheckedHub:
    """
    Replacement for `HfApi` while the Trainer pushes. Only the main process calls its methods.

    Args:
        api (`HfApi`):
            Wrapped client.
        where (`str`):
            Node and rank, for messages.
        output_dir (`Path`):
            Folder of the trainer.
        must_succeed (`bool`):
            Value of `hub_push_must_succeed`.
        token (`str`, *optional*):
            Value of `hub_token`.
        check (`Callable[[Path], None]`):
            Function that raises `SavedWeightsError` if the weights in a folder are not the trained model.

    Raises (from its methods):
        `SavedWeightsError`: before anything is sent, if the weights in a folder are not the trained model.
        `HubPushError`: after the last try, from `create_repo`, and from pushes if they must succeed (a background push
        raises it through its `Future`). A push that runs in the background or need not succeed prints it.
    """

    api: HfApi
    where: str
    output_dir: Path
    must_succeed: bool
    token: str | None
    check: Callable[[Path], None]

    def create_repo(self, repo_id: str, *, token: str | None = None, **keywords: Any) -> RepoUrl:
        token = token or self.token
        push = {"repo_id": repo_id, "folder_path": self.output_dir, "ignore_patterns": NOT_PUSHED}
        try:
            return self._try_often(
                lambda: self.api.create_repo(repo_id, token=token, **keywords), token
            )
        except HubPushError as error:
            raise HubPushError(
                f"{self.where}: the repository {repo_id} could not be created or found: {error} Nothing is "
                f"lost: the model is saved in {self.output_dir}, and every push tries again. Once it is "
                f"saved, you can push with `trainer.push_to_hub()`, or from a shell:\n    {command(push)}"
            ) from None

    def upload_folder(
        self, *, run_as_future: bool = False, token: str | None = None, **push: Any
    ) -> CommitInfo | Future[CommitInfo | None] | None:
        """Check and push a folder with the Trainer's keywords; return `HfApi`'s result, or `None` after a failure."""
        if push["repo_id"] is None:
            return None  # the creation of the repository failed and was reported
        self.check(Path(push["folder_path"]))
        push["token"] = token or self.token
        return self.api.run_as_future(self._push, push, True) if run_as_future else self._push(push)

    def _push(self, push: dict[str, Any], in_background: bool = False) -> CommitInfo | None:
        try:  # a copy, because huggingface_hub appends its own patterns to the list at every try
            return self._try_often(
                lambda: self.api.upload_folder(**copy.deepcopy(push)), push["token"]
            )
        except HubPushError as error:
            failure = HubPushError(
                f"{self.where}: the push of {push['folder_path']} to {push['repo_id']} "
                f"({push['commit_message']!r}) failed: {error} Nothing is lost: the files are in that folder. Push "
                f"them again with `trainer.push_to_hub()`, or from a shell:\n    {command(push)}"
            )
        if in_background or not self.must_succeed:
            report(failure)
        if self.must_succeed:
            raise failure
        return None

    def _try_often(self, action: Callable[[], T], token: str | None) -> T:
        """Call `action`, retry transient errors, and raise `HubPushError` with the reason; callers add the rest."""
        start, waits = time.monotonic(), iter(WAITS_S)
        tries = 0
        while True:
            tries += 1
            try:
                limit_silence()
                return action()
            except Exception as error:  # any error: the files are saved, so the run can continue
                root = root_of(error)
                status = root.response.status_code if isinstance(root, HfHubHTTPError) else 0
                reason = hide(describe(root), token, self.token, get_token())
                is_passing = isinstance(root, PASSING) or status in WORTH_ANOTHER_TRY
                wait = next(waits, None) if is_passing else None
                seconds = time.monotonic() - start
                if wait is None or seconds + wait > LIMIT_S:
                    advice = CURES.get(status, "")
                    counted = "1 try" if tries == 1 else f"{tries} tries"
                    raise HubPushError(
                        f"{reason} ({counted} in {seconds:.0f} s). {advice}".strip()
                    ) from None
            report(
                f"{self.where}: a request to the Hub did not succeed: {reason}. Next try in {wait:g} s."
            )
            time.sleep(wait)


def command(push: dict[str, Any]) -> str:
    """Return the shell command that repeats a push, without the token."""
    words = [
        "hf",
        "upload",
        push["repo_id"],
        str(push["folder_path"]),
        push.get("path_in_repo") or ".",
    ]
    for pattern in push.get("ignore_patterns") or ():
        words += ["--exclude", pattern]
    if push.get("revision"):
        words += ["--revision", push["revision"]]
    if push.get("commit_message"):
        words += ["--commit-message", push["commit_message"]]
    return shlex.join(words)


def limit_silence() -> None:
    """Set a timeout on the client that all huggingface_hub calls share, unless it already has one."""
    session = get_session()
    if session.timeout == httpx.Timeout(None):
        session.timeout = httpx.Timeout(STALL_S)


# ---- errors ---------------------------------------------------------------------------------------------------------


def root_of(error: BaseException) -> BaseException:
    """Return the failed request or missing file that caused an error; the error itself if there is none.

    huggingface_hub wraps the error of an upload ("Error while uploading 'model.safetensors' to the Hub.").
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError | PASSING):
            return cause
        cause = cause.__cause__
    return error


def describe(root: BaseException) -> str:
    """Return the root cause of a failed request as one short line."""
    text = re.sub(r"For more information check: \S+", "", str(root))
    text = " ".join(text.split()).rstrip(".")
    text = text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + "..."
    return f"{type(root).__name__}: {text}"


def hide(text: str, *secrets: str | None) -> str:
    """Mask tokens, and the query strings of URLs, which contain storage signatures."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\"]*", r"\1?***", text)
