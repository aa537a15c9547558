"""The texts of other libraries that docs/operate/errors.md quotes are those of the installed versions."""

import mmap
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # it changes with a version of a library, not with this code

PAGE = Path(__file__).parents[1] / "docs" / "operate" / "errors.md"
# Parts of the quoted texts between the numbers and names that a library inserts -> file below site-packages
TEXTS = {
    "network addresses of (": "torch/lib/libtorch_cpu.so",
    "cannot be retrieved": "torch/lib/libtorch_cpu.so",
    "The client socket has timed out after ": "torch/lib/libtorch_cpu.so",
    "The client socket has failed to connect": "torch/lib/libtorch_cpu.so",
    "seconds waiting for clients. ": "torch/lib/libtorch_cpu.so",
    " clients joined": "torch/lib/libtorch_cpu.so",
    "EADDRINUSE": "torch/lib/libtorch_cpu.so",
    "No CUDA GPUs are available": "torch/lib/libtorch_cpu.so",
    "RendezvousTimeoutError": "torch/distributed/elastic/rendezvous/api.py",
    "another process is utilizing it": "accelerate/utils/launch.py",
    "Your setup doesn't support bf16/gpu": "transformers/training_args.py",
    "not installed": "deepspeed/launcher/runner.py",
    "Unable to find hostfile": "deepspeed/launcher/runner.py",
    "to micro_batch_per_gpu * gradient_acc_step * world_size": "deepspeed/runtime/config.py",
    "CUDA_HOME does not exist": "deepspeed/ops/op_builder/builder.py",
    "MissingCUDAException": "deepspeed/ops/op_builder/builder.py",
    "CUDAMismatchException": "deepspeed/ops/op_builder/builder.py",
    "is less than desired GPU memory utilization": "vllm/v1/worker/utils.py",
    "No available memory for the cache blocks": "vllm/v1/core/kv_cache_utils.py",
}
# In CUDA and NCCL, which a torch for CPUs lacks, or the C library
ELSEWHERE = (
    "CUDA error: invalid device ordinal", "Duplicate GPU detected", "ncclSystemError", "ncclRemoteError",
    "peer access is not supported between these two devices", "Watchdog caught collective operation timeout",
    "Connection refused", "No space left on device", "Bus error",
)  # fmt: skip


@pytest.mark.parametrize(("text", "file"), TEXTS.items())
def test_a_quoted_text_is_in_the_installed_library(text, file):
    assert text in PAGE.read_text()
    package, _, rest = file.partition("/")
    path = Path(find_spec(package).origin).parent / rest
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as found:
        assert found.find(text.encode()) >= 0


def test_the_texts_that_only_a_gpu_prints_are_on_the_page():
    page = PAGE.read_text()
    assert [text for text in ELSEWHERE if text not in page] == []
