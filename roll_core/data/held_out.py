"""Which generated problems are held out: the digest of the text decides, so training and evaluation never share one."""

import hashlib

HELD_OUT_SHARE = 10
"""One problem text in this many is held out."""


def is_held_out(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0
