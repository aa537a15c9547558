"""Sizes that vLLM's CPU build can run, asked of its kernels. Not for the oldest vLLM, which has others."""

import subprocess
import sys

import pytest

from trl_multinode.call_checks import CPU_HEAD_SIZES, CPU_LATENT_SIZES

pytestmark = [pytest.mark.engine, pytest.mark.nightly]  # the lock pins what it asks


def test_the_cpu_build_has_attention_kernels_for_the_sizes_that_are_accepted():
    """The kernels decide, not the list of `CPUAttentionBackend`, which leaves 48 out and is not read."""
    code = """
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
one, two = torch.tensor([2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
found = []
for size in range(8, 577, 8):
    isa = _get_attn_isa(torch.float32, 128, size)
    try:
        ops.cpu_attn_get_scheduler_metadata(1, 2, 1, size, one, torch.float32, two, True, -1, isa, False)
    except RuntimeError:
        continue
    found.append(size)
print('SIZES', *found)
print('LATENT', *CPUMLABackend.get_supported_head_sizes())
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr[-2000:]
    lines = [line.split() for line in printed.stdout.splitlines() if line]
    found = {name: {int(one) for one in numbers} for name, *numbers in lines if name.isupper()}
    assert found["SIZES"] == CPU_HEAD_SIZES and found["LATENT"] == CPU_LATENT_SIZES
