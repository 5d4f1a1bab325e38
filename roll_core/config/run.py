"""Schema of a run file, and the checks that span its sections: batch arithmetic, backends, placement, transport.

`load.py` builds a `RunConfig` from YAML; every role gets the whole of it.
"""

import math
from typing import Any

from pydantic import NonNegativeInt, PositiveInt, model_validator

from roll_core.config.algorithm.methods import AlgorithmConfig, Grpo
from roll_core.config.base import PathText, Section
from roll_core.config.inference import InferenceConfig, RehearsalInference, TorchInference, VllmInference
from roll_core.config.model import ModelConfig, ScratchModel
from roll_core.config.operations.legs import LegsConfig, NodesConfig
from roll_core.config.operations.placement import ClusterConfig, DeviceKind, PlacementConfig
from roll_core.config.operations.services import (
    CheckpointConfig,
    DeadlinesConfig,
    EvaluationConfig,
    RetriesConfig,
    StoreConfig,
    TrackingConfig,
)
from roll_core.config.operations.weights import WeightsConfig, WeightsTransport
from roll_core.config.optimizer import WarmStartConfig
from roll_core.config.problems import ArithmeticProblems, ProblemsConfig, ReasoningGymProblems
from roll_core.config.rewards import ExactMatch, ReasoningGym, RewardConfig
from roll_core.config.rollout import RolloutConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.mismatch import MismatchAction
from roll_core.config.training.training import BackendKind, Packing, Precision, TrainingConfig
from roll_core.types.names import RunId

LONGEST_RUN_NAME = 128
"""Longest name of a run, in bytes. File names have at most 255, and a number, a suffix or a prefix is added."""


class ForkedFrom(Section):
    """Checkpoint of another run to start from: its policy, optimizer state, position in the problem stream and reference
    policy. Artifacts of the other run are shared, not copied."""

    run_id: RunId
    """Id of the other run, for example quickstart-1; it must be in the same store and have the same `model`."""
    iteration: NonNegativeInt
    """Iteration of the other run to continue after; it must have a checkpoint."""


class RunConfig(Section):
    """A run file: everything that defines one training run."""

    name: str
    """Name of the run: letters, digits, '-' and '_'. Runs are numbered under it: quickstart-1, quickstart-2, ..."""
    seed: int = 0
    """Seed of every random choice of the run. Change it to repeat an experiment with other chance."""
    iterations: PositiveInt
    """Iterations to train; each collects a batch of trajectories and updates the policy."""
    model: ModelConfig = ScratchModel()
    """Model to train: the policy."""
    problems: ProblemsConfig = ArithmeticProblems()
    """Source of the problems to train and evaluate on."""
    reward: RewardConfig = ExactMatch()
    """Grading of completions."""
    forked_from: ForkedFrom | None = None
    """Checkpoint of another run to start from; `roll fork` fills it in. Null starts with the model, after the warm start."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before the first iteration; null starts with the model as it is."""
    algorithm: AlgorithmConfig = Grpo()
    """Method that turns rewards into a policy update; `docs/algorithms.md` explains every kind."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of trajectories: how many, how long, how far ahead of training."""
    inference: InferenceConfig = TorchInference()
    """Engine that generates tokens."""
    training: TrainingConfig = TrainingConfig()
    """Update of the policy: backend, parallelism, optimizer, batching, memory."""
    weights: WeightsConfig = WeightsConfig()
    """Publishing of new weights to the engines."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Greedy evaluation on held-out problems."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: how often they are stored, and which of them stay."""
    cluster: ClusterConfig = ClusterConfig()
    """Nodes and devices that a leg holds."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of the trainer and of the engines."""
    legs: LegsConfig = LegsConfig()
    """Launcher, time limit and failure limits of legs."""
    nodes: NodesConfig = NodesConfig()
    """Health checks of nodes, and exclusion of nodes that fail repeatedly."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """Time limits of a leg's stages."""
    retries: RetriesConfig = RetriesConfig()
    """Retries of transient failures."""
    store: StoreConfig = StoreConfig()
    """Store of artifacts, manifests and records."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow tracking."""
    work_dir: PathText = "roll-data/work"
    """Scratch folder for logs, the stage cache and the spools, on a disk that every node of a leg can reach. A relative path
    starts at the working directory."""

    @property
    def engine_devices(self) -> list[tuple[int, ...]]:
        """Devices of every engine: one, or as many as inference.tensor_parallel."""
        each = self.inference.tensor_parallel if isinstance(self.inference, VllmInference) else 1
        return [self.placement.engines[start : start + each] for start in range(0, len(self.placement.engines), each)]

    @property
    def engines_in_bfloat16(self) -> bool:
        """True if engines hold weights in bfloat16, which halves their memory. CPUs have no arithmetic for it."""
        return self.training.precision is Precision.BFLOAT16 and self.cluster.device is DeviceKind.CUDA

    @property
    def weights_transport(self) -> WeightsTransport:
        """Transport in use: `weights.transport`, with `auto` resolved by the placement."""
        if self.weights.transport is not WeightsTransport.AUTO:
            return self.weights.transport
        if self.training.backend is BackendKind.REHEARSAL:
            return WeightsTransport.RAY
        if self.shares_gpus and self.legs.elastic is None:
            return WeightsTransport.SHARED_GPU
        apart = self.cluster.device is DeviceKind.CUDA and not self.placement.shared
        return WeightsTransport.BROADCAST if apart and self.inference.kind != "rehearsal" else WeightsTransport.RAY

    @property
    def shares_gpus(self) -> bool:
        """True if every engine is on the GPU of a trainer rank, so that weights need not leave it."""
        return self.cluster.device is DeviceKind.CUDA and set(self.placement.engines) <= set(self.placement.trainer)

    @property
    def data_ranks(self) -> int:
        """Number of shards of a batch: one for each copy of the model."""
        if self.training.backend is BackendKind.TORCH:
            return len(self.placement.trainer)
        return self.training.layout.data_parallel_size(len(self.placement.trainer))

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the run, the critic's warm-up included."""
        return self.iterations * self.training.steps_per_iteration

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps that update the policy: all but those of the critic's warm-up."""
        return (self.iterations - self.algorithm.warmup_iterations) * self.training.steps_per_iteration

    @property
    def fallback_algorithm(self) -> AlgorithmConfig:
        """Algorithm for iterations beyond the limits of `training.mismatch`: corrected if its action says so."""
        mismatch = self.training.mismatch
        corrects = mismatch is not None and mismatch.action is MismatchAction.CORRECT
        return self.algorithm.with_correction if corrects else self.algorithm

    @property
    def without_engines(self) -> "RunConfig":
        """Config with one engine that has no model, for roles that replay stored rollouts and generate nothing."""
        no_model = RehearsalInference(seconds_per_token=1.0, median_tokens=1, sigma=0.0)
        placement = self.placement.model_copy(update={"engines": self.placement.engines[:1]})
        return self.model_copy(update={"inference": no_model, "placement": placement})

    @model_validator(mode="after")
    def _check_name(self):
        if not self.name or not all(c.isalnum() or c in "-_" for c in self.name):
            raise ValueError(f"name ('{self.name}') may hold letters, digits, '-' and '_' only: it names folders")
        if len(self.name.encode()) > LONGEST_RUN_NAME:
            raise ValueError(f"name has {len(self.name)} letters: it names folders and jobs, give it {LONGEST_RUN_NAME}")
        return self

    @model_validator(mode="after")
    def _check_reward_grades_the_problems(self):
        if isinstance(self.reward, ReasoningGym) and not isinstance(self.problems, ReasoningGymProblems):
            raise ValueError(
                f"reward.kind reasoning_gym grades problems.kind reasoning_gym alone, not {self.problems.kind}: change one"
            )
        return self

    @model_validator(mode="after")
    def _check_held_out_puzzles_suffice(self):
        problems, wanted = self.problems, self.evaluation.num_problems
        if isinstance(problems, ArithmeticProblems) and wanted > problems.num_puzzles:
            raise ValueError(
                f"evaluation.num_problems ({wanted}) is more than problems.digits={problems.digits} can give: lower it or "
                "raise problems.digits"
            )
        return self

    @model_validator(mode="after")
    def _check_iterations_exceed_the_fork(self):
        if self.forked_from is not None and self.iterations <= self.forked_from.iteration:
            raise ValueError(
                f"iterations ({self.iterations}) must be above forked_from.iteration ({self.forked_from.iteration}), "
                "from which this run goes on"
            )
        return self

    @model_validator(mode="after")
    def _check_lora_backend_and_router_losses(self):
        if self.training.lora is None:
            return self
        for key in ("balance_loss", "z_loss"):
            if getattr(self.training.routing, key):
                raise ValueError(
                    f"training.experts.{key} is to move the routers, which training.lora leaves as they are: leave one of "
                    "them out"
                )
        if self.training.backend is not BackendKind.TORCH:
            raise ValueError(
                f"training.lora is of training.backend torch, and this is {self.training.backend.value}: leave it out, or "
                "set training.backend=torch"
            )
        return self

    @model_validator(mode="after")
    def _check_layout_divides_the_trainer(self):
        layout, ranks = self.training.layout, len(self.placement.trainer)
        if self.training.backend is BackendKind.TORCH:
            if layout != LayoutConfig():
                raise ValueError(
                    "training.layout is for training.backend megatron, and training.backend torch shards over all of "
                    "placement.trainer: leave it out, or set training.backend=megatron"
                )
            return self
        for keys in (("tensor", "pipeline", "context"), ("expert_tensor", "expert", "pipeline")):
            sizes = {key: getattr(layout, key) for key in keys}
            together = math.prod(sizes.values())
            if ranks % together:
                largest = max(sizes, key=lambda key: sizes[key])
                others = together // sizes[largest]
                works = [size for size in range(1, min(sizes[largest], ranks + 1)) if ranks % (others * size) == 0]
                advice = f"set training.layout.{largest}={works[-1]}" if works else "lower one of these"
                raise ValueError(
                    f"training.layout: {' x '.join(keys)} ({together}) must divide the {ranks} devices of "
                    f"placement.trainer: {advice}, or name {-(-ranks // together) * together} devices"
                )
        return self

    @model_validator(mode="after")
    def _check_batch_arithmetic(self):
        rollout, training = self.rollout, self.training
        if rollout.group_size < 2 and self.algorithm.compares_groups:
            raise ValueError(
                f"rollout.group_size ({rollout.group_size}) must be at least 2: "
                f"algorithm {self.algorithm.kind} compares the trajectories of one problem"
            )
        if rollout.num_groups % training.optimizer_steps:
            steps = training.optimizer_steps
            groups = max(1, round(rollout.num_groups / steps)) * steps
            fewer = next(n for n in range(min(steps, rollout.num_groups), 0, -1) if rollout.num_groups % n == 0)
            raise ValueError(
                f"rollout.num_groups ({rollout.num_groups}) must be a multiple of training.optimizer_steps ({steps}), which "
                f"take the same number each: set rollout.num_groups={groups} or training.optimizer_steps={fewer}"
            )
        if rollout.max_new_tokens >= self.model.max_positions:
            raise ValueError(
                f"rollout.max_new_tokens ({rollout.max_new_tokens}) must be below model.max_positions "
                f"({self.model.max_positions}), which also holds the prompt"
            )
        if training.micro_batch_tokens < self.model.max_positions:
            raise ValueError(
                f"training.micro_batch_tokens ({training.micro_batch_tokens}) must be at least model.max_positions "
                f"({self.model.max_positions}), so that the longest sequence fits in a micro-batch"
            )
        if training.row_tokens is not None and training.row_tokens > training.micro_batch_tokens:
            raise ValueError(
                f"training.row_tokens ({training.row_tokens}) must be at most training.micro_batch_tokens "
                f"({training.micro_batch_tokens})"
            )
        if training.packing is Packing.SHARED_PROMPTS and training.row_tokens is None:
            raise ValueError(
                "training.packing shared_prompts needs training.row_tokens: room for a prompt and several completions, "
                f"for example {4 * self.model.max_positions}"
            )
        self._check_algorithm_limits()
        if rollout.temperature == 0:
            raise ValueError("rollout.temperature must be above 0: greedy trajectories of a group are all the same")
        per_step = rollout.num_groups // training.optimizer_steps * rollout.group_size
        if per_step < self.data_ranks:
            copies = (
                "the number of placement.trainer devices"
                if training.backend is BackendKind.TORCH
                else "the copies of the model that training.layout makes of placement.trainer"
            )
            raise ValueError(
                f"rollout.num_groups x rollout.group_size / training.optimizer_steps ({per_step} trajectories a step) "
                f"must be at least {copies} ({self.data_ranks}): set rollout.num_groups="
                f"{-(-self.data_ranks // rollout.group_size) * training.optimizer_steps}"
            )
        return self

    def _check_algorithm_limits(self) -> None:
        """Raise if an algorithm setting exceeds iterations or rollout.max_new_tokens and would have no sensible effect."""
        algorithm, max_new_tokens = self.algorithm, self.rollout.max_new_tokens
        if algorithm.warmup_iterations >= self.iterations:
            raise ValueError(
                f"algorithm.critic.warmup_iterations ({algorithm.warmup_iterations}) must be below iterations "
                f"({self.iterations}): the policy would never move"
            )
        for key, section in algorithm.shaping_sections.items():
            overlong, limit = section.overlong, section.masks.wrong_above_tokens
            if overlong is not None and (overlong.buffer_tokens or 0) > max_new_tokens:
                raise ValueError(
                    f"{key}.overlong.buffer_tokens ({overlong.buffer_tokens}) must be at most rollout.max_new_tokens "
                    f"({max_new_tokens}): every completion would be charged"
                )
            if limit is not None and limit >= max_new_tokens:
                raise ValueError(
                    f"{key}.masks.wrong_above_tokens ({limit}) must be below rollout.max_new_tokens ({max_new_tokens}): "
                    "no completion is longer"
                )

    @model_validator(mode="after")
    def _check_mismatch_needs_a_model(self):
        if self.training.mismatch is not None and self.inference.kind == "rehearsal":
            raise ValueError(
                "training.mismatch compares logprobs of trainer and engines, and inference.kind rehearsal has no model: "
                "leave training.mismatch out"
            )
        return self

    @model_validator(mode="after")
    def _check_replay_needs_torch_engine(self):
        if self.training.routing.replay and not isinstance(self.inference, TorchInference):
            raise ValueError(
                f"training.experts.replay needs an engine that records which experts it chose, and inference.kind "
                f"{self.inference.kind} does not so far: set inference.kind=torch, or leave training.experts.replay out"
            )
        return self

    @model_validator(mode="after")
    def _check_megatron_limits(self):
        training = self.training
        if training.backend is not BackendKind.MEGATRON:
            return self
        if self.algorithm.has_critic:
            raise ValueError(
                f"algorithm.kind {self.algorithm.kind} has a critic, which training.backend megatron does not train so far: "
                "set training.backend=torch, or take an algorithm without one"
            )
        if training.compile:
            raise ValueError(
                "training.compile is for training.backend torch so far: leave it out, or set training.backend=torch"
            )
        return self

    @model_validator(mode="after")
    def _check_rehearsal_has_no_weights(self):
        if self.training.backend is not BackendKind.REHEARSAL:
            if self.training.seconds_per_token:
                raise ValueError(
                    f"training.seconds_per_token is of training.backend rehearsal, and this is "
                    f"{self.training.backend.value}: leave it out, or set training.backend=rehearsal"
                )
            return self
        if self.inference.kind != "rehearsal":
            raise ValueError(
                f"training.backend rehearsal has no weights for engines of inference.kind {self.inference.kind}: set "
                "inference.kind=rehearsal, or another training.backend"
            )
        if self.weights.transport not in (WeightsTransport.AUTO, WeightsTransport.RAY):
            raise ValueError(
                f"weights.transport {self.weights.transport.value} moves tensors, and training.backend rehearsal has none: "
                "leave weights.transport out"
            )
        return self

    @model_validator(mode="after")
    def _check_offload_needs_shared_gpus(self):
        if self.training.offload and not self.shares_gpus:
            raise ValueError(
                "training.offload makes room for engines on the trainer's GPUs: leave it out, or set cluster.device=cuda "
                "and give placement.engines devices of placement.trainer"
            )
        return self

    @model_validator(mode="after")
    def _check_placement_is_in_the_cluster(self):
        for key in ("trainer", "engines"):
            devices = getattr(self.placement, key)
            if max(devices) >= self.cluster.num_devices:
                raise ValueError(
                    f"placement.{key} names device {max(devices)}, but cluster.nodes ({self.cluster.nodes}) x "
                    f"cluster.devices_per_node ({self.cluster.devices_per_node}) gives devices 0 to "
                    f"{self.cluster.num_devices - 1}: raise devices_per_node or change placement.{key}"
                )
        return self

    @model_validator(mode="after")
    def _check_tensor_parallel_engines(self):
        if not isinstance(self.inference, VllmInference) or self.inference.tensor_parallel == 1:
            return self
        each = self.inference.tensor_parallel
        if len(self.placement.engines) % each:
            raise ValueError(
                f"placement.engines names {len(self.placement.engines)} device(s), but inference.tensor_parallel gives each "
                f"engine {each}: name a multiple of {each}"
            )
        if self.cluster.device is DeviceKind.CUDA and self.placement.shared:
            raise ValueError(
                f"inference.tensor_parallel ({each}) needs GPUs of the engines' own so far, but placement.trainer and "
                f"placement.engines share {sorted(self.placement.shared)}: change one, or set inference.tensor_parallel=1"
            )
        if self.cluster.device is DeviceKind.CUDA and self.cluster.devices_per_node % each:
            raise ValueError(
                f"inference.tensor_parallel ({each}) must divide cluster.devices_per_node "
                f"({self.cluster.devices_per_node}): an engine's devices are on one node"
            )
        return self

    @model_validator(mode="after")
    def _check_weights_transport(self):
        if self.weights.transport is WeightsTransport.SHARED_GPU and not self.shares_gpus:
            raise ValueError(
                "weights.transport shared_gpu needs cluster.device cuda and every device of placement.engines in "
                "placement.trainer: change one, or set weights.transport=auto"
            )
        if self.weights.transport is WeightsTransport.SHARED_GPU and self.legs.elastic is not None:
            raise ValueError(
                "weights.transport shared_gpu does not reach the engines of legs.elastic: set weights.transport=auto, or "
                "leave legs.elastic out"
            )
        if self.weights.transport is WeightsTransport.BROADCAST:
            self._check_broadcast()
        return self

    def _check_broadcast(self) -> None:
        if self.inference.kind == "rehearsal":
            raise ValueError(
                "weights.transport broadcast is for engines with a model, and inference.kind rehearsal has none: "
                "set weights.transport=auto"
            )
        if self.cluster.device is DeviceKind.CUDA and self.placement.shared:
            raise ValueError(
                f"weights.transport broadcast needs a GPU for each who takes part, but placement.trainer and "
                f"placement.engines share {sorted(self.placement.shared)}: change one, or set weights.transport=auto"
            )


def flat_config(config: RunConfig) -> dict[str, str]:
    """Text of every value by its dotted key, for trackers and tables. Example: {"rollout.group_size": "16", ...}"""

    def walk(tree: dict[str, Any], prefix: str) -> dict[str, str]:
        flat: dict[str, str] = {}
        for key, value in tree.items():
            flat |= walk(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
        return flat

    return walk(config.model_dump(mode="json"), "")
