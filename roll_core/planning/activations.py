"""What the backward pass reads again of the forward pass: numbers that each layer keeps for each token, term by term.

Those of the torch backend were found by listing the tensors that autograd saved for a layer on the CPU; a test lists them
again where layers are not compiled. Those of the megatron backend follow from its code, without Transformer Engine, on a
GPU. h: hidden, q: all queries, k: all keys, i: inside the MLP.
"""

from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Packing, Precision

IMBALANCE = 1.25
"""Tokens of the busiest rank of those that share out experts, by the mean. A guess, until routers of real runs were seen."""


def kept_bytes_of_a_layer(config: RunConfig, shape: ModelShape) -> float:
    """On one rank, for each token of a micro-batch that it takes part in, if nothing is computed again."""
    match config.training.backend:
        case BackendKind.TORCH if config.training.compile:
            return _compiled(config, shape)
        case BackendKind.TORCH:
            return _step_by_step(config, shape)
        case BackendKind.MEGATRON:
            return _by_megatron(config, shape, config.training.layout)


def kept_bytes_between_layers(config: RunConfig, shape: ModelShape) -> float:
    """What a layer is given, from which it can be computed again."""
    layout = config.training.layout
    return _width(config) * shape.hidden / (layout.tensor * layout.context)


def masked_tokens(config: RunConfig) -> int:
    """Tokens of a row that attention masks, 0 if it needs none. It turns what is true and false into numbers, in each layer:
    for every token as many as its row has."""
    training = config.training
    if training.backend is BackendKind.MEGATRON and training.packing is Packing.NONE and training.layout.context == 1:
        return 0  # a row is one sequence, and whole
    return training.row_tokens or config.model.max_positions


def _compiled(config: RunConfig, shape: ModelShape) -> float:
    h, q, k, i = _sizes(shape)
    halves = 4 * h  # what attention and MLP were given, as it was and normalised
    attention = 4 * q  # queries, keys and values for every head, and the answer
    if shape.has_head_norms:
        attention += q + k  # before those
    inside = 3 * i  # gate, up, and their product
    return _width(config) * (halves + attention + masked_tokens(config) + _routed(shape, inside)) + _statistics(shape)


def _step_by_step(config: RunConfig, shape: ModelShape) -> float:
    h, q, k, i = _sizes(shape)
    width = _width(config)
    # A norm computes in float32: it keeps what it was given in that, and its answer before its weight.
    norms = 2 * h + (q + k if shape.has_head_norms else 0)
    of_norms = (4 + width) * norms if width == 2 else width * 2 * norms
    # Under autocast every product has a copy of its own of what it is given; else those of a half share one.
    products = (4 if shape.experts else 5) * h if _under_autocast(config) else 2 * h
    attention = 4 * q  # queries, keys and values for every head, and the answer
    inside = 4 * i  # gate, up, the gate's activation, and their product
    kept = width * (products + attention + masked_tokens(config) + _routed(shape, inside))
    if _under_autocast(config) and shape.experts:
        # Autocast does not know the product of all experts: they compute in float32, and what they are added to becomes it.
        kept += width * _routed(shape, inside) + width * 2 * h
    return of_norms + kept + _statistics(shape)


def _by_megatron(config: RunConfig, shape: ModelShape, layout: LayoutConfig) -> float:
    h, q, k, i = _sizes(shape)
    halves = 4 * h  # what attention and MLP were given, as it was and normalised; shared out with the sequence
    attention = (q + 2 * k) + q + q  # projected; rotated queries; the answer
    if shape.has_head_norms:
        attention += q  # a copy of the queries to be normalised
    rotation = 4 * shape.head_size * layout.tensor  # cosines and sines for queries and keys, the same for all heads
    mask = layout.tensor * masked_tokens(config)  # the same for all heads
    # Without a mask, rotated keys; with one, keys and values of all parts of the row, once more for every query head.
    attention += 2 * q * layout.context if mask else k
    if shape.experts:
        busiest = IMBALANCE if layout.expert > 1 else 1.0
        # What experts are given, whole on each rank that shares one; gate and up, the gate's activation, their product
        # before and after the router's weight. The router: scores and choices, in float32.
        inside = busiest * shape.experts_per_token * (h * layout.expert_tensor + 5 * i) + 7 * shape.experts
    else:
        inside = 3 * i  # gate and up, and their product
    numbers = halves + attention + rotation + mask + inside
    return (_width(config) * numbers + _statistics(shape)) / (layout.tensor * layout.context)


def _sizes(shape: ModelShape) -> tuple[int, int, int, int]:
    return shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.intermediate


def _width(config: RunConfig) -> int:
    """Bytes of a number."""
    return 2 if config.training.precision is Precision.BFLOAT16 else 4


def _under_autocast(config: RunConfig) -> bool:
    return config.training.precision is Precision.BFLOAT16 and len(config.placement.trainer) == 1


def _routed(shape: ModelShape, inside: int) -> int:
    """Of an MLP, or of the experts that a token goes to: what those are given and answer is kept for each of them."""
    return shape.experts_per_token * (inside + 2 * shape.hidden) + 7 * shape.experts if shape.experts else inside


def _statistics(shape: ModelShape) -> int:
    """Of norms and of attention's softmax, in float32."""
    of_head_norms = shape.heads + shape.kv_heads if shape.has_head_norms else 0
    return 4 * (2 + of_head_norms + shape.heads)
