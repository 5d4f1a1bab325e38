"""Character tokenizer built in code: one token per printable character. It needs neither torch nor a download."""

PAD, EOS = 0, 1
CHARACTERS = tuple("0123456789+-*/=<>?!.,:;()[]{} abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n")
VOCABULARY = ("<pad>", "<eos>", *CHARACTERS)
_ID_OF = {character: number for number, character in enumerate(VOCABULARY)}


def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text; a character outside the vocabulary is an error, never silently dropped."""
    unknown = sorted(set(text) - _ID_OF.keys())
    if unknown:
        raise ValueError(f"the character tokenizer has no token for {unknown}; it knows {''.join(CHARACTERS)!r}")
    return tuple(_ID_OF[character] for character in text)


def decode(token_ids: tuple[int, ...]) -> str:
    """Text of token ids, without the padding and end markers."""
    return "".join(VOCABULARY[t] for t in token_ids if t not in (PAD, EOS))
