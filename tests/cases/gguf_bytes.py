"""A writer of GGUF bytes for tests, free to write what no file should hold."""

import struct
from collections.abc import Sequence
from typing import Any

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32 = range(7)
BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(7, 13)

_CODES = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "B",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, item: Any) -> bytes:
    """Bytes of a value; an array is given as (item kind, items)."""
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        item_kind, items = item
        head = struct.pack("<IQ", item_kind, len(items))
        return head + b"".join(value(item_kind, i) for i in items)
    return struct.pack("<" + _CODES[kind], item)


def pair(key: str | bytes, kind: int, item: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, item)


def tensor_info(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """Bytes of a tensor info; `dims` as in the file, fastest axis first."""
    head = string(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


ARCHITECTURE = pair("general.architecture", STRING, "llama")


def gguf(
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    pairs: Sequence[bytes] = (ARCHITECTURE,),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Bytes of a file; the counts are the true ones unless given."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data
