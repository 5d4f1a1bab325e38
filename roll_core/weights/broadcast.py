"""Broadcast of weight buckets to all engines at once, through a process group of its own.

Members are trainer rank 0, which sends, and every worker of every engine. The backend is NCCL between GPUs and gloo between
CPUs. The group is separate from the process groups that trainers and engines compute with.

The group is torch's own, not vLLM's `StatelessProcessGroup`: that one waits forever for a missing member and needs GPUs.
Here every wait ends after `timeout_s`, and the sender knows which members were missing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_core.errors import BroadcastBroken

_POLL_S = 0.0005
"""Seconds between polls of a collective: far below the time a bucket takes. The code polls instead of blocking in the
collective, because NCCL collectives do not end when a member dies."""


@dataclass(frozen=True)
class Rendezvous:
    """Address and member list through which the members of a broadcast group find each other.

    Example: Rendezvous("10.0.0.7", 41403, members=("trainer rank 0", "engine 0", "engine 1"), timeout_s=60.0)
    """

    host: str
    port: int
    members: tuple[str, ...]
    """Member names, indexed by rank in the group. An engine with several workers appears once per worker, under the
    engine's name."""
    timeout_s: float
    """Seconds each wait may take: for all members to join, and for each bucket."""


class BroadcastSender:
    """Rank 0 of a broadcast group: opens the rendezvous and sends the buckets."""

    def __init__(self, host: str, members: tuple[str, ...], timeout_s: float, device: torch.device):
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.rendezvous = Rendezvous(host, self._store.port, members, timeout_s)
        self._device = device
        self._group: Any = None
        self._round = 0
        self.late_members: tuple[str, ...] = ()
        """Names of the members that had not arrived when a wait timed out."""

    def wait_for_members(self) -> None:
        """Wait until all members have joined, then build the process group. Raise BroadcastBroken after `timeout_s`."""
        self._wait(lambda: True, "did not join the broadcast")
        with _as_broadcast_broken(self.rendezvous):
            self._group = _build_process_group(self._store, self.rendezvous, 0, self._device)

    def send(self, flat: Tensor) -> None:
        """Broadcast one bucket of bytes; on return its memory can be reused. Raise BroadcastBroken if a member is late or
        gone."""
        self._round += 1
        with _as_broadcast_broken(self.rendezvous):
            sending = self._group.broadcast(flat, 0)
            self._wait(partial(_is_done, sending), f"took no part in bucket {self._round} of the broadcast")

    def close(self) -> None:
        """Abort the process group, if it was built."""
        if self._group is not None:
            self._group.abort()

    def _wait(self, is_done: Callable[[], bool], failure: str) -> None:
        """Wait until `is_done` and every member has arrived at this round. Raise BroadcastBroken, naming the missing members
        and the `failure`, after `timeout_s`.

        Arrivals are checked beside the collective, because members pass the bytes on to each other: the sender's part can be
        complete while a late member keeps others waiting.
        """
        ends_at = time.monotonic() + self.rendezvous.timeout_s
        while not is_done() or self._missing_members():
            if time.monotonic() > ends_at:
                self.late_members = self._missing_members()
                who = ", ".join(self.late_members) or "somebody"
                raise BroadcastBroken(
                    f"{who} {failure} within {self.rendezvous.timeout_s:.0f} s (weights.broadcast_seconds)"
                )
            time.sleep(_POLL_S)

    def _missing_members(self) -> tuple[str, ...]:
        """Names of the members that have not arrived at the current round."""
        members = enumerate(self.rendezvous.members[1:], start=1)
        return tuple(
            dict.fromkeys(name for rank, name in members if not self._store.check([_arrival_key(self._round, rank)]))
        )


class BroadcastReceiver:
    """One receiving rank of a broadcast group: joins the rendezvous on construction."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device):
        self._rendezvous = rendezvous
        self._rank = rank
        self._round = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        with _as_broadcast_broken(rendezvous):
            timeout = timedelta(seconds=rendezvous.timeout_s)
            self._store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
            self._announce()
            self._group = _build_process_group(self._store, rendezvous, rank, device)

    def receive(self, num_bytes: int) -> Tensor:
        """Receive the next bucket. The result is a view of a buffer that the next call overwrites."""
        self._round += 1
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._buffer.device)
        flat = self._buffer[:num_bytes]
        with _as_broadcast_broken(self._rendezvous):
            self._announce()
            receiving = self._group.broadcast(flat, 0)
            ends_at = time.monotonic() + self._rendezvous.timeout_s
            while not _is_done(receiving):
                if time.monotonic() > ends_at:
                    raise BroadcastBroken(f"bucket {self._round} did not come within {self._rendezvous.timeout_s:.0f} s")
                time.sleep(_POLL_S)
        return flat

    def close(self) -> None:
        """Abort the process group."""
        self._group.abort()

    def _announce(self) -> None:
        """Record in the store that this rank has arrived at the current round."""
        self._store.set(_arrival_key(self._round, self._rank), "")


def _arrival_key(number: int, rank: int) -> str:
    """Store key that a member sets when it arrives at a round. Round 0 is the rendezvous, round n is bucket n."""
    return f"round {number}: {rank}"


def _build_process_group(store: Any, rendezvous: Rendezvous, rank: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=2 * rendezvous.timeout_s)  # backstop: the polls above give up first
    shared = dist.PrefixStore("group", store)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(shared, rank, len(rendezvous.members), timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(shared, rank, len(rendezvous.members), options)


def _is_done(work: Any) -> bool:
    """True if a collective has completed; raises the collective's error if it failed."""
    return work.is_completed() and work.wait()


@contextmanager
def _as_broadcast_broken(rendezvous: Rendezvous) -> Iterator[None]:
    """Raise BroadcastBroken in place of the plain RuntimeErrors that torch raises when a member is gone."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise BroadcastBroken(f"the broadcast between {', '.join(rendezvous.members)} broke: {first_line}") from None
