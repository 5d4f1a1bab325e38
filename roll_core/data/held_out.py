"""Held-out rule of generated problems: the digest of the text decides, so training and evaluation never share one."""

import hashlib

HELD_OUT_SHARE = 10
"""Divisor of the held-out share: one problem text in ten is held out."""


def is_held_out(question: str) -> bool:
    """True if a problem with this text belongs to the evaluation set."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0
