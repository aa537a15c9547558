"""A model hub on this machine's loopback: as much of the Hub's HTTP API as `push_to_hub` and `from_pretrained` use."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER = "tester"
CLOSE_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
LFS_SUFFIXES = (".safetensors", ".bin", ".pt")
Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers


class LoopbackHub:
    """
    A hub that keeps everything in memory and listens on 127.0.0.1 only.

    ```python
    with LoopbackHub() as hub:
        subprocess.run(command, env=os.environ | hub.environment)  # pushes to `tester/<name>`
        weights = safetensors.torch.load(hub.repos["tester/my-model"]["model.safetensors"])
    ```

    Attributes:
        repos (`dict[str, dict[str, bytes]]`):
            Content of the last commit, by repository and path.
        commits (`list[str]`):
            Messages of all commits, the oldest first.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self._objects: dict[str, bytes] = {}  # LFS, by sha256
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="hub", daemon=True)
        self._thread.start()

    def __enter__(self) -> "LoopbackHub":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which `huggingface_hub` talks to this hub. Xet has a protocol of its own, so it is off."""
        switches = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": "loopback", "NO_PROXY": "127.0.0.1", **switches}

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---- what the Hub answers; one method for each route

    def whoami(self, body: bytes) -> Answer:
        return _json({"name": USER, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def validate_yaml(self, body: bytes) -> Answer:
        return _json({"errors": [], "warnings": []})

    def create(self, body: bytes) -> Answer:
        request = json.loads(body)
        repo = f"{request.get('organization') or USER}/{request['name']}"
        status = 409 if repo in self.repos else 200
        self.repos.setdefault(repo, {})
        return _json({"url": f"{self.endpoint}/{repo}", "name": repo}, status)

    def info(self, body: bytes, repo: str) -> Answer:
        files = [{"rfilename": path} for path in self.repos[repo]]
        return _json({"id": repo, "sha": self._commit, "tags": [], "siblings": files, "private": False})

    def preupload(self, body: bytes, repo: str) -> Answer:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
        return _json({"files": [{"path": p, "uploadMode": modes[p], "shouldIgnore": False} for p in paths]})

    def lfs_batch(self, body: bytes, repo: str) -> Answer:
        objects = json.loads(body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self._objects:
                wanted["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}
        return _json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return _json({"error": f"{len(body)} bytes came that are not object {oid}"}, 400)
        self._objects[oid] = body
        return _json({})

    def commit(self, body: bytes, repo: str) -> Answer:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self._objects[value["oid"]]
        return _json({"commitUrl": f"{self.endpoint}/{repo}/commit/{self._commit}", "commitOid": self._commit})

    def resolve(self, body: bytes, repo: str, path: str) -> Answer:
        commit = {"X-Repo-Commit": self._commit}
        if path not in self.repos[repo]:
            return 404, b"", commit | {"X-Error-Code": "EntryNotFound"}
        content = self.repos[repo][path]
        return 200, content, commit | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}

    @property
    def _commit(self) -> str:
        return f"{len(self.commits):040x}"


_REPO, _REVISION = r"(?P<repo>[\w.-]+/[\w.-]+)", r"[\w.%-]+"
_ROUTES: list[tuple[str, Callable[..., Answer]]] = [
    (r"GET /api/whoami-v2", LoopbackHub.whoami),
    (r"POST /api/validate-yaml", LoopbackHub.validate_yaml),
    (r"POST /api/repos/create", LoopbackHub.create),
    (rf"GET /api/models/{_REPO}(/revision/{_REVISION})?", LoopbackHub.info),
    (rf"POST /api/models/{_REPO}/preupload/{_REVISION}", LoopbackHub.preupload),
    (rf"POST /api/models/{_REPO}/commit/{_REVISION}", LoopbackHub.commit),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", LoopbackHub.lfs_batch),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", LoopbackHub.lfs_put),
    (rf"(GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<path>[^?]+)", LoopbackHub.resolve),
]


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    timeout = REQUEST_TIMEOUT_S  # of the socket: a client that stalls does not hold its thread for ever

    def _answer(self) -> None:
        status, body, headers = self._route(self._read_body())
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _route(self, body: bytes) -> Answer:
        request = f"{self.command} {self.path.split('?')[0]}"
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, request):
                found = match.groupdict()
                if "repo" in found and found["repo"] not in self.hub.repos:
                    return 404, b"", {"X-Error-Code": "RepoNotFound"}
                return method(self.hub, body, **found)
        return 404, b"", {"X-Error-Code": "EntryNotFound"}

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, *_: object) -> None:
        """Silent: request lines are of no use, and headers hold tokens."""


def _json(value: object, status: int = 200) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}
