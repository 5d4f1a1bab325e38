"""Broadcast of weights between processes: every member gets the bytes; late and dead members are named."""

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
from tests.support import ROOT, patience

CPU = torch.device("cpu")
RECEIVER_PROGRAM = """
import sys, torch
from roll_core.weights.broadcast import BroadcastReceiver, Rendezvous
host, port, members, timeout_s, rank = eval(sys.argv[1])
receiver = BroadcastReceiver(Rendezvous(host, port, members, timeout_s), rank, torch.device("cpu"))
while True:
    print(int(receiver.receive(20_000_000)[-1]), flush=True)
"""
"""Program that joins a broadcast and prints the last byte of every bucket."""


def new_sender(*engines: str, timeout_s: float = 180.0) -> BroadcastSender:
    return BroadcastSender("127.0.0.1", ("trainer rank 0", *engines), timeout_s, CPU)


def start_receiver(sender: BroadcastSender, rank: int) -> subprocess.Popen[str]:
    arguments = repr((*astuple(sender.rendezvous), rank))
    return subprocess.Popen([sys.executable, "-c", RECEIVER_PROGRAM, arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def bucket(number: int) -> torch.Tensor:
    """Bucket of 20 MB, more than the buffers of a socket hold while the other end does not read."""
    return torch.full((20_000_000,), number, dtype=torch.uint8)


def test_all_receivers_get_every_bucket_and_the_sender_raises_when_one_is_killed():
    sender = new_sender("engine 0", "engine 1")
    receivers = [start_receiver(sender, rank) for rank in (1, 2)]
    sender.wait_for_members()
    for number in (3, 5):
        sender.send(bucket(number))
        assert [int(process.stdout.readline()) for process in receivers] == [number] * 2
    os.kill(receivers[1].pid, signal.SIGKILL)
    receivers[1].wait()
    with pytest.raises(BroadcastBroken, match="between trainer rank 0, engine 0, engine 1 broke"):
        sender.send(bucket(7))
    assert sender.late_members == (), "a dead member is not late"
    sender.close()
    receivers[0].kill()
    receivers[0].wait()


def test_members_that_do_not_join_are_named():
    sender = new_sender("engine 0", "engine 1", "engine 2", timeout_s=3.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(BroadcastReceiver, sender.rendezvous, 2, CPU)
        with pytest.raises(BroadcastBroken, match="engine 0, engine 2 did not join the broadcast within 3 s"):
            sender.wait_for_members()
        assert sender.late_members == ("engine 0", "engine 2")
        with pytest.raises(BroadcastBroken):  # the member that joined does not wait forever
            joining.result(timeout=patience(60))


def test_a_member_that_misses_a_bucket_is_named():
    """Engine 1 has two workers, one of which stopped."""
    sender = new_sender("engine 0", "engine 1", "engine 1", timeout_s=3.0)
    with ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(BroadcastReceiver, sender.rendezvous, rank, CPU) for rank in (1, 2, 3)]
        sender.wait_for_members()
        first, second, _ = (each.result(timeout=patience(60)) for each in joining)
        waiting = [pool.submit(each.receive, 20_000_000) for each in (first, second)]
        with pytest.raises(BroadcastBroken, match="engine 1 took no part in bucket 1 of the broadcast within 3 s"):
            sender.send(bucket(1))
        assert sender.late_members == ("engine 1",)
        sender.close()
        for each in waiting:  # the other receivers do not wait forever
            each.exception(timeout=patience(60))
