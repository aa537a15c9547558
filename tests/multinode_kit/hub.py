"""Model hub on the loopback interface: the part of the Hub's HTTP API that `push_to_hub` and `from_pretrained` use."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = "tester"
TIMEOUT_S = 30.0
LFS_SUFFIXES = (".safetensors", ".bin")
Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers


CUT, STALL = -1, -2  # values of `Fault.status` that are not HTTP statuses


@dataclass
class Fault:
    """Replacement for the answer to some requests."""

    status: int
    on: str  # regular expression, matched anywhere in strings like "POST /api/models/tester/run/commit/main"
    times: float  # number of requests still to be affected


class LoopbackHub:
    """
    Hub that keeps all files in memory and listens on 127.0.0.1 only. Every client is user `tester`, with all rights.

    ```python
    with LoopbackHub() as hub:
        subprocess.run(command, env=os.environ | hub.environment)  # pushes to `tester/my-model`
        weights = safetensors.torch.load(hub.repos["tester/my-model"]["model.safetensors"])
        hub.fail(500, times=1, on="/commit/").cut_connection(on="PUT /lfs/")  # from now on
    ```

    Attributes:
        repos (`dict[str, dict[str, bytes]]`):
            Content of every file after the last commit, by repository and path.
        commits (`list[str]`):
            Messages of all commits, oldest first.
        environment (`dict[str, str]`):
            Variables that direct `huggingface_hub` to this hub. They disable Xet, which is another protocol.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self._faults: list[Fault] = []
        self._healed = threading.Event()
        self._objects: dict[str, bytes] = {}  # LFS: sha256 -> content
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": "loopback",
            "NO_PROXY": "127.0.0.1",
        }
        self.environment |= {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="hub", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "LoopbackHub":
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(TIMEOUT_S)

    # ---- faults

    def fail(self, status: int, times: float = float("inf"), on: str = "") -> "LoopbackHub":
        """Answer with `status` the next `times` requests whose method and path match the regular expression `on`."""
        self._healed.clear()
        self._faults.append(Fault(status, on, times))
        return self

    def cut_connection(self, times: float = float("inf"), on: str = "") -> "LoopbackHub":
        """Reset the connections of the matching requests before reading their content."""
        return self.fail(CUT, times, on)

    def stall(self, times: float = float("inf"), on: str = "") -> "LoopbackHub":
        """Leave the matching requests unanswered until `heal` or for 30 s, then reset their connections."""
        return self.fail(STALL, times, on)

    def heal(self) -> "LoopbackHub":
        """Remove all faults and end the stalls."""
        self._faults.clear()
        self._healed.set()
        return self

    def _fault_of(self, request: str) -> int | None:
        for fault in self._faults:
            if fault.times > 0 and re.search(fault.on, request):
                fault.times -= 1
                return fault.status
        return None

    # ---- one method for each route, see _ROUTES

    def whoami(self, body: bytes) -> Answer:
        return _json({"name": USER, "type": "user", "orgs": []})

    def validate_yaml(self, body: bytes) -> Answer:
        return _json({"errors": [], "warnings": []})

    def create(self, body: bytes) -> Answer:
        repo = f"{USER}/{json.loads(body)['name']}"
        status = 409 if repo in self.repos else 200
        self.repos.setdefault(repo, {})
        return _json({"url": f"{self.endpoint}/{repo}"}, status)

    def preupload(self, body: bytes, repo: str) -> Answer:
        files = [
            {"path": file["path"], "shouldIgnore": False} for file in json.loads(body)["files"]
        ]
        for file in files:
            file["uploadMode"] = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
        return _json({"files": files})

    def lfs_batch(self, body: bytes, repo: str) -> Answer:
        objects = json.loads(body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self._objects:
                wanted["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}
        return _json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return _json({"error": f"these {len(body)} bytes are not the object {oid}"}, 400)
        self._objects[oid] = body
        return _json({})

    def commit(self, body: bytes, repo: str) -> Answer:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        for kind, value in [(operation["key"], operation["value"]) for operation in operations]:
            content = (
                self._objects[value["oid"]]
                if kind == "lfsFile"
                else base64.b64decode(value["content"])
            )
            self.repos[repo][value["path"]] = content
        self.commits.append(header["value"]["summary"])
        return _json(
            {"commitUrl": f"{self.endpoint}/{repo}/commit/{self._head}", "commitOid": self._head}
        )

    def resolve(self, body: bytes, repo: str, path: str) -> Answer:
        headers = {"X-Repo-Commit": self._head}
        if path not in self.repos[repo]:
            return 404, b"", headers | {"X-Error-Code": "EntryNotFound"}
        content = self.repos[repo][path]
        return 200, content, headers | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}

    @property
    def _head(self) -> str:
        return f"{len(self.commits):040x}"


_REPO, _REVISION = r"(?P<repo>[\w.-]+/[\w.-]+)", r"[\w.%-]+"
_ROUTES: dict[str, Callable[..., Answer]] = {
    r"GET /api/whoami-v2": LoopbackHub.whoami,
    r"POST /api/validate-yaml": LoopbackHub.validate_yaml,
    r"POST /api/repos/create": LoopbackHub.create,
    rf"POST /api/models/{_REPO}/preupload/{_REVISION}": LoopbackHub.preupload,
    rf"POST /api/models/{_REPO}/commit/{_REVISION}": LoopbackHub.commit,
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": LoopbackHub.lfs_batch,
    r"PUT /lfs/(?P<oid>[0-9a-f]{64})": LoopbackHub.lfs_put,
    rf"(?:GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<path>.+)": LoopbackHub.resolve,
}


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    timeout = TIMEOUT_S  # else a client that stalls would hold its thread forever

    def _serve(self) -> None:
        request = f"{self.command} {self.path.partition('?')[0]}"
        if (fault := self.hub._fault_of(request)) in (CUT, STALL):
            if fault == STALL:
                self.hub._healed.wait(TIMEOUT_S)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is None and self.command == "POST" and "Authorization" not in self.headers:
            fault = 401  # as the real hub, where nobody without a token changes anything
        answer = (fault, b"", {}) if fault is not None else self._answer(request, body)
        status, content, headers = answer
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _answer(self, request: str, body: bytes) -> Answer:
        for route, method in _ROUTES.items():
            if match := re.fullmatch(route, request):
                if match.groupdict().get("repo", "") not in ("", *self.hub.repos):
                    return 404, b"", {"X-Error-Code": "RepoNotFound"}
                return method(self.hub, body, **match.groupdict())
        return 404, b"", {"X-Error-Code": "EntryNotFound"}

    def log_message(self, *_: Any) -> None:
        """Print nothing: a line per request would flood the output of the tests."""


def _json(value: object, status: int = 200) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}
