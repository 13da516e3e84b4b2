"""Small tokenizer files made by hand, and broken ones; for tests and for fuzzing."""

import base64
import json
import struct
from collections.abc import Iterable

UNIGRAM, BPE = 1, 2


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(**values: int | float | bytes) -> bytes:
    """A message from `f1=..., f2=...`."""
    return b"".join(field(int(name[1:]), value) for name, value in values.items())


def sentencepiece_model(
    pieces: Iterable[tuple[str, float, int]],
    *,
    kind: int = BPE,
    trainer: bytes = b"",
    normalizer: bytes = b"",
) -> bytes:
    """A `.model` file: <unk>, <s>, </s>, then (piece, score, type)."""
    all_pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *pieces]
    out = b"".join(field(1, message(f1=p.encode(), f2=s, f3=t)) for p, s, t in all_pieces)
    return out + field(2, message(f3=kind) + trainer) + field(3, normalizer)


def charsmap(units: list[int], texts: bytes) -> bytes:
    return struct.pack("<I", len(units) * 4) + struct.pack(f"<{len(units)}I", *units) + texts


def byte_pieces() -> list[tuple[str, float, int]]:
    return [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]


def tiktoken_file(merged: Iterable[bytes]) -> bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), *merged]
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))


def tekken_file(merged: Iterable[bytes], **more) -> bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), *merged]
    config = {
        "pattern": r" ?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+",
        "default_vocab_size": len(tokens) + 5,
        "default_num_special_tokens": 5,
    }
    special = ["<unk>", "<s>", "</s>", "[INST]"]
    file = {
        "config": config,
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": t} for i, t in enumerate(special)],
    }
    return json.dumps(file | more).encode()
