"""Digests of policies, and the GPU kernel that computes them. Without a GPU, Triton's interpreter runs the kernel."""

import os
import subprocess
import sys

import torch

from roll_core.weights.digests import WeightsDigest

KERNEL_PROGRAM = """
import torch
from roll_core.weights.digest_kernel import mix_on_gpu
from roll_core.weights.digests import FIRST_FACTOR, POSITION_FACTOR, SECOND_FACTOR, mix

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    many = [torch.randn(size).to(dtype) for size in (1, 8191, 8192, 20_003, 7)] + [torch.randn(30, 40).to(dtype).T]
    for tensors in (many, many[3:4]):
        on_gpu = mix_on_gpu(tensors, POSITION_FACTOR, FIRST_FACTOR, SECOND_FACTOR)
        assert on_gpu.tolist() == mix(tensors).tolist(), (dtype, len(tensors))
"""
"""Program that compares digests by the kernel with digests by plain torch."""


def test_one_launch_mixes_all_tensors_like_plain_torch_mixes_each():
    """The kernel runs in a process of its own, because Triton decides at import whether kernels are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL_PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_digest_depends_on_every_bit_name_and_position_and_not_on_how_tensors_are_passed():
    weights = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.arange(4.0))]

    def digest(tensors, at_once):
        digest = WeightsDigest()
        if at_once:
            digest.add(tensors)
        else:
            list(digest.observe(tensors))
        return digest.hexdigest()

    (a, matrix), (b, row) = weights
    others = [
        [(a, matrix), (b, row.flip(0))],
        [(a, matrix.view(3, 2)), (b, row)],
        [(b, matrix), (a, row)],
        [(a, matrix), (b, row.nextafter(torch.tensor(9.0)))],
        [(a, matrix)],
    ]
    assert digest(weights, at_once=True) == digest(weights, at_once=False)
    assert len({digest(tensors, at_once=True) for tensors in [weights, *others]}) == 6
