"""Protocol Buffers' wire format, as far as a SentencePiece model needs it."""

import struct
from collections.abc import Iterator

from infer.errors import WeightFormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10

Field = tuple[int, int, int | bytes | float]


def fields(data: bytes, what: str) -> Iterator[Field]:
    """Yield (number, wire type, value) of a message: int, bytes, or float for 4 and 8 bytes.

    Nothing is allocated that is longer than `data`.

    Source: protobuf.dev, "Encoding".

    Raises:
        WeightFormatError: the message ends early or has a wire type that is not in use.
    """
    at, size = 0, len(data)
    while at < size:
        tag, at = _varint(data, at, what)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise WeightFormatError(f"{what} has a field of number 0 at byte {at}")
        if wire == VARINT:
            value, at = _varint(data, at, what)
        elif wire in (FIXED32, FIXED64, BYTES):
            length = {FIXED32: 4, FIXED64: 8}.get(wire)
            if length is None:
                length, at = _varint(data, at, what)
            if length > size - at:
                raise WeightFormatError(
                    f"{what} ends at byte {size}, within a field of {length} bytes at {at}"
                )
            value = data[at : at + length]
            at += length
            if wire != BYTES:
                value = struct.unpack("<f" if wire == FIXED32 else "<d", value)[0]
        else:
            raise WeightFormatError(f"{what} has the wire type {wire} at byte {at}")
        yield number, wire, value


def _varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise WeightFormatError(f"{what} ends at byte {len(data)}, within a number")
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + i + 1
    raise WeightFormatError(f"{what} has a number of more than 10 bytes at byte {at}")
