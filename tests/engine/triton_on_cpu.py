"""vLLM's Triton kernels on a CPU: an import of this module, before vLLM's own, runs them in Triton's interpreter.

It also replaces vLLM's buffers in pinned memory, and the kernel of `top_k` and `top_p`, which the interpreter cannot
run; vLLM has the same function in torch. It needs a process of its own, because Triton reads the variable once.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import vllm.triton_utils as triton_utils


class CpuBuffer:
    """vLLM's `UvaBuffer` without pinned memory."""

    def __init__(self, size, dtype):
        self.cpu = self._uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n=None):
        return self._uva[:n]


def replace_triton() -> None:
    triton_utils.HAS_TRITON, triton_utils.triton, triton_utils.tl = True, triton, triton.language
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import buffer_utils

    topk_topp_sampler.HAS_TRITON = False
    buffer_utils.UvaBuffer, buffer_utils.is_uva_available = CpuBuffer, lambda: True


replace_triton()
