"""Seeds derived from the run's seed and from their use, never drawn. A resumed run therefore gets the same seeds."""

import hashlib


def derive_seed(run_seed: int, *scope: str | int) -> int:
    """Derive a 63-bit seed from the run's seed and the scope it is used in.

    Example: derive_seed(0, "collect", 4, "sort/train/17", 2)
    """
    text = "/".join(str(part) for part in (run_seed, *scope))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
