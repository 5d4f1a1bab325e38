"""Reader of config text: YAML with the plain types of YAML 1.2, limited in size, so that no text takes long to read.

Numbers, true and false, null, text, lists and mappings are all there is: 2024-13-45 is text, 010 is ten, and 3e-4 is a
number. A key that is given twice is an error. An alias is a copy of what its anchor names.
"""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MOST_BYTES = 50_000
"""Longest text, in bytes. A shipped config has about a thousand."""
MOST_LEVELS = 32
"""Deepest nesting of lists and mappings. A run file has seven levels."""
MOST_VALUES = 5_000
"""Most values in a text, those of aliases counted each time. A run file has about a hundred, and PyYAML takes up to a
millisecond for each on a loaded machine."""
MOST_DIGITS = 4300
"""Most digits of an integer that Python reads from text."""

_TAG = "tag:yaml.org,2002:"
_SIMPLE_TYPES = {"null": "~nN", "bool": "tTfF", "int": "-+0123456789", "float": "-+.0123456789", "merge": "<"}
"""First characters of the values of each simple type; a missing value is null, too."""
_PATTERNS = {
    "null": re.compile(r"^(~|null|Null|NULL|)$"),
    "bool": re.compile(r"^(true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"^[-+]?[0-9]+$"),
    "float": re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    "merge": re.compile(r"^<<$"),
}


class TextRefused(ValueError):
    """Config text cannot be read; the message says where and why."""


def read_yaml(text: str) -> Any:
    """Read a YAML text; raise `TextRefused` if it is not valid or exceeds a limit."""
    if len(text.encode(errors="surrogatepass")) > MOST_BYTES:
        raise TextRefused(f"it has more than {MOST_BYTES:,} bytes: a config has about a thousand")
    try:
        node = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise TextRefused(f"it is not valid YAML: {' '.join(str(error).split())}") from None
    return None if node is None else _Values().read(node, 0)


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, used up to its nodes, with the simple types of YAML 1.2 and limits on nesting and number."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # those of YAML 1.1 are not inherited
    _level = 0
    _count = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._level += 1
        self._count += 1
        if self._level > MOST_LEVELS:
            raise TextRefused(f"it nests deeper than {MOST_LEVELS} levels: a config has seven")
        _check_number(self._count)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


for _name, _first in _SIMPLE_TYPES.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _PATTERNS[_name], ["", *_first] if _name == "null" else list(_first))


class _Values:
    """Conversion of nodes to plain values, which counts them."""

    def __init__(self) -> None:
        self._count = 0

    def read(self, node: Node, level: int) -> Any:
        """Value of a node; what an alias names is converted again, so that no two places share a value."""
        self._count += 1
        _check_number(self._count)
        if level > MOST_LEVELS:
            raise TextRefused(f"{_place(node)}: an anchor holds an alias of itself: remove one of them")
        match node:
            case SequenceNode():
                return [self.read(each, level + 1) for each in node.value]
            case MappingNode():
                return self._mapping(node, level)
            case _:
                return _scalar(node)

    def _mapping(self, node: MappingNode, level: int) -> dict[str, Any]:
        """Mapping with the keys of its merges (`<<`) first, so that its own keys override them."""
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            value = self.read(value_node, level + 1)
            if key_node.tag == f"{_TAG}merge":
                for each in reversed(value) if isinstance(value, list) else (value,):
                    if not isinstance(each, dict):
                        raise TextRefused(f"{_place(key_node)}: << takes a mapping or a list of them: name an anchor of one")
                    merged |= each
                continue
            key = _key(key_node)
            if key in own:
                raise TextRefused(f"{_place(key_node)}: the key '{key}' is given twice: remove one of them")
            own[key] = value
        return merged | own


def _key(node: Node) -> str:
    """Text of a mapping's key, as written."""
    if not isinstance(node, ScalarNode):
        raise TextRefused(f"{_place(node)}: a key must be a word, not a list or a mapping")
    return _text(node)


def _text(node: Node) -> str:
    """Text of a scalar. Half of a surrogate pair, which YAML can escape, is no text."""
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise TextRefused(f"{_place(node)}: it holds half of a surrogate pair: remove it")
    return node.value


def _scalar(node: Node) -> Any:
    """Value of a number, a truth value, null or a text."""
    text, kind = _text(node), node.tag.removeprefix(_TAG)
    if kind not in ("str", "value", *_PATTERNS) or (kind in _PATTERNS and not _PATTERNS[kind].match(text)):
        raise TextRefused(f"{_place(node)}: the tag {node.tag} is not for configs: remove it")
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if len(text) > MOST_DIGITS:
            raise TextRefused(f"{_place(node)}: a number of {len(text):,} digits is too large")
        case "int":
            return int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def _check_number(count: int) -> None:
    if count > 2 * MOST_VALUES:  # a key is a node, too
        raise TextRefused(f"it has more than {MOST_VALUES:,} values, those of aliases counted each time: shorten it")


def _place(node: Node) -> str:
    return f"line {node.start_mark.line + 1}"
