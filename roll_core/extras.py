"""Packages that only some configs need. One that is missing is a sentence saying what to install."""

from enum import StrEnum
from importlib.util import find_spec

from roll_core.errors import UserError


class Extra(StrEnum):
    """Groups of packages in pyproject.toml."""

    MATH = "math"
    MEGATRON = "megatron"
    MODELS = "models"


def require(module: str, extra: Extra, needed_by: str) -> None:
    """Refuse what needs a module that is not installed, without importing it."""
    if find_spec(module) is None:
        raise UserError(f"{needed_by}: the package {module} is missing: pip install 'roll[{extra}]'")
