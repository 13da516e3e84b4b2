"""Metadata of tiny vocabularies, as a GGUF file would give it."""

from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def letters() -> list[str]:
    """GPT-2's letter for each byte, written out: printing ones, then U+0100 and up in order."""
    printing = "".join(map(chr, range(33, 127))) + "".join(map(chr, range(161, 256)))
    printing = printing.replace("\xad", "")
    spare = iter(range(256, 512))
    return [chr(b) if chr(b) in printing else chr(next(spare)) for b in range(256)]


def with_prefix(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level(
    merges: list[str],
    *,
    special: tuple[tuple[str, int], ...] = (("<s>", CONTROL), ("</s>", CONTROL)),
    pre: str = "gpt-2",
    without: bytes = b"",
    **more: Any,
) -> dict[str, Any]:
    """Specials first, then a token for each byte, then one for each merge."""
    base = [letter for byte, letter in enumerate(letters()) if byte not in without]
    tokens = [text for text, _ in special] + base + [m.replace(" ", "") for m in merges]
    types = [kind for _, kind in special] + [NORMAL] * (len(tokens) - len(special))
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return with_prefix(**values | more)


def scored(
    pieces: list[tuple[str, float]],
    *,
    special: tuple[tuple[str, int], ...] = (
        ("<unk>", UNKNOWN),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
    ),
    byte_tokens: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Specials first, then the byte tokens, then the pieces."""
    entries = [(text, kind, 0.0) for text, kind in special]
    entries += [(f"<0x{b:02X}>", BYTE, 0.0) for b in range(256) if byte_tokens]
    entries += [(text, NORMAL, score) for text, score in pieces]
    values = {
        "model": "llama",
        "tokens": [text for text, _, _ in entries],
        "token_type": np.array([kind for _, kind, _ in entries], np.int32),
        "scores": np.array([score for _, _, score in entries], np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return with_prefix(**values | more)
