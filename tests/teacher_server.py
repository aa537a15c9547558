"""A teacher behind the part of vLLM's HTTP server that TRL's `VLLMClient.get_sequence_logprobs` uses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def prompt_logprobs(model, ids: list[int], top: int) -> list[dict | None]:
    """Log-probs of each token of a prompt and of the `top` likeliest, as vLLM returns them: none for the first."""
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    found: list[dict | None] = [None]
    for row, actual in zip(scores, ids[1:], strict=False):
        order = row.argsort(descending=True)
        ranks = {int(token): rank + 1 for rank, token in enumerate(order)}
        chosen = dict.fromkeys([actual, *order[:top].tolist()])
        found.append(
            {str(token): {"logprob": row[token].item(), "rank": ranks[token]} for token in chosen}
        )
    return found


@contextmanager
def teacher_server(folder: Path, status: int = 200) -> Iterator[str]:
    """The URL of a server in a thread of this process; with another `status`, `/health` answers with that."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            codes = {"/health": status, "/v1/models": 200}
            self.answer({"data": [{"id": "teacher"}]}, codes.get(self.path, 404))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                choices = [
                    prompt_logprobs(model, ids, request["prompt_logprobs"])
                    for ids in request["prompt"]
                ]
            self.answer({"choices": [{"prompt_logprobs": one} for one in choices]})

        def answer(self, body: dict, code: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # `shutdown` waits so long
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
