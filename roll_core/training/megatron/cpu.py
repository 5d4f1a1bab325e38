"""Emulation of CUDA for Megatron-Core on machines without it: tests, and small runs. With CUDA nothing here has any effect.

Megatron-Core names the device "cuda" in its sources. `on_device()` replaces it by the CPU wherever torch is given a device,
and emulates what Megatron reads from `torch.cuda`: the device, streams, random state. It also patches code that fails
without Transformer Engine or NCCL. Each patch says why it is needed, and can go when upstream is fixed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """Redirect "cuda" to the CPU in the calling thread, if there is no CUDA. All Megatron code is imported and called within
    this context."""
    if torch.cuda.is_available():
        yield
        return
    _emulate_cuda()
    with _CudaIsCpu():
        yield


class _CudaIsCpu(TorchFunctionMode):
    """Torch function mode that replaces CUDA devices by the CPU and pinned memory by plain memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # Megatron's optimizers compare these type names
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """Stand-in for a CUDA stream. A CPU has only one, which is always synchronized."""

    def __init__(self, *_: Any, **__: Any): ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _emulate_cuda() -> None:
    """Patch `torch.cuda`, once per process. `torch.cuda.is_available()` keeps its value. Each no-op is a function object of
    its own, since torch's compiler has a table of the functions of `torch.cuda`."""
    cuda: Any = torch.cuda
    if cuda.Stream is _Stream:
        return
    torch._dynamo.config.disable = True  # Megatron's compiled functions would need a C++ compiler
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *_: None
    cuda.Stream, cuda.stream, cuda.current_stream = _Stream, lambda *_: contextlib.nullcontext(), lambda *_: _Stream()
    cuda.default_generators = {CPU: torch.default_generator}
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda._lazy_call = lambda call, **__: call()
    _patch_gather()
    with _CudaIsCpu():
        _patch_mixtures()


def _patch_gather() -> None:
    """Let `all_gather` take tensors of unequal shapes, which gloo refuses. Experts under both expert and tensor parallelism
    gather unequal tensors."""
    original: Any = dist.all_gather

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({each.shape for each in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        sizes = [len(each) for each in tensor_list]
        gathered = torch.cat(tensor_list)
        sent = torch.cat([tensor] * len(sizes))
        dist.all_to_all_single(gathered, sent, sizes, [len(tensor)] * len(sizes), group=group)
        for mine, found in zip(tensor_list, gathered.split(sizes), strict=True):
            mine.copy_(found)
        return None

    dist.all_gather = all_gather


def _patch_mixtures() -> None:
    """Let the token dispatcher of mixture-of-experts layers run on the CPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        """Convert to numpy if asked, on the CPU, too: Megatron's version converts GPU tensors only, but all-to-all needs
        the converted sizes."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
