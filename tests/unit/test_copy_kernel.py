"""Copy kernel: many copies in one launch. Without a GPU, Triton's interpreter runs the kernel."""

import os
import subprocess
import sys

KERNEL_PROGRAM = """
import torch
from roll_core.inference.vllm.copy_kernel import CopyTable, FlatCopy

torch.manual_seed(0)
numbers = torch.randn(50_000)
for dtype in (torch.float32, torch.float16):  # the interpreter truncates bfloat16, a GPU rounds it: see tests/gpu
    memory = torch.zeros(40_000, dtype=dtype)
    expected = memory.clone()
    copies = []
    for start, offset, size in ((0, 16, 16), (4096, 64, 4096), (16_000, 8192, 20_000 - 16 * 50), (48, 32, 32)):
        copies.append(FlatCopy(start, memory[offset : offset + size]))
        expected[offset : offset + size] = numbers[start : start + size]
    assert all(copy.is_aligned for copy in copies)
    CopyTable(copies).copy(numbers)
    assert torch.equal(memory, expected), dtype
    assert not FlatCopy(8, memory[:16]).is_aligned
    assert not FlatCopy(0, memory[1:17]).is_aligned
    assert not FlatCopy(0, memory[:15]).is_aligned
"""
"""Program that compares copies by the kernel with copies by plain torch."""


def test_one_launch_copies_and_rounds_like_plain_torch():
    """The kernel runs in a process of its own, because Triton decides at import whether kernels are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL_PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
