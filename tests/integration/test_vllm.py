"""Runs with vLLM as their engine, whose process is killed or hangs: their tokens are those of runs with the torch engine."""

import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from roll_core.store.records.rollouts import decode_trajectories
from roll_core.types.leg import LegEnding
from tests.integration.conftest import Workspace, settings
from tests.support import wait_until

MODEL = ("model.num_heads=2", "model.num_kv_heads=1")
"""32 features a head: the fewest that vLLM's attention on CPUs supports."""


def vllm_process(engine: int) -> int | None:
    """Process id of the vLLM process of an engine role; None while it is not there."""
    children = [int(pid) for listed in Path(f"/proc/{engine}/task").glob("*/children") for pid in listed.read_text().split()]
    return next((pid for pid in children if b"EngineCore" in command_of(pid)), None)


def command_of(pid: int) -> bytes:
    """Command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def completions(workspace: Workspace, iteration: int) -> list[tuple[int, ...]]:
    collected = workspace.chain()[iteration].collected
    return [t.turns[0].completion_ids for t in decode_trajectories(workspace.store.get(collected.trajectories))]


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGKILL,), pytest.param((signal.SIGKILL, signal.SIGSTOP), marks=pytest.mark.exhaustive)],
    ids=["killed", "killed, then hangs"],
)
def test_vllm_gives_the_tokens_of_the_torch_engine_also_when_its_process_is_killed_or_hangs(new_workspace, signals):
    by_torch, by_vllm = new_workspace("by-torch"), new_workspace("by-vllm")
    longer = (*MODEL, "iterations=6", "deadlines.heartbeat=8")
    by_torch.train(*longer)

    lost: list[int] = []

    def signal_vllm(number: signal.Signals) -> None:
        def processes() -> list[int | None]:
            engine = by_vllm.pid_of("engine 0")
            return [engine, vllm_process(engine)]

        wait_until(lambda: not {None, *lost} & {*processes()}, "the engine has a vLLM that was not signalled yet")
        engine, process = processes()
        os.kill(process, number)
        lost.extend([engine, process])

    run = by_vllm.open(*longer, "inference.kind=vllm")
    with contextlib.ExitStack() as stack:
        for number, iteration in zip(signals, (1, 3), strict=False):
            stack.enter_context(by_vllm.when_committed(iteration, partial(signal_vllm, number)))
        ended = by_vllm.run_leg(run)
    assert ended.ending is LegEnding.FINISHED, ended.cause
    assert len(set(lost)) == len(lost), "the engine was not replaced"
    assert not any(Path(f"/proc/{pid}").exists() for pid in lost), "a process of a replaced engine is left"
    assert [m.draws for m in by_vllm.chain()] == [m.draws for m in by_torch.chain()]
    for iteration in range(1, 7):
        assert completions(by_vllm, iteration) == completions(by_torch, iteration)


def test_settings_that_vllm_does_not_support_are_refused_before_anything_starts(workspace):
    refused = workspace.refused("run", str(workspace.config), *settings("inference.kind=vllm"))
    assert "the model has 16 features a head, and vLLM's attention on CPUs knows 32, 64" in refused
    three = ("cluster.devices_per_node=3", "placement.engines=0-2", "inference={kind: vllm, tensor_parallel: 3}")
    refused = workspace.refused("run", str(workspace.config), *settings(*MODEL, *three))
    assert "inference.tensor_parallel (3): the model's 2 heads and 1 key-value heads cannot be shared" in refused
    assert not (workspace.folder / "roll-data/work/tiny-1").exists()


@pytest.mark.exhaustive
def test_an_engine_that_is_killed_leaves_no_process_of_vllm(workspace):
    run = workspace.open(*MODEL, "inference.kind=vllm")

    def kill_engine() -> None:
        process = vllm_process(workspace.pid_of("engine 0"))
        assert process is not None
        workspace.kill("engine 0")
        wait_until(lambda: not Path(f"/proc/{process}").exists(), "vLLM's process ended with its engine's", 60.0)

    with workspace.when_committed(0, kill_engine):
        ended = workspace.run_leg(run)
    assert ended.ending is LegEnding.FINISHED, ended.cause
