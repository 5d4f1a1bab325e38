"""Reference manual of all config keys, built from the config classes: docs/reference/config.md, terminal help, JSON schema.

`entries` walks over the keys of a run file and of a nightly file; the text of a key is the docstring under its field. `roll
config` prints `describe` and `json_schema`; `python -m roll_core.config.reference` prints `markdown`.
"""

import difflib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from roll_core.config.base import Section
from roll_core.config.field_words import default_of, text_of, type_of, unit_of, values_of
from roll_core.config.load import sections_of
from roll_core.config.operations.nightly import NightlyConfig
from roll_core.config.run import RunConfig
from roll_core.errors import UserError

FILES: dict[str, type[Section]] = {"run": RunConfig, "nightly": NightlyConfig}
"""Config class of each kind of file."""
ONLY_WITH = re.compile(r"\s*Only with (`[^`]+`(?: or `[^`]+`)*)\.$")
"""Last sentence of a docstring whose key has an effect only under a condition."""
Homes = dict[type[BaseModel], str]
"""First key that holds each section class."""


@dataclass(frozen=True)
class KeyEntry:
    """One key of a config file.

    Example: KeyEntry(key="weights.full_every", type="positive integer", default="10", unit="weights versions",
    text="Weights versions between two that are stored whole; ...", conditions=("`weights.transport: store`",))
    """

    key: str
    """Dotted key; `[]` stands for any position in a list: algorithm.teachers[].run_id"""
    type: str
    default: str
    """YAML text, or "required"."""
    unit: str
    text: str
    values: tuple[tuple[str, str], ...] = ()
    """Allowed values of an enum or of `kind`, each with its meaning."""
    conditions: tuple[str, ...] = ()
    """Conditions that must all hold for the key to have an effect; a key without a value stands for "is set"."""
    variant: str = ""
    """Innermost variant that has the key, for example "model.kind: scratch"; empty for keys of every variant."""
    same_as: str = ""
    """Key under which the keys of this section are listed, if it is not this one."""
    file: str = "run"

    @property
    def section(self) -> str:
        """Top-level section; empty for a top-level key that is no section."""
        return re.split(r"[.\[]", self.key)[0] if "." in self.key or "section" in self.type else ""

    @property
    def condition(self) -> str:
        """All conditions in one phrase; empty if the key always has an effect."""
        return _join(self.conditions, " and ", " or ")

    @property
    def used_by(self) -> str:
        """Files in which the key has an effect."""
        if self.file == "nightly":
            return "nightly files"
        return f"runs with {self.condition}" if self.conditions else "every run"


def _join(phrases: Sequence[str], word: str, other: str) -> str:
    """Phrases joined by a word; with several, those that contain the other word are put in parentheses."""
    return word.join(f"({each})" if other in each and len(phrases) > 1 else each for each in phrases)


def entries() -> list[KeyEntry]:
    """Every key of a run file, then every key of a nightly file, in the order of the classes."""
    homes: Homes = {}
    return [replace(entry, file=file) for file, root in FILES.items() for entry in _keys(root, "", (), homes)]


def _keys(section: type[BaseModel], prefix: str, conditions: tuple[str, ...], homes: Homes) -> Iterator[KeyEntry]:
    """Keys of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        if name == "kind":
            continue
        key = prefix + name
        text, own_conditions = _split_condition(text_of(section, name), prefix, section)
        holds = (*conditions, *own_conditions)
        members, several = sections_of(field.annotation)
        home = homes.setdefault(members[0], key) if members else key
        yield KeyEntry(
            key=key,
            type=type_of(field.annotation, field.metadata),
            default=default_of(field),
            unit="" if members else unit_of(name, field),
            text=text,
            values=values_of(field.annotation),
            conditions=holds,
            same_as=home if home != key else "",
        )
        if members and home == key:
            holds = (*holds, f"`{key}`") if field.default is None else holds
            yield from _keys_below(f"{key}[]" if several else key, field, members, holds, homes)


def _keys_below(
    key: str, field: FieldInfo, members: list[type[BaseModel]], conditions: tuple[str, ...], homes: Homes
) -> Iterator[KeyEntry]:
    """Keys of the section at `key`. In a union, the form of a key that most of its variants share comes first, once."""
    if len(members) == 1:
        yield from _keys(members[0], f"{key}.", conditions, homes)
        return
    variants: dict[str, type[BaseModel]] = {member.model_fields["kind"].default: member for member in members}
    values = tuple((kind, " ".join((member.__doc__ or "").split())) for kind, member in variants.items())
    default = field.default.model_dump()["kind"] if isinstance(field.default, Section) else "required"
    yield KeyEntry(
        key=f"{key}.kind",
        type=f"one of: {', '.join(variants)}",
        default=default,
        unit="",
        text="Variant of the section.",
        values=values,
        conditions=conditions,
    )
    found = {kind: list(_keys(member, f"{key}.", conditions, homes)) for kind, member in variants.items()}
    in_all = set.intersection(*({entry.key for entry in own} for own in found.values()))
    counts = Counter(entry for own in found.values() for entry in own if entry.key in in_all)
    order = list(dict.fromkeys(entry.key for entry in counts))
    shared = sorted((e for e, count in counts.items() if count > len(found) / 2), key=lambda e: order.index(e.key))
    yield from shared
    for kind, own in found.items():
        variant = f"{key}.kind: {kind}"
        for entry in own:
            if entry not in shared:
                yield replace(entry, conditions=(f"`{variant}`", *entry.conditions), variant=entry.variant or variant)


def _split_condition(text: str, prefix: str, section: type[BaseModel]) -> tuple[str, tuple[str, ...]]:
    """Text without its "Only with ..." sentence, and the condition of that sentence with its keys in full, in a tuple that
    is empty if there is none."""
    found = ONLY_WITH.search(text)
    if found is None:
        return text, ()

    def in_full(quoted: re.Match[str]) -> str:
        return f"`{prefix}{quoted[1]}" if quoted[1] in section.model_fields else quoted[0]

    return text[: found.start()], (re.sub(r"`(\w+)", in_full, found[1]),)


INTRO = """\
<!-- Written by `make docs` from the docstrings in roll_core/config: change those, not this file. -->
# Configuration reference

A run file is YAML. A dot in a key stands for a level: `training.optimizer.learning_rate` is written

```yaml
training:
  optimizer:
    learning_rate: 1.0e-5
```

- `--set training.optimizer.learning_rate=1e-5` changes one key on the command line. The value is YAML; the option can be
  repeated.
- `extends: FILE`, or a list of files, takes the keys of other files first. Paths are relative to the file that extends, and
  later files override earlier ones.
- A section with `kind` has the keys of that kind only. Keys of every kind are listed first; a kind's own table comes after
  and overrides them.
- `[]` in a key stands for each entry of a list.
- An unknown key is refused. `roll config KEY` prints this reference in the terminal.
"""


def markdown() -> str:
    """The page docs/reference/config.md: one table per section and variant."""
    tables: dict[tuple[str, str], dict[str, list[KeyEntry]]] = {}
    for entry in entries():
        tables.setdefault((entry.file, entry.section), {}).setdefault(entry.variant, []).append(entry)
    parts = [INTRO]
    for (file, section), variants in tables.items():
        parts.append(f"## {section or 'Top level'}{' (nightly file)' if file == 'nightly' else ''}\n")
        if section:
            top = variants[""].pop(0)
            users = f"runs with `{section}`" if top.default == "null" else top.used_by
            parts.append(f"{_cell(top)} Default: {_code(top.default)}. Used by: {users}.\n")
        for variant, rows in variants.items():
            parts += [f"### {variant}\n"] if variant else []
            parts += ["| key | type | default | unit | what it does | used by |", "|---|---|---|---|---|---|"]
            parts += [f"| `{e.key}` | {e.type} | {_code(e.default)} | {e.unit} | {_cell(e)} | {e.used_by} |" for e in rows]
            parts.append("")
    return "\n".join(parts)


def _code(default: str) -> str:
    return default if default == "required" else f"`{default}`"


def _cell(entry: KeyEntry) -> str:
    return "<br>".join(_meaning(entry)).replace("|", "\\|")


def _meaning(entry: KeyEntry) -> list[str]:
    """Text of a key, then a line for each of its values."""
    text = f"{entry.text} Keys as in `{entry.same_as}`." if entry.same_as else entry.text
    return [text, *(f"`{value}`: {meaning}" for value, meaning in entry.values)]


def describe(key: str | None = None) -> str:
    """Terminal text: all sections with one line each, or the keys of a section or key in detail."""
    listed = entries()
    if key is None:
        top = [entry for entry in listed if "." not in entry.key]
        return "\n".join(
            f"{entry.key:12} ({entry.file} file) {entry.text.partition('. ')[0].removesuffix('.')}" for entry in top
        )
    found = _find(_plain(key), listed)
    if not found:
        near = difflib.get_close_matches(key, [entry.key for entry in listed], n=1, cutoff=0.0)[0]
        raise UserError(f"{key} is not a config key; did you mean '{near}'?")
    conditions: dict[KeyEntry, list[str]] = {}
    for entry in found:
        conditions.setdefault(replace(entry, conditions=(), variant=""), []).append(entry.condition)
    return "\n\n".join(_detail(entry, either) for entry, either in conditions.items())


def _find(key: str, listed: list[KeyEntry]) -> list[KeyEntry]:
    """Entries of a key and of all keys below it. A section that occurs several times is listed once, under its first key;
    its other keys are found there."""
    found = [entry for entry in listed if f"{_plain(entry.key)}.".startswith(f"{key}.")]
    repeated = [entry for entry in listed if entry.same_as and key.startswith(f"{_plain(entry.key)}.")]
    if found or not repeated:
        return found
    below = key.removeprefix(f"{_plain(repeated[0].key)}.")
    if repeated[0].type.startswith("mapping"):
        below = below.partition(".")[2]
    return _find(_plain(f"{repeated[0].same_as}.{below}").rstrip("."), listed)


def _plain(key: str) -> str:
    """Key without list positions: algorithm.teachers[].run_id and algorithm.teachers.0.run_id lose the [] and the 0."""
    return re.sub(r"\[\d*\]|\.\d+(?=\.|$)", "", key)


def _detail(entry: KeyEntry, either: list[str]) -> str:
    """Key with type, default and meaning, each on indented lines; it has an effect under either of the conditions."""
    default = entry.default if entry.default == "required" else f"default: {entry.default}"
    lines = [f"{entry.type}{f' ({entry.unit})' if entry.unit else ''}; {default}", *_meaning(entry)]
    lines += [f"Only with {_join(either, ' or ', ' and ')}."] if all(either) else []
    return "\n".join([entry.key, *(textwrap.indent(textwrap.fill(line, 96), "    ") for line in lines)])


def json_schema() -> dict[str, Any]:
    """JSON schema of a run file, for editors. No key is required, not even `kind`, because `extends` may supply it."""
    schema: dict[str, Any] = _without_requirements(RunConfig.model_json_schema())
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    extends = names | {"description": "File or list of files, relative to this one, whose keys are taken first."}
    return schema | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"extends": extends} | schema["properties"],
    }


def _without_requirements(schema: Any) -> Any:
    """Copy of a schema without required keys, and with `anyOf` in place of each union that is told apart by `kind`."""
    if isinstance(schema, list):
        return [_without_requirements(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if name not in ("required", "discriminator")}
    return {"anyOf" if name == "oneOf" else name: _without_requirements(part) for name, part in kept.items()}


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
