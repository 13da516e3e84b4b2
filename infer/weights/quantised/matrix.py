"""A quantised matrix of a checkpoint as parts of a planar weight, and what its readers share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from infer.errors import WeightFormatError
from infer.quant.formats import PlanarFormat
from infer.weights.safetensors import DTYPES, TensorInfo

Read = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """An array of a packed weight: what it is, and how it is read."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return DTYPES[self.dtype][0] // 8 * int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A quantised matrix [out, in].

    Attributes:
        shape: (out, in).
        format: what its codes mean.
        parts: arrays by the names of `packed_form.PARTS`.
        sources: the file's tensors that they are made of, or that say nothing more.
        unused: names of tensors that hold something which is not used here, with the reason.
    """

    shape: tuple[int, int]
    format: PlanarFormat
    parts: Mapping[str, Part]
    sources: tuple[str, ...]
    unused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rows(self, index: slice | np.ndarray, name: str) -> "Matrix":
        """Return the matrix of some of the rows, which a fused tensor holds for one weight.

        Raises:
            WeightFormatError: scales span rows of several weights.
        """
        out = len(range(*index.indices(self.shape[0]))) if isinstance(index, slice) else len(index)
        span = self.format.rows
        at: Any = index
        if span > 1:
            # A run of rows from the beginning of a block on.
            if not isinstance(index, slice) or index.step not in (None, 1):
                start = None
            else:
                start = index.start or 0
            if start is None or start % span:
                raise WeightFormatError(
                    f"{name}: a scale spans {span} rows of a tensor that holds several weights, and"
                    " rows of two of them; this version does not split it"
                )
            at = slice(start // span, start // span + -(-out // span))
        parts = {}
        for part, array in self.parts.items():
            by = {"data": index, "scale": at, "zero": at}.get(part)
            if by is None or (part != "data" and span == 0):
                parts[part] = array
                continue
            count = out if part == "data" or span == 1 else at.stop - at.start
            take = lambda array=array, by=by: array.read()[by]
            parts[part] = Part(array.dtype, (count, *array.shape[1:]), take)
        return dataclasses.replace(self, shape=(out, self.shape[1]), parts=parts)


class Tensors:
    """The tensors of a folder, asked for with what they must be."""

    def __init__(self, path: str, infos: Mapping[str, TensorInfo], read: Read):
        """See the attributes of `infer.weights.shards.SafetensorsFolder`."""
        self.path, self.infos, self._read = path, infos, read

    def read(self, name: str) -> np.ndarray:
        """Return a tensor."""
        return self._read(name)

    def ending(self, suffix: str) -> list[str]:
        """Return the modules that have a tensor MODULE.suffix."""
        end = f".{suffix}"
        return [name.removesuffix(end) for name in self.infos if name.endswith(end)]

    def get(
        self, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None
    ) -> TensorInfo:
        """Return what a header says of a tensor.

        Args:
            name: of the tensor.
            dtypes: those that it may have.
            shape: sizes, None for any; None for any shape.

        Raises:
            WeightFormatError: it is missing, or of another dtype or shape.
        """
        info = self.infos.get(name)
        if info is None:
            raise self.error(name, "is missing")
        if info.dtype not in dtypes:
            raise self.error(name, f"is {info.dtype}, must be {' or '.join(dtypes)}")
        if shape is not None and (
            len(info.shape) != len(shape)
            or any(want not in (None, have) for want, have in zip(shape, info.shape, strict=True))
        ):
            want = ["any" if size is None else size for size in shape]
            raise self.error(name, f"is {list(info.shape)}, must be {want}")
        return info

    def error(self, name: str, problem: str) -> WeightFormatError:
        """Return an error about a tensor."""
        return WeightFormatError(f"{self.path}: {name} {problem}")


FLOATS = ("F16", "BF16", "F32")
SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes uint8 [..., n] in the planes of `infer.quant.codes.pack`."""
    if bits == 8:
        return codes
    planes = {2: (2,), 3: (2, 1), 4: (4,)}[bits]
    parts, shift = [], 0
    for width in planes:
        part = (codes >> shift) & ((1 << width) - 1)
        part = part.reshape(*codes.shape[:-1], -1, 8 // width)
        places = np.arange(0, 8, width, dtype=np.uint8)
        parts.append(np.bitwise_or.reduce(part << places, axis=-1).astype(np.uint8))
        shift += width
    return np.concatenate(parts, axis=-1)


def bytes_of_words(words: np.ndarray) -> np.ndarray:
    """Return int32 [..., n] as bytes [..., 4 n], the low ones first."""
    return np.ascontiguousarray(words).view(np.uint8)


def unpacked(stream: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of bytes [..., n] in which `bits` bits each follow one another, the low ones
    first: uint8 [..., 8 n / bits].
    """
    if bits == 8:
        return stream
    if bits in (2, 4):
        places = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (stream[..., None] >> places) & np.uint8((1 << bits) - 1)
        return codes.reshape(*stream.shape[:-1], -1)
    single = np.unpackbits(stream, axis=-1, bitorder="little")
    single = single.reshape(*stream.shape[:-1], -1, bits)
    return (single << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def order_of_groups(g_idx: np.ndarray, group: int, where: str) -> np.ndarray | None:
    """Return the order of the inputs in which those of a group stand side by side, int32; None
    where they do already.

    Args:
        g_idx: the group of each input.
        group: inputs of a group.
        where: how messages begin.

    Raises:
        WeightFormatError: groups are not of that size each.
    """
    wanted = np.arange(len(g_idx)) // group
    if np.array_equal(g_idx, wanted):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], wanted):
        raise WeightFormatError(
            f"{where} puts the inputs into groups that are not of {group} each; this version reads"
            " equal groups only"
        )
    return order
