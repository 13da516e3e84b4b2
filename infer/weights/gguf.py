"""GGUF files: a header that is checked before it is believed, and tensors read in place.

    magic "GGUF" | version u32 | tensors u64 | keys u64
    key-value pairs | tensor infos | padding | tensor data

The container knows no model.  Opening reads the header only; tensors stay in the mapped file until
they are asked for.  A model that is split over several files opens as one, by any of them
(`infer.weights.gguf_split`).

Stricter than gguf-py: a name or a key that comes twice, tensors that share bytes, an offset that is
not aligned, more than four axes, an axis of 0, and a name that is empty or holds a NUL are refused.
Gaps between tensors and bytes after the last one are accepted.

Source: the GGUF specification (docs/gguf.md in ggml-org/ggml), versions 2 and 3, little-endian.
"""

import itertools
import math
import mmap
import operator
import os
import stat
import struct
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8

from infer.errors import WeightFormatError
from infer.quant.blocks import FORMATS, dequantize_numpy
from infer.quant.formats import GGML_TYPES, REMOVED_GGML_TYPES, Format
from infer.weights import gguf_split
from infer.weights.gguf_metadata import (
    CUT_SHORT,
    MAX_KEYS,
    RECONVERT,
    Cursor,
    Metadata,
    TypedMetadata,
    shown,
)
from infer.weights.mapped import check_length

MAX_DIMS = 4  # GGML_MAX_DIMS
DEFAULT_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
# Ours: a file with one tensor for each of 10^4 experts stays below; more would only cost time.
MAX_TENSORS = 1 << 17

# Types that are numbers already and no weights of a model: read by `array`, never packed.
_NUMBERS = {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}


class TensorInfo(NamedTuple):
    """Where a tensor lies in the file and what its bytes mean.

    `shape` is in numpy's order, slowest axis first (the file stores it the other way round);
    `offset` counts from the start of the file, which is number `part` of a split model's files.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int
    part: int = 0


class GGUFFile(TypedMetadata):
    """An open GGUF file: `path`, `version`, `metadata`, `tensors`, and the tensors' bytes.

    Of a split model these are the first file's path, version and metadata, and the tensors of all
    files; `paths` names the files.  Metadata, views and arrays that were handed out stay valid
    after `close`.
    """

    def __init__(self, path: str, data: mmap.mmap | bytes):
        """Check and index a file's bytes, which messages call `path`; see `GGUFFile.open`."""
        if data[:4] != b"GGUF":
            raise WeightFormatError(f"{path}: {_what_else(data[:64])}")
        cursor = Cursor(path, data)
        self.path = path
        self.version = _read_version(cursor)
        num_tensors = cursor.count("tensors", 24, MAX_TENSORS)
        self.metadata: Metadata = Metadata(cursor, cursor.count("metadata keys", 13, MAX_KEYS))
        self.alignment = self.meta_int("general.alignment", DEFAULT_ALIGNMENT)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise cursor.refuse(f"general.alignment is {self.alignment}, not a power of two")
        self.tensors: dict[str, TensorInfo] = _read_tensors(cursor, num_tensors, self.alignment)
        self.paths: tuple[str, ...] = (path,)
        self._data: tuple[mmap.mmap | bytes, ...] | None = (data,)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUFFile":
        """Open a file, or all files of a split model, and check the whole headers.

        Args:
            path: A regular file; of a split model any of its files, the others lying beside it.

        Raises:
            OSError: It does not exist or may not be read.
            WeightFormatError: It is no GGUF file, or one that is broken, hostile, or of a kind that
                is not read; or other files of the split model are missing, or of another model.
                The message is one line.
        """
        name = os.fspath(path)
        one = cls._map(name)
        paths = gguf_split.part_paths(name, one.path, one.metadata)
        if len(paths) > 1:
            parts = [one if p == name else cls._map(p) for p in paths]
            gguf_split.check_parts(parts)
            one = cls._joined(parts)
        one.paths = tuple(paths)
        return one

    @classmethod
    def _map(cls, name: str) -> "GGUFFile":
        label = name if name.isprintable() else repr(name)
        info = os.stat(name)
        if not stat.S_ISREG(info.st_mode):  # before opening: a pipe would wait for its writer
            kind = "a folder" if stat.S_ISDIR(info.st_mode) else "no regular file"
            raise WeightFormatError(f"{label}: is {kind}; give the path of the .gguf file itself")
        with open(name, "rb") as file:
            if info.st_size == 0:  # nothing to map
                return cls(label, b"")
            return cls(label, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @classmethod
    def _joined(cls, parts: list["GGUFFile"]) -> "GGUFFile":
        """Return the first part with the tensors of all."""
        whole = parts[0]
        whole.tensors = {
            name: info._replace(part=i)
            for i, part in enumerate(parts)
            for name, info in part.tensors.items()
        }
        whole._data = tuple(data for part in parts for data in part._data or ())
        return whole

    def close(self) -> None:
        """Let go of the file; it is unmapped when the last view of it is gone."""
        self._data = None

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def raw(self, name: str) -> UInt8[np.ndarray, "rows row_bytes"]:
        """Return a tensor's bytes as they lie in the file: a read-only view, nothing is copied.

        Args:
            name: A tensor of this file.

        Returns:
            A row for each run along the last axis: the axes before it are flattened, and a vector
            is one row.

        Raises:
            WeightFormatError: The file has no such tensor, or has become shorter.
            ValueError: The file is closed.
        """
        info = self._info(name)
        if self._data is None:
            raise ValueError(f"{self.path} is closed; read tensors inside its `with` block")
        self._check_length(info)
        view = np.frombuffer(self._data[info.part], np.uint8, info.nbytes, info.offset)
        return view.reshape(math.prod(info.shape[:-1]), -1)

    def array(self, name: str, dtype: Any = None) -> Shaped[np.ndarray, "..."]:
        """Return a tensor's numbers, decoded.

        Args:
            name: A tensor of this file.
            dtype: Of the result.  None: float32, or an integer tensor's own dtype.

        Raises:
            WeightFormatError: The file has no such tensor, or its type has no decoder.
            ValueError: The file is closed.
        """
        info, raw = self._info(name), self.raw(name)
        if info.type_name in _NUMBERS:
            own = np.dtype(_NUMBERS[info.type_name])
            default = np.float32 if own.kind == "f" else own.newbyteorder("=")
            numbers = raw.reshape(-1).view(own).reshape(info.shape)
            with np.errstate(over="ignore", invalid="ignore"):  # too large for `dtype`: infinite
                return numbers.astype(default if dtype is None else dtype)
        if info.type_name not in FORMATS:
            raise WeightFormatError(
                f"{self.path}: tensor {shown(name)} is {info.type_name}, and decoded are"
                f" {', '.join(FORMATS)}; take a Q4_K_M or Q8_0 file of this model, or requantise it"
            )
        dtype = np.float32 if dtype is None else dtype
        return dequantize_numpy(raw, FORMATS[info.type_name], info.shape, dtype)

    def release(self, name: str) -> None:
        """Let the system drop the pages that reading a tensor brought into memory."""
        info = self._info(name)
        self._drop(info.part, info.offset, info.offset + info.nbytes)

    def release_view(self, name: str, view: np.ndarray) -> None:
        """Let the system drop the pages under some rows of what `raw` returned, which stay
        readable; an array that lies elsewhere is left alone.

        Raises:
            WeightFormatError: The file has become shorter than the tensor asks for.
        """
        self._check_length(self._info(name))
        if not view.flags.c_contiguous:
            return
        for part, data in enumerate(self._data or ()):
            start = view.ctypes.data - np.frombuffer(data, np.uint8).ctypes.data
            if 0 <= start and start + view.nbytes <= len(data):
                self._drop(part, start, start + view.nbytes)

    def _check_length(self, info: TensorInfo) -> None:
        if self._data is not None:
            end = info.offset + info.nbytes
            path = self.path if len(self.paths) == 1 else shown(self.paths[info.part])
            check_length(path, self._data[info.part], end)

    def _drop(self, part: int, first: int, last: int) -> None:
        """Let the system drop the whole pages of bytes [first, last) of a file."""
        data = None if self._data is None else self._data[part]
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            last = last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                data.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            some = ", ".join([shown(n) for n in self.tensors][:3]) or "none"
            raise WeightFormatError(
                f"{self.path}: has no tensor {shown(name)}; of its {len(self.tensors)} tensors the"
                f" first are {some}"
            )
        return self.tensors[name]


def _what_else(head: bytes) -> str:
    """Say what a file without the magic looks like, and what to do about it."""
    if not head:
        return "is empty (0 bytes); download it again"
    if head[:2] == b"PK":
        return (
            "is a zip archive, as PyTorch writes, not GGUF; use the model's .gguf or .safetensors"
        )
    if head[8:9] == b"{":
        return "is a safetensors file, not GGUF; load it as one, under the suffix .safetensors"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):  # ggml, ggmf, ggjt, ggla as u32
        return "is a GGML file from before GGUF; get a .gguf file of the model"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
    if head.lstrip()[:1] in (b"{", b"[", b"<"):
        return "is JSON or HTML text, not GGUF; check the address that it was downloaded from"
    return f"starts with {head[:4]!r}, and a GGUF file with b'GGUF'; give the model's .gguf file"


def _read_version(cursor: Cursor) -> int:
    cursor.step(4, "the magic")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise cursor.refuse("is big-endian, and only little-endian GGUF is read", RECONVERT)
    if version == 1:
        raise cursor.refuse("is GGUF version 1, and 2 and 3 are read", RECONVERT)
    raise cursor.refuse(f"is GGUF version {version}, and 2 and 3 are read")


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Read the tensor infos; check that each tensor lies inside the file and shares no byte."""
    entries: dict[str, tuple[tuple[int, ...], Format, int]] = {}
    for i in range(count):
        name = cursor.tensor_name(i)
        if name in entries:
            raise cursor.refuse(f"has the tensor {shown(name)} twice")
        entries[name] = _read_entry(cursor, name, alignment)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors, end = {}, cursor.end
    last, in_order = 0, True
    for name, (shape, format, offset) in entries.items():
        nbytes = math.prod(shape) // format.group * format.block_bytes  # Python ints: no wrap
        start = data_start + offset
        if start + nbytes > end:
            raise cursor.refuse(
                f"tensor {shown(name)}, {format.name} of shape {shape}, ends at byte"
                f" {start + nbytes}, and the file at {cursor.end}",
                CUT_SHORT,
            )
        in_order &= start >= last
        last = start + nbytes
        tensors[name] = TensorInfo(name, shape, format.name, start, nbytes)
    if in_order:  # one after the other, as writers lay them out
        return tensors
    by_offset = sorted(tensors.values(), key=operator.attrgetter("offset"))
    for a, b in itertools.pairwise(by_offset):
        if a.offset + a.nbytes > b.offset:
            raise cursor.refuse(
                f"tensors {shown(a.name)} and {shown(b.name)} share the bytes from {b.offset} on"
            )
    return tensors


# A tensor's shape, type and offset, by its number of axes.
_ENTRIES = [struct.Struct(f"<{num_dims}QIQ") for num_dims in range(MAX_DIMS + 1)]


def _read_entry(cursor: Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], Format, int]:
    """Read a tensor's shape (in numpy's order), format and offset; check each by itself."""
    # The hot loop of opening a file with many tensors: messages are made where they are needed.
    num_dims = cursor.u32("a tensor's number of axes")
    if num_dims > MAX_DIMS:
        raise cursor.refuse(
            f"tensor {shown(name)} claims {num_dims} axes, and GGUF has at most {MAX_DIMS}"
        )
    entry = _ENTRIES[num_dims]
    *dims, number, offset = entry.unpack_from(
        cursor.data, cursor.step(entry.size, "a tensor's shape, type and offset")
    )
    shape = tuple(dims[::-1])
    format = GGML_TYPES.get(number)
    if format is None or 0 in shape or offset % alignment:
        raise _entry_error(cursor, name, shape, number, offset, alignment)
    if (shape[-1] if shape else 1) % format.group:
        raise cursor.refuse(
            f"tensor {shown(name)} is {format.name} of shape {shape}, and its rows must be whole"
            f" blocks of {format.group}"
        )
    return shape, format, offset


def _entry_error(
    cursor: Cursor, name: str, shape: tuple[int, ...], number: int, offset: int, alignment: int
) -> WeightFormatError:
    """Return what is wrong with a tensor's type, shape or offset."""
    what = f"tensor {shown(name)}"
    if number not in GGML_TYPES:
        removed = REMOVED_GGML_TYPES.get(number)
        known = f"{removed}, which ggml has removed" if removed else "which is not known"
        return cursor.refuse(
            f"{what} has the type {number}, {known}", "get a file of another type, such as Q8_0"
        )
    if 0 in shape:
        return cursor.refuse(f"{what} has the shape {shape}, and no axis may be 0")
    return cursor.refuse(
        f"{what} has the offset {offset}, not a multiple of the alignment {alignment}"
    )
