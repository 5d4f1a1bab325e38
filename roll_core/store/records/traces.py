"""Parquet codec of traces, one row per attempt with its engine spans nested, so that any data tool can read them."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from roll_core.types.trace import AttemptTrace, Fate, Span

_SPAN = pa.struct(
    [
        ("engine", pa.string()),
        ("begin", pa.float64()),
        ("end", pa.float64()),
        ("num_tokens", pa.int32()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("problem", pa.int64()),
        ("attempt", pa.int32()),
        ("fate", pa.string()),
        ("num_prompt_tokens", pa.int32()),
        ("oldest_version", pa.int32()),
        ("drawn_at", pa.float64()),
        ("spans", pa.list_(_SPAN)),
        ("grading_at", pa.float64()),
        ("graded_at", pa.float64()),
        ("consumed_at", pa.float64()),
    ]
)


def encode_trace(attempts: list[AttemptTrace]) -> bytes:
    """Encode attempts as Parquet, deterministically: equal attempts give equal bytes, hence the same digest."""
    rows = [vars(attempt) | {"spans": [vars(span) for span in attempt.spans]} for attempt in attempts]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def decode_trace(data: bytes) -> list[AttemptTrace]:
    """Decode what `encode_trace` encoded."""
    return [
        AttemptTrace(**row | {"fate": Fate(row["fate"]), "spans": tuple(Span(**span) for span in row["spans"])})
        for row in pq.read_table(io.BytesIO(data)).to_pylist()
    ]
