"""What a GGUF header is made of: bounds-checked numbers and strings, and the key-value section.

Nothing is allocated by a size that a file claims: a count is held against the bytes that are left,
values are stepped over when the file opens and decoded when they are asked for.

Source: the GGUF specification (docs/gguf.md in ggml-org/ggml).
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.errors import WeightFormatError

BOOL, STRING, ARRAY = 7, 8, 9

# Value type number -> (its name, its dtype in the file); strings and arrays carry a length.
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "u1"),
    1: ("int8", "i1"),
    2: ("uint16", "<u2"),
    3: ("int16", "<i2"),
    4: ("uint32", "<u4"),
    5: ("int32", "<i4"),
    6: ("float32", "<f4"),
    BOOL: ("bool", "u1"),
    STRING: ("string", ""),
    ARRAY: ("array", ""),
    10: ("uint64", "<u8"),
    11: ("int64", "<i8"),
    12: ("float64", "<f8"),
}
# Bytes that an item of an array takes at least: a string its length, an array its head.
_MIN_BYTES = {t: np.dtype(d).itemsize for t, (_, d) in VALUE_TYPES.items() if d}
_MIN_BYTES |= {STRING: 8, ARRAY: 12}

# Ours, far above any model, since a header that claims more only costs the reader time:
# vocabularies have 10^5 to 10^6 strings, files some 50 keys.  The specification limits a key to
# 2^16 - 1 bytes.
MAX_STRINGS = 1 << 22  # in all arrays of a file together; an array in an array counts as 256
MAX_KEYS = 1 << 16
MAX_NAME_BYTES = (1 << 16) - 1
MAX_ARRAY_DEPTH = 8

_REQUIRED: Any = object()

# Ways out, the second half of a message.
DAMAGED = "the file is damaged, get it from its source again"
CUT_SHORT = "the file is cut short or damaged, download it again"
RECONVERT = "convert the model again with a current converter"

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def shown(name: str) -> str:
    """Return a name from a file as it may stand in a message: one printable line, not too long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class Cursor:
    """A position in the bytes of a GGUF file; every step is checked against their end."""

    def __init__(self, path: str, data: Any):
        """Start at the first byte of `data`, which is a mapped file or bytes."""
        self.path, self.data, self.pos, self.end = path, data, 0, len(data)
        self._num_strings = 0

    def refuse(self, what: str, way_out: str = DAMAGED) -> WeightFormatError:
        """Return the error that says on one line what is wrong with this file and what to do."""
        return WeightFormatError(f"{self.path}: {what}; {way_out}")

    def step(self, num_bytes: int, what: str) -> int:
        """Move on by `num_bytes`, which `what` takes, and return where it starts."""
        start = self.pos
        if num_bytes > self.end - start:
            raise self.refuse(
                f"{what} takes {num_bytes} bytes, and {self.end - start} are left", CUT_SHORT
            )
        self.pos = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit number."""
        return _U32.unpack_from(self.data, self.step(4, what))[0]

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit number."""
        return _U64.unpack_from(self.data, self.step(8, what))[0]

    def count(self, what: str, item_bytes: int, limit: int | None = None) -> int:
        """Read a count of items of at least `item_bytes` each; refuse one that cannot be true."""
        count = self.u64(f"the number of {what}")
        left = self.end - self.pos
        if count > left // item_bytes:
            raise self.refuse(
                f"claims {count} {what}, and the {left} bytes left hold {left // item_bytes}",
                CUT_SHORT,
            )
        if limit is not None and count > limit:
            raise self.refuse(f"claims {count} {what}, and no more than {limit} are read")
        return count

    def string(self, what: str, max_bytes: int | None = None) -> str:
        """Read a length-prefixed UTF-8 string."""
        length = self.u64(f"the length of {what}")
        if max_bytes is not None and length > max_bytes:
            raise self.refuse(f"{what} claims {length} bytes, and {max_bytes} is the limit")
        start = self.step(length, what)
        try:
            return str(self.data[start : self.pos], "utf-8")
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not UTF-8", RECONVERT) from None

    def name(self, what: str) -> str:
        """Read a key or a tensor name: a short string, not empty, without NUL."""
        name = self.string(what, MAX_NAME_BYTES)
        if not name:
            raise self.refuse(f"{what} is empty")
        if "\0" in name:
            raise self.refuse(f"{what}, {shown(name)}, holds a NUL, at which other readers stop")
        return name

    def tensor_name(self, index: int) -> str:
        """Read the name of tensor number `index`, as `name` does, but quickly where all is well."""
        start = self.pos
        if start + 8 <= self.end:
            start += 8
            end = start + _U64.unpack_from(self.data, start - 8)[0]
            if start < end <= min(self.end, start + MAX_NAME_BYTES):
                raw = self.data[start:end]
                if raw.isascii() and b"\0" not in raw:
                    self.pos = end
                    return raw.decode()
        return self.name(f"the name of tensor {index}")

    def value_type(self, what: str) -> int:
        """Read a value type number and refuse one that does not exist."""
        number = self.u32(f"the type of {what}")
        if number not in VALUE_TYPES:
            raise self.refuse(f"{what} has the value type {number}, and GGUF has 0 to 12")
        return number

    def skip_value(self, value_type: int, what: str, depth: int = 0) -> None:
        """Step over a value, checking the sizes that it claims."""
        if value_type == STRING:
            self.step(self.u64(f"the length of {what}"), what)
        elif value_type != ARRAY:
            self.step(_MIN_BYTES[value_type], what)
        else:
            item_type, count = self.array_head(what, depth)
            if item_type == ARRAY:
                for _ in range(count):
                    self.skip_value(ARRAY, what, depth + 1)
            elif item_type == STRING:
                self._skip_strings(count, what)
            else:
                self.step(_MIN_BYTES[item_type] * count, what)

    def array_head(self, what: str, depth: int = 0) -> tuple[int, int]:
        """Read an array's item type and its number of items."""
        if depth >= MAX_ARRAY_DEPTH:
            raise self.refuse(f"{what} nests arrays deeper than the limit of {MAX_ARRAY_DEPTH}")
        item_type = self.value_type(f"the items of {what}")
        count = self.count(f"items in {what}", _MIN_BYTES[item_type])
        self._num_strings += count * {STRING: 1, ARRAY: 256}.get(item_type, 0)
        if self._num_strings > MAX_STRINGS:
            raise self.refuse(f"has more than {MAX_STRINGS} strings with {what}")
        return item_type, count

    def _skip_strings(self, count: int, what: str) -> None:
        # The hot loop of opening a file, one unpack a string.  It cannot run away: the position
        # only grows, and unpack refuses to read past the end.
        unpack, data, pos = _U64.unpack_from, self.data, self.pos
        try:
            for _ in range(count):
                pos += 8 + unpack(data, pos)[0]
        except (struct.error, OverflowError):  # a position past 2^63 fits no index
            pos = self.end + 1
        if pos > self.end:
            raise self.refuse(f"a string in {what} runs past the end of the file", CUT_SHORT)
        self.pos = pos

    def value(self, value_type: int, what: str) -> Any:
        """Read a value that `skip_value` has stepped over before, so that its sizes hold."""
        if value_type == STRING:
            return self.string(what)
        if value_type != ARRAY:
            return self._numbers(value_type, 1, what)[0].item()
        item_type, count = self.array_head(what)
        if item_type == STRING:
            return self._strings(count, what)
        if item_type == ARRAY:
            return [self.value(ARRAY, what) for _ in range(count)]
        return self._numbers(item_type, count, what)

    def _numbers(self, value_type: int, count: int, what: str) -> np.ndarray:
        dtype = np.dtype(VALUE_TYPES[value_type][1])
        start = self.step(dtype.itemsize * count, what)
        # A copy: aligned, writable, and in the machine's own byte order.
        numbers = np.frombuffer(self.data, dtype, count, start).astype(dtype.newbyteorder("="))
        if value_type != BOOL:
            return numbers
        if (numbers > 1).any():
            raise self.refuse(f"{what} holds {numbers.max()} as a bool, which is 0 or 1")
        return numbers.astype(np.bool_)

    def _strings(self, count: int, what: str) -> list[str]:
        unpack, data, pos, strings = _U64.unpack_from, self.data, self.pos, []
        append = strings.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                append(data[start:pos].decode())
        except UnicodeDecodeError:
            raise self.refuse(f"string {len(strings)} in {what} is not UTF-8", RECONVERT) from None
        self.pos = pos
        return strings


@dataclass(frozen=True, kw_only=True)
class RawValue:
    """A value as its bytes in a file, with its exact type: what a writer copies."""

    value_type: int
    data: bytes

    def value(self) -> Any:
        """Return the value, as `Metadata` does."""
        return Cursor("a metadata value", self.data).value(self.value_type, "it")


class Metadata(Mapping[str, Any]):
    """The key-value section: keys are read at once, a value is decoded when it is first asked for.

    A value is a Python int, float, bool or str, a numpy array of numbers or bools, a list of str,
    or a list of such arrays.
    """

    def __init__(self, cursor: Cursor, count: int):
        """Read `count` keys at `cursor` and step over their values."""
        self._path, self._data = cursor.path, cursor.data
        self._entries: dict[str, tuple[int, int, int]] = {}  # value type, first byte, end
        self._values: dict[str, Any] = {}
        for i in range(count):
            key = cursor.name(f"metadata key {i}")
            if key in self._entries:
                raise cursor.refuse(f"has the metadata key {shown(key)} twice")
            value_type = cursor.value_type(f"metadata {shown(key)}")
            start = cursor.pos
            cursor.skip_value(value_type, f"metadata {shown(key)}")
            self._entries[key] = (value_type, start, cursor.pos)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            value_type, cursor = self._locate(key)
            self._values[key] = cursor.value(value_type, f"metadata {shown(key)}")
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def type_of(self, key: str) -> str:
        """Return the type that the file declares: "uint32", "array of string" and the like."""
        value_type, cursor = self._locate(key)
        if value_type != ARRAY:
            return VALUE_TYPES[value_type][0]
        return f"array of {VALUE_TYPES[cursor.array_head(key)[0]][0]}"

    def raw(self, key: str) -> RawValue:
        """Return a value's own bytes and type; it is decoded once, so that what is copied is sound.

        Raises:
            WeightFormatError: The bytes make no sense as such a value.
        """
        self[key]
        value_type, start, end = self._entries[key]
        return RawValue(value_type=value_type, data=bytes(self._data[start:end]))

    def _locate(self, key: str) -> tuple[int, Cursor]:
        value_type, start, end = self._entries[key]
        return value_type, Cursor(self._path, self._data[start:end])


class TypedMetadata:
    """Access to metadata that checks types; `path` is what messages call the file."""

    path: str
    metadata: Metadata

    def meta_int(self, key: str, default: int = _REQUIRED) -> int:
        """Return an integer value.

        Args:
            key: The metadata key.
            default: Taken when the file lacks the key; without one, the key is required.

        Raises:
            WeightFormatError: The key is missing and required, or its value is of another type.
        """
        return self._meta(key, default, "an integer", lambda v: type(v) is int)

    def meta_float(self, key: str, default: float = _REQUIRED) -> float:
        """Return a float; an integer in the file is taken as one.  Otherwise as `meta_int`."""
        return float(self._meta(key, default, "a number", lambda v: type(v) in (int, float)))

    def meta_bool(self, key: str, default: bool = _REQUIRED) -> bool:
        """Return a bool.  Otherwise as `meta_int`."""
        return self._meta(key, default, "a bool", lambda v: type(v) is bool)

    def meta_str(self, key: str, default: str = _REQUIRED) -> str:
        """Return a string.  Otherwise as `meta_int`."""
        return self._meta(key, default, "a string", lambda v: type(v) is str)

    def meta_strs(self, key: str, default: list[str] = _REQUIRED) -> list[str]:
        """Return an array of strings.  Otherwise as `meta_int`."""
        is_list = lambda v: type(v) is list and all(type(s) is str for s in v)
        return self._meta(key, default, "an array of strings", is_list)

    def meta_ints(self, key: str, default: np.ndarray = _REQUIRED) -> np.ndarray:
        """Return an array of integers, in the file's own width.  Otherwise as `meta_int`."""
        return self._meta(key, default, "an array of integers", lambda v: _is_array(v, "iu"))

    def meta_floats(self, key: str, default: np.ndarray = _REQUIRED) -> np.ndarray:
        """Return an array of floats, in the file's own width.  Otherwise as `meta_int`."""
        return self._meta(key, default, "an array of floats", lambda v: _is_array(v, "f"))

    def _meta(self, key: str, default: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self.metadata:
            if default is _REQUIRED:
                raise WeightFormatError(
                    f"{self.path}: has no metadata {shown(key)} ({wanted}); {RECONVERT}"
                )
            return default
        value = self.metadata[key]
        if not fits(value):
            raise WeightFormatError(
                f"{self.path}: metadata {shown(key)} has the type {self.metadata.type_of(key)} and"
                f" must be {wanted}; {RECONVERT}"
            )
        return value


def _is_array(value: Any, kinds: str) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in kinds
