"""torch and transformers in a process that has just begun: what models need of them, and no more. Called by roles."""

import gc


def import_models() -> None:
    """Before anything else imports transformers.

    It takes scikit-learn, SciPy and pandas along where they are installed, as they are with MLflow, for ways to decode and
    losses that nothing here uses. And there is no garbage among modules, however often a collector looks through them.
    """
    gc.disable()
    try:
        from transformers import utils

        utils.is_sklearn_available = utils.is_scipy_available = _is_not_needed
        import roll_core.models.causal_lm  # noqa: F401
    finally:
        gc.enable()


def _is_not_needed() -> bool:
    return False
