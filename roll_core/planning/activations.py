"""Activation memory: elements that each layer saves per token in the forward pass, for the backward pass, term by term.

Terms of the torch backend were found by listing the tensors that autograd saved for a layer on the CPU; a test lists them
again for layers that are not compiled. Terms of the megatron backend follow from its code, without Transformer Engine, on a
GPU. h: hidden size, q: width of all queries, k: width of all keys, i: width inside the MLP.
"""

from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Packing, Precision

EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest rank of an expert-parallel group, relative to the mean. A guess until routers of real runs are
measured."""


def saved_bytes_per_layer(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of activations that a layer keeps for its backward pass, for each token of a micro-batch, on one rank, without
    recomputation."""
    match config.training.backend:
        case BackendKind.TORCH if config.training.compile:
            return _torch_compiled_bytes(config, shape)
        case BackendKind.TORCH | BackendKind.REHEARSAL:
            return _torch_eager_bytes(config, shape)
        case BackendKind.MEGATRON:
            return _megatron_bytes(config, shape, config.training.layout)


def layer_input_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of a layer's input on one rank for each token: all that is saved of a layer with activation checkpointing."""
    layout = config.training.layout
    return _bytes_per_element(config) * shape.hidden / (layout.tensor * layout.context)


def mask_row_tokens(config: RunConfig) -> int:
    """Tokens in a row if attention needs an explicit mask, 0 if it does not. Each layer saves the mask as floating-point
    elements: for every token, one per token of its row."""
    training = config.training
    if training.backend is BackendKind.MEGATRON and training.packing is Packing.NONE and training.layout.context == 1:
        return 0  # a row is one whole sequence
    return training.row_tokens or config.model.max_positions


def _torch_compiled_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes that a compiled layer of the torch backend saves per token."""
    h, q, k, i = _sizes(shape)
    halves = 4 * h  # inputs of attention and MLP, before and after their norms
    attention = 4 * q  # queries, keys and values for every head, and the output
    if shape.has_head_norms:
        attention += q + k  # queries and keys before their norms
    inside = 3 * i  # gate, up, and their product
    return _bytes_per_element(config) * (
        halves + attention + mask_row_tokens(config) + _mlp_elements(shape, inside)
    ) + _statistics_bytes(shape)


def _torch_eager_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes that a layer of the torch backend saves per token if it is not compiled."""
    h, q, k, i = _sizes(shape)
    width = _bytes_per_element(config)
    # A norm computes in float32: it saves its input in float32, and its output before the weight is applied.
    norms = 2 * h + (q + k if shape.has_head_norms else 0)
    norm_bytes = (4 + width) * norms if width == 2 else width * 2 * norms
    # Under autocast every matrix product saves a copy of its input; else the products of attention share one, and so do
    # those of the MLP.
    products = (4 if shape.experts else 5) * h if _under_autocast(config) else 2 * h
    attention = 4 * q  # queries, keys and values for every head, and the output
    inside = 4 * i  # gate, up, the gate's activation, and their product
    saved = width * (products + attention + mask_row_tokens(config) + _mlp_elements(shape, inside))
    if _under_autocast(config) and shape.experts:
        # Autocast does not cover the grouped product of all experts: they compute in float32, and so does their residual.
        saved += width * _mlp_elements(shape, inside) + width * 2 * h
    return norm_bytes + saved + _statistics_bytes(shape)


def _megatron_bytes(config: RunConfig, shape: ModelShape, layout: LayoutConfig) -> float:
    """Bytes that a layer of the megatron backend saves per token on one rank."""
    h, q, k, i = _sizes(shape)
    halves = 4 * h  # inputs of attention and MLP, before and after their norms; sharded by sequence
    attention = (q + 2 * k) + q + q  # projected queries, keys and values; rotated queries; the output
    if shape.has_head_norms:
        attention += q  # a copy of the queries before their norm
    rotation = 4 * shape.head_size * layout.tensor  # cosines and sines for queries and keys, the same for all heads
    mask = layout.tensor * mask_row_tokens(config)  # the same for all heads
    # Without a mask: rotated keys. With one: keys and values of the whole row, repeated for every query head.
    attention += 2 * q * layout.context if mask else k
    if shape.experts:
        busiest = EXPERT_IMBALANCE if layout.expert > 1 else 1.0
        # Input of the experts, whole on each rank that shares an expert; gate and up, the gate's activation, their
        # product before and after the router's weight. Router: scores and choices, in float32.
        inside = busiest * shape.experts_per_token * (h * layout.expert_tensor + 5 * i) + 7 * shape.experts
    else:
        inside = 3 * i  # gate and up, and their product
    elements = halves + attention + rotation + mask + inside
    return (_bytes_per_element(config) * elements + _statistics_bytes(shape)) / (layout.tensor * layout.context)


def _sizes(shape: ModelShape) -> tuple[int, int, int, int]:
    """Widths h, q, k and i of a layer."""
    return shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.intermediate


def _bytes_per_element(config: RunConfig) -> int:
    """Bytes of an element of an activation."""
    return 2 if config.training.precision is Precision.BFLOAT16 else 4


def _under_autocast(config: RunConfig) -> bool:
    """True if matrix products use bfloat16 by autocast, as a single rank does. Several ranks use FSDP's mixed precision."""
    return config.training.precision is Precision.BFLOAT16 and len(config.placement.trainer) == 1


def _mlp_elements(shape: ModelShape, inside: int) -> int:
    """Elements that an MLP saves per token, `inside` of them within one MLP or expert. With experts, the input and output of
    each expert that the token goes to are saved as well."""
    return shape.experts_per_token * (inside + 2 * shape.hidden) + 7 * shape.experts if shape.experts else inside


def _statistics_bytes(shape: ModelShape) -> int:
    """Bytes of the float32 statistics of norms and of attention's softmax, per token."""
    head_norms = shape.heads + shape.kv_heads if shape.has_head_norms else 0
    return 4 * (2 + head_norms + shape.heads)
