"""What every role does once its models are loaded."""

import gc


def settle() -> None:
    """Exempt everything loaded so far from garbage collection: a full collection over torch's modules takes 0.3 s."""
    gc.collect()
    gc.freeze()
