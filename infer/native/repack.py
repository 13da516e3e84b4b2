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
from infer.native.formats import FORMATS
from infer.pytree import Leaf, pytree_dataclass, static
from infer.quant.qarray import QArray

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
    format: str = static(kw_only=True)  # a key of FORMATS
    shape: tuple[int, ...] = static(kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, scales included."""
        return self.data.nbytes


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
    panel_bytes = library.infer_native_panel_bytes(FORMATS[name], ctypes.c_int64(width))
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
