"""Loading of configs: YAML files and `a.b=value` overrides become a validated RunConfig, or one sentence that says what to
change.

`extends:` names files, relative to the file that has it, whose keys are read first; later files override earlier ones.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from roll_core.config.algorithm.methods import Distillation
from roll_core.config.algorithm.teachers import PretrainedTeacher, TeacherConfig
from roll_core.config.model import PretrainedModel
from roll_core.config.operations.nightly import NightlyConfig
from roll_core.config.problems import FileProblems
from roll_core.config.run import RunConfig
from roll_core.config.yaml_text import MOST_BYTES, MOST_LEVELS, TextRefused, read_yaml
from roll_core.errors import UserError, shorten
from roll_core.host import is_portable, path_fault

Tree = dict[str, Any]
MOST_FILES = 100
"""Most files that one config may consist of. Shipped configs have up to four."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file, apply overrides in order, validate."""
    tree = ConfigFiles().read(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    return validate_config(tree, str(path))


def load_nightly(path: str | Path) -> NightlyConfig:
    """Read a nightly file and validate it; paths of its run files are relative to it and become absolute."""
    tree = ConfigFiles().read(Path(path))
    try:
        config = NightlyConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {_explain(error, NightlyConfig)}") from None
    folder = Path(path).resolve().parent
    absolute = [r.model_copy(update={"config": str(folder / r.config)}) for r in config.references]
    return config.model_copy(update={"references": tuple(absolute)})


def override_config(config: RunConfig, overrides: Iterable[str], source: str) -> RunConfig:
    """Return a copy of a config with `a.b=value` overrides applied in order; `source` names it in errors."""
    tree = config.model_dump(mode="json")
    for override in overrides:
        _apply_override(tree, override)
    return validate_config(tree, source)


def validate_config(tree: Tree, source: str) -> RunConfig:
    """Validate a merged tree; paths become absolute, so that they are the same for every process of the run."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error, RunConfig)}") from None
    return _with_absolute_paths(config)


class ConfigFiles:
    """Reader of a file and of all that it extends. Each file is read once, however often it is named."""

    def __init__(self) -> None:
        self._trees: dict[Path, Tree] = {}
        self._size = 0

    def read(self, path: Path, chain: tuple[Path, ...] = ()) -> Tree:
        """Read a file merged over the files it extends; `chain` holds the files that led here, to detect cycles."""
        asked_by = f"extends in {chain[-1]}" if chain else "config"
        if fault := path_fault(str(path)):
            raise UserError(f"{asked_by}: the path '{path}' {fault}")
        path = path.resolve()
        if path in chain:
            raise UserError(f"extends: {path} extends itself through {' -> '.join(p.name for p in chain)}: remove one")
        if path not in self._trees:
            self._trees[path] = self._read_new(path, chain, asked_by)
        return self._trees[path]

    def _read_new(self, path: Path, chain: tuple[Path, ...], asked_by: str) -> Tree:
        if len(self._trees) + len(chain) >= MOST_FILES:
            raise UserError(f"{asked_by}: a config of more than {MOST_FILES} files: extend fewer")
        tree = self._parse(path, asked_by)
        merged: Tree = {}
        for parent in _parents(tree, path):
            merged = _merge(merged, self.read(path.parent / parent, (*chain, path)))
        return _merge(merged, tree)

    def _parse(self, path: Path, asked_by: str) -> Tree:
        """Read the keys and values of one file."""
        try:
            if not path.is_file():
                raise UserError(f"{asked_by}: {_no_file(path)}")
            self._size += path.stat().st_size
            if self._size > MOST_BYTES:
                raise UserError(
                    f"{asked_by}: {path} and the files read before it have more than {MOST_BYTES:,} bytes: shorten them"
                )
            tree = read_yaml(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"config: {path} cannot be read: {error}") from None
        except TextRefused as error:
            raise UserError(f"config: {path}: {error}") from None
        if not isinstance(tree, dict):
            raise UserError(f"config: {path} must hold keys and values, like 'name: quickstart'")
        return tree


def _parents(tree: Tree, path: Path) -> list[str]:
    """Take the files that a tree extends out of it."""
    parents = tree.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"extends in {path} must be a file or a list of files, not {parents!r}")
    return parents


def _no_file(path: Path) -> str:
    """Sentence about a path that is no file, with a YAML file of a similar name in the same folder, if there is one."""
    if path.exists():
        return f"{path} is not a file: name a YAML file"
    names = {file.stem: file for file in path.parent.glob("*.y*ml")} if path.parent.is_dir() else {}
    near = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.7)
    return f"no such file {path}" + (f"; did you mean {names[near[0]]}?" if near else "")


def _merge(base: Tree, over: Tree) -> Tree:
    """Return `base` overridden by `over`; sections in both are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_sections else value
    return merged


def _apply_override(tree: Tree, override: str) -> None:
    """Set one `a.b=value` in a tree, in place; the value is read as YAML."""
    if not is_portable(override):
        raise UserError(f"--set {shorten(override, 80)}: it holds a NUL or a byte that is not UTF-8: remove it")
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys) or len(keys) > MOST_LEVELS:
        raise UserError(f"--set {shorten(override, 80)}: write it as key=value, for example --set rollout.group_size=8")
    try:
        value = read_yaml(text)
    except TextRefused as error:
        raise UserError(f"--set {dotted}: '{shorten(text, 80)}' is not a value ({error}); quote it if it is text") from None
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {dotted}: '{key}' is a value, not a section; set {key} itself")
        tree = child
    tree[keys[-1]] = value


def _explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One sentence for the first error. Unknown keys come first, because a typo explains a missing key."""
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    rest = error.error_count() - 1
    more = f" (and {rest} more)" if rest else ""
    section, key = _locate(first["loc"], root)
    dotted = ".".join(key)
    match first["type"]:
        case "extra_forbidden":
            return f"{dotted} is not a key{_suggestion(section, key[-1])}{more}"
        case "missing":
            return f"{dotted} is required: add it{more}"
        case "union_tag_invalid":
            tag, tags = shorten(str(first["ctx"]["tag"]), 80), first["ctx"]["expected_tags"]
            return f"{dotted}.kind is '{tag}', expected one of {tags}{more}"
        case "union_tag_not_found":
            return f"{dotted}.kind is required: say which variant of {dotted} is meant{more}"
        case "value_error":
            return f"{dotted + ': ' if dotted else ''}{first['ctx']['error']}{more}"
        case _:
            message = first["msg"][0].lower() + first["msg"][1:]
            return f"{dotted} is {shorten(repr(first['input']), 80)}, but {message}{more}"


def _locate(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[type[BaseModel], list[str]]:
    """Section that an error is in, and its key path without the union tags that pydantic inserts."""
    section = root
    key: list[str] = []
    variants: dict[str, type[BaseModel]] = {}
    names_a_member = False
    for part in loc:
        if part in variants:
            section, variants = variants[str(part)], {}
            continue
        key.append(str(part))
        if names_a_member:  # this part is the index or the name of one section among several
            names_a_member = False
            continue
        field = section.model_fields.get(str(part))
        if field is None:
            continue
        members, names_a_member = sections_of(field.annotation)
        if len(members) == 1:
            section = members[0]
        variants = {m.model_fields["kind"].default: m for m in members if "kind" in m.model_fields}
    return section, key


def sections_of(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Section classes that a field may hold, and True if it holds several sections, in a list or by name."""
    several = False
    if typing.get_origin(annotation) in (tuple, list, dict, Mapping):
        several = True
        annotation = [a for a in typing.get_args(annotation) if a is not Ellipsis][-1]
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)], several


def _suggestion(section: type[BaseModel], wrong: str) -> str:
    """Suggestion of the nearest key. All keys are listed if none is near, or if another variant may be meant."""
    names = list(section.model_fields)
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    guess = f"; did you mean '{near[0]}'?" if near else ""
    if "kind" in names:
        return f"{guess or ';'} {section.model_fields['kind'].default} has the keys: {', '.join(names)}"
    return guess or f"; valid keys here: {', '.join(names)}"


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return a copy whose local paths are absolute."""
    store = config.store.model_copy(update={"uri": absolute_uri(config.store.uri)})
    tracking = config.tracking.model_copy(update={"uri": absolute_sqlite_uri(config.tracking.uri)})
    work_dir = str(Path(config.work_dir).absolute())
    model, problems = config.model, config.problems
    if isinstance(model, PretrainedModel):
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    if isinstance(problems, FileProblems):
        files = {"train": problems.train, "held_out": problems.held_out}
        problems = problems.model_copy(update={key: str(Path(file).absolute()) for key, file in files.items()})
    algorithm = config.algorithm
    if isinstance(algorithm, Distillation):
        algorithm = algorithm.model_copy(update={"teachers": tuple(map(_with_absolute_path, algorithm.teachers))})
    sections = {
        "algorithm": algorithm,
        "store": store,
        "tracking": tracking,
        "work_dir": work_dir,
        "model": model,
        "problems": problems,
    }
    return config.model_copy(update=sections)


def _with_absolute_path(teacher: TeacherConfig) -> TeacherConfig:
    if isinstance(teacher, PretrainedTeacher) and isinstance(teacher.model, PretrainedModel):
        model = teacher.model.model_copy(update={"path": str(Path(teacher.model.path).absolute())})
        return teacher.model_copy(update={"model": model})
    return teacher


def absolute_uri(uri: str) -> str:
    """Store address with an absolute path: 'roll-data/store' -> 'file:///home/me/roll-data/store'; s3:// is unchanged."""
    protocol, separator, path = uri.partition("://")
    if fault := path_fault(uri):
        raise UserError(f"store.uri: '{uri}' {fault}")
    if separator and protocol != "file":
        return uri
    if separator and not path.startswith("/"):
        raise UserError(f"store.uri: {uri} names a host or a relative path: write file:///{path}, or {path} without file://")
    return "file://" + str(Path(path if separator else uri).absolute())


def absolute_sqlite_uri(uri: str | None) -> str | None:
    """Make a tracking address independent of the working directory: only that of a SQLite file can be relative."""
    sqlite = "sqlite:///"
    if uri is None or not uri.startswith(sqlite):
        return uri
    return sqlite + str(Path(uri.removeprefix(sqlite)).absolute())
