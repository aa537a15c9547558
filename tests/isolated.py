"""Script of `test_isolation.py`, on a node of its own: vLLM's listeners, files and environments, as JSON.

Arguments: folder for logs and results, tensor parallel size, and `kill` for an end by SIGKILL of everything.
"""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
from listening import listeners

from multinode_kit.engines import TREE, SyncDriver, running_engines
from multinode_kit.models import tiny_qwen2


def facts(process: psutil.Process) -> dict:
    return {
        "title": " ".join(" ".join(process.cmdline()).split()),
        "listeners": listeners(process.pid),
        "environment": Path(f"/proc/{process.pid}/environ")
        .read_bytes()
        .decode(errors="replace")
        .split("\0"),
    }


def main() -> None:
    folder, workers, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    model = tiny_qwen2(300)
    with running_engines(model, folder, TREE, tensor_parallel_size=workers) as engines:
        trainer = SyncDriver(model, engines)
        trainer.perturb()
        trainer.send()
        processes = psutil.Process().children(recursive=True)
        found = [facts(process) for process in processes]
        (folder / "facts.json").write_text(json.dumps(found))
        if end == "kill":
            for process in processes:
                process.suspend()  # none of them may notice the end of another
            for process in (*processes, psutil.Process()):
                os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
