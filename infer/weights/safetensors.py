"""safetensors files: a header that is checked before it is believed, and tensors read in place.

    header length u64 | header: JSON, an object | tensor data

The container knows no model, and nothing in it is ever executed.  Opening reads the header only;
tensors are views of the mapped file.  As strict as the reference library (no overlap, no hole, no
byte that belongs to nobody), and in two things stricter: a name that comes twice is refused, where
the library keeps the last, and so are more than 131,072 tensors.

The header is read from the mapping piece by piece, so that one of 100 MB costs no more memory than
the tensors that it names.

Source: the format's description in huggingface/safetensors, README.md and
safetensors/src/tensor.rs.
"""

import itertools
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from infer.errors import WeightFormatError
from infer.model_files import RepeatedKey, label, shown, unique_pairs
from infer.weights.mapped import check_length

MAX_HEADER_BYTES = 100_000_000  # the reference library's own limit
MAX_TENSORS = 1 << 17  # ours, as for GGUF
MAX_ENTRY_BYTES = 4096  # of one tensor's description; a usual one has 80
MAX_NAME_BYTES = 1 << 16
MAX_ELEMENTS = (1 << 63) - 1

# Name -> (bits an element, the dtype of a view).  What is narrower than a byte has no dtype of its
# own in numpy's memory: it is viewed as the packed bytes.
DTYPES: dict[str, tuple[int, np.dtype]] = {
    name: (bits, np.dtype(dtype))
    for name, bits, dtype in (
        ("F64", 64, "<f8"),
        ("F32", 32, "<f4"),
        ("F16", 16, "<f2"),
        ("BF16", 16, ml_dtypes.bfloat16),
        ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", 8, ml_dtypes.float8_e5m2),
        ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
        ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
        ("F6_E2M3", 6, "u1"),
        ("F6_E3M2", 6, "u1"),
        ("F4", 4, "u1"),
        ("I64", 64, "<i8"),
        ("I32", 32, "<i4"),
        ("I16", 16, "<i2"),
        ("I8", 8, "i1"),
        ("U64", 64, "<u8"),
        ("U32", 32, "<u4"),
        ("U16", 16, "<u2"),
        ("U8", 8, "u1"),
        ("BOOL", 8, "?"),
        ("C64", 64, "<c8"),
    )
}
FLOATS = ("F64", "F32", "F16", "BF16")

_AGAIN = "the file is damaged, get it from its source again"
_CUT_SHORT = "the file is cut short or damaged, download it again"

_SPACE = re.compile(rb"[ \t\n\r]*")
# Possessive, so that a string of 100 MB is matched without memory of its own.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ENTRY = re.compile(rb"\{[^{}]*+\}")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies in the file and what its bytes mean; `offset` counts from the start of
    the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """The dtype, as every kind of tensor file calls it."""
        return self.dtype


class SafetensorsFile:
    """An open safetensors file: `path`, `metadata`, `tensors`, and the tensors' bytes.

    Views that were handed out stay valid after `close`.
    """

    def __init__(self, path: str, data: mmap.mmap | bytes):
        """Check and index a file's bytes, which messages call `path`; see `open`."""
        self.path = path
        header = _Header(path, data)
        self.metadata: dict[str, str] = header.metadata
        self.tensors: dict[str, TensorInfo] = header.tensors
        self._data: mmap.mmap | bytes | None = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "SafetensorsFile":
        """Open a file and check its whole header.

        Args:
            path: A regular file.

        Raises:
            OSError: It does not exist or may not be read.
            WeightFormatError: It is no safetensors file, or one that is broken or hostile.  The
                message is one line.
        """
        name = os.fspath(path)
        info = os.stat(name)
        if not stat.S_ISREG(info.st_mode):  # before opening: a pipe would wait for its writer
            kind = "a folder" if stat.S_ISDIR(info.st_mode) else "no regular file"
            raise WeightFormatError(f"{label(name)}: is {kind}; give the .safetensors file itself")
        with open(name, "rb") as file:
            if info.st_size == 0:  # nothing to map
                return cls(label(name), b"")
            return cls(label(name), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def close(self) -> None:
        """Let go of the file; it is unmapped when the last view of it is gone."""
        self._data = None

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def raw(self, name: str) -> UInt8[np.ndarray, " nbytes"]:
        """Return a tensor's bytes: a read-only view, nothing is copied.

        Raises:
            WeightFormatError: The file has no such tensor, or has become shorter.
            ValueError: The file is closed.
        """
        info = self._info(name)
        if self._data is None:
            raise ValueError(f"{self.path} is closed; read tensors inside its `with` block")
        if not info.nbytes:
            return np.empty(0, np.uint8)
        check_length(self.path, self._data, info.offset + info.nbytes)
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)

    def array(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return a tensor as a read-only view of the file, which need not be aligned.

        Elements narrower than a byte come packed, as uint8: the last axis of a tensor [.., n] then
        has n * bits / 8 bytes.

        Raises:
            WeightFormatError: The file has no such tensor, or rows of packed elements that do not
                fill whole bytes (`raw` gives those).
            ValueError: The file is closed.
        """
        info = self._info(name)
        bits, dtype = DTYPES[info.dtype]
        shape = info.shape
        if bits < 8:
            row_bits = (shape[-1] if shape else 1) * bits
            if row_bits % 8:
                raise WeightFormatError(
                    f"{self.path}: tensor {shown(name)} is {info.dtype} of shape {list(shape)},"
                    " whose rows are no whole bytes; read its bytes with raw()"
                )
            shape = (*shape[:-1], row_bits // 8)
        return self.raw(name).view(dtype).reshape(shape)

    def release(self, name: str) -> None:
        """Let the system drop the pages that reading a tensor brought into memory."""
        info = self._info(name)
        if isinstance(self._data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._data.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            some = ", ".join([shown(n) for n in self.tensors][:3]) or "none"
            raise WeightFormatError(
                f"{self.path}: has no tensor {shown(name)}; of its {len(self.tensors)} tensors the"
                f" first are {some}"
            )
        return self.tensors[name]


class _Header:
    """Reads and checks the header of `data`, from front to back, without copying it."""

    def __init__(self, path: str, data: mmap.mmap | bytes):
        self._path, self._data = path, data
        self._end = 8 + self._length()
        self._pos = 8
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if self._data[8:9] != b"{":
            raise self._refuse("its header is not a JSON object")
        seen_metadata = False
        for name in self._keys():
            if name == "__metadata__":
                if seen_metadata:
                    raise self._refuse("has '__metadata__' twice")
                seen_metadata = True
                self._read_metadata()
                continue
            if name in self.tensors:
                raise self._refuse(f"has the tensor {shown(name)} twice")
            if len(self.tensors) == MAX_TENSORS:
                raise self._refuse(f"has more than {MAX_TENSORS} tensors", "split it")
            self.tensors[name] = self._entry(name)
        self._skip_space()
        if self._pos != self._end:
            raise self._refuse(f"its header goes on after its object, at byte {self._pos}")
        self._check_places()

    def _length(self) -> int:
        size = len(self._data)
        if size < 8:
            raise self._refuse(f"has {size} bytes, and a safetensors file at least 8", _CUT_SHORT)
        length = int.from_bytes(self._data[:8], "little")
        if length > size - 8 or length > MAX_HEADER_BYTES:
            if other := _what_else(self._data[:64]):
                raise WeightFormatError(f"{self._path}: {other}")
            if length > MAX_HEADER_BYTES:
                raise self._refuse(
                    f"claims a header of {length} bytes, and {MAX_HEADER_BYTES} is the limit"
                )
            raise self._refuse(
                f"claims a header of {length} bytes, and {size - 8} are there", _CUT_SHORT
            )
        return length

    def _keys(self) -> Iterator[str]:
        """Step through an object; after each key that is yielded, the caller reads its value."""
        self._expect(b"{")
        if self._peek() == b"}":
            self._pos += 1
            return
        while True:
            yield self._string("a name", MAX_NAME_BYTES)
            if self._peek() == b"}":
                self._pos += 1
                return
            self._expect(b",")

    def _string(self, what: str, limit: int | None = None) -> str:
        """Read a string; of a key, the colon after it too."""
        self._skip_space()
        match = _STRING.match(self._data, self._pos, self._end)
        if match is None:
            raise self._refuse(f"its header must have {what} at byte {self._pos}")
        start, self._pos = self._pos, match.end()
        if limit is not None and self._pos - start > limit:
            raise self._refuse(f"{what} of {self._pos - start} bytes, and {limit} is the limit")
        text = self._json(match.group(), what)
        if limit is not None:
            self._expect(b":")
        return text

    def _read_metadata(self) -> None:
        for key in self._keys():
            if key in self.metadata:
                raise self._refuse(f"has the metadata {shown(key)} twice")
            self._skip_space()
            if self._peek() != b'"':
                raise self._refuse(f"metadata {shown(key)} must be a string")
            self.metadata[key] = self._string("a string")

    def _entry(self, name: str) -> TensorInfo:
        self._skip_space()
        end = min(self._end, self._pos + MAX_ENTRY_BYTES)
        match = _ENTRY.match(self._data, self._pos, end)
        what = f"tensor {shown(name)}"
        if match is None:
            raise self._refuse(f"{what} must be described by an object of at most {MAX_ENTRY_BYTES}"
                               " bytes without objects in it")  # fmt: skip
        self._pos = match.end()
        entry = self._json(match.group(), what)
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._refuse(f"{what} must have dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._refuse(
                f"{what} has the dtype {shown(str(dtype))}; known are {', '.join(DTYPES)}",
                "write it in one of these",
            )
        if not _are_counts(shape):
            raise self._refuse(f"{what} has the shape {_short(shape)}, must be a list of counts")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise self._refuse(f"{what} has the data_offsets {_short(offsets)}, must be two counts")
        return self._placed(name, dtype, tuple(shape), *offsets)

    def _placed(
        self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int
    ) -> TensorInfo:
        what = f"tensor {shown(name)}, {dtype} of shape {_short(list(shape))},"
        # Python ints: nothing wraps.  Axes of 0 are left out, as a reader that multiplies in order
        # would wrap before it comes to one.
        if math.prod(n for n in shape if n) > MAX_ELEMENTS or len(shape) > 64:
            raise self._refuse(f"{what} has more elements than 64 bits can count")
        bits = math.prod(shape) * DTYPES[dtype][0]
        if bits % 8:
            raise self._refuse(f"{what} does not fill whole bytes")
        if begin > end:
            raise self._refuse(f"{what} ends at {end} before it begins at {begin}")
        if end - begin != bits // 8:
            raise self._refuse(f"{what} takes {bits // 8} bytes, and its range has {end - begin}")
        if self._end + end > len(self._data):
            raise self._refuse(
                f"{what} ends at byte {self._end + end}, and the file at {len(self._data)}",
                _CUT_SHORT,
            )
        return TensorInfo(
            name=name, shape=shape, dtype=dtype, offset=self._end + begin, nbytes=end - begin
        )

    def _check_places(self) -> None:
        """Every byte after the header belongs to one tensor."""
        placed = sorted(self.tensors.values(), key=lambda t: (t.offset, t.nbytes))
        if placed and placed[0].offset != self._end:
            raise self._refuse(f"bytes {self._end} to {placed[0].offset} belong to no tensor")
        for a, b in itertools.pairwise(placed):
            end = a.offset + a.nbytes
            if b.offset < end:
                raise self._refuse(
                    f"tensors {shown(a.name)} and {shown(b.name)} share the bytes from {b.offset}"
                    " on"
                )
            if b.offset > end:
                raise self._refuse(f"bytes {end} to {b.offset} belong to no tensor")
        end = placed[-1].offset + placed[-1].nbytes if placed else self._end
        if end != len(self._data):
            raise self._refuse(f"bytes {end} to {len(self._data)} belong to no tensor")

    def _json(self, piece: bytes, what: str) -> Any:
        try:
            value = json.loads(piece.decode(), object_pairs_hook=unique_pairs)
            if isinstance(value, str):
                value.encode()
            return value
        except UnicodeError:
            raise self._refuse(f"{what} is not UTF-8") from None
        except RepeatedKey:
            raise self._refuse(f"{what} says something twice") from None
        except (ValueError, RecursionError):
            raise self._refuse(f"{what} is no JSON, at byte {self._pos}") from None

    def _skip_space(self) -> None:
        match = _SPACE.match(self._data, self._pos, self._end)
        assert match is not None
        self._pos = match.end()

    def _peek(self) -> bytes:
        self._skip_space()
        return self._data[self._pos : min(self._pos + 1, self._end)]

    def _expect(self, byte: bytes) -> None:
        if self._peek() != byte:
            raise self._refuse(
                f"its header has {self._peek()!r} at byte {self._pos}, must have {byte!r}"
            )
        self._pos += 1

    def _refuse(self, what: str, way_out: str = _AGAIN) -> WeightFormatError:
        return WeightFormatError(f"{self._path}: {what}; {way_out}")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _what_else(head: bytes) -> str | None:
    """Say what a file with an impossible header length looks like; None: nothing known."""
    if head[:4] == b"GGUF":
        return "is a GGUF file, not safetensors; give it the suffix .gguf"
    if head[:2] == b"PK" or head[:1] == b"\x80":
        return (
            "is a pickle, as PyTorch writes, not safetensors; pickles are never read, convert it to"
            " safetensors where you trust its source"
        )
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
    if head.lstrip()[:1] in (b"{", b"[", b"<"):
        return "is JSON or HTML text, not safetensors; check the address that it came from"
    return None
