"""Weights in the order in which the native kernels read them: 16 output rows side by side.

A packed weight holds the same codes and scales as the GGUF blocks it is made of, about as many
bytes, and decodes to the same numbers.  `repack.cc` writes the layout, `gemm_kernels.h` reads it.
"""

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from infer import native
from infer.native.formats import (
    E4M3,
    E5M2,
    FLOAT_FORMATS,
    FORMATS,
    INTEGERS,
    INTEGERS_WITH_ZERO,
    LEVELS,
    planar_number,
    planar_refusal,
)
from infer.pytree import Leaf, pytree_dataclass, static
from infer.quant import codes
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, scales

_PANEL = 16
# Bytes of a weight that are repacked at a time.
_PIECE = 8 << 20

_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@pytree_dataclass
class Packed:
    """A weight [out, in] in panels of 16 rows, the last one padded with zeros; or the weights
    [E, out, in] of E experts, one after the other.
    """

    data: Leaf  # uint8 [(E,) ceil(out / 16), panel_bytes]
    format: str = static(kw_only=True)  # a key of FORMATS, or the name of a planar format
    shape: tuple[int, ...] = static(kw_only=True)
    planar: int = static(kw_only=True, default=0)  # of a planar format, see `planar_number`
    activations: str = static(kw_only=True, default="")  # as of PlanarFormat
    rotated: int = static(kw_only=True, default=0)  # likewise
    perm: Leaf = None  # int32 [in]: column j of the panels is input perm[j]
    act_scale: Leaf = None  # float32 []: of activations whose scale is static

    @property
    def number(self) -> int:
        """What the library takes for the format."""
        return self.planar or FORMATS[self.format]

    @property
    def is_integer(self) -> bool:
        """Whether activations meet it as 8-bit integers."""
        kinds = (*INTEGERS.values(), *INTEGERS_WITH_ZERO.values())
        return self.planar & 255 in kinds if self.planar else self.format not in FLOAT_FORMATS

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, scales included."""
        return sum(p.nbytes for p in (self.data, self.perm, self.act_scale) if p is not None)


def repack(
    weight: QArray | jax.Array | np.ndarray, done: Callable[[np.ndarray], None] | None = None
) -> Packed:
    """Return a weight [out, in], or [E, out, in], repacked, as a JAX array on the CPU; all threads
    take part.

    Args:
        weight: packed blocks, or a float32, float16 or bfloat16 array; known on the host.
        done: called with one piece after the other of the weight's rows, of about 8 MB, when it is
            not needed any more, so that the pages of a mapped file need not all be in memory.

    Raises:
        NotImplementedError: there is no kernel for the format, or `in` is 0 or no multiple of 32.
        ValueError: the weight is neither a matrix nor a stack of them, or its data is of another
            size.
    """
    library = native.library()
    if isinstance(weight, QArray) and isinstance(weight.format, PlanarFormat):
        if len(weight.shape) == 3:
            raise NotImplementedError(
                f"no native kernel for experts' weights in {weight.format.name}; there are"
                f" {', '.join(FORMATS)}"
            )
        return _repack_planar(library, weight, weight.format)
    if isinstance(weight, QArray):
        name, rows = weight.format.name, np.asarray(weight.data)
        if weight.format.layout != "blocks":
            name = weight.format.layout
    else:
        name, rows = _OF_DTYPE.get(str(weight.dtype), str(weight.dtype)), np.asarray(weight)
        if rows.ndim not in (2, 3):
            raise ValueError(
                f"a weight is a matrix [out, in], or [E, out, in], not of shape {rows.shape}"
            )
    *experts, out, width = weight.shape
    if name not in FORMATS:
        raise NotImplementedError(
            f"no native kernel for weights in {name}; there are {', '.join(FORMATS)}"
        )
    if isinstance(weight, QArray):
        _check_blocks(weight, rows)
    if width % 32 or width == 0:
        raise NotImplementedError(
            f"the native kernels take a width that is a multiple of 32, from 32 on, not {width}"
        )
    # Row by row in place, even if the rows are a view of a mapped file.
    if rows.strides[-1] != rows.itemsize or rows.strides[-2] < rows.shape[-1] * rows.itemsize:
        rows = np.ascontiguousarray(rows)
    library.infer_native_panel_bytes.restype = ctypes.c_int64
    panel_bytes = library.infer_native_panel_bytes(
        ctypes.c_int64(FORMATS[name]), ctypes.c_int64(width)
    )
    panels = -(-out // _PANEL)
    data = _aligned_zeros((*experts, panels, panel_bytes))
    step = _PANEL * max(1, _PIECE // (_PANEL * rows.strides[-2]))
    matrices = zip(rows, data, strict=True) if experts else [(rows, data)]
    for of_matrix, panels_of_matrix in matrices:
        for first in range(0, out, step):
            piece = of_matrix[first : first + step]
            library.infer_native_repack(
                FORMATS[name],
                ctypes.c_void_p(piece.ctypes.data),
                ctypes.c_int64(rows.strides[-2]),
                len(piece),
                width,
                ctypes.c_void_p(panels_of_matrix[first // _PANEL :].ctypes.data),
            )
            if done is not None:
                done(piece)
    return Packed(_on_cpu(data), format=name, shape=(*experts, out, width))


def _repack_planar(library: Any, weight: QArray, format: PlanarFormat) -> Packed:
    """Return a planar weight in panels; its scales are rounded no further."""
    # Shapes that do not belong together would be read past their ends.
    weight = QArray.planar(
        weight.data,
        weight.scale,
        format,
        weight.shape,
        zero=weight.zero,
        global_scale=weight.global_scale,
        perm=weight.perm,
        act_scale=weight.act_scale,
    )
    out, width = weight.shape
    refusal = planar_refusal(format.code, format.group, width, format.activations)
    if refusal:
        raise NotImplementedError(f"no native kernel for weights in {format.name}: {refusal}")
    span = min(format.group or width, width)
    coded = _codes(weight, format)
    scales, common, zeros = _scales_by_row(weight, format)
    levels = None
    if format.code == "int":
        kinds = INTEGERS if format.symmetric else INTEGERS_WITH_ZERO
        kind = kinds[format.bits]
    elif format.bits == 4:
        kind, levels = LEVELS, np.ascontiguousarray(codes.LEVELS[format.code], np.float32)
    else:
        kind = E5M2 if format.code == "e5m2" else E4M3
    # Half the bytes where nothing is lost.
    with np.errstate(over="ignore", invalid="ignore"):
        halved = scales.astype(np.float16)
    half = bool((halved.astype(np.float32) == scales).all())
    scales = np.ascontiguousarray(halved if half else scales)
    number = planar_number(kind, span, half)
    library.infer_native_panel_bytes.restype = ctypes.c_int64
    size = library.infer_native_panel_bytes(ctypes.c_int64(number), ctypes.c_int64(width))
    data = _aligned_zeros((-(-out // _PANEL), size))
    address = lambda a: ctypes.c_void_p(None if a is None else a.ctypes.data)
    library.infer_native_repack_planar(
        ctypes.c_int64(number),
        address(coded),
        address(scales),
        address(zeros),
        ctypes.c_float(common),
        address(levels),
        out,
        width,
        address(data),
    )
    part = lambda value: None if value is None else _on_cpu(np.asarray(value))
    return Packed(
        _on_cpu(data),
        format=format.name,
        shape=(out, width),
        planar=number,
        activations=format.activations,
        rotated=format.rotated,
        perm=part(weight.perm),
        act_scale=part(weight.act_scale),
    )


def _codes(weight: QArray, format: PlanarFormat) -> np.ndarray:
    """Return the codes uint8 [out, in]; floats of 6 bits as E4M3, which holds all of them."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        data = jax.numpy.asarray(np.asarray(weight.data))
        coded = codes.unpack(data, format.bits, weight.shape[1])
        if format.code in ("e2m3", "e3m2"):
            coded = codes.nearest(codes.values(coded, format.code), "e4m3")
    return np.ascontiguousarray(coded)


def _scales_by_row(
    weight: QArray, format: PlanarFormat
) -> tuple[np.ndarray, float, np.ndarray | None]:
    """Return scales float32 [out, spans], the factor on all of them, and zero points likewise."""
    out = weight.shape[0]
    rows = lambda grid: np.ascontiguousarray(np.repeat(grid, format.rows or out, 0)[:out])
    zeros = None if format.symmetric else rows(np.asarray(weight.zero))
    if format.scale_dtype == "e4m3":
        stored = codes.LEVELS["e4m3"][np.asarray(weight.scale)]
        return rows(stored), float(np.asarray(weight.global_scale)), zeros
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        host = jax.tree.map(np.asarray, weight)
        return rows(np.asarray(scales(host))), 1.0, zeros


def _check_blocks(weight: QArray, rows: np.ndarray) -> None:
    """Refuse data of another size than the shape says: it would be read past its end."""
    *lead, width = weight.shape
    group = weight.format.group
    want = (*lead, width // group * weight.format.block_bytes)
    if width % group or rows.dtype != np.uint8 or rows.shape != want:
        raise ValueError(
            f"a {weight.format.name} weight {list(weight.shape)} has data {rows.dtype}"
            f"{list(rows.shape)}; its blocks of {group} are uint8 {list(want)}"
        )


# Weights lie side by side in chunks of huge pages: with pages of 4 KB a core was measured to read
# memory at half the speed.
_CHUNK = 64 << 20
_HUGE = 2 << 20
_lock = threading.Lock()
# The chunk that is being filled, as long as an array lives in it, and the bytes taken.
_chunk: weakref.ref[mmap.mmap] | None = None
_taken = 0


def _aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros on a 64-byte boundary, which JAX takes without a copy."""
    global _chunk, _taken
    size = math.prod(shape)
    with _lock:
        memory = _chunk() if _chunk is not None else None
        if memory is None or _taken + size > len(memory):
            length = -(-max(size, _CHUNK) // _HUGE) * _HUGE + _HUGE
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            _chunk, _taken = weakref.ref(memory), 0
        raw = np.frombuffer(memory, np.uint8)
        _taken += -(raw.ctypes.data + _taken) % 64
        start, _taken = _taken, _taken + size
    return raw[start : start + size].reshape(shape)


def _on_cpu(data: np.ndarray) -> Any:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.device_put(data)  # no copy, unlike jnp.asarray
