"""The `vllm` inference engine: vLLM's asynchronous engine, on CPUs or GPUs, with weights that change while it lives.

vLLM never generates while weights change. Whatever it is at is finished before that, or ended and asked for again from the
tokens it has, here or by the scheduler. So all tokens of one request to vLLM are by one version, and its cache, which is
emptied with each update, never mixes two. It starts without weights: they come with the first update, and nobody is served
before that.
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
from roll_core.inference.vllm.support import PLACE, SEED, check_version
from roll_core.models.causal_lm import model_config
from roll_core.types.trajectory import Ending
from roll_core.weights.broadcast import Rendezvous
from roll_core.weights.buckets import BroadcastBucket, Bucket, DeviceBucket, WeightsBucket, starts_of
from roll_core.weights.checks import WeightsCheck

WORKER = "roll_core.inference.vllm.worker.WorkerExtension"
"""What vLLM's worker is extended by, where it runs."""
_CPU_BLOCK_TOKENS = 32
"""vLLM's cache on CPUs is given out in blocks of so many tokens: the fewest it can. Whole blocks of a prompt are shared."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or all engines of a machine are pinned to its first core
    "TORCHDYNAMO_DISABLE": "1",  # or the first request with logprobs compiles C++, on CPUs, for half a minute
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Where there is no GPU. Set before vLLM is imported; what it starts inherits it."""
_ENDINGS = {"stop": Ending.STOP, "length": Ending.LENGTH, "abort": Ending.ABORTED}


@dataclass(eq=False)
class _Sequence(InFlightCompletion):
    """A request on its way: waiting until it has a slot, then with vLLM, perhaps several times."""

    driving: asyncio.Task[None] | None = None
    number: int = 0
    """How often vLLM was asked: it may not have forgotten an earlier request of the same name."""
    at_vllm: bool = False
    interrupted: bool = False
    goes_on: bool = False
    """It is interrupted for new weights, and asked for again when they are there."""

    @property
    def name(self) -> str:
        """Of what vLLM was asked last."""
        return f"{self.request.request_id}#{self.number}"

    @property
    def rest(self) -> GenerationRequest:
        return replace(self.request, prefix_ids=self.request.prefix_ids + tuple(self.token_ids))


class VllmEngine:
    """Build it inside a running event loop, since vLLM's listens there for what its process says."""

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
        self._vocabulary = model_config(model).vocab_size
        self._num_slots = num_slots
        self._can_sleep = device.type == "cuda"
        self._asleep = False
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[_Sequence, None] = {}
        self._version: int | None = None
        self._adopted = asyncio.Event()
        self._begun = False
        self._loads_in_place = False
        """Nothing has to be prepared for new weights: they are copied over the old ones."""
        self._loaded: list[str] = []
        if device.type == "cpu":
            os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS=str(num_threads))
        self._llm = _start_vllm(model, config, num_slots, device, dtype)
        self._draws_by_position = self._llm.vllm_config.use_v2_model_runner

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, self._max_tokens, self._vocabulary)
        sequence = _Sequence(request, asyncio.get_running_loop().create_future())
        self._waiting.append(sequence)
        self._fill_slots()
        try:
            return await sequence.done
        finally:
            self._let_go(sequence)  # whoever asked may have gone before it was done

    async def abort(self, *request_ids: str) -> None:
        for sequence in [s for s in self._waiting if s.request.request_id in request_ids]:
            self._waiting.remove(sequence)
            sequence.finish(Ending.ABORTED)
        unwanted = [s for s in self._running if s.request.request_id in request_ids]
        for sequence in unwanted:
            if sequence.goes_on and not sequence.at_vllm:  # it waits for new weights
                sequence.finish(Ending.ABORTED)
            sequence.goes_on = False
        with _telling_its_death():
            await self._interrupt(unwanted)
        await asyncio.gather(*(s.done for s in unwanted), return_exceptions=True)

    async def begin_update(self, in_flight: InFlightPolicy) -> None:
        self._adopted.clear()
        with _telling_its_death():
            await self._make_way(in_flight)
            if self._asleep:
                await self._llm.wake_up(tags=["weights"])
            if not self._begun:
                self._loads_in_place = all(await self._llm.collective_rpc("roll_begin", args=(os.getpid(),)))
                self._begun = True
            # Not the method that wraps it, which waits 20 ms for answers under way: here nobody waits for any.
            await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
            if not self._loads_in_place:
                await self._llm.collective_rpc("roll_begin_weights")
        self._version, self._loaded = None, []

    async def join(self, meeting: Rendezvous, rank: int) -> None:
        with _telling_its_death():
            await self._llm.collective_rpc("roll_join", args=(pickle.dumps(meeting), rank))

    async def load(self, bucket: Bucket) -> None:
        starts = bucket.starts if isinstance(bucket, DeviceBucket) else starts_of(bucket.entries)
        layout = pickle.dumps((bucket.entries, starts))
        match bucket:
            case DeviceBucket():
                with _telling_its_death():
                    await self._llm.collective_rpc("roll_load_shared", args=(bucket.handle, layout))
            case WeightsBucket():
                with _telling_its_death(), _in_file(bucket) as path:
                    await self._llm.collective_rpc("roll_load_file", args=(path, layout))
            case BroadcastBucket():
                with _telling_its_death():
                    await self._llm.collective_rpc("roll_load_broadcast", args=(bucket.num_bytes, layout))
        self._loaded += [entry.name for entry in bucket.entries]

    async def finish_update(self, version: int, check: WeightsCheck | None) -> None:
        missing = set(check.names if check else ()).difference(self._loaded)
        samples = pickle.dumps(check.samples if check and not missing else ())
        with _telling_its_death():
            by_worker = await self._llm.collective_rpc("roll_finish_weights", args=(samples,))
            if missing:
                raise WrongWeights(f"weights version {version} lacks {', '.join(sorted(missing))}")
            if differences := [difference for found in by_worker for difference in found]:
                raise WrongWeights(f"weights version {version} differs from the trainer's: {'; '.join(differences)}")
            if not self._asleep:
                await self._llm.resume_generation()
        self._version = version
        if not self._asleep:
            self._adopted.set()
            self._fill_slots()

    async def sleep(self) -> None:
        in_flight = len(self._running) + len(self._waiting)
        assert in_flight == 0, f"an engine must not sleep with {in_flight} requests in flight"
        self._adopted.clear()
        self._version = None
        if self._can_sleep:
            with _telling_its_death():
                await self._llm.sleep(level=2)  # 1 would copy weights to the host, which nobody will want
            self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            with _telling_its_death():
                await self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if self._version is not None:
            self._adopted.set()
            self._fill_slots()

    async def answer(self) -> None:
        with _telling_its_death():
            await self._llm.collective_rpc("roll_answer")

    def close(self) -> None:
        """End vLLM's process; the engine's own would take it along, too."""
        self._llm.shutdown()

    async def _make_way(self, in_flight: InFlightPolicy) -> None:
        running = list(self._running)
        match in_flight:
            case InFlightPolicy.FINISH:
                pass
            case InFlightPolicy.RESUME:
                await self._interrupt(running)
            case InFlightPolicy.CONTINUE:
                for sequence in running:
                    sequence.goes_on = True
                await self._interrupt(running)
                return
        await asyncio.gather(*(s.done for s in running), return_exceptions=True)

    # ---------------------------------------------------------------------------------------------- requests
    def _fill_slots(self) -> None:
        while self._waiting and self._adopted.is_set() and len(self._running) < self._num_slots:
            sequence = self._waiting.popleft()
            self._running[sequence] = None
            sequence.driving = asyncio.create_task(self._drive(sequence))
            sequence.driving.add_done_callback(partial(self._pass_on_failure, sequence))

    async def _drive(self, sequence: _Sequence) -> None:
        """Ask vLLM until it is done, again from where it was if weights came in between."""
        try:
            while not sequence.done.done():
                with _telling_its_death():
                    ending = await self._ask(sequence)
                if ending is not Ending.ABORTED or not sequence.goes_on:
                    sequence.finish(ending)
                    break
                await self._adopted.wait()
                sequence.goes_on = sequence.interrupted = False
        finally:
            self._leave(sequence)  # before whoever asked is told that it is done

    def _pass_on_failure(self, sequence: _Sequence, driving: asyncio.Task[None]) -> None:
        """Whatever went wrong is the answer to who waits for this one."""
        error = None if driving.cancelled() else driving.exception()
        if error is not None and not sequence.done.done():
            sequence.done.set_exception(error)
        self._leave(sequence)  # it may have been cancelled before it began

    def _leave(self, sequence: _Sequence) -> None:
        self._running.pop(sequence, None)
        self._fill_slots()

    async def _ask(self, sequence: _Sequence) -> Ending:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        if sequence.interrupted:
            return Ending.ABORTED
        assert self._version is not None, "an engine without weights serves nobody"
        sequence.number += 1
        request, asked_of = sequence.rest, self._version
        sampling = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_new_tokens - len(request.prefix_ids),
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,
            seed=request.seed if self._draws_by_position else None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={SEED: request.seed, PLACE: len(request.prefix_ids)},
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.context_ids))
        answer = await self._llm.add_request(sequence.name, prompt, sampling)
        sequence.at_vllm = True
        try:
            if sequence.interrupted:  # while it was on its way
                await self._llm.abort(sequence.name)
            (part,) = (await answer.get()).outputs
        except asyncio.CancelledError:
            await self._llm.abort(sequence.name)
            raise
        finally:
            sequence.at_vllm = False
            answer.close()
        token_ids = list(part.token_ids)
        sequence.token_ids += token_ids
        sequence.logprobs += [chosen[token].logprob for token, chosen in zip(token_ids, part.logprobs, strict=True)]
        sequence.versions += [asked_of] * len(token_ids)
        return _ENDINGS[part.finish_reason]

    async def _interrupt(self, sequences: list[_Sequence]) -> None:
        """Have vLLM end these, with the tokens they have."""
        for sequence in sequences:
            sequence.interrupted = True
        await self._llm.abort([sequence.name for sequence in sequences if sequence.at_vllm])

    def _let_go(self, sequence: _Sequence) -> None:
        if sequence.driving is None and sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence.driving is not None:
            sequence.driving.cancel()  # vLLM ends what nobody listens to


@contextmanager
def _telling_its_death() -> Iterator[None]:
    """That vLLM's process is no more is an error of ours, which whoever gets it can read without vLLM."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(f"vLLM's process ended: {error}") from None


@contextmanager
def _in_file(bucket: WeightsBucket) -> Iterator[str]:
    """A bucket where vLLM's process finds it: in a file, which is in memory where the system has a place for that."""
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(prefix="roll-weights-", dir=memory if memory.is_dir() else None) as file:
        file.write(bucket.data.data)
        file.flush()
        yield file.name


def _start_vllm(model: ModelConfig, config: VllmInference, num_slots: int, device: torch.device, dtype: torch.dtype) -> Any:
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
    # By its class: "uni" alone is taken for "mp", with one process more. And "mp" by its name: inside an actor of Ray's vLLM
    # would have Ray start its workers.
    uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    arguments["distributed_executor_backend"] = uniproc if config.tensor_parallel == 1 else "mp"
    with _model_folder(model) as folder:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **arguments))


def _bytes_of_all_slots(model: ModelConfig, num_slots: int, dtype: torch.dtype, num_workers: int) -> int:
    """A worker's keys and values of as many sequences as there are slots, each as long as it may become."""
    built = model_config(model)
    heads = -(-built.num_key_value_heads // num_workers)
    a_token = 2 * built.num_hidden_layers * heads * built.head_dim * dtype.itemsize
    tokens = -(-model.max_positions // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    return (num_slots + 1) * tokens * a_token  # and a block that vLLM keeps for itself


@contextmanager
def _model_folder(model: ModelConfig) -> Iterator[Path]:
    """A folder with the model's config, which is all that vLLM reads of it."""
    match model:
        case PretrainedModel():
            yield Path(model.path)
        case ScratchModel():
            with tempfile.TemporaryDirectory(prefix="roll-model-") as folder:
                model_config(model).save_pretrained(folder)
                yield Path(folder)
