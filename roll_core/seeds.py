"""Seeds derived from where they are used, never drawn: the same place in the same run always gets the same number."""

import hashlib


def derive_seed(run_seed: int, *place: str | int) -> int:
    """A 63-bit seed for one place: derive_seed(0, "collect", 4, "sort/train/17", 2)."""
    text = "/".join(str(part) for part in (run_seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
