"""Traces of attempts: their Parquet file, and their reference in a manifest."""

import io

import pyarrow.parquet as pq

from roll_core.store.records.traces import decode_trace, encode_trace
from roll_core.types.manifest import Collected, CollectRequest, Draws
from roll_core.types.refs import ArtifactKind, ArtifactRef
from roll_core.types.trace import AttemptTrace, Fate, Span
from tests.stored_runs import bare_manifest

RESUMED = AttemptTrace(
    problem=97,
    attempt=2,
    fate=Fate.TRAINED,
    num_prompt_tokens=12,
    oldest_version=3,
    drawn_at=1763200000.0,
    spans=(Span("engine 0", 1763200000.1, 1763200001.4, 40), Span("engine 1", 1763200001.5, 1763200002.4, 56)),
    grading_at=1763200002.5,
    graded_at=1763200002.7,
    consumed_at=1763200005.0,
)
NEVER_BEGUN = AttemptTrace(98, -1, Fate.ABORTED, 9, None, 1763200000.0, (), None, None, 1763200005.0)


def test_a_trace_survives_parquet_and_gives_the_same_bytes_again():
    data = encode_trace([RESUMED, NEVER_BEGUN])
    assert decode_trace(data) == [RESUMED, NEVER_BEGUN]
    assert encode_trace(decode_trace(data)) == data
    assert decode_trace(encode_trace([])) == []
    assert pq.read_table(io.BytesIO(data)).column("fate").to_pylist() == ["trained", "aborted"]


def test_a_manifest_names_its_rollouts_and_their_trace():
    rollouts = ArtifactRef(kind=ArtifactKind.TRAJECTORIES, digest="a1" * 32, size=1)
    trace = ArtifactRef(kind=ArtifactKind.TRACE, digest="b2" * 32, size=2)
    collected = Collected(
        request=CollectRequest(iteration=1, parent="", weights_version=0, first_problem=0, num_groups=1),
        trajectories=rollouts,
        num_trajectories=1,
        num_failed=0,
        num_tokens=5,
        draws=Draws(first=0, outcomes="t"),
        trace=trace,
    )
    manifest = bare_manifest(1, next_problem=1, collected=collected)
    assert manifest.artifacts == [rollouts, trace]
    assert manifest.model_copy(update={"collected": None}).artifacts == []
