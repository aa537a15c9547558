"""`make setup`: a virtual environment with the locked CPU stack and this package. Standard library only.

Usage: python3.11 requirements/install.py VENV [--warm]

With `--warm`, the second half: DeepSpeed's extension and the byte code of what is imported.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.txt"
TORCH = "2.13.0+cpu"
LOOK_LIMIT_S = 60  # alone 2 s; beside the tests it once took more than 10
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
}
COST = "about 1 GB of downloads, 4 GB on disk, 3 to 6 minutes"
CURE = """\
pip cannot see the CPU build of torch ({torch}), so it would install one with several GB of CUDA libraries.
Set one of these and run again:
    export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
    export PIP_FIND_LINKS=/folder/with/the/torch/wheel"""
# The extension is compiled on first use (25-45 s), by every rank at once if nobody did it before. An import writes
# byte code; that of all 25,000 files takes 85 CPU seconds, that of the 6,000 that are imported 17
WARM_UPS = (
    "from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder as B; B().load(verbose=False)",
    "import trl.trainer.grpo_trainer, peft, datasets, accelerate.commands.accelerate_cli; "
    "import vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.v1.engine.async_llm",
)

# torchvision's next import describes both to torch's compiler, which must know them. Nothing here calls them
OPERATORS = """

# Added by requirements/install.py of trl-multinode
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def main() -> None:
    venv = Path(sys.argv[1])
    start = time.monotonic()
    if sys.argv[2:] == ["--warm"]:
        warm_up(venv)
    else:
        check_system()
        print(f"Setting up {venv}: {COST}.", flush=True)
        check_torch()
        install(venv)
    print(f"Ready after {time.monotonic() - start:.0f} s.", flush=True)


def install(venv: Path) -> None:
    run(sys.executable, "-m", "venv", "--clear", str(venv))
    python = str(venv / "bin" / "python")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as uv_only:
        uv_only.write(
            next(line for line in LOCK.read_text().splitlines() if line.startswith("uv=="))
        )
        uv_only.flush()
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "-r",
            uv_only.name,
        )
    # uv shows its progress to a person; a log would get a line for each of 200 packages
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    uv = [str(venv / "bin" / "uv"), "pip", "install", *quiet, "--python", python, "--no-deps"]
    run(*uv, "--require-hashes", "-r", str(LOCK), env=index_settings())
    run(*uv, "--no-build-isolation", "-e", str(ROOT), env=index_settings())
    declare_operators(venv)


def declare_operators(venv: Path) -> None:
    """Let torchvision be imported without its extension, which needs CUDA's libraries: declare two operators."""
    file = next(venv.glob("lib/*/site-packages/torchvision/extension.py"))
    text = file.read_text()
    # uv may have linked the file to the one in its cache, which other environments share
    file.unlink()
    file.write_text(text + OPERATORS)


def index_settings() -> dict[str, str]:
    """Return this process's environment with pip's indexes in the variables that uv reads; those that are set win."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_LIMIT_S).stdout
    values = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]] = value.strip("'")
    variables = {}
    for option, variable in UV_VARIABLES.items():
        words = values.get(option, "").replace("\\n", " ").split()
        # A folder that is configured and does not exist is ignored by pip and an error for uv
        usable = [
            word
            for word in words
            if "://" in word and not word.startswith("file:") or usable_folder(word)
        ]
        if usable:
            variables[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(usable)
    # As pip, which looks for a version in all indexes; the hashes of the lock keep what another index may offer out
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {**variables, **os.environ}


def usable_folder(word: str) -> bool:
    return Path(word.removeprefix("file://")).is_dir()


def warm_up(venv: Path) -> None:
    """Compile DeepSpeed's extension and import the libraries, at once."""
    python, environment = str(venv / "bin" / "python"), build_environment(venv)
    # A machine may set it; then each process of the tests would compile what it imports, and `make test-e2e` took 358
    # instead of 274 s
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    running = [subprocess.Popen([python, "-c", code], env=environment) for code in WARM_UPS]
    codes = [process.wait(3600) for process in running]
    if any(codes):
        sys.exit("The imports or DeepSpeed's extension failed; their own messages are above.")


def check_system() -> None:
    """One sentence at once, rather than a compiler's error in five minutes."""
    found = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if (
        platform.system() != "Linux"
        or platform.machine() != "x86_64"
        or sys.version_info[:2] != (3, 11)
    ):
        sys.exit(f"The CPU stack is locked for Linux x86_64 and Python 3.11; this is {found}.")
    if shutil.which("g++") is None:
        sys.exit(
            "A C++ compiler is missing (DeepSpeed compiles on a CPU): install g++, on Debian `apt install g++`."
        )


def check_torch() -> None:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_LIMIT_S).stdout
    except subprocess.TimeoutExpired:
        sys.exit(
            f"pip found no package index within {LOOK_LIMIT_S} s: check the network, or PIP_INDEX_URL."
        )
    if TORCH not in seen.replace(",", " ").split():
        sys.exit(CURE.format(torch=TORCH))


def build_environment(venv: Path) -> dict[str, str]:
    """What the Makefile sets for everything it runs."""
    path = f"{venv.resolve() / 'bin'}:{os.environ['PATH']}"  # ninja is in there
    folder = str(venv.resolve() / "torch_extensions")
    return {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": folder, "DS_ACCELERATOR": "cpu"}


def run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, timeout=3600)
    if done.returncode != 0:
        sys.exit(
            f"`{' '.join(command)}` failed with code {done.returncode}; its own message is above."
        )


if __name__ == "__main__":
    main()
