"""Store transport of weights: bit for bit the same, in full or as deltas, and retired when no engine needs them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.records.weights import recorded_weights, weights_record_name
from roll_core.store.upkeep.garbage import find_garbage, remove
from roll_core.store.upkeep.retention import retire_weights
from roll_core.types.refs import WeightsRef
from roll_core.weights.buckets import unpack
from roll_core.weights.checks import CheckRecorder
from roll_core.weights.digests import WeightsDigest
from roll_core.weights.stored import WeightsReader, WeightsWriter, apply_delta, encode_delta
from tests.stored_runs import StoredRuns

HOUR = 3600.0
Named = list[tuple[str, torch.Tensor]]


def policy(version: int) -> Named:
    """Tensors of a weights version, each version a small step after the one before. The first tensor never changes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer.{i}.weight": torch.randn(40, 25, generator=generator) for i in range(5)}
    for _ in range(version):
        for name in list(tensors)[1:]:
            tensors[name] = tensors[name] - 1e-5 * torch.randn(40, 25, generator=generator)
    return list(tensors.items())


@pytest.fixture
def runs(tmp_path) -> StoredRuns:
    runs = StoredRuns(tmp_path)
    runs.open()
    runs.commit("tiny-1", 1)
    return runs


def writer(store: ObjectStore, full_every: int = 3, dtype: torch.dtype = torch.float32) -> WeightsWriter:
    return WeightsWriter(store, "tiny-1", full_every, dtype, bucket_bytes=9_000)


def fetched(reader: WeightsReader, weights: WeightsRef) -> dict[str, torch.Tensor]:
    """Tensors of a weights version, as an engine reads them."""
    reader.fetch(weights)
    return dict(unpack(reader.buckets(weights)))


def assert_same(fetched: dict[str, torch.Tensor], expected: Named, dtype: torch.dtype = torch.float32) -> None:
    assert list(fetched) == [name for name, _ in expected]
    for name, tensor in expected:
        assert torch.equal(fetched[name], tensor.to(dtype)), name


def every_bit_pattern() -> Iterator[np.ndarray]:
    """Two byte arrays: every pattern of 16 bits, and random bytes."""
    yield np.arange(2**16, dtype=np.uint16).view(np.uint8)
    yield np.random.default_rng(0).integers(0, 256, 2**17, dtype=np.uint8)  # NaNs and infinities among them


def test_a_delta_restores_every_bit_whatever_the_values_are():
    old, new = every_bit_pattern()
    for width in (1, 2, 4):
        assert np.array_equal(apply_delta(old, encode_delta(old, new, width)), new)
        assert np.array_equal(apply_delta(new, encode_delta(new, old, width)), old)


def test_the_delta_of_unchanged_weights_is_tiny():
    same = np.random.default_rng(0).integers(0, 256, 2**20, dtype=np.uint8)
    assert len(encode_delta(same, same.copy(), 4)) < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_fetches_every_version_has_the_trainers_values(runs, dtype):
    writes, reader = writer(runs.store, dtype=dtype), WeightsReader(runs.store)
    stored = [writes.write(version, policy(version)) for version in range(7)]
    assert [weights.base is None for weights in stored] == [True, False, False, True, False, False, True]
    assert stored[1].stored_bytes < 0.7 * stored[0].stored_bytes
    for version, weights in enumerate(stored):
        assert_same(fetched(reader, weights), policy(version), dtype)


def test_an_engine_that_starts_or_missed_versions_begins_with_the_last_full_one(runs):
    writes = writer(runs.store, full_every=9)
    stored = [writes.write(version, policy(version)) for version in range(5)]
    for missed in (stored[1], stored[4]):
        reader = WeightsReader(runs.store)
        reader.fetch(missed)
        assert_same(fetched(reader, stored[3]), policy(3))
    assert_same(fetched(WeightsReader(runs.store), stored[4]), policy(4))


def test_a_stored_version_has_the_digest_and_the_check_that_engines_compare_with(runs):
    weights = writer(runs.store).write(4, policy(4))
    digest, recorder = WeightsDigest(), CheckRecorder(4)
    list(digest.observe(recorder.observe(policy(4))))
    check = WeightsReader(runs.store).check(weights)
    assert weights.weights_digest == digest.hexdigest()
    assert check.names == recorder.check.names
    for read, said in zip(check.samples, recorder.check.samples, strict=True):
        assert (read.name, read.columns) == (said.name, said.columns)
        assert torch.equal(read.values, said.values)


def test_a_version_that_could_not_be_written_is_not_the_base_of_the_next(runs):
    writes = writer(runs.store, full_every=9)
    writes.write(0, policy(0))

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from policy(1)[:3]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        writes.write(1, interrupted())
    weights = writes.write(1, policy(1))
    assert weights.base is None
    assert_same(fetched(WeightsReader(runs.store), weights), policy(1))


def test_an_interrupted_reader_begins_with_the_last_full_version(runs):
    writes, reader = writer(runs.store, full_every=9), WeightsReader(runs.store)
    reader.fetch(writes.write(0, policy(0)))
    weights = writes.write(1, policy(1))
    lost, data = object_name(weights.buckets[-1].artifact), runs.store.get(weights.buckets[-1].artifact)
    runs.store.delete(lost)
    with pytest.raises(ArtifactDamaged, match=f"{lost} is missing"):
        reader.fetch(weights)
    runs.store.put(data, weights.buckets[-1].artifact.kind)
    assert_same(fetched(reader, weights), policy(1))


def test_a_delta_to_another_base_is_noticed_and_the_bucket_is_named(runs):
    writes, reader = writer(runs.store, full_every=9), WeightsReader(runs.store)
    first, second, third = (writes.write(version, policy(version)) for version in range(3))
    reader.fetch(first)
    misled = third.model_copy(update={"base": second.base})
    with pytest.raises(ArtifactDamaged, match="bucket 0 of weights version 2 of tiny-1 is not what was stored"):
        reader.fetch(misled)


def test_a_missing_record_of_a_base_version_is_named(runs):
    writes = writer(runs.store, full_every=9)
    first, second = writes.write(0, policy(0)), writes.write(1, policy(1))
    runs.store.delete(weights_record_name(first))
    with pytest.raises(
        ArtifactDamaged, match=f"{weights_record_name(first)}, which weights version 1 is made of, is missing"
    ):
        WeightsReader(runs.store).fetch(second)


# -------------------------------------------------------------------------------------------------- retention
def versions(runs: StoredRuns, run_id: str = "tiny-1") -> list[int]:
    return sorted(each.weights.version for each in recorded_weights(runs.store, run_id))


def test_versions_that_no_engine_needs_are_retired_and_the_newest_can_still_be_read(runs):
    writes = writer(runs.store)
    for version in range(5):
        writes.write(version, policy(version))
        runs.make_all_old()
    last = writes.write(5, policy(5))
    runs.make_all_old()
    retire_weights(runs.store, "tiny-1", HOUR)
    assert versions(runs) == [3, 4, 5]
    assert_same(fetched(WeightsReader(runs.store), last), policy(5))
    assert list(find_garbage(runs.store, HOUR)) == [], "what was retired left objects behind"


def test_a_young_version_stays_with_all_its_base_versions(runs):
    writes = writer(runs.store)
    writes.write(0, policy(0))
    runs.make_all_old()
    stored = [writes.write(version, policy(version)) for version in (1, 2, 3)]
    assert retire_weights(runs.store, "tiny-1", HOUR) == []
    assert_same(fetched(WeightsReader(runs.store), stored[1]), policy(2))


def test_objects_that_another_run_shares_stay(runs):
    """Runs that begin with the same policy store the same bytes."""
    other = runs.open(name="other")
    first = WeightsWriter(runs.store, other, 3, torch.float32, bucket_bytes=9_000).write(0, policy(0))
    writes = writer(runs.store, full_every=1)
    for version in range(2):
        writes.write(version, policy(version))
        runs.make_all_old()
    retire_weights(runs.store, "tiny-1", HOUR)
    assert versions(runs) == [1]
    assert_same(fetched(WeightsReader(runs.store), first), policy(0))


def test_garbage_collection_keeps_versions_that_engines_read_until_the_run_is_done(runs):
    writes = writer(runs.store)
    stored = [writes.write(version, policy(version)) for version in range(5)]
    runs.make_all_old()
    list(remove(runs.store, find_garbage(runs.store, HOUR)))
    assert versions(runs) == [3, 4]
    assert_same(fetched(WeightsReader(runs.store), stored[-1]), policy(4))
    runs.commit("tiny-1", 99)
    runs.make_all_old()
    list(remove(runs.store, find_garbage(runs.store, HOUR)))
    assert versions(runs) == []
    assert {object_name(artifact) for each in stored for artifact in each.artifacts} & runs.objects() == set()


def test_a_version_recorded_again_by_the_next_leg_is_young(runs):
    writer(runs.store).write(0, policy(0))
    runs.make_all_old()
    writer(runs.store).write(0, policy(0))
    (recorded,) = recorded_weights(runs.store, "tiny-1")
    assert recorded.age_seconds < HOUR
