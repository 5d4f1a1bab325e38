"""The `torch` inference engine: continuous batching over a Hugging Face model, on CPUs or one GPU.

Sequences being decoded occupy the first rows ("slots") of one KV cache. After each step finished sequences leave, the last
ones move into their slots, and waiting requests fill the free slots. No finished sequence holds up the batch.

Shapes: B sequences, P contexts being prefilled, K key-value heads, T cached tokens, D head size, V vocabulary, H hidden
features, C recorded experts per token (layers x experts).
"""

import asyncio
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll_core.config.model import ModelConfig
from roll_core.config.rollout import InFlightPolicy
from roll_core.errors import WrongWeights
from roll_core.inference.completions import InFlightCompletion, check_request
from roll_core.inference.expert_recorder import ExpertRecorder
from roll_core.inference.requests import Completion, GenerationRequest
from roll_core.inference.sampling import sample_tokens
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.types.routing import RoutedExperts
from roll_core.types.trajectory import Ending
from roll_core.weights.broadcast import BroadcastReceiver, Rendezvous
from roll_core.weights.buckets import BroadcastBucket, Bucket, split_flat, unpack
from roll_core.weights.checks import WeightsCheck

PREFILL_TOKENS = 32_768
"""Maximum number of context tokens, padding included, in one prefill. After an update all interrupted requests return at
once, each with its own context; prefilling them together would need the memory of a second KV cache."""


class _DecodingSequence(InFlightCompletion):
    """Request in the engine: first waiting for a slot, then gaining one token per step."""

    def __init__(self, request: GenerationRequest, done: "asyncio.Future[Completion]", recorder: ExpertRecorder | None):
        super().__init__(request, done)
        self._recorder = recorder
        self.expert_chunks: list[NDArray[np.int16]] = []
        """Recorded experts: one array for the context, then one per new token. Empty if experts are not recorded."""

    def routed_experts(self) -> RoutedExperts | None:
        return self._recorder.pack(self.expert_chunks) if self._recorder is not None and self.expert_chunks else None

    @property
    def num_cached(self) -> int:
        """Number of tokens in the KV cache before the next step: all but the newest."""
        return len(self.request.prompt_ids) + self.next_index - 1

    @property
    def next_index(self) -> int:
        """Index of the next token in the whole completion, prefix included."""
        return len(self.request.prefix_ids) + len(self.token_ids)

    def ending(self) -> Ending | None:
        """STOP or LENGTH if the completion is complete, else None."""
        if self.token_ids and self.token_ids[-1] in self.request.stop_token_ids:
            return Ending.STOP
        return Ending.LENGTH if self.next_index == self.request.max_new_tokens else None


class _SlotCache:
    """KV cache of all slots, passed to the model as its cache. The engine declares before each call what the call writes."""

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, max_tokens: int, head_dim: int, like: Tensor):
        shape = (num_layers, 2, num_slots, num_kv_heads, max_tokens, head_dim)
        self._cached = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._prefilled: list[tuple[Tensor, Tensor]] = []
        self._positions_B: Tensor | None = None
        self._num_tokens = 0

    def begin_prefill(self) -> None:
        """Announce a prefill: the call attends to its own tokens only, and its keys and values are held until
        `assign_slots`."""
        self._prefilled, self._positions_B = [], None

    def begin_decode(self, positions_B: Tensor, num_tokens: int) -> None:
        """Announce a decode step: one token for each of the first B slots, at these positions, attending to `num_tokens`
        cached tokens."""
        self._positions_B, self._num_tokens = positions_B, num_tokens

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, K, new tokens, D] and return all that the call may attend to. Called by the model
        per layer."""
        if self._positions_B is None:
            self._prefilled.append((keys, values))
            return keys, values
        rows_B = torch.arange(len(keys), device=keys.device)
        cached_keys, cached_values = self._cached[layer]
        cached_keys[rows_B, :, self._positions_B] = keys[:, :, 0]
        cached_values[rows_B, :, self._positions_B] = values[:, :, 0]
        return cached_keys[: len(keys), :, : self._num_tokens], cached_values[: len(keys), :, : self._num_tokens]

    def assign_slots(self, first_slot: int, context_of_slot: Tensor) -> None:
        """Copy prefilled contexts into consecutive slots from `first_slot` on; several slots may share one context."""
        slots = slice(first_slot, first_slot + len(context_of_slot))
        for layer, (keys, values) in enumerate(self._prefilled):
            self._cached[layer, 0, slots, :, : keys.shape[2]] = keys[context_of_slot]
            self._cached[layer, 1, slots, :, : keys.shape[2]] = values[context_of_slot]
        self._prefilled = []

    def move(self, slots: list[int], to: list[int]) -> None:
        """Copy the cache of each of `slots` to the slot at the same place in `to`, whose cache is lost."""
        self._cached[:, :, to] = self._cached[:, :, slots]


class TorchEngine:
    """Inference engine that runs a Hugging Face model in this process, one step at a time between events of the event
    loop."""

    def __init__(self, model: ModelConfig, *, seed: int, num_slots: int, device: torch.device, dtype: torch.dtype):
        self._max_tokens = model.max_positions
        self._num_slots = num_slots
        self._device = device
        self._model = build_model(model, seed).to(device, dtype).eval().requires_grad_(False)
        self._parameters = dict(to_checkpoint_names(self._model.named_parameters()))
        self._cache: _SlotCache | None = None
        self._waiting: deque[_DecodingSequence] = deque()
        self._running: list[_DecodingSequence] = []
        self._version = 0
        self._admitting = True
        self._loading_weights = False
        """True during an update: no step may compute with a mix of old and new weights."""
        self._missing: set[str] = set()
        """Names of the tensors that the current update has not loaded yet."""
        self._receiver: BroadcastReceiver | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._recorder: ExpertRecorder | None = None

    def record_experts(self) -> None:
        """Record from now on the experts that tokens are routed to, and return them with completions."""
        self._recorder = ExpertRecorder(self._model)

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, self._max_tokens, self._model.config.vocab_size)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_DecodingSequence(request, done, self._recorder))
        self._ensure_stepping()
        try:
            return await done
        except asyncio.CancelledError:
            await self.abort(request.request_id)  # its slot is free for a request that somebody awaits
            raise

    async def abort(self, *request_ids: str) -> None:
        for sequence in [*self._waiting, *self._running]:
            if sequence.request.request_id in request_ids:
                sequence.finish(Ending.ABORTED)
        self._waiting = deque(s for s in self._waiting if not s.done.done())
        self._drop_finished()

    async def begin_update(self, in_flight: InFlightPolicy) -> None:
        await self.wake()
        self._admitting = False
        match in_flight:
            case InFlightPolicy.FINISH:
                await asyncio.gather(*(s.done for s in self._running))
            case InFlightPolicy.RESUME:
                for sequence in self._running:
                    sequence.finish(Ending.ABORTED)
                self._drop_finished()
            case InFlightPolicy.CONTINUE:
                pass
        self._loading_weights = True
        self._missing = set(self._parameters)

    async def join(self, rendezvous: Rendezvous, rank: int) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = await asyncio.to_thread(BroadcastReceiver, rendezvous, rank, self._device)

    async def load(self, bucket: Bucket) -> None:
        if isinstance(bucket, BroadcastBucket):
            assert self._receiver is not None, "an engine joins before it is sent anything"
            tensors = split_flat(await asyncio.to_thread(self._receiver.receive, bucket.num_bytes), bucket.entries)
        else:
            tensors = unpack([bucket])
        with torch.no_grad():
            for name, tensor in tensors:
                self._parameters[name].copy_(tensor)
                self._missing.discard(name)

    async def finish_update(self, version: int, check: WeightsCheck | None) -> None:
        if self._missing:
            raise WrongWeights(f"weights version {version} lacks {', '.join(sorted(self._missing))}")
        for sample in check.samples if check else ():
            held = self._parameters[sample.name][..., list(sample.columns)]
            if not torch.equal(held, sample.values.to(held)):
                raise WrongWeights(f"weights version {version} differs from the trainer's: {sample.name}")
        self._version = version
        self._admitting, self._loading_weights = True, False
        self._ensure_stepping()

    async def sleep(self) -> None:
        in_flight = len(self._running) + len(self._waiting)
        assert in_flight == 0, f"an engine must not sleep with {in_flight} requests in flight"
        self._cache, self._admitting = None, False
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        self._model.to(self._device)
        self._parameters = dict(to_checkpoint_names(self._model.named_parameters()))

    async def ping(self) -> None:
        """Return at once: the engine runs in the caller's event loop."""

    def _ensure_stepping(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._step_until_idle())
            self._loop_task.add_done_callback(self._fail_all_requests)

    def _fail_all_requests(self, loop_task: asyncio.Task[None]) -> None:
        """Fail every request in the engine with the exception of a failed step, so that none waits forever."""
        error = None if loop_task.cancelled() else loop_task.exception()
        if error is None:
            return
        for sequence in [*self._waiting, *self._running]:
            if not sequence.done.done():
                sequence.done.set_exception(error)
        self._waiting.clear()
        self._running.clear()

    async def _step_until_idle(self) -> None:
        """Step until no request can progress, yielding to the event loop between steps so that requests, aborts and
        updates get in."""
        while not self._loading_weights and (self._running or (self._waiting and self._admitting)):
            if self._running:
                self._decode()
            if self._waiting and self._admitting and len(self._running) < self._num_slots:
                self._prefill()
            await asyncio.sleep(0)

    @torch.inference_mode()
    def _prefill(self) -> None:
        """Start waiting requests in the free slots: compute their contexts (the prompt and, if resumed, the prefix) and
        their first new token. A context shared by several requests, such as the prompt of a group, is computed once."""
        first_slot = len(self._running)
        starting = self._take_waiting(self._num_slots - first_slot)
        self._running += starting  # first, so that a failure below reaches their callers
        contexts = list(dict.fromkeys(s.request.context_ids for s in starting))
        context_index = {context: i for i, context in enumerate(contexts)}
        lengths_P = torch.tensor([len(c) for c in contexts])
        longest = int(lengths_P.max())
        token_ids_PT = torch.tensor([c + (0,) * (longest - len(c)) for c in contexts])
        causal_TT = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()
        cache = self._ensure_cache()
        cache.begin_prefill()
        hidden = self._forward(
            token_ids_PT, torch.arange(longest).expand(len(contexts), -1), causal_TT.expand(len(contexts), 1, -1, -1), cache
        )
        last_PH = hidden[torch.arange(len(contexts)), lengths_P - 1]
        context_of_slot = torch.tensor([context_index[s.request.context_ids] for s in starting])
        cache.assign_slots(first_slot, context_of_slot)
        if self._recorder is not None:
            chosen_PTC = self._recorder.take().reshape(len(contexts), longest, -1)
            for sequence in starting:
                context = sequence.request.context_ids
                sequence.expert_chunks.append(chosen_PTC[context_index[context], : len(context)])
        self._sample(starting, self._logits(last_PH)[context_of_slot])

    def _take_waiting(self, limit: int) -> list[_DecodingSequence]:
        """Dequeue up to `limit` waiting requests that fit into one prefill; at least one."""
        taken: list[_DecodingSequence] = []
        contexts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(taken) < limit:
            context = self._waiting[0].request.context_ids
            longest = max(longest, len(context))
            contexts.add(context)
            if taken and len(contexts) * longest > PREFILL_TOKENS:
                break
            taken.append(self._waiting.popleft())
        return taken

    @torch.inference_mode()
    def _decode(self) -> None:
        """Generate one more token for every running sequence."""
        positions_B = torch.tensor([s.num_cached for s in self._running], device=self._device)
        num_tokens = int(positions_B.max()) + 1
        visible_BT = torch.arange(num_tokens, device=self._device) <= positions_B[:, None]
        cache = self._ensure_cache()
        cache.begin_decode(positions_B, num_tokens)
        newest_B1 = torch.tensor([[s.token_ids[-1]] for s in self._running])
        hidden = self._forward(newest_B1, positions_B[:, None], visible_BT[:, None, None, :], cache)
        if self._recorder is not None:
            for sequence, chosen_C in zip(self._running, self._recorder.take(), strict=True):
                sequence.expert_chunks.append(chosen_C[None])
        self._sample(self._running, self._logits(hidden[:, 0]))

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: _SlotCache) -> Tensor:
        return self._model.base_model(
            input_ids=token_ids.to(self._device),
            attention_mask=mask,
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        return self._model.get_output_embeddings()(hidden_BH).float()

    def _sample(self, sequences: list[_DecodingSequence], logits_BV: Tensor) -> None:
        """Append the next token to each sequence, with its logprob at the sampling temperature, and finish complete
        sequences."""
        temperatures = [s.request.temperature for s in sequences]
        scale_B1 = torch.tensor([[t or 1.0] for t in temperatures], device=self._device)
        logprobs_BV = (logits_BV / scale_B1).log_softmax(dim=-1)
        seeds_B = np.array([s.request.seed for s in sequences], dtype=np.uint64)
        indices_B = np.array([s.next_index for s in sequences], dtype=np.uint64)
        tokens_B = sample_tokens(logprobs_BV, seeds_B, indices_B)
        if 0 in temperatures:
            greedy_B = torch.tensor([t == 0 for t in temperatures], device=self._device)
            tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), tokens_B)
        chosen_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
        for sequence, token, logprob in zip(sequences, tokens_B.tolist(), chosen_B.tolist(), strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self._version)
            ending = sequence.ending()
            if ending is not None:
                sequence.finish(ending)
        self._drop_finished()

    @torch.inference_mode()
    def _drop_finished(self) -> None:
        """Remove finished sequences and move the last running ones into their slots. Moving only those keeps copies of KV
        cache, which are expensive, to a minimum; the order of slots has no meaning."""
        is_done = [sequence.done.done() for sequence in self._running]
        num_staying = is_done.count(False)
        free = [slot for slot in range(num_staying) if is_done[slot]]
        moving = [slot for slot in range(num_staying, len(is_done)) if not is_done[slot]]
        if moving and self._cache is not None:
            self._cache.move(moving, to=free)
        for slot, target in zip(moving, free, strict=True):
            self._running[target] = self._running[slot]
        del self._running[num_staying:]

    def _ensure_cache(self) -> _SlotCache:
        if self._cache is None:
            config = self._model.config
            like = next(self._model.parameters())
            self._cache = _SlotCache(
                config.num_hidden_layers,
                self._num_slots,
                config.num_key_value_heads,
                self._max_tokens,
                config.head_dim if config.head_dim else config.hidden_size // config.num_attention_heads,
                like,
            )
        return self._cache
