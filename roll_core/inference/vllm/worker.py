"""Extension of vLLM's worker, run in the worker's process; all code that depends on vLLM's internals is here.

It loads weights while vLLM runs, reads them back, samples by seed and token index, and exits with the role's process.
`vllm/engine.py` calls its methods by name.

vLLM fuses q, k and v into one matrix, and gate and up into another. On CPUs it packs matrices for a matrix library, where
they can only be read through a product. Weights are therefore read back by probing: the columns of a linear layer are its
outputs for unit vectors. Experts cannot be probed like that; instead, packing a matrix of known indices reveals the
permutation that packing applies.

Shapes: B sequences, V vocabulary, C columns, E experts, I input features, O output features, P elements of a flat matrix.
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
from roll_core.inference.sampling import sample_tokens
from roll_core.inference.vllm.replayed_load import ReplayedLoad
from roll_core.inference.vllm.support import FIRST_INDEX, SEED
from roll_core.models.checkpoint_names import expert_of
from roll_core.weights.broadcast import BroadcastReceiver
from roll_core.weights.buckets import FlatLayout, open_handle, split_flat
from roll_core.weights.checks import WeightsSample


class WorkerExtension:
    """Mixin of methods that vLLM adds to its worker class; `self` is the worker."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _roll_replayed: ReplayedLoad | None
    """Replayed loader, if the model uses weights in the layout in which they are loaded. None makes vLLM reload layer by
    layer."""
    _roll_is_loading: bool = False
    """True during a layer-by-layer reload."""
    _roll_receiver: BroadcastReceiver | None = None

    def roll_begin(self, role_pid: int) -> bool:
        """Prepare the worker, once, before the first request. `role_pid` is the process that started the engine.

        Return True if weights can be loaded without `roll_begin_weights`.
        """
        end_with_parent(signal.SIGKILL)  # even if vLLM hangs, which would keep its memory
        if os.getppid() != role_pid:  # several workers: their parent, vLLM's process, does not notice the role's end
            threading.Thread(target=_exit_with, args=(role_pid,), daemon=True).start()
        model = self.model_runner.model
        self._roll_replayed = ReplayedLoad(model) if _keeps_checkpoint_layout(model) else None
        if not self.vllm_config.use_v2_model_runner:  # the v2 runner draws by seed and position itself
            self.model_runner.sampler.topk_topp_sampler = _SeededSampler(self.model_runner)
        return self._roll_replayed is not None

    def roll_ping(self) -> None:
        """Return at once. vLLM runs it between two steps, so that a hanging step delays it."""

    def roll_begin_weights(self) -> None:
        """Prepare vLLM's layer-by-layer reload."""
        model = self.model_runner.model
        if self._roll_is_loading:  # an aborted update left layers waiting for tensors
            self._roll_finish_loading()
        self._roll_is_loading = True
        _drop_expert_kernels(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def roll_load_file(self, path: str, layout: bytes) -> None:
        """Load tensors from a file; `layout` is a pickled (entries, starts)."""
        self._roll_load(torch.from_file(path, shared=False, size=Path(path).stat().st_size, dtype=torch.uint8), layout)

    def roll_load_shared(self, handle: bytes, layout: bytes) -> None:
        """Load tensors from memory of this worker's GPU that another process shares."""
        self._roll_load(open_handle(handle), layout)
        torch.cuda.synchronize(self.device)  # the sender reuses the memory on return

    def roll_join(self, pickled_rendezvous: bytes, first_rank: int) -> None:
        """Join a broadcast group, as rank `first_rank` plus the rank of this worker in the engine."""
        if self._roll_receiver is not None:
            self._roll_receiver.close()
        self._roll_receiver = BroadcastReceiver(pickle.loads(pickled_rendezvous), first_rank + self.rank, self.device)

    def roll_load_broadcast(self, num_bytes: int, layout: bytes) -> None:
        """Load tensors from the next broadcast of the group joined last."""
        assert self._roll_receiver is not None, "an engine joins before it is sent anything"
        self._roll_load(self._roll_receiver.receive(num_bytes), layout)

    def _roll_load(self, flat: Tensor, layout: bytes) -> None:
        unpickled = _unpickle_layout(layout)
        with set_current_vllm_config(self.vllm_config):
            if self._roll_replayed is not None:
                self._roll_replayed.load_flat(flat.to(self.device), unpickled)
            else:
                # Copies: vLLM keeps a layer's tensors until it has all of them, and the buffer is reused before that.
                named = split_flat(flat, unpickled.entries, unpickled.starts)
                self.model_runner.model.load_weights((name, part.to(self.device, copy=True)) for name, part in named)

    def roll_finish_weights(self, pickled_samples: bytes) -> list[str]:
        """Finish a load and compare with the samples. Return a description of each difference."""
        self._roll_finish_loading()
        return _differences(self.model_runner.model, pickle.loads(pickled_samples))

    def _roll_finish_loading(self) -> None:
        if self._roll_replayed is not None:
            self._roll_replayed.finish()
            return
        model = self.model_runner.model
        self._roll_is_loading = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        _repack_embeddings(model)


class _SeededSampler(nn.Module):
    """Replacement of vLLM's random sampler: maps logits at their temperature to tokens and logprobs, by seed and token
    index."""

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
        indices_B = [arguments[FIRST_INDEX] + len(r.output_token_ids) for arguments, r in zip(extra, requests, strict=True)]
        return sample_tokens(logprobs_BV, seeds_B, np.array(indices_B, dtype=np.uint64)), logprobs_BV


@cache
def _unpickle_layout(layout: bytes) -> FlatLayout:
    """Unpickle a layout. Cached, since updates repeat few layouts."""
    return FlatLayout(*pickle.loads(layout))


def _exit_with(pid: int) -> None:
    """Exit this process when process `pid` ends."""
    select.select([os.pidfd_open(pid)], [], [])  # readable once the process has ended
    os._exit(1)


def _keeps_checkpoint_layout(model: nn.Module) -> bool:
    """True if no layer packs or permutes its weights after loading."""
    methods = [method for module in model.modules() if (method := getattr(module, "quant_method", None)) is not None]
    return current_platform.is_cuda() and all(
        isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod) for method in methods
    )


def _drop_expert_kernels(model: nn.Module) -> None:
    """Drop the kernels of experts before a reload. On CPUs experts are packed only when their kernel is built."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_embeddings(model: nn.Module) -> None:
    """Pack embeddings again after a reload. On CPUs a tied output head keeps a packed copy that loading does not update."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


# ---------------------------------------------------------------------------------------------------- reading back
class _Shard(NamedTuple):
    """Part of a matrix that this worker holds under tensor parallelism."""

    rows: range
    """Rows of the whole matrix that the worker holds."""
    first_row: int
    """First of these rows in the worker's matrix; not 0 if other matrices are fused before it."""
    columns: range
    """Columns of the whole matrix that the worker holds."""


def _differences(model: Any, samples: tuple[WeightsSample, ...]) -> list[str]:
    """Describe each sample that differs from this worker's weights, with the largest difference."""
    modules = dict(model.named_modules())
    compared = [
        (f"{sample.name} (as {location})", held, expected.to(held.device, held.dtype))
        for sample in samples
        for location, held, expected in _sampled_columns(model, modules, sample)
    ]
    # All comparisons are queued before the first result is awaited.
    found = [(held != expected).any() for _, held, expected in compared]
    return [
        f"{name} by up to {(held - expected).abs().max().item():.3g}"
        for (name, held, expected), differs in zip(compared, found, strict=True)
        if differs
    ]


def _sampled_columns(model: Any, modules: dict[str, Any], sample: WeightsSample) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield, for every module that holds the sampled columns: its name, this worker's values and the expected values.

    Experts on GPUs are left out, since their kernels have layouts of their own.
    """
    path, _, kind = sample.name.rpartition(".")
    if expert := expert_of(sample.name):
        layer, number, projection = expert
        if current_platform.is_cpu():
            yield f"{layer} {number}", *_expert_columns(modules[f"{layer}.routed_experts"], number, projection, sample)
    elif path in modules:
        yield path, *_module_columns(modules[path], kind, 0, sample)
    else:
        parent, _, leaf = path.rpartition(".")
        for fused, parts in model.packed_modules_mapping.items():
            if leaf in parts and f"{parent}.{fused}" in modules:
                module = modules[f"{parent}.{fused}"]
                yield f"{parent}.{fused}", *_module_columns(module, kind, parts.index(leaf), sample)
    if path.endswith("embed_tokens") and model.config.tie_word_embeddings:
        yield "the output head", *_probed_columns(model.lm_head, 0, sample)  # may be the embedding itself


def _module_columns(module: Any, kind: str, part: int, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Held and expected values of the sampled columns in one module; `part` is the index among the matrices fused into
    it."""
    if isinstance(module, VocabParallelEmbedding):
        return _matrix_columns(module.weight, _shard(module, part), sample)
    if kind == "weight" and isinstance(module, LinearBase):
        return _probed_columns(module, part, sample)
    parameter: Tensor = getattr(module, kind)
    return parameter[..., torch.tensor(sample.columns, device=parameter.device)], sample.values


def _matrix_columns(matrix_OI: Tensor, shard: _Shard, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Held and expected values of the sampled columns in a matrix that can be read directly."""
    rows, first, columns = shard
    is_held_C = torch.tensor([column in columns for column in sample.columns])
    columns_C = torch.tensor(sample.columns)[is_held_C] - columns.start
    held_OC = matrix_OI[first : first + len(rows), columns_C.to(matrix_OI.device)]
    return held_OC, sample.values[rows.start : rows.stop, is_held_C]


def _expert_columns(module: Any, number: int, projection: str, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Held and expected values of the sampled columns of an expert on CPUs. Workers split the intermediate features: the
    rows of gate and up, the columns of down."""
    packed_EOI = module.w2_weight if projection == "down" else module.w13_weight
    matrix_OI = _unpacked(packed_EOI[number], module.quant_method.moe_kernel.fused_experts.isa)
    width, worker = module.moe_config.intermediate_size_per_partition, module.moe_config.tp_rank
    held_range = range(worker * width, (worker + 1) * width)
    if projection == "down":
        return _matrix_columns(matrix_OI, _Shard(range(len(matrix_OI)), 0, held_range), sample)
    first = len(matrix_OI) // 2 if projection == "up" else 0
    return _matrix_columns(matrix_OI, _Shard(held_range, first, range(matrix_OI.shape[1])), sample)


def _unpacked(packed_OI: Tensor, isa: str) -> Tensor:
    """Restore the order of elements of an expert's matrix, which vLLM permutes for the CPU's instruction set `isa`."""
    matrix_P = torch.empty_like(packed_OI).flatten()
    matrix_P[_packing_permutation(packed_OI.shape, packed_OI.dtype, isa)] = packed_OI.flatten()
    return matrix_P.view_as(packed_OI)


@cache
def _packing_permutation(shape: torch.Size, dtype: torch.dtype, isa: str) -> Tensor:
    """Index in the plain matrix of each element of the packed one [P].

    Indices are packed digit by digit in base 256, since every dtype represents 0 to 255 exactly.
    """
    index_P, origin_P = torch.arange(shape.numel()), torch.zeros(shape.numel(), dtype=torch.int64)
    for digit in range(4):
        digit_P = index_P // 256**digit % 256
        packed_1OI = cpu_prepack_moe_weight(digit_P.to(dtype).view(1, *shape), isa)
        origin_P += packed_1OI.flatten().long() * 256**digit
    return origin_P


def _probed_columns(module: Any, part: int, sample: WeightsSample) -> tuple[Tensor, Tensor]:
    """Held and expected values of the sampled columns of a linear layer [O, C]: its outputs for unit vectors. They are
    exact, since all other products are zero."""
    rows, first, columns = _shard(module, part)
    is_held_C = torch.tensor([column in columns for column in sample.columns])
    columns_C = torch.tensor(sample.columns)[is_held_C] - columns.start
    expected_OC = sample.values[rows.start : rows.stop, is_held_C]
    if not len(columns_C):
        return expected_OC, expected_OC
    like = next(module.parameters())
    unit_vectors_CI = nn.functional.one_hot(columns_C.to(like.device), len(columns)).to(like.dtype)
    outputs_CO = module.quant_method.apply(module, unit_vectors_CI, bias=None)
    return outputs_CO[:, first : first + len(rows)].T, expected_OC


def _shard(module: Any, part: int) -> _Shard:
    """Rows and columns that this worker holds of the `part`-th matrix fused into a module."""
    match module:
        case VocabParallelEmbedding():
            rows = range(module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index)
            return _Shard(rows, 0, range(module.embedding_dim))
        case ColumnParallelLinear():
            sizes = module.output_partition_sizes
            # Few key-value heads are replicated on several workers.
            copies = module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) and part > 0 else 1
            start = module.tp_rank // copies * sizes[part]
            return _Shard(range(start, start + sizes[part]), sum(sizes[:part]), range(module.input_size))
        case RowParallelLinear():
            width = module.input_size_per_partition
            return _Shard(range(module.output_size), 0, range(module.tp_rank * width, (module.tp_rank + 1) * width))
        case _:
            return _Shard(range(module.output_size), 0, range(module.input_size))
