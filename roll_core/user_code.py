"""Loading of user-defined functions, which the config names as `package.module:function`. Used by `rollout.filter`."""

import importlib
from collections.abc import Callable
from typing import Any

from roll_core.errors import UserError, one_line


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function `name` that the config gives under `key`; UserError if that fails."""
    module_name, colon, function_name = name.partition(":")
    if not module_name or not colon or not function_name.isidentifier():
        raise UserError(f"{key}: '{name}' must be written like package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an import runs user code, which may raise anything
        raise UserError(
            f"{key}: {module_name} cannot be imported ({one_line(error)}): install it, or put its folder on PYTHONPATH"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{key}: {module_name} has no function '{function_name}'")
    return function
