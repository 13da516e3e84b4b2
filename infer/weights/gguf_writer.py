"""Writing GGUF files: metadata and tensors, one tensor in memory at a time, whole files or none.

    write_gguf("out.gguf", {"general.architecture": "llama"}, [GGUFTensor.of("a", array)])

The bytes depend on the arguments alone: keys and tensors stand in the order given.  A file appears
under its name when it is complete; on an error or an interrupt nothing is left.  With
`max_part_bytes` a model is split into files as llama.cpp splits it.

Source: the GGUF specification (docs/gguf.md in ggml-org/ggml), version 3, little-endian.  We refuse
what other readers cannot take: names of 64 bytes and more, more than four axes, an axis of 0.
"""

import contextlib
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Shaped

from infer.quant.formats import GGML_TYPES
from infer.weights import gguf_split
from infer.weights.gguf import DEFAULT_ALIGNMENT, MAX_DIMS, GGUFFile
from infer.weights.gguf_metadata import (
    ARRAY,
    BOOL,
    MAX_NAME_BYTES,
    STRING,
    VALUE_TYPES,
    RawValue,
    shown,
)

VERSION = 3
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with the NUL that ends it

_ALIGNMENT = "general.alignment"
_SPLIT_KEYS = (gguf_split.NUMBER, gguf_split.COUNT, gguf_split.TENSORS)
_NUMBERS = {name: number for number, (name, dtype) in VALUE_TYPES.items() if dtype}
_TYPE_NUMBERS = {format.name: number for number, format in GGML_TYPES.items()}
# dtype of an array -> the tensor type that holds its numbers.
_TENSOR_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """A tensor to write: what it is, and its bytes or a function that makes them when it is due.

    `shape` is logical, in numpy's order; `data` holds `shape` in the type `type_name`, as an array
    of any dtype whose bytes they are.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: Shaped[np.ndarray, "..."] | Callable[[], np.ndarray]

    @classmethod
    def of(cls, name: str, array: Shaped[np.ndarray, "..."]) -> "GGUFTensor":
        """Return an array of floats (bfloat16 too) or signed integers as a tensor of its own type.

        Raises:
            ValueError: No tensor type has this dtype.
        """
        kind = _TENSOR_TYPES.get(array.dtype.name)
        if kind is None:
            raise ValueError(
                f"tensor {shown(name)} is {array.dtype}, and a GGUF file holds"
                f" {', '.join(_TENSOR_TYPES)}; cast it, or pack it and give its type_name"
            )
        return cls(name=name, shape=array.shape, type_name=kind, data=array)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        format = GGML_TYPES[_TYPE_NUMBERS[self.type_name]]
        return math.prod(self.shape) // format.group * format.block_bytes


def tensors_of(file: GGUFFile) -> list[GGUFTensor]:
    """Return all tensors of an open file as they are, to be read one by one as they are written."""
    return [
        GGUFTensor(
            name=t.name,
            shape=t.shape,
            type_name=t.type_name,
            data=lambda name=t.name: file.raw(name),
        )
        for t in file.tensors.values()
    ]


def metadata_of(file: GGUFFile) -> dict[str, RawValue]:
    """Return an open file's metadata with their exact types, without those of a split."""
    return {key: file.metadata.raw(key) for key in file.metadata if key not in _SPLIT_KEYS}


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[GGUFTensor],
    *,
    alignment: int | None = None,
    max_part_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, ...]:
    """Write a file, or the files of a split model, and return their paths.

    Args:
        path: Of the file; it may exist and is then replaced. The parts of a split model are called
            `<path without .gguf>-00001-of-00003.gguf` and so on.
        metadata: Key to value, in this order. A bool, str or float (as float32) stands for itself;
            an int takes the first of uint32, int32, uint64 and int64 that holds it; a numpy scalar
            has its own type; a numpy array is an array of it, a list of str an array of strings,
            and any other list an array of arrays (llama.cpp reads none). An empty array of strings
            is `np.array([], "U")`. A `RawValue` from a reader is written as it was read.
        tensors: In this order; the data of one is asked for when its turn comes.
        alignment: Of each tensor in the file, a power of two. None: general.alignment of the
            metadata, or 32.
        max_part_bytes: Split so that the tensors of one file take at most so many bytes (a tensor
            that is larger has a file of its own). None, or enough for all: one file.
        progress: Called with (bytes done, bytes in all).

    Raises:
        ValueError: A name, shape, type, value or size that GGUF does not have.
        OSError: The file cannot be written.
    """
    path, tensors = Path(path), list(tensors)
    metadata, alignment = _with_alignment(dict(metadata), alignment)
    _check_tensors(tensors)
    parts = _cut(tensors, alignment, max_part_bytes)
    names = [path]
    if len(parts) > 1:
        stem = path.name.removesuffix(".gguf")
        names = [
            path.with_name(gguf_split.part_name(stem, i, len(parts))) for i in range(len(parts))
        ]
    heads = [
        head_bytes(part, keys, alignment)
        for part, keys in zip(parts, _part_metadata(metadata, parts), strict=True)
    ]
    count = _Counter(sum(t.nbytes for t in tensors), progress)
    with contextlib.ExitStack() as stack:
        drafts = []
        for name, head, part in zip(names, heads, parts, strict=True):
            draft = name.with_name(f".{name.name}.{secrets.token_hex(4)}.part")
            stack.callback(draft.unlink, missing_ok=True)
            with open(draft, "xb") as out:
                out.write(head)
                for tensor in part:
                    _write_tensor(out, tensor, alignment, count)
                out.flush()
                os.fsync(out.fileno())
            drafts.append(draft)
        # The first part last: whoever finds it finds the others.
        for draft, name in reversed(list(zip(drafts, names, strict=True))):
            os.replace(draft, name)
    return tuple(names)


@dataclass
class _Counter:
    """Bytes of tensors that are written, told to `progress`."""

    total: int
    progress: Callable[[int, int], None] | None
    done: int = 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)


# ---- what goes into which file -------------------------------------------------------------------


def _with_alignment(metadata: dict[str, Any], alignment: int | None) -> tuple[dict[str, Any], int]:
    """Return the metadata with general.alignment in it where it is not the default."""
    said = metadata.get(_ALIGNMENT)
    if isinstance(said, RawValue):
        said = said.value()
    if said is not None and not isinstance(said, int | np.integer):
        raise ValueError(f"{_ALIGNMENT} is {_kind(said)}, must be an integer")
    if alignment is None:
        alignment = DEFAULT_ALIGNMENT if said is None else int(said)
    if not 1 <= alignment < 1 << 32 or alignment & (alignment - 1):
        raise ValueError(f"the alignment is {alignment}, must be a power of two below 2^32")
    if said is not None and int(said) != alignment:
        raise ValueError(
            f"alignment is {alignment}, and the metadata say {_ALIGNMENT} {said}; give one of them"
        )
    if said is None and alignment != DEFAULT_ALIGNMENT:
        metadata[_ALIGNMENT] = np.uint32(alignment)
    return metadata, alignment


def _cut(
    tensors: list[GGUFTensor], alignment: int, max_part_bytes: int | None
) -> list[list[GGUFTensor]]:
    """Cut the tensors into runs of at most `max_part_bytes`, or of one tensor."""
    if max_part_bytes is None:
        return [tensors]
    if max_part_bytes < 1:
        raise ValueError(f"max_part_bytes is {max_part_bytes}, must be at least 1")
    parts: list[list[GGUFTensor]] = [[]]
    used = 0
    for tensor in tensors:
        size = _padded(tensor.nbytes, alignment)
        if parts[-1] and used + size > max_part_bytes:
            parts.append([])
            used = 0
        parts[-1].append(tensor)
        used += size
    if len(parts) > gguf_split.MAX_PARTS:
        raise ValueError(
            f"max_part_bytes {max_part_bytes} makes {len(parts)} files, and a model has at most"
            f" {gguf_split.MAX_PARTS}; allow more bytes a file"
        )
    return parts


def _part_metadata(
    metadata: dict[str, Any], parts: Sequence[Sequence[GGUFTensor]]
) -> list[dict[str, Any]]:
    """Return each file's metadata: all in the first, in each what makes it a part."""
    for key in _SPLIT_KEYS:
        if key in metadata:
            raise ValueError(f"the metadata have {key}, which the writer itself sets; leave it out")
    if len(parts) == 1:
        return [metadata]
    every = {_ALIGNMENT: metadata[_ALIGNMENT]} if _ALIGNMENT in metadata else {}
    split = [
        {
            gguf_split.NUMBER: np.uint16(i),
            gguf_split.COUNT: np.uint16(len(parts)),
            gguf_split.TENSORS: np.int32(sum(len(part) for part in parts)),
        }
        for i in range(len(parts))
    ]
    return [metadata | split[0], *(every | keys for keys in split[1:])]


def _check_tensors(tensors: list[GGUFTensor]) -> None:
    names = set()
    for t in tensors:
        _check_name(t.name, "tensor name", MAX_TENSOR_NAME_BYTES)
        if t.name in names:
            raise ValueError(f"the tensor {shown(t.name)} is there twice; a name stands for one")
        names.add(t.name)
        if t.type_name not in _TYPE_NUMBERS:
            raise ValueError(
                f"tensor {shown(t.name)} has the type {t.type_name}; use one of"
                f" {', '.join(_TYPE_NUMBERS)}"
            )
        if len(t.shape) > MAX_DIMS or 0 in t.shape:
            raise ValueError(
                f"tensor {shown(t.name)} has the shape {t.shape}, and GGUF has at most {MAX_DIMS}"
                " axes, none of 0; reshape it"
            )
        # Raises if rows are no whole blocks.
        GGML_TYPES[_TYPE_NUMBERS[t.type_name]].row_bytes(t.shape[-1] if t.shape else 1)


def _check_name(name: str, what: str, max_bytes: int) -> None:
    if not name or "\0" in name or len(name.encode()) > max_bytes:
        raise ValueError(
            f"{what} {shown(name)} must be 1 to {max_bytes} bytes of UTF-8 without NUL; shorten it"
        )


# ---- bytes ---------------------------------------------------------------------------------------


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def head_bytes(
    tensors: Sequence[GGUFTensor],
    metadata: Mapping[str, Any],
    alignment: int = DEFAULT_ALIGNMENT,
) -> bytes:
    """Return all bytes of a file before its first tensor's."""
    out = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        _check_name(key, "metadata key", MAX_NAME_BYTES)
        number, encoded = _encoded(value, f"metadata {shown(key)}")
        out += [_string(key), struct.pack("<I", number), encoded]
    offset = 0
    for t in tensors:
        dims = t.shape[::-1]  # the file has the fastest axis first
        out += [
            _string(t.name),
            struct.pack(f"<I{len(dims)}Q", len(dims), *dims),
            struct.pack("<IQ", _TYPE_NUMBERS[t.type_name], offset),
        ]
        offset += _padded(t.nbytes, alignment)
    head = b"".join(out)
    return head.ljust(_padded(len(head), alignment), b"\0")


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _encoded(value: Any, what: str) -> tuple[int, bytes]:
    """Return a value's type number and its bytes."""
    if isinstance(value, RawValue):
        return value.value_type, value.data
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, bool | int | float | np.generic):
        number = _scalar_type(value, what)
        return number, np.asarray(value).astype(VALUE_TYPES[number][1]).tobytes()
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return ARRAY, _encoded_array(value, what)
    if isinstance(value, list | tuple) and value:
        return ARRAY, _encoded_list(value, what)
    raise ValueError(
        f"{what} is {_kind(value)}; give a bool, number, string, array of one axis, or a list of"
        ' strings or arrays that is not empty (no strings: `np.array([], "U")`)'
    )


def _encoded_array(array: np.ndarray, what: str) -> bytes:
    if array.dtype.kind == "U":
        return struct.pack("<IQ", STRING, array.size) + b"".join(map(_string, array.tolist()))
    number = _number_type(array.dtype, what)
    return struct.pack("<IQ", number, array.size) + array.astype(VALUE_TYPES[number][1]).tobytes()


def _encoded_list(items: Sequence[Any], what: str) -> bytes:
    if all(isinstance(item, str) for item in items):
        return struct.pack("<IQ", STRING, len(items)) + b"".join(map(_string, items))
    if not all(isinstance(item, np.ndarray | list | tuple) for item in items):
        kinds = sorted({_kind(item) for item in items})
        raise ValueError(
            f"{what} is a list of {' and '.join(kinds)}; give numbers as a numpy array, and else"
            " only strings or only arrays"
        )
    encoded = [_encoded(item, what)[1] for item in items]
    return struct.pack("<IQ", ARRAY, len(items)) + b"".join(encoded)


def _scalar_type(value: Any, what: str) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float) and not isinstance(value, np.generic):
        if math.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
            raise ValueError(f"{what} is {value}, too large for a float32; give it as np.float64")
        return _NUMBERS["float32"]
    if isinstance(value, np.generic):
        return _number_type(value.dtype, what)
    for name in ("uint32", "int32", "uint64", "int64"):
        if np.iinfo(name).min <= value <= np.iinfo(name).max:
            return _NUMBERS[name]
    raise ValueError(f"{what} is {value}, which fits no integer of 64 bits; give it as a string")


def _number_type(dtype: np.dtype, what: str) -> int:
    number = _NUMBERS.get(dtype.name)
    if number is None:
        raise ValueError(f"{what} is {dtype}, and GGUF has {', '.join(_NUMBERS)}; cast it to one")
    return number


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.ndim} axes"
    return f"{type(value).__name__}{' without items' if value in ([], ()) else ''}"


def _write_tensor(out: BinaryIO, tensor: GGUFTensor, alignment: int, count: _Counter) -> None:
    data = tensor.data if isinstance(tensor.data, np.ndarray) else tensor.data()
    if data.nbytes != tensor.nbytes:
        raise ValueError(
            f"tensor {shown(tensor.name)}, {tensor.type_name} of shape {tensor.shape}, takes"
            f" {tensor.nbytes} bytes, and its data has {data.nbytes}; pass its own packed bytes"
        )
    if data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("<"))
    out.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    out.write(b"\0" * (-data.nbytes % alignment))
    count.add(data.nbytes)
