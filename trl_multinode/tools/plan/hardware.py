"""Nodes, GPUs and links of a plan, and the rates that it assumes of them."""

import re
from dataclasses import dataclass

from ..text import matching
from . import PlanError

GIB = 2**30
# A GPU sold with 80 GB shows about 79.1 GiB to CUDA, one with 141 GB 139.8
USABLE_SHARE = 0.98
# Memory rate of the vendors' data sheets, in TB per second
MEMORY_RATES = {
    "GB200": 8.0,
    "B200": 8.0,
    "H200": 4.8,
    "GH200": 4.0,
    "H100": 3.35,
    "H800": 3.35,
    "H20": 4.0,
    "A100": 2.0,
    "A800": 2.0,
    "L40S": 0.864,
    "L40": 0.864,
    "MI355X": 8.0,
    "MI325X": 6.0,
    "MI300X": 5.3,
}


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU; the rates are `None` if no table has its name."""

    name: str
    total: float  # bytes that CUDA reports
    memory_rate: float | None  # bytes per second
    peak: float | None  # dense bfloat16 operations per second


@dataclass(frozen=True)
class Cluster:
    """Equal nodes and the link between them."""

    nodes: int
    gpus: int  # of a node
    gpu: Gpu
    link: float  # bytes per second into a node


def parse_gpu(text: str) -> Gpu:
    """Return a GPU of a name and the GB of its memory, as in `H100-80`, for a parser."""
    from ...reporting.flops import peak_of

    read = matching(r"([A-Za-z][\w ]*)-([1-9]\d*)", "a name and GB of memory, as in H100-80")
    name, gigabytes = read(text)
    words = name.upper().split()
    rate = next((1e12 * rate for known, rate in MEMORY_RATES.items() if known in words), None)
    return Gpu(text, int(gigabytes) * GIB * USABLE_SHARE, rate, peak_of(name.upper()))


def parse_split(text: str, gpus: int) -> tuple[int, int]:
    """Read a split such as `7+1`."""
    match = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if match is None or int(match[1]) + int(match[2]) != gpus:
        raise PlanError(
            f"`--splits` are training + reserved GPUs of a node, {gpus} in all (got {text!r}, expected for example "
            f"{gpus - 1}+1)."
        )
    return int(match[1]), int(match[2])
