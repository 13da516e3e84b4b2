"""safetensors files, byte by byte."""

import json
import struct
from typing import Any


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, an object or the bytes themselves, padded to eight bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data
