"""Inside vLLM's worker process, and all that depends on vLLM's insides: loading weights while it lives, reading them back,
drawing tokens by seed and place, and ending with the process that started it. `vllm_engine` calls it by name.

vLLM keeps weights in other shapes than Hugging Face does: q, k and v in one matrix, gate and up in another, and on CPUs
packed for a matrix library, where nothing can be read but through a product. So weights are read back by what they do: the
columns of a linear layer are what it answers to unit vectors. An expert answers no such thing, but what packing does to its
matrices shows when it is done to numbers that name their places.
Shapes: B sequences, V vocabulary, C columns, E experts, I input features, O output features, P places in a matrix.
"""

import os
import pickle
import select
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from roll_core.host import end_with_parent
from roll_core.inference.sampling import draw
from roll_core.inference.vllm.replayed_load import ReplayedLoad
from roll_core.inference.vllm.support import PLACE, SEED
from roll_core.models.checkpoint_names import expert_of
from roll_core.weights.broadcast import Receiver
from roll_core.weights.buckets import FlatLayout, cut, open_handle
from roll_core.weights.checks import WeightsSample


class WorkerExtension:
    """Methods that vLLM's worker is given: `self` is the worker."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _roll_replayed: ReplayedLoad | None
    """Where weights are used in the shape in which they are loaded; otherwise vLLM loads them as it did when it started."""
    _roll_is_loading: bool = False
    _roll_receiver: Receiver | None = None

    def roll_begin(self, role: int) -> bool:
        """Once, before the first request. `role` is the process that started all this. Answers whether weights can be loaded
        without `roll_begin_weights`."""
        end_with_parent(signal.SIGKILL)  # also where vLLM hangs: it would keep its memory
        if os.getppid() != role:  # one of several workers: their parent is vLLM's, which does not see that the role is gone
            threading.Thread(target=_end_with, args=(role,), daemon=True).start()
        model = self.model_runner.model
        self._roll_replayed = ReplayedLoad(model) if _is_loaded_as_it_is(model) else None
        if not self.vllm_config.use_v2_model_runner:  # which draws by seed and position, too
            self.model_runner.sampler.topk_topp_sampler = _SeededSampler(self.model_runner)
        return self._roll_replayed is not None

    def roll_answer(self) -> None:
        """Between two steps, or not at all."""

    def roll_begin_weights(self) -> None:
        model = self.model_runner.model
        if self._roll_is_loading:  # an update that broke off left layers that wait for the rest of their tensors
            self._roll_finish_loading()
        self._roll_is_loading = True
        _forget_packed_experts(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def roll_load_file(self, path: str, layout: bytes) -> None:
        """Tensors that lie in a file; the layout says what and where."""
        self._roll_load(torch.from_file(path, shared=False, size=Path(path).stat().st_size, dtype=torch.uint8), layout)

    def roll_load_shared(self, handle: bytes, layout: bytes) -> None:
        """The same in memory of this worker's GPU that another process shares."""
        self._roll_load(open_handle(handle), layout)
        torch.cuda.synchronize(self.device)  # the memory is used again when this answers

    def roll_join(self, pickled_meeting: bytes, first_rank: int) -> None:
        """Take part in broadcasts, each worker of this engine as a rank of its own."""
        if self._roll_receiver is not None:
            self._roll_receiver.close()
        self._roll_receiver = Receiver(pickle.loads(pickled_meeting), first_rank + self.rank, self.device)

    def roll_load_broadcast(self, num_bytes: int, layout: bytes) -> None:
        """The same through the group that was joined."""
        assert self._roll_receiver is not None, "an engine joins before it is sent anything"
        self._roll_load(self._roll_receiver.receive(num_bytes), layout)

    def _roll_load(self, flat: Tensor, layout: bytes) -> None:
        unpickled = _unpickle_layout(layout)
        with set_current_vllm_config(self.vllm_config):
            if self._roll_replayed is not None:
                self._roll_replayed.load_flat(flat.to(self.device), unpickled)
            else:
                # Copies: a layer's tensors are kept until it has all of them, and the memory is used again before that.
                named = cut(flat, unpickled.entries, unpickled.starts)
                self.model_runner.model.load_weights((name, part.to(self.device, copy=True)) for name, part in named)

    def roll_finish_weights(self, pickled_samples: bytes) -> list[str]:
        """All have been loaded. Which of them are not what the samples say, and by how much."""
        self._roll_finish_loading()
        return _differences(self.model_runner.model, pickle.loads(pickled_samples))

    def _roll_finish_loading(self) -> None:
        if self._roll_replayed is not None:
            self._roll_replayed.settle()
            return
        model = self.model_runner.model
        self._roll_is_loading = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        _repack_embeddings(model)


class _SeededSampler(nn.Module):
    """Stands where vLLM's random sampler stands: gets logits at their temperature, answers tokens and logprobs."""

    def __init__(self, model_runner: Any):
        super().__init__()
        self._requests = model_runner.requests
        self._batch = lambda: model_runner.input_batch

    def forward(
        self, logits_BV: Tensor, _generators: object, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert (top_k, top_p) == (None, None), "tokens are drawn from the full distribution"
        requests = [self._requests[request_id] for request_id in self._batch().req_ids[: len(logits_BV)]]
        logprobs_BV = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        extra = [request.sampling_params.extra_args for request in requests]
        seeds_B = np.array([arguments[SEED] for arguments in extra], dtype=np.uint64)
        places_B = [arguments[PLACE] + len(r.output_token_ids) for arguments, r in zip(extra, requests, strict=True)]
        return draw(logprobs_BV, seeds_B, np.array(places_B, dtype=np.uint64)), logprobs_BV


@cache
def _unpickle_layout(layout: bytes) -> FlatLayout:
    """Which is one of few that come again and again."""
    return FlatLayout(*pickle.loads(layout))


def _end_with(process: int) -> None:
    select.select([os.pidfd_open(process)], [], [])  # readable once it has ended
    os._exit(1)


def _is_loaded_as_it_is(model: nn.Module) -> bool:
    """Whether no layer packs or permutes its weights once it has them."""
    methods = [method for module in model.modules() if (method := getattr(module, "quant_method", None)) is not None]
    return current_platform.is_cuda() and all(
        isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod) for method in methods
    )


def _forget_packed_experts(model: nn.Module) -> None:
    """On CPUs experts are packed when their kernel is first built, and only then: without it, it is built again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_embeddings(model: nn.Module) -> None:
    """On CPUs a head that is tied to the embedding keeps a packed copy, which loading the embedding leaves as it was."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


# ---------------------------------------------------------------------------------------------------- reading back
class _Shard(NamedTuple):
    """The part of a matrix that this worker holds, where several hold an engine's weights together."""

    rows: range
    first_row: int
    """Where those begin here: after other matrices, if several were made one."""
    columns: range


def _differences(model: Any, samples: tuple[WeightsSample, ...]) -> list[str]:
    """By name, and by how much."""
    modules = dict(model.named_modules())
    compared = [
        (f"{sample.name} (as {place})", values, said.to(values.device, values.dtype))
        for sample in samples
        for place, values, said in _readings(model, modules, sample)
    ]
    # All are compared before the first answer is waited for.
    found = [(values != expected).any() for _, values, expected in compared]
    return [
        f"{name} by up to {(values - expected).abs().max().item():.3g}"
        for (name, values, expected), differs in zip(compared, found, strict=True)
        if differs
    ]


def _readings(model: Any, modules: dict[str, Any], sample: WeightsSample) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What this worker has of the sampled columns wherever the model keeps them: the name of the place, what is there and
    what should be. Nothing for experts on GPUs, whose kernels have layouts of their own."""
    path, _, kind = sample.name.rpartition(".")
    if expert := expert_of(sample.name):
        layer, number, projection = expert
        if current_platform.is_cpu():
            yield f"{layer} {number}", *_expert_reading(modules[f"{layer}.routed_experts"], number, projection, sample)
    elif path in modules:
        yield path, *_reading(modules[path], kind, 0, sample)
    else:
        parent, _, leaf = path.rpartition(".")
        for fused, parts in model.packed_modules_mapping.items():
            if leaf in parts and f"{parent}.{fused}" in modules:
                module = modules[f"{parent}.{fused}"]
                yield f"{parent}.{fused}", *_reading(module, kind, parts.index(leaf), sample)
    if path.endswith("embed_tokens") and model.config.tie_word_embeddings:
        yield "the output head", *_answered(model.lm_head, 0, sample)  # which may be the embedding itself


def _reading(module: Any, kind: str, part: int, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    if isinstance(module, VocabParallelEmbedding):
        return _held(module.weight, _shard(module, part), sample)
    if kind == "weight" and isinstance(module, LinearBase):
        return _answered(module, part, sample)
    parameter: Tensor = getattr(module, kind)
    return parameter[..., torch.tensor(sample.columns, device=parameter.device)], sample.values


def _held(matrix_OI: Tensor, shard: _Shard, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Columns of a matrix that can be read as it is."""
    rows, first, columns = shard
    mine_C = torch.tensor([column in columns for column in sample.columns])
    columns_C = torch.tensor(sample.columns)[mine_C] - columns.start
    held_OC = matrix_OI[first : first + len(rows), columns_C.to(matrix_OI.device)]
    return held_OC, sample.values[rows.start : rows.stop, mine_C]


def _expert_reading(module: Any, number: int, projection: str, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Of an expert on a CPU. Each worker has some of the features between its matrices, of gate and up the rows."""
    packed_EOI = module.w2_weight if projection == "down" else module.w13_weight
    matrix_OI = _unpacked(packed_EOI[number], module.quant_method.moe_kernel.fused_experts.isa)
    width, worker = module.moe_config.intermediate_size_per_partition, module.moe_config.tp_rank
    mine = range(worker * width, (worker + 1) * width)
    if projection == "down":
        return _held(matrix_OI, _Shard(range(len(matrix_OI)), 0, mine), sample)
    first = len(matrix_OI) // 2 if projection == "up" else 0
    return _held(matrix_OI, _Shard(mine, first, range(matrix_OI.shape[1])), sample)


def _unpacked(packed_OI: Tensor, instructions: str) -> Tensor:
    matrix_P = torch.empty_like(packed_OI).flatten()
    matrix_P[_places_when_packed(packed_OI.shape, packed_OI.dtype, instructions)] = packed_OI.flatten()
    return matrix_P.view_as(packed_OI)


@cache
def _places_when_packed(shape: torch.Size, dtype: torch.dtype, instructions: str) -> Tensor:
    """Where in an expert's matrix each number comes from that is in the packed one [P]. Digit by digit, each of which every
    kind of number can say."""
    place_P, found_P = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
    for digit in range(4):
        digit_P = place_P // 256**digit % 256
        packed_1OI = cpu_prepack_moe_weight(digit_P.to(dtype).view(1, *shape), instructions)
        found_P += packed_1OI.flatten().long() * 256**digit
    return found_P


def _answered(module: Any, part: int, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Columns of a linear layer [O, C]: what it answers to unit vectors. Exact, since all other products are zero."""
    rows, first, columns = _shard(module, part)
    mine_C = torch.tensor([column in columns for column in sample.columns])
    columns_C = torch.tensor(sample.columns)[mine_C] - columns.start
    expected_OC = sample.values[rows.start : rows.stop, mine_C]
    if not len(columns_C):
        return expected_OC, expected_OC
    like = next(module.parameters())
    units_CI = nn.functional.one_hot(columns_C.to(like.device), len(columns)).to(like.dtype)
    answers_CO = module.quant_method.apply(module, units_CI, bias=None)
    return answers_CO[:, first : first + len(rows)].T, expected_OC


def _shard(module: Any, part: int) -> _Shard:
    match module:
        case VocabParallelEmbedding():
            rows = range(module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index)
            return _Shard(rows, 0, range(module.embedding_dim))
        case ColumnParallelLinear():
            sizes = module.output_partition_sizes
            # Keys and values of few heads are with several workers.
            copies = module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) and part > 0 else 1
            start = module.tp_rank // copies * sizes[part]
            return _Shard(range(start, start + sizes[part]), sum(sizes[:part]), range(module.input_size))
        case RowParallelLinear():
            width = module.input_size_per_partition
            return _Shard(range(module.output_size), 0, range(module.tp_rank * width, (module.tp_rank + 1) * width))
        case _:
            return _Shard(range(module.output_size), 0, range(module.input_size))
