"""`make setup`: a virtual environment with the locked CPU stack and this package. Standard library only.

Usage: python3.11 requirements/install.py VENV
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.txt"
TORCH = "2.13.0+cpu"
LOOK_LIMIT_S = 10
COST = "about 1 GB of downloads, 4 GB on disk, 3 to 6 minutes"
CURE = """\
pip cannot see the CPU build of torch ({torch}), so it would install one with several GB of CUDA libraries.
Set one of these and run again:
    export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
    export PIP_FIND_LINKS=/folder/with/the/torch/wheel"""
# Compiled on first use (25-45 s), by every rank at once if nobody did it before
WARM_UP = "from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder as B; B().load(verbose=False)"


def main() -> None:
    venv = Path(sys.argv[1])
    check_system()
    print(f"Setting up {venv}: {COST}.", flush=True)
    check_torch()
    start = time.monotonic()
    run(sys.executable, "-m", "venv", "--clear", str(venv))
    python = str(venv / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--require-hashes", "-r", str(LOCK))
    compile_packages(python)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    run(python, "-c", WARM_UP, env=build_environment(venv))
    print(f"Ready after {time.monotonic() - start:.0f} s.", flush=True)


def check_system() -> None:
    """One sentence at once, rather than a compiler's error in five minutes."""
    found = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() != "Linux" or platform.machine() != "x86_64" or sys.version_info[:2] != (3, 11):
        sys.exit(f"The CPU stack is locked for Linux x86_64 and Python 3.11; this is {found}.")
    if shutil.which("g++") is None:
        sys.exit("A C++ compiler is missing (DeepSpeed compiles on a CPU): install g++, on Debian `apt install g++`.")


def check_torch() -> None:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_LIMIT_S).stdout
    except subprocess.TimeoutExpired:
        sys.exit(f"pip found no package index within {LOOK_LIMIT_S} s: check the network, or PIP_INDEX_URL.")
    if TORCH not in seen.replace(",", " ").split():
        sys.exit(CURE.format(torch=TORCH))


def compile_packages(python: str) -> None:
    """Compile the packages on all cores, which pip does on one; some have files that no Python compiles."""
    where = "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"
    run(python, "-c", where)


def build_environment(venv: Path) -> dict[str, str]:
    """What the Makefile sets for everything it runs."""
    path = f"{venv.resolve() / 'bin'}:{os.environ['PATH']}"  # ninja is in there
    folder = str(venv.resolve() / "torch_extensions")
    return {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": folder, "DS_ACCELERATOR": "cpu"}


def run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, timeout=3600)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed with code {done.returncode}; its own message is above.")


if __name__ == "__main__":
    main()
