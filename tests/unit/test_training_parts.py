"""Learning-rate schedules, buckets of weights, random numbers of engines."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.config.optimizer import Decay, OptimizerConfig
from roll_core.inference.randomness import uniforms
from roll_core.training.schedule import learning_rate_at
from roll_core.weights.buckets import pack, unpack


def rates(decay: Decay, steps: int, **fields: float) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, decay=decay, **fields)
    return [learning_rate_at(step, config, steps) for step in range(steps)]


def test_warm_up_rises_in_equal_steps_to_the_rate():
    assert rates(Decay.CONSTANT, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_its_final_fraction():
    assert rates(Decay.LINEAR, 5, final_fraction=0.2) == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])
    assert learning_rate_at(
        5, OptimizerConfig(learning_rate=1.0, decay=Decay.LINEAR, final_fraction=0.2), 5
    ) == pytest.approx(0.2)


def test_cosine_decay_is_half_way_at_half_time():
    assert learning_rate_at(50, OptimizerConfig(learning_rate=2.0, decay=Decay.COSINE), 100) == pytest.approx(1.0)


@given(st.integers(40, 4000))
def test_tensors_survive_buckets_of_any_size(bucket_bytes):
    tensors = [
        ("a", torch.arange(7, dtype=torch.float32).reshape(7, 1)),
        ("b", torch.tensor(3.5)),
        ("c", torch.randn(5, 8).to(torch.bfloat16)),
        ("d", torch.arange(100, dtype=torch.int64)),
    ]
    buckets = list(pack(tensors, bucket_bytes))
    assert all(len(bucket.entries) == 1 or bucket.data.nbytes <= bucket_bytes for bucket in buckets)
    for (name, tensor), (name_back, back) in zip(tensors, unpack(buckets), strict=True):
        assert name == name_back
        assert tensor.dtype == back.dtype
        assert torch.equal(tensor, back)


def test_uniforms_are_even_and_depend_on_seed_and_position_alone():
    seeds, positions = np.arange(20_000, dtype=np.uint64), np.full(20_000, 3, dtype=np.uint64)
    drawn = uniforms(seeds, positions)
    assert drawn[77] == uniforms(seeds[77:78], positions[77:78])[0]
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 5 * 1000**0.5  # five standard deviations
    along = uniforms(np.full(20_000, 12345, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 5 / 20_000**0.5
