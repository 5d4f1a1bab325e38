"""Broadcasts between processes: all get the bytes, and who is late or gone is known by name."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import pytest
import torch

from roll_core.errors import BroadcastBroken
from roll_core.weights.broadcast import BroadcastReceiver, BroadcastSender
from tests.support import ROOT

CPU = torch.device("cpu")
RECEIVING = """
import sys, torch
from roll_core.weights.broadcast import BroadcastReceiver, Rendezvous
host, port, members, timeout_s, rank = eval(sys.argv[1])
receiver = BroadcastReceiver(Rendezvous(host, port, members, timeout_s), rank, torch.device("cpu"))
while True:
    print(int(receiver.receive(20_000_000)[-1]), flush=True)
"""
"""A process that joins and says what it got."""


def sender(*engines: str, timeout_s: float = 30.0) -> BroadcastSender:
    return BroadcastSender("127.0.0.1", ("trainer rank 0", *engines), timeout_s, CPU)


def start_receiving(of: BroadcastSender, rank: int) -> subprocess.Popen[str]:
    arguments = repr((*astuple(of.rendezvous), rank))
    return subprocess.Popen([sys.executable, "-c", RECEIVING, arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def bucket(number: int) -> torch.Tensor:
    """More than the buffers of a socket take without anybody at its other end."""
    return torch.full((20_000_000,), number, dtype=torch.uint8)


def test_all_get_every_bucket_and_when_one_is_killed_the_sender_is_told():
    sends = sender("engine 0", "engine 1")
    received = [start_receiving(sends, rank) for rank in (1, 2)]
    sends.wait_for_members()
    for number in (3, 5):
        sends.send(bucket(number))
        assert [int(process.stdout.readline()) for process in received] == [number] * 2
    os.kill(received[1].pid, signal.SIGKILL)
    received[1].wait()
    with pytest.raises(BroadcastBroken, match="between trainer rank 0, engine 0, engine 1 broke"):
        sends.send(bucket(7))
    assert sends.late_members == (), "who is gone was never waited for"
    sends.close()
    received[0].kill()
    received[0].wait()


def test_who_does_not_join_is_named():
    sends = sender("engine 0", "engine 1", "engine 2", timeout_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(BroadcastReceiver, sends.rendezvous, 2, CPU)
        with pytest.raises(BroadcastBroken, match="engine 0, engine 2 did not join the broadcast within 1 s"):
            sends.wait_for_members()
        assert sends.late_members == ("engine 0", "engine 2")
        with pytest.raises(BroadcastBroken):  # nor does anybody else wait for ever
            joining.result(timeout=60)


def test_who_takes_no_part_in_a_bucket_is_named():
    """An engine of two workers, of which one stopped."""
    sends = sender("engine 0", "engine 1", "engine 1", timeout_s=1.0)
    with ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(BroadcastReceiver, sends.rendezvous, rank, CPU) for rank in (1, 2, 3)]
        sends.wait_for_members()
        first, second, _ = (each.result(timeout=60) for each in joining)
        waiting = [pool.submit(each.receive, 20_000_000) for each in (first, second)]
        with pytest.raises(BroadcastBroken, match="engine 1 took no part in bucket 1 of the broadcast within 1 s"):
            sends.send(bucket(1))
        assert sends.late_members == ("engine 1",)
        sends.close()
        for each in waiting:  # nobody waits for ever
            each.exception(timeout=60)
