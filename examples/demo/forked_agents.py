"""Agents of `make demo MODE=harness`: processes of their own, as forks of one that has imported `openai`.

A started agent imports `openai` for 1.4 s of a core, and the demo plays thousands of hunts on two cores; a fork plays
its hunt in 0.05 s of a core. Each rank has one such process:

```python
agents = Agents()
await agents.run(session)    # like `start_agent` of examples/harness.py
```
"""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

REQUEST_BYTES = 1 << 16
ENDED_WELL = b"1"
NOBODY = "http://127.0.0.1:9"  # where no server listens


class Agents:
    """The process that forks, which ends with this one."""

    def __init__(self) -> None:
        # each message arrives whole
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        """End the process; the end of this one does it too."""
        self._socket.close()
        self._process.wait()

    async def run(self, session) -> None:
        """Run the agent for a session in a fork, which ends with the session."""
        request = [str(session.folder), session.base_url, session.api_key, session.model]
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs.fileno()])
            ours.setblocking(False)
            # an agent that fails closes its end; one whose session is cancelled sees that this one is closed
            if await asyncio.get_running_loop().sock_recv(ours, 1) != ENDED_WELL:
                raise RuntimeError(f"The agent in {session.folder} has failed.")


def serve(requests: socket.socket) -> None:
    """Fork an agent for each request, until the rank has ended."""
    import harness_agent
    from openai import APIConnectionError, OpenAI

    # no child is waited for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    client = OpenAI(base_url=NOBODY, api_key="none")
    # the first call of a process takes 0.14 s of a core, after this one 0.03 s
    with suppress(APIConnectionError):
        once = client.with_options(max_retries=0)
        once.chat.completions.create(model="none", messages=[], tools=harness_agent.TOOLS)
    gc.freeze()
    while True:
        request, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 1)
        if not request:
            return
        session = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            folder, base_url, api_key, model = json.loads(request)
            threading.Thread(target=end_with, args=(session,), daemon=True).start()
            os.chdir(folder)
            result = harness_agent.play(client.copy(base_url=base_url, api_key=api_key), model)
            Path("result.json").write_text(json.dumps(result))
            session.sendall(ENDED_WELL)
            os._exit(0)
        session.close()


def end_with(session: socket.socket) -> None:
    """End this process when the other end of a socket is closed."""
    session.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
