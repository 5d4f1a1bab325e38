"""Faster import of torch and transformers in a process that has just started. Called by roles."""

import gc


def import_models() -> None:
    """Import transformers without what models do not need. Call it before any other import of transformers.

    transformers would import scikit-learn, SciPy and pandas where they are installed, as they are with MLflow, for decoding
    methods and losses that are unused here. Garbage collection is off meanwhile: imported modules are no garbage, so
    scanning them is wasted time.
    """
    gc.disable()
    try:
        from transformers import utils

        utils.is_sklearn_available = utils.is_scipy_available = _not_available
        import roll_core.models.causal_lm  # noqa: F401
    finally:
        gc.enable()


def _not_available() -> bool:
    return False
