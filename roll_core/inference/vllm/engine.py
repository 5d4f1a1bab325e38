"""The `vllm` inference engine: vLLM's asynchronous engine on CPUs or GPUs, with weights that change while it runs.

vLLM never generates while weights change. Before an update, running requests finish or are aborted in vLLM; aborted ones are
submitted again with the tokens they have, by this engine or by the rollout scheduler. All tokens of one vLLM request
therefore have one weights version, and the KV cache, which every update clears, never mixes two. The engine starts without
weights and serves nothing before its first update.
"""

import asyncio
import os
import pickle
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.config.rollout import InFlightPolicy
from roll_core.errors import EngineDied, WrongWeights
from roll_core.inference.completions import InFlightCompletion, check_request
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.vllm.support import FIRST_INDEX, SEED, check_version
from roll_core.models.causal_lm import model_config
from roll_core.types.trajectory import Ending
from roll_core.weights.broadcast import Rendezvous
from roll_core.weights.buckets import BroadcastBucket, Bucket, DeviceBucket, WeightsBucket, starts_of
from roll_core.weights.checks import WeightsCheck

WORKER = "roll_core.inference.vllm.worker.WorkerExtension"
"""Import path of the class that extends vLLM's worker, in the worker's process."""
_CPU_BLOCK_TOKENS = 32
"""Block size of vLLM's KV cache on CPUs, in tokens: the smallest it supports. Prompts share whole blocks only."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all engines of a machine are pinned to its first core
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request with logprobs compiles C++ for half a minute
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Environment variables without a GPU. They must be set before vLLM is imported; vLLM's processes inherit them."""
_ENDINGS = {"stop": Ending.STOP, "length": Ending.LENGTH, "abort": Ending.ABORTED}
"""Ending by vLLM's finish reason."""


@dataclass(eq=False)
class _VllmSequence(InFlightCompletion):
    """Request in the engine: first waiting for a slot, then submitted to vLLM, several times if updates interrupt it."""

    task: asyncio.Task[None] | None = None
    """Task that generates the completion; None while the request waits for a slot."""
    num_submissions: int = 0
    """Number of submissions to vLLM. It makes each request id unique, since vLLM may still remember an earlier
    submission."""
    is_submitted: bool = False
    """True while vLLM has the request."""
    interrupted: bool = False
    """True once an update or an abort has ended the current submission."""
    resumes: bool = False
    """True if the request is interrupted for new weights and will be submitted again when they are loaded."""

    @property
    def vllm_request_id(self) -> str:
        """Request id of the latest submission to vLLM."""
        return f"{self.request.request_id}#{self.num_submissions}"

    @property
    def remaining_request(self) -> GenerationRequest:
        """Request for the rest of the completion, with all tokens so far as its prefix."""
        return replace(self.request, prefix_ids=self.request.prefix_ids + tuple(self.token_ids))


class VllmEngine:
    """Inference engine that has vLLM generate in processes of its own. Build it inside a running event loop, which vLLM
    uses to receive outputs."""

    def __init__(
        self,
        model: ModelConfig,
        config: VllmInference,
        *,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        num_threads: int,
    ):
        check_version()
        self._max_tokens = model.max_positions
        self._vocab_size = model_config(model).vocab_size
        self._num_slots = num_slots
        self._can_sleep = device.type == "cuda"
        self._asleep = False
        self._waiting: deque[_VllmSequence] = deque()
        self._running: dict[_VllmSequence, None] = {}
        self._version: int | None = None
        self._can_serve = asyncio.Event()
        """Set while the engine is awake and has complete weights."""
        self._workers_begun = False
        """True once `roll_begin` has run in the workers."""
        self._loads_in_place = False
        """True if new weights are copied over the old ones, so that an update needs no `roll_begin_weights`."""
        self._loaded_names: list[str] = []
        """Names of the tensors that the current update has loaded."""
        if device.type == "cpu":
            os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS=str(num_threads))
        self._llm = _start_vllm(model, config, num_slots, device, dtype)
        self._draws_by_position = self._llm.vllm_config.use_v2_model_runner

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, self._max_tokens, self._vocab_size)
        sequence = _VllmSequence(request, asyncio.get_running_loop().create_future())
        self._waiting.append(sequence)
        self._fill_slots()
        try:
            return await sequence.done
        finally:
            self._withdraw(sequence)  # the caller may have been cancelled

    async def abort(self, *request_ids: str) -> None:
        for sequence in [s for s in self._waiting if s.request.request_id in request_ids]:
            self._waiting.remove(sequence)
            sequence.finish(Ending.ABORTED)
        unwanted = [s for s in self._running if s.request.request_id in request_ids]
        for sequence in unwanted:
            if sequence.resumes and not sequence.is_submitted:  # paused for new weights
                sequence.finish(Ending.ABORTED)
            sequence.resumes = False
        with _as_engine_died():
            await self._interrupt(unwanted)
        await asyncio.gather(*(s.done for s in unwanted), return_exceptions=True)

    async def begin_update(self, in_flight: InFlightPolicy) -> None:
        self._can_serve.clear()
        with _as_engine_died():
            await self._quiesce(in_flight)
            if self._asleep:
                await self._llm.wake_up(tags=["weights"])
            if not self._workers_begun:
                self._loads_in_place = all(await self._llm.collective_rpc("roll_begin", args=(os.getpid(),)))
                self._workers_begun = True
            # The public method around this one also waits 20 ms for outputs under way; here no outputs are awaited.
            await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
            if not self._loads_in_place:
                await self._llm.collective_rpc("roll_begin_weights")
        self._version, self._loaded_names = None, []

    async def join(self, rendezvous: Rendezvous, rank: int) -> None:
        with _as_engine_died():
            await self._llm.collective_rpc("roll_join", args=(pickle.dumps(rendezvous), rank))

    async def load(self, bucket: Bucket) -> None:
        starts = bucket.starts if isinstance(bucket, DeviceBucket) else starts_of(bucket.entries)
        layout = pickle.dumps((bucket.entries, starts))
        match bucket:
            case DeviceBucket():
                with _as_engine_died():
                    await self._llm.collective_rpc("roll_load_shared", args=(bucket.handle, layout))
            case WeightsBucket():
                with _as_engine_died(), _bucket_file(bucket) as path:
                    await self._llm.collective_rpc("roll_load_file", args=(path, layout))
            case BroadcastBucket():
                with _as_engine_died():
                    await self._llm.collective_rpc("roll_load_broadcast", args=(bucket.num_bytes, layout))
        self._loaded_names += [entry.name for entry in bucket.entries]

    async def finish_update(self, version: int, check: WeightsCheck | None) -> None:
        missing = set(check.names if check else ()).difference(self._loaded_names)
        samples = pickle.dumps(check.samples if check and not missing else ())
        with _as_engine_died():
            by_worker = await self._llm.collective_rpc("roll_finish_weights", args=(samples,))
            if missing:
                raise WrongWeights(f"weights version {version} lacks {', '.join(sorted(missing))}")
            if differences := [difference for found in by_worker for difference in found]:
                raise WrongWeights(f"weights version {version} differs from the trainer's: {'; '.join(differences)}")
            if not self._asleep:
                await self._llm.resume_generation()
        self._version = version
        if not self._asleep:
            self._can_serve.set()
            self._fill_slots()

    async def sleep(self) -> None:
        in_flight = len(self._running) + len(self._waiting)
        assert in_flight == 0, f"an engine must not sleep with {in_flight} requests in flight"
        self._can_serve.clear()
        self._version = None
        if self._can_sleep:
            with _as_engine_died():
                await self._llm.sleep(level=2)  # level 1 would copy the weights to the host, to no use
            self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            with _as_engine_died():
                await self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if self._version is not None:
            self._can_serve.set()
            self._fill_slots()

    async def ping(self) -> None:
        with _as_engine_died():
            await self._llm.collective_rpc("roll_ping")

    def close(self) -> None:
        """End vLLM's process. It would end with this process, too."""
        self._llm.shutdown()

    async def _quiesce(self, in_flight: InFlightPolicy) -> None:
        """Finish or interrupt the running requests before weights change, as `in_flight` says."""
        running = list(self._running)
        match in_flight:
            case InFlightPolicy.FINISH:
                pass
            case InFlightPolicy.RESUME:
                await self._interrupt(running)
            case InFlightPolicy.CONTINUE:
                for sequence in running:
                    sequence.resumes = True
                await self._interrupt(running)
                return
        await asyncio.gather(*(s.done for s in running), return_exceptions=True)

    # ---------------------------------------------------------------------------------------------- requests
    def _fill_slots(self) -> None:
        """Start waiting requests while slots are free and the engine can serve."""
        while self._waiting and self._can_serve.is_set() and len(self._running) < self._num_slots:
            sequence = self._waiting.popleft()
            self._running[sequence] = None
            sequence.task = asyncio.create_task(self._generate_to_end(sequence))
            sequence.task.add_done_callback(partial(self._forward_failure, sequence))

    async def _generate_to_end(self, sequence: _VllmSequence) -> None:
        """Submit a request to vLLM until its completion ends, again after each update that interrupted it."""
        try:
            while not sequence.done.done():
                with _as_engine_died():
                    ending = await self._submit(sequence)
                if ending is not Ending.ABORTED or not sequence.resumes:
                    sequence.finish(ending)
                    break
                await self._can_serve.wait()
                sequence.resumes = sequence.interrupted = False
        finally:
            self._free_slot(sequence)  # before the caller's await returns

    def _forward_failure(self, sequence: _VllmSequence, task: asyncio.Task[None]) -> None:
        """Pass an exception of the generating task to the caller that awaits the completion."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not sequence.done.done():
            sequence.done.set_exception(error)
        self._free_slot(sequence)  # the task may have been cancelled before it began

    def _free_slot(self, sequence: _VllmSequence) -> None:
        self._running.pop(sequence, None)
        self._fill_slots()

    async def _submit(self, sequence: _VllmSequence) -> Ending:
        """Submit the rest of a request to vLLM, append the tokens it returns and return how the submission ended."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        if sequence.interrupted:
            return Ending.ABORTED
        assert self._version is not None, "an engine without weights accepts no requests"
        sequence.num_submissions += 1
        request, version = sequence.remaining_request, self._version
        sampling = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_new_tokens - len(request.prefix_ids),
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,
            seed=request.seed if self._draws_by_position else None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={SEED: request.seed, FIRST_INDEX: len(request.prefix_ids)},
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.context_ids))
        collector = await self._llm.add_request(sequence.vllm_request_id, prompt, sampling)
        sequence.is_submitted = True
        try:
            if sequence.interrupted:  # during add_request, so that the abort missed it
                await self._llm.abort(sequence.vllm_request_id)
            (output,) = (await collector.get()).outputs
        except asyncio.CancelledError:
            await self._llm.abort(sequence.vllm_request_id)
            raise
        finally:
            sequence.is_submitted = False
            collector.close()
        token_ids = list(output.token_ids)
        sequence.token_ids += token_ids
        sequence.logprobs += [chosen[token].logprob for token, chosen in zip(token_ids, output.logprobs, strict=True)]
        sequence.versions += [version] * len(token_ids)
        return _ENDINGS[output.finish_reason]

    async def _interrupt(self, sequences: list[_VllmSequence]) -> None:
        """Abort submissions in vLLM; they return the tokens generated so far."""
        for sequence in sequences:
            sequence.interrupted = True
        await self._llm.abort([sequence.vllm_request_id for sequence in sequences if sequence.is_submitted])

    def _withdraw(self, sequence: _VllmSequence) -> None:
        """Remove a request that its caller no longer awaits."""
        if sequence.task is None and sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence.task is not None:
            sequence.task.cancel()  # cancelling also aborts the request in vLLM


@contextmanager
def _as_engine_died() -> Iterator[None]:
    """Raise EngineDied in place of vLLM's EngineDeadError, which processes without vLLM cannot unpickle."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(f"vLLM's process ended: {error}") from None


@contextmanager
def _bucket_file(bucket: WeightsBucket) -> Iterator[str]:
    """Write a bucket to a temporary file for vLLM's processes, in shared memory where the system has it; yields the path."""
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(prefix="roll-weights-", dir=memory if memory.is_dir() else None) as file:
        file.write(bucket.data.data)
        file.flush()
        yield file.name


def _start_vllm(model: ModelConfig, config: VllmInference, num_slots: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Start vLLM's asynchronous engine with dummy weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": model.max_positions,
        "max_num_seqs": num_slots,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
        "tensor_parallel_size": config.tensor_parallel,
    }
    if config.cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.cache_gib * 2**30)
    elif device.type == "cpu":
        arguments["kv_cache_memory_bytes"] = _bytes_of_all_slots(model, num_slots, dtype, config.tensor_parallel)
    if device.type == "cuda":
        arguments |= {"gpu_memory_utilization": config.memory_share, "enable_sleep_mode": True}
        if not config.compile:
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    else:
        arguments |= {"enforce_eager": not config.compile, "block_size": _CPU_BLOCK_TOKENS}
    # One worker: the class itself, since vLLM takes "uni" for "mp", with one more process. Several: "mp" explicitly, since
    # inside a Ray actor vLLM would have Ray start its workers.
    uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    arguments["distributed_executor_backend"] = uniproc if config.tensor_parallel == 1 else "mp"
    with _model_folder(model) as folder:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **arguments))


def _bytes_of_all_slots(model: ModelConfig, num_slots: int, dtype: torch.dtype, num_workers: int) -> int:
    """Size in bytes of one worker's KV cache for all slots, each at the maximum sequence length."""
    built = model_config(model)
    heads = -(-built.num_key_value_heads // num_workers)
    bytes_per_token = 2 * built.num_hidden_layers * heads * built.head_dim * dtype.itemsize
    tokens = -(-model.max_positions // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    return (num_slots + 1) * tokens * bytes_per_token  # one more, since vLLM keeps a block for itself


@contextmanager
def _model_folder(model: ModelConfig) -> Iterator[Path]:
    """Folder with the model's config, which is all that vLLM reads of a model here."""
    match model:
        case PretrainedModel():
            yield Path(model.path)
        case ScratchModel():
            with tempfile.TemporaryDirectory(prefix="roll-model-") as folder:
                model_config(model).save_pretrained(folder)
                yield Path(folder)
