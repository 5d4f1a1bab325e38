"""Packing plan: which sample goes into which row of which micro-batch of which rank. Pure integers: no tensors here.

A unit is one sequence, or several that share a prompt, which is then computed once. Rows hold several units end to end;
attention never crosses from one unit to the next. Every rank gets the same number of micro-batches, as collectives require,
and about the same number of tokens.
"""

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from roll_core.config.training.training import Packing

Unit = tuple[int, ...]
"""Indices of the samples that share a prompt; a single index when prompts are not shared."""
PackedRow = tuple[int, ...]
"""Indices of the units in one row."""
MicroBatchPlan = tuple[PackedRow, ...]
"""Rows of one micro-batch."""


@dataclass(frozen=True)
class PackingLimits:
    """Limits of packing, in tokens. `row_tokens=None`: rows as long as the longest sequence."""

    micro_batch_tokens: int
    row_tokens: int | None
    packing: Packing
    width_multiple: int = 1
    """Row widths are padded to a multiple of this many tokens. Compiled layers need it, since they recompile for some other
    widths; so do Megatron ranks, which split rows."""


def plan_units(prompts: Sequence[Hashable], lengths: list[tuple[int, int]], row_tokens: int) -> list[Unit]:
    """Group samples with the same prompt, as many as fit in a row. `lengths` are the (prompt, rest) tokens of each sample.

    Example: plan_units(["a", "a", "b"], [(2, 3), (2, 4), (5, 1)], 9) == [(0, 1), (2,)]
    """
    units: list[list[int]] = []
    space: list[int] = []
    open_unit: dict[Hashable, int] = {}
    for index, (prompt, (prompt_tokens, rest_tokens)) in enumerate(zip(prompts, lengths, strict=True)):
        unit = open_unit.get(prompt)
        if unit is None or space[unit] < rest_tokens:
            unit = open_unit[prompt] = len(units)
            units.append([])
            space.append(row_tokens - prompt_tokens)
        units[unit].append(index)
        space[unit] -= rest_tokens
    return [tuple(unit) for unit in units]


def plan_ranks(lengths: list[int], num_ranks: int, limits: PackingLimits) -> list[list[MicroBatchPlan]]:
    """Plan the micro-batches of each rank from the lengths of units. Blank micro-batches (no rows) fill up ranks that would
    have fewer.

    Example: plan_ranks([5, 3, 2], 1, PackingLimits(100, 5, Packing.ROWS)) == [[((0,), (1, 2))]]
    """
    if not lengths:
        return [[()] for _ in range(num_ranks)]
    row_tokens = max(limits.row_tokens or 0, max(lengths))
    alone = limits.packing is Packing.NONE
    rows: list[PackedRow] = [(i,) for i in range(len(lengths))] if alone else pack_rows(lengths, row_tokens)
    rows_per_micro_batch = max(1, limits.micro_batch_tokens // row_tokens)
    ranks = [_chunks(share, rows_per_micro_batch) for share in _balance(rows, lengths, num_ranks)]
    most = max(len(micro_batches) for micro_batches in ranks)
    return [micro_batches + [()] * (most - len(micro_batches)) for micro_batches in ranks]


def pack_rows(lengths: list[int], row_tokens: int) -> list[PackedRow]:
    """Pack by best-fit decreasing: longest first, each into the fullest row with space for it. At most 11/9 of the fewest
    rows."""
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = bisect.bisect_left(spaces, (lengths[index], -1))
        if slot == len(spaces):
            rows.append([])
            space, row = row_tokens, len(rows) - 1
        else:
            space, row = spaces.pop(slot)
        rows[row].append(index)
        bisect.insort(spaces, (space - lengths[index], row))
    return [tuple(row) for row in rows]


def _balance(rows: list[PackedRow], lengths: list[int], num_ranks: int) -> list[list[PackedRow]]:
    """Balance rows by longest processing time first: each row to the rank with the fewest tokens so far."""
    shares: list[list[PackedRow]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    tokens = {row: sum(lengths[i] for i in row) for row in rows}
    for row in sorted(rows, key=lambda r: (-tokens[r], r)):
        lightest = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        shares[lightest].append(row)
        loads[lightest] += tokens[row]
    return shares


def _chunks(rows: list[PackedRow], size: int) -> list[MicroBatchPlan]:
    """Split rows into as few micro-batches of at most `size` rows as possible, all of about the same size."""
    count = -(-len(rows) // size)
    bounds = [len(rows) * chunk // max(1, count) for chunk in range(count + 1)]
    return [tuple(rows[start:end]) for start, end in pairwise(bounds)]
