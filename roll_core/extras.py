"""Optional packages that only some configs need, and the check that they are installed."""

from enum import StrEnum
from importlib.util import find_spec

from roll_core.errors import UserError


class Extra(StrEnum):
    """Group of optional packages (an extra) in pyproject.toml."""

    MATH = "math"
    MEGATRON = "megatron"
    MODELS = "models"


def require(module: str, extra: Extra, needed_by: str) -> None:
    """Raise a UserError that says what to install, if a module is missing. The module is not imported.

    `needed_by` names the config key or command that needs it.
    """
    if find_spec(module) is None:
        raise UserError(f"{needed_by}: the package {module} is missing: pip install 'roll-rl[{extra}]'")
