"""Contract of training backends: loss and gradients do not depend on how a batch is cut; checkpoints can be resharded."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from roll_core.algorithms.catalog import build_algorithm
from roll_core.algorithms.inputs import LossFn
from roll_core.algorithms.values import clipped_value_loss
from roll_core.batching.micro_batch import MicroBatch
from roll_core.batching.packing import PackingLimits, plan_ranks
from roll_core.config.algorithm.correction import CorrectionConfig, CorrectionLevel, FilterConfig, WeightingConfig
from roll_core.config.algorithm.methods import AlgorithmConfig, Grpo, Gspo, Ppo
from roll_core.config.algorithm.policy_update import Aggregation, KlLossConfig, RatioLevel
from roll_core.config.algorithm.shaping import KlEstimator
from roll_core.config.model import Architecture, ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.training import BackendKind, Packing, TrainingConfig
from roll_core.models.causal_lm import build_model
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.training.base import Policy
from roll_core.training.learner import Learner
from roll_core.training.megatron.backend import MegatronBackend, MegatronSettings
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.critic import TorchCritic
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.manifest import Metrics
from tests.megatron_worlds import start_ranks
from tests.micro_batches import cut, random_tokens
from tests.support import MODEL_BACKENDS, random_samples, tiny_config, trajectory

NUM_SAMPLES = 12
MODEL = ScratchModel(max_positions=32)
ALGORITHM = Grpo(entropy_coefficient=0.01, aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN)
LOSSES: dict[str, AlgorithmConfig] = {
    "tokens": ALGORITHM,
    "sequences": Gspo(
        level=RatioLevel.TURN,
        aggregation=Aggregation.FIXED_LENGTH,
        correction=CorrectionConfig(
            weighting=WeightingConfig(level=CorrectionLevel.GEOMETRIC),
            filters=(FilterConfig(level=CorrectionLevel.SEGMENT, lower=0.01, upper=50.0),),
        ),
    ),
    "vocabulary": Grpo(kl_loss=KlLossConfig(coefficient=0.5, estimator=KlEstimator.FULL)),
    "values": Ppo(),
}
"""Losses whose terms depend on a token, a turn, a sequence or the vocabulary, and the loss of the critic."""
TRAINED = [(kind, loss) for kind in MODEL_BACKENDS for loss in LOSSES if kind is BackendKind.TORCH or loss != "values"]
"""Pairs of backend and loss; megatron has no critic."""


@dataclass(frozen=True)
class Layout:
    """Cut of one batch into ranks and micro-batches.

    `micro_batch_tokens` sets the gradient accumulation: one, about two or about four micro-batches.
    """

    num_ranks: int = 1
    micro_batch_tokens: int = 4096
    packing: Packing = Packing.ROWS
    reverse: bool = False
    activation_checkpointing: bool = False
    chunk_tokens: int = 4096
    width_multiple: int = 1

    @property
    def limits(self) -> PackingLimits:
        row_tokens = 26 if self.packing is Packing.SHARED_PROMPTS else None
        return PackingLimits(self.micro_batch_tokens, row_tokens, self.packing, self.width_multiple)


REFERENCE = Layout()
LAYOUTS = {
    "unpacked": Layout(packing=Packing.NONE),
    "accumulated twice": Layout(micro_batch_tokens=52),
    "accumulated four times": Layout(micro_batch_tokens=26),
    "accumulated four times, reversed": Layout(micro_batch_tokens=26, reverse=True),
    "unpacked, accumulated, reversed": Layout(micro_batch_tokens=26, packing=Packing.NONE, reverse=True),
    "prompts shared": Layout(packing=Packing.SHARED_PROMPTS),
    "prompts shared, accumulated": Layout(packing=Packing.SHARED_PROMPTS, micro_batch_tokens=26),
    "activations recomputed": Layout(activation_checkpointing=True),
    "logits three tokens at a time": Layout(chunk_tokens=3),
    "rows padded": Layout(packing=Packing.SHARED_PROMPTS, micro_batch_tokens=52, width_multiple=16),
    "two ranks": Layout(num_ranks=2),
    "two ranks, accumulated four times": Layout(num_ranks=2, micro_batch_tokens=13),
    "two ranks, prompts shared": Layout(num_ranks=2, packing=Packing.SHARED_PROMPTS),
    "two ranks, unpacked, reversed": Layout(num_ranks=2, packing=Packing.NONE, micro_batch_tokens=26, reverse=True),
    "three ranks, one of them with a blank micro-batch": Layout(num_ranks=3, micro_batch_tokens=26),
}


def loss_of(algorithm: AlgorithmConfig) -> LossFn:
    return build_algorithm(algorithm, num_optimizer_steps=1, max_new_tokens=8).loss


def new_backend(layout: Layout, model: ScratchModel = MODEL, kind: BackendKind = BackendKind.TORCH) -> Any:
    training = TrainingConfig(
        backend=kind, activation_checkpointing=layout.activation_checkpointing, logprob_chunk_tokens=layout.chunk_tokens
    )
    backend: Any
    match kind:
        case BackendKind.TORCH:
            backend = TorchBackend(model, TorchSettings(training, seed=3, temperature=1.0, device=torch.device("cpu")))
        case BackendKind.MEGATRON:
            backend = MegatronBackend(model, MegatronSettings(training, 3, 1.0, torch.device("cpu")))
    backend.start_optimizer(OptimizerConfig(learning_rate=1e-3, max_gradient_norm=1e9), total_steps=10)
    return backend


def gradients_of(backend: Any) -> dict[str, torch.Tensor]:
    """Gradients of a backend by checkpoint name."""
    named = backend.gradients()
    if not isinstance(backend, MegatronBackend):
        named = to_checkpoint_names((name.removeprefix("model."), gradient) for name, gradient in named)
    return {name: gradient.clone() for name, gradient in named}


@pytest.fixture(params=MODEL_BACKENDS)
def kind(request) -> BackendKind:
    return request.param


def new_critic(layout: Layout) -> TorchCritic:
    training = TrainingConfig(
        activation_checkpointing=layout.activation_checkpointing, logprob_chunk_tokens=layout.chunk_tokens
    )
    critic = TorchCritic(MODEL, TorchSettings(training, seed=3, temperature=1.0, device=torch.device("cpu")))
    critic.start_optimizer(OptimizerConfig(learning_rate=1e-3, max_gradient_norm=1e9), total_steps=10)
    torch.manual_seed(0)
    # The head starts at zero, with which the trunk would have no gradient.
    head = torch.nn.init.normal_(torch.empty(1, MODEL.hidden_size), std=0.1)
    set_model_state_dict(critic._scorer, {"head.weight": head}, options=StateDictOptions(full_state_dict=True, strict=False))
    return critic


def micro_batches(layout: Layout, rank: int) -> list[MicroBatch]:
    samples = random_samples(NUM_SAMPLES)
    found = cut(samples, layout.limits, random_tokens(samples), rank=rank, num_ranks=layout.num_ranks)
    return found[::-1] if layout.reverse else found


def loss_and_gradients(
    layout: Layout, name: str, rank: int, kind: BackendKind = BackendKind.TORCH
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Train one step with the loss `name`; return the loss, the gradients, and the number of micro-batches."""
    parts = micro_batches(layout, rank)
    if name == "values":
        backend = new_critic(layout)
        for micro_batch in parts:
            backend.accumulate(micro_batch, partial(clipped_value_loss, value_clip=0.2))
    else:
        backend = new_backend(layout, kind=kind)
        # The reference has another architecture, so that its distribution differs.
        backend.build_frozen(Policy.REFERENCE, ScratchModel(max_positions=32, architecture=Architecture.LLAMA))
        accumulate = backend.accumulate_beside_reference if name == "vocabulary" else backend.accumulate
        accumulate(parts, loss_of(LOSSES[name]))
    gradients = gradients_of(backend)
    metrics = backend.apply_gradients()
    return metrics["critic/loss" if name == "values" else "update/loss"], gradients, len(parts)


def _in_rank(rank: int, num_ranks: int, folder: str, kind: BackendKind) -> None:
    """Compute all layouts of `num_ranks` ranks in one of them. Then two ranks save a checkpoint, and three load it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    try:
        for (name, layout), (trained_kind, loss) in itertools.product(LAYOUTS.items(), TRAINED):
            if layout.num_ranks == num_ranks and trained_kind is kind:
                torch.save(loss_and_gradients(layout, loss, rank, kind), f"{folder}/{name}, {loss} by rank {rank}")
        learn(rank, num_ranks, Path(folder), kind)
        if num_ranks == 2:
            _save(rank, Path(folder), kind)
        else:
            _load_and_compare(Path(folder), kind)
    finally:
        dist.destroy_process_group()


def _step(backend: Any, layout: Layout, rank: int) -> None:
    backend.accumulate(micro_batches(layout, rank), loss_of(ALGORITHM))
    backend.apply_gradients()


def _step_with_infinite_advantages(backend: Any) -> Metrics:
    """Train a step whose gradients are not finite."""
    samples = random_samples(3)
    advantages_N = torch.full((sum(s.num_trained_tokens for s in samples),), torch.inf)
    tokens = replace(random_tokens(samples), advantages_N=advantages_N)
    backend.accumulate(cut(samples, REFERENCE.limits, tokens), loss_of(Grpo()))
    return backend.apply_gradients()


def _save(rank: int, folder: Path, kind: BackendKind) -> None:
    """Save a checkpoint as in a run: a snapshot, written by a thread while training continues."""
    layout = Layout(num_ranks=2)
    backend = new_backend(layout, kind=kind)
    _step(backend, layout, rank)
    if kind is BackendKind.TORCH:
        backend.offload()
    snapshot = backend.snapshot()
    backend.reload()
    torch.save({name: tensor.clone() for name, tensor in backend.weights()}, folder / f"weights by rank {rank}")
    with ThreadPoolExecutor(1) as executor:
        writing = executor.submit(snapshot, folder / "checkpoint")
        for _ in range(3):
            _step(backend, layout, rank)
        writing.result()


def _load_and_compare(folder: Path, kind: BackendKind) -> None:
    backend = new_backend(Layout(num_ranks=3), kind=kind)
    backend.load(folder / "checkpoint")
    backend.load_frozen(Policy.REFERENCE, folder / "checkpoint")
    expected = torch.load(folder / "weights by rank 0")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.weights())


@pytest.fixture(scope="module")
def rank_folders(tmp_path_factory) -> Callable[[BackendKind], Path]:
    """Folder with the results of two and of three ranks, by backend. Ranks start once for all tests, since that is slow."""

    @cache
    def folder_of(kind: BackendKind) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{kind}")
        for num_ranks in (2, 3):
            start_ranks(_in_rank, (num_ranks, str(folder), kind), num_ranks)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def expected():
    return {loss: loss_and_gradients(REFERENCE, loss, 0) for loss in LOSSES}


@pytest.mark.parametrize(("kind", "loss"), TRAINED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_depend_neither_on_how_the_batch_is_cut_nor_on_the_backend(
    name, kind, loss, expected, rank_folders
):
    layout = LAYOUTS[name]
    if layout.num_ranks == 1:
        found, gradients, cuts = loss_and_gradients(layout, loss, 0, kind)
    else:
        folder = rank_folders(kind)
        found, gradients, cuts = torch.load(folder / f"{name}, {loss} by rank {layout.num_ranks - 1}")
    assert (cuts > 1) == (layout.micro_batch_tokens < 4096)
    assert found == pytest.approx(expected[loss][0], rel=1e-5)
    assert gradients.keys() == expected[loss][1].keys()
    for weight, gradient in gradients.items():
        scale = expected[loss][1][weight].abs().max().item()
        torch.testing.assert_close(gradient, expected[loss][1][weight], rtol=1e-5, atol=2e-5 * scale)


def learn(rank: int, num_ranks: int, folder: Path, kind: BackendKind) -> None:
    """Train two iterations on this rank's share, with a KL in the reward, and by PPO if the backend has a critic.

    Rank 0 saves weights and metrics.
    """
    shaping: dict[str, Any] = {"kl": {"estimator": "k3", "adaptive": {"target": 0.1}}}
    algorithm = (
        {"kind": "ppo", "shaping": shaping | {"normalize": {}}}
        if kind is BackendKind.TORCH
        else {"kind": "grpo", "shaping": shaping}
    )
    training = {"backend": kind.value, "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-5}, "optimizer_steps": 2}
    config = tiny_config(folder, algorithm=algorithm, training=training)
    learner = Learner(config, rank=rank, device=torch.device("cpu"))
    learner.snapshot()(folder / f"start-{num_ranks}")
    learner.load_frozen(Policy.REFERENCE, folder / f"start-{num_ranks}")
    for iteration in (1, 2):
        prepared = learner.prepare(
            [trajectory(g, a, float(a % 3 == 0), completion=1 + a) for g in range(3) for a in range(4)],
            weights_version=0,
        )
        critic = learner.update_critic(prepared, iteration) if kind is BackendKind.TORCH else {}
        metrics = prepared.metrics | critic | learner.update(prepared, iteration)
    weights = dict(learner.weights())
    if rank == 0:
        torch.save((weights, metrics), folder / f"learned by {num_ranks}")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_ranks_learn_what_one_learns(num_ranks, kind, rank_folders, tmp_path):
    learn(0, 1, tmp_path, kind)
    expected, expected_metrics = torch.load(tmp_path / "learned by 1")
    weights, metrics = torch.load(rank_folders(kind) / f"learned by {num_ranks}")
    assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


def test_skipping_zero_advantages_changes_no_gradient(kind):
    samples = random_samples(NUM_SAMPLES)
    tokens = random_tokens(samples)
    is_idle_N = tokens.turn_N // 2 % 2 == 1
    half_idle = replace(tokens, advantages_N=torch.where(is_idle_N, 0.0, tokens.advantages_N))
    found = []
    for chosen in (range(NUM_SAMPLES), range(0, NUM_SAMPLES, 2)):
        backend = new_backend(REFERENCE, kind=kind)
        backend.accumulate(cut(samples, REFERENCE.limits, half_idle, chosen=chosen), loss_of(Grpo()))
        found.append(gradients_of(backend))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("architecture", list(Architecture))
def test_logprobs_equal_those_of_the_plain_model(architecture, kind):
    model = ScratchModel(max_positions=32, architecture=architecture)
    backend, plain = new_backend(Layout(chunk_tokens=5), model, kind), build_model(model, seed=3)
    samples = random_samples(NUM_SAMPLES)
    (batch,) = cut(samples, REFERENCE.limits)
    scored = iter(backend.logprobs([batch], Policy.CURRENT)[0].tolist())
    lengths = [s.num_tokens for s in samples]
    order = [i for rows in plan_ranks(lengths, 1, REFERENCE.limits)[0] for row in rows for i in row]
    for index in order:
        sample = samples[index]
        with torch.no_grad():
            logits = plain(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        for position in range(sample.num_tokens):
            if sample.trained[position]:
                assert next(scored) == pytest.approx(logits[position - 1, sample.token_ids[position]].item(), abs=1e-5)


def test_an_optimizer_step_lowers_the_loss_on_the_same_batch(kind):
    backend = new_backend(REFERENCE, kind=kind)
    (batch,) = micro_batches(REFERENCE, 0)
    anchored = batch.with_signals(anchor_logprobs_N=backend.logprobs([batch], Policy.CURRENT)[0])
    losses = []
    for _ in range(5):
        backend.accumulate([anchored], loss_of(Grpo()))
        losses.append(backend.apply_gradients()["update/loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_three(kind, rank_folders):
    # Three ranks have loaded and compared it in the fixture.
    backend = new_backend(REFERENCE, kind=kind)
    folder = rank_folders(kind)
    backend.load(folder / "checkpoint")
    expected = torch.load(folder / "weights by rank 0")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.weights())


def test_a_loaded_backend_trains_exactly_like_the_one_that_was_saved(tmp_path, kind):
    original = new_backend(REFERENCE, kind=kind)
    _step(original, REFERENCE, 0)
    _step_with_infinite_advantages(original)  # a skipped step, which Adam must not count
    snapshot = original.snapshot()
    _step(original, REFERENCE, 0)
    snapshot(tmp_path / "checkpoint")  # written later, with the state of the time of the snapshot
    copy = new_backend(REFERENCE, kind=kind)
    copy.load(tmp_path / "checkpoint")
    _step(copy, REFERENCE, 0)
    expected = dict(original.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in copy.weights())


def test_an_offloaded_backend_can_be_saved_and_trains_as_if_never_offloaded(tmp_path, kind):
    untouched, offloaded, loaded = (new_backend(REFERENCE, kind=kind) for _ in range(3))
    for backend in (untouched, offloaded, loaded):
        backend.build_frozen(Policy.REFERENCE, MODEL)
    offloaded.offload()
    offloaded.snapshot()(tmp_path / "before")  # when the optimizer has no state yet
    offloaded.reload()
    for backend in (untouched, offloaded):
        _step(backend, REFERENCE, 0)
    for _ in range(2):
        offloaded.offload()
        offloaded.snapshot()(tmp_path / "offloaded")
        offloaded.reload()
    loaded.load(tmp_path / "offloaded")
    for backend in (untouched, offloaded, loaded):
        _step(backend, REFERENCE, 0)
    expected = dict(untouched.weights())
    for backend in (offloaded, loaded):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.weights())


def test_weights_can_be_read_from_an_offloaded_backend(kind):
    backend = new_backend(REFERENCE, kind=kind)
    expected = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.offload()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.weights())


def test_a_checkpoint_whose_save_was_interrupted_cannot_be_loaded(tmp_path, kind):
    """Saving writes the metadata last. In the store, an interrupted checkpoint has no record either."""
    backend = new_backend(REFERENCE, kind=kind)
    backend.snapshot()(tmp_path / "checkpoint")
    (tmp_path / "checkpoint/.metadata").unlink()
    with pytest.raises((FileNotFoundError, CheckpointException)):
        backend.load(tmp_path / "checkpoint")


def test_a_step_with_a_gradient_that_is_not_finite_changes_no_weights_and_is_counted(kind):
    backend = new_backend(REFERENCE, kind=kind)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    assert _step_with_infinite_advantages(backend)["update/skipped_steps"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())


def test_discarded_gradients_do_not_affect_the_next_step(kind):
    backend = new_backend(REFERENCE, kind=kind)
    (batch,) = micro_batches(REFERENCE, 0)
    backend.accumulate([batch], loss_of(Gspo()))
    backend.discard_gradients()
    backend.accumulate([batch], loss_of(Grpo()))
    gradients = gradients_of(backend)
    expected = new_backend(REFERENCE, kind=kind)
    expected.accumulate([batch], loss_of(Grpo()))
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in gradients_of(expected).items())
    assert backend.apply_gradients() == expected.apply_gradients()
