"""Parquet codec of trajectories, one row each, so that any data tool can read what a run generated."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from roll_core.types.routing import RoutedExperts
from roll_core.types.trajectory import Ending, Failure, Score, Trajectory, Turn

_TURN = pa.struct(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())),
        ("weights_versions", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("experts", pa.struct([("numbers", pa.binary()), ("per_token", pa.int32()), ("width", pa.int32())])),
    ]
)
_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("domain", pa.string()),
        ("group", pa.int32()),
        ("attempt", pa.int32()),
        ("turns", pa.list_(_TURN)),
        ("ending", pa.string()),
        ("score", pa.struct([("value", pa.float64()), ("correct", pa.bool_())])),
        ("failure", pa.struct([("stage", pa.string()), ("cause", pa.string())])),
    ]
)


def encode_trajectories(trajectories: list[Trajectory]) -> bytes:
    """Encode trajectories as Parquet, deterministically: equal trajectories give equal bytes, hence the same digest."""
    rows = [
        {
            "problem_id": t.problem_id,
            "domain": t.domain,
            "group": t.group,
            "attempt": t.attempt,
            "turns": [_record_of_turn(turn) for turn in t.turns],
            "ending": t.ending.value,
            "score": _record_of(t.score) if t.score else None,
            "failure": _record_of(t.failure) if t.failure else None,
        }
        for t in trajectories
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def decode_trajectories(data: bytes) -> list[Trajectory]:
    """Decode what `encode_trajectories` encoded."""
    return [
        Trajectory(
            problem_id=row["problem_id"],
            domain=row["domain"],
            group=row["group"],
            attempt=row["attempt"],
            turns=tuple(
                Turn(
                    prompt_ids=tuple(turn["prompt_ids"]),
                    completion_ids=tuple(turn["completion_ids"]),
                    sampler_logprobs=tuple(turn["sampler_logprobs"]),
                    weights_versions=tuple(turn["weights_versions"]),
                    text=turn["text"],
                    reward=turn["reward"],
                    experts=RoutedExperts(**turn["experts"]) if turn["experts"] else None,
                )
                for turn in row["turns"]
            ),
            ending=Ending(row["ending"]),
            score=Score(**row["score"]) if row["score"] else None,
            failure=Failure(**row["failure"]) if row["failure"] else None,
        )
        for row in pq.read_table(io.BytesIO(data)).to_pylist()
    ]


def _record_of_turn(turn: Turn) -> dict[str, object]:
    return vars(turn) | {"experts": _record_of(turn.experts) if turn.experts else None}


def _record_of(record: RoutedExperts | Score | Failure) -> dict[str, object]:
    return vars(record)
