"""Runs with vLLM as their engine, whose process is killed or hangs: their tokens are those of runs with the torch engine."""

import os
import signal
from pathlib import Path

from roll_core.store.records.rollouts import decode_trajectories
from tests.integration.conftest import Workspace, wait_until

MODEL = ("--set", "model.num_heads=2", "--set", "model.num_kv_heads=1")
"""32 features a head: the fewest that vLLM's attention on CPUs knows."""


def vllm_process(engine: int) -> int | None:
    """The process that an engine's role has vLLM in, once it is there."""
    children = [int(pid) for listed in Path(f"/proc/{engine}/task").glob("*/children") for pid in listed.read_text().split()]
    return next((pid for pid in children if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()), None)


def completions(workspace: Workspace, iteration: int) -> list[tuple[int, ...]]:
    collected = workspace.chain()[iteration].collected
    return [t.turns[0].completion_ids for t in decode_trajectories(workspace.store.get(collected.trajectories))]


def test_vllm_gives_the_tokens_of_the_torch_engine_also_when_its_process_is_killed_or_hangs(new_workspace):
    by_torch, by_vllm = new_workspace("by-torch"), new_workspace("by-vllm")
    longer = (*MODEL, "--set", "iterations=6", "--set", "deadlines.heartbeat=8")
    done = by_torch.roll("run", str(by_torch.config), *longer)
    assert done.returncode == 0, done.stdout

    running = by_vllm.start("run", str(by_vllm.config), *longer, "--set", "inference.kind=vllm")
    lost = []
    for iteration, fault in ((1, signal.SIGKILL), (3, signal.SIGSTOP)):
        by_vllm.wait_for_iteration(iteration)
        engine = by_vllm.pid_of("engine 0")
        process = vllm_process(engine)
        assert process is not None
        os.kill(process, fault)
        lost += [engine, process]
    output, _ = running.communicate(timeout=200)
    assert running.returncode == 0, output

    assert len(set(lost)) == len(lost), "the engine was not replaced"
    assert not any(Path(f"/proc/{pid}").exists() for pid in lost), "a process of an engine that was replaced is left"
    assert not (by_vllm.folder / "roll-data/work/tiny-1/leg-2").exists(), "the leg did not survive"
    assert [m.draws for m in by_vllm.chain()] == [m.draws for m in by_torch.chain()]
    for iteration in range(1, 7):
        assert completions(by_vllm, iteration) == completions(by_torch, iteration)


def test_what_vllm_cannot_do_is_said_before_anything_starts(workspace):
    refused = workspace.refused("run", str(workspace.config), "--set", "inference.kind=vllm")
    assert "the model has 16 features a head, and vLLM's attention on CPUs knows 32, 64" in refused
    three = ("--set", "cluster.devices_per_node=3", "--set", "placement.engines=0-2")
    workers = ("--set", "inference={kind: vllm, tensor_parallel: 3}")
    refused = workspace.refused("run", str(workspace.config), *MODEL, *three, *workers)
    assert "inference.tensor_parallel (3): the model's 2 heads and 1 key-value heads cannot be shared" in refused
    assert not (workspace.folder / "roll-data/work/tiny-1").exists()


def test_when_a_run_is_killed_no_process_of_vllm_is_left(workspace):
    running = workspace.start("run", str(workspace.config), *MODEL, "--set", "inference.kind=vllm")
    workspace.wait_for_iteration(0)
    process = vllm_process(workspace.pid_of("engine 0"))
    assert process is not None
    os.kill(workspace.pid_of("engine 0"), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "vLLM's process ended with its engine's", deadline_s=60.0)
    output, _ = running.communicate(timeout=200)
    assert running.returncode == 0, output
