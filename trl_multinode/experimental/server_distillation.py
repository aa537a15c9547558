"""TRL's experimental distillation from a teacher on a vLLM server, with the student on the engines of every node."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
from trl import DistillationTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from ..config import GRPO_ONLY, NO_LOGPROBS, NodeFields
from ..errors import ConfigurationError
from ..host import NodeHost
from ..trainers import MultiNodeDistillationTrainer

WAIT_S = 60.0  # TRL waits as long for a server that is still starting, but only once the student is loaded
ANSWER_S = 5.0
SCHEMES = ("http://", "https://")


@dataclass
class MultiNodeServerDistillationConfig(NodeFields, ServerDistillationConfig):
    """TRL's `ServerDistillationConfig` with the settings and the three changed defaults of [`NodeFields`]."""

    _not_for = GRPO_ONLY | NO_LOGPROBS


class MultiNodeServerDistillationTrainer(MultiNodeDistillationTrainer, ServerDistillationTrainer):
    """
    TRL's `ServerDistillationTrainer` with the same arguments; every node's engines generate the student's
    completions. The teacher stays on its vLLM server: every rank sends it the tokens of each micro-batch, and every
    node must reach it.
    """

    _trl, _config = ServerDistillationTrainer, MultiNodeServerDistillationConfig
    _rounds_of = DistillationTrainer

    def _check_call(self, host: NodeHost, settings: Any, call: dict[str, Any]) -> None:
        super()._check_call(host, settings, call)
        # TRL appends "/health"; a server has no "//health", and TRL repeats the request without a limit
        settings.teacher_model_server_url = settings.teacher_model_server_url.rstrip("/")
        if host.topology.is_local_main:
            check_teacher(settings.teacher_model_server_url, str(host.topology))


def check_teacher(url: str, where: str, wait_s: float = WAIT_S) -> None:
    """Wait for a healthy teacher server; raise `ConfigurationError` if there is none `wait_s` seconds later."""
    deadline = time.monotonic() + (wait_s if url.startswith(SCHEMES) else 0.0)
    while (problem := problem_of(url)) is not None:
        if time.monotonic() >= deadline:
            raise ConfigurationError(
                f"{where}: no healthy vLLM server at `teacher_model_server_url` {url!r} within {wait_s:.0f} "
                f"s: {problem}.",
                setting="teacher_model_server_url",
                got=url,
                cure="Start it with `vllm serve TEACHER --host 0.0.0.0 --port 8000`, and give a URL that "
                "every node reaches: not `localhost`, and no port that a firewall blocks.",
            )
        time.sleep(min(1.0, wait_s))


def problem_of(url: str) -> str | None:
    """Return what is wrong with the server at `url`, or `None` if it is healthy."""
    if not url.startswith(SCHEMES):
        return "a URL begins with http:// or https://"
    try:
        status = httpx.get(f"{url}/health", timeout=ANSWER_S, follow_redirects=True).status_code
    # refused, unknown host, too late, not HTTP; not a URL
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
    ) as error:
        return str(error) or type(error).__name__
    return None if status == 200 else f"it answers /health with HTTP status {status}"
