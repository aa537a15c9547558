"""Versions of the libraries on one node."""

import platform

from ..libraries import installed

# in the order of a report
LIBRARIES = (
    "torch", "transformers", "trl", "vllm", "deepspeed", "accelerate", "peft", "trl_multinode",
)  # fmt: skip
# a different major.minor of these is an error, any other difference a warning
MUST_AGREE = (
    "trl",
    "vllm",
    "torch",
)
MISSING = "none"  # the version of a library that a node lacks


def local_versions() -> dict[str, str]:
    """Return the versions of this node's libraries, of Python, and of the CUDA or ROCm that torch was built for."""
    from torch.version import cuda, hip

    found = {library: installed(library) or MISSING for library in LIBRARIES}
    return {
        **found,
        "python": platform.python_version(),
        "cuda": cuda or (f"ROCm {hip}" if hip else MISSING),
    }


def major_minor(version: str) -> tuple[str, ...]:
    """Return the first two parts of a version."""
    return tuple(version.split("+")[0].split(".")[:2])
