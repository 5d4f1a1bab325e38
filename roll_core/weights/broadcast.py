"""Weights to all engines at once: rank 0 of the trainer and every worker of every engine form a group, through which buckets
are broadcast, by NCCL between GPUs and by gloo between CPUs.

The group has nothing to do with those that trainers or engines compute with. It is torch's own and not vLLM's
`StatelessProcessGroup`, which waits for ever for a member that does not come, and needs GPUs. Here every wait ends after
`patience_s`, and the sender knows who was not there.
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
"""Far below what a bucket takes. Nobody waits in a collective itself: those of NCCL do not end when a member is gone."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a group find each other.

    Example: Rendezvous("10.0.0.7", 41403, members=("trainer rank 0", "engine 0", "engine 1"), patience_s=60.0)
    """

    host: str
    port: int
    members: tuple[str, ...]
    """By their rank in the group; a worker of an engine that has several goes by the engine's name."""
    patience_s: float


class Sender:
    """Rank 0 of a group; it opens the place where the others come to."""

    def __init__(self, host: str, members: tuple[str, ...], patience_s: float, device: torch.device):
        patience = timedelta(seconds=patience_s)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
        self.meeting = Rendezvous(host, self._store.port, members, patience_s)
        self._device = device
        self._group: Any = None
        self._round = 0
        self.late: tuple[str, ...] = ()
        """Who was waited for in vain."""

    def meet(self) -> None:
        """Wait until all are there."""
        self._wait(lambda: True, "did not join the broadcast")
        with _telling_what_broke(self.meeting):
            self._group = _group(self._store, self.meeting, 0, self._device)

    def send(self, flat: Tensor) -> None:
        """Broadcast a bucket. Its memory can be used again when this returns."""
        self._round += 1
        with _telling_what_broke(self.meeting):
            sending = self._group.broadcast(flat, 0)
            self._wait(partial(_is_done, sending), f"took no part in bucket {self._round} of the broadcast")

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _wait(self, is_done: Callable[[], bool], otherwise: str) -> None:
        """Until all have come to this round, too: bytes are passed on, and who is late may be missed by others only."""
        ends_at = time.monotonic() + self.meeting.patience_s
        while not is_done() or self._absent():
            if time.monotonic() > ends_at:
                self.late = self._absent()
                who = ", ".join(self.late) or "somebody"
                raise BroadcastBroken(
                    f"{who} {otherwise} within {self.meeting.patience_s:.0f} s (weights.broadcast_seconds)"
                )
            time.sleep(_POLL_S)

    def _absent(self) -> tuple[str, ...]:
        """Who has not come to this round, or to the meeting."""
        members = enumerate(self.meeting.members[1:], start=1)
        return tuple(dict.fromkeys(name for rank, name in members if not self._store.check([_sign(self._round, rank)])))


class Receiver:
    """Every other rank."""

    def __init__(self, meeting: Rendezvous, rank: int, device: torch.device):
        self._meeting = meeting
        self._rank = rank
        self._round = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        with _telling_what_broke(meeting):
            patience = timedelta(seconds=meeting.patience_s)
            self._store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=patience)
            self._show()
            self._group = _group(self._store, meeting, rank, device)

    def receive(self, num_bytes: int) -> Tensor:
        """The bytes of the next bucket: a view of memory that the one after it is received in."""
        self._round += 1
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._buffer.device)
        flat = self._buffer[:num_bytes]
        with _telling_what_broke(self._meeting):
            self._show()
            receiving = self._group.broadcast(flat, 0)
            ends_at = time.monotonic() + self._meeting.patience_s
            while not _is_done(receiving):
                if time.monotonic() > ends_at:
                    raise BroadcastBroken(f"bucket {self._round} did not come within {self._meeting.patience_s:.0f} s")
                time.sleep(_POLL_S)
        return flat

    def close(self) -> None:
        self._group.abort()

    def _show(self) -> None:
        self._store.set(_sign(self._round, self._rank), "")


def _sign(number: int, rank: int) -> str:
    """What a member leaves when it comes to a round; the meeting is the first."""
    return f"round {number}: {rank}"


def _group(store: Any, meeting: Rendezvous, rank: int, device: torch.device) -> Any:
    patience = timedelta(seconds=2 * meeting.patience_s)  # only if nobody has looked for so long
    shared = dist.PrefixStore("group", store)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(shared, rank, len(meeting.members), patience)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(shared, rank, len(meeting.members), options)


def _is_done(work: Any) -> bool:
    """Whether a collective has come to its end; raises what went wrong with it."""
    return work.is_completed() and work.wait()


@contextmanager
def _telling_what_broke(meeting: Rendezvous) -> Iterator[None]:
    """Torch raises plain RuntimeErrors when a member is gone."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise BroadcastBroken(f"the broadcast between {', '.join(meeting.members)} broke: {first_line}") from None
