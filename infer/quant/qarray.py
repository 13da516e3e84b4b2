"""The quantised array: packed bytes, the numbers that scale them, and the law that decodes them.

Two layouts.  *blocks*: GGUF's own bytes, row by row, kept as they are in the file.  *planar*:
codes, scales and zero points in arrays of their own.  `dequantize` is the definition of a QArray's
value; every fast path is tested against it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from infer.pytree import Leaf, pytree_dataclass, static
from infer.quant.blocks import decode_blocks
from infer.quant.formats import Format


@pytree_dataclass
class QArray:
    """A weight [out, in] in packed form.

    `data` is uint8 [out, in / group * block_bytes].  The weights of E experts, which one operation
    reads, are one QArray of shape (E, out, in), its data uint8 [E, out, row_bytes].  There are no
    other leading axes: a stack of layers is a tuple of QArrays.
    """

    data: Leaf  # uint8 [(E,) out, row_bytes]
    scale: Leaf = None
    zero: Leaf = None
    global_scale: Leaf = None
    perm: Leaf = None
    format: Format = static(kw_only=True)
    shape: tuple[int, ...] = static(kw_only=True)

    @classmethod
    def create(cls, data: Any, format: Format, shape: tuple[int, ...]) -> "QArray":
        """Return the packed weight after checking that bytes, format and shape belong together.

        Args:
            data: uint8 [(E,) out, row_bytes], on the host or on a device; it is kept as it is.
            format: A format of the layout "blocks".
            shape: The logical shape (out, in), or (E, out, in).

        Raises:
            ValueError: They do not belong together.
        """
        if format.layout != "blocks":
            raise ValueError(
                f"{format.name} has the layout {format.layout!r}, and QArray.create takes 'blocks';"
                " build the planar form with its quantiser"
            )
        if len(shape) not in (2, 3) or min(shape) < 1:
            raise ValueError(
                f"a QArray is a matrix (out, in), or experts' (E, out, in), of at least one weight,"
                f" not of shape {shape}; keep a vector as a float array, and a stack of layers as a"
                " tuple of QArrays"
            )
        wanted = (*shape[:-1], format.row_bytes(shape[-1]))
        if data.dtype != np.uint8 or tuple(data.shape) != wanted:
            raise ValueError(
                f"data is {data.dtype} {tuple(data.shape)}, and {format.name} of shape {shape} is"
                f" uint8 {wanted}; pass the packed rows as bytes"
            )
        return cls(data=data, format=format, shape=tuple(shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, scales included."""
        parts = (self.data, self.scale, self.zero, self.global_scale, self.perm)
        return sum(p.nbytes for p in parts if p is not None)


def dequantize(q: QArray, dtype: Any = jnp.float32) -> Float[Array, "*E O I"]:
    """Return the weight [out, in], or [E, out, in], of `q`, computed in float32 and cast once to
    `dtype`.

    Raises:
        ValueError: The format has no decoder.
    """
    return _decode_rows(jnp.asarray(q.data), q, dtype)


def take_rows(
    q: QArray, ids: Int[Array | np.ndarray, "*B"], dtype: Any = jnp.float32
) -> Float[Array, "*B I"]:
    """Return rows `ids` of the weight: `dequantize(q)[ids]`, decoding only those rows.

    This is the embedding lookup of a packed table.  A row that does not exist is loud: ids below 0
    or from `out` on give NaN, where plain indexing would wrap or clip them to another token's row.

    Args:
        q: The table [out, in].
        ids: Row numbers, 0 to out - 1, of any shape.
        dtype: Of the result; the float32 value is cast once.

    Raises:
        ValueError: The format has no decoder, or the table is no matrix.
    """
    _check_matrix(q)
    ids = jnp.asarray(ids)
    exists = (ids >= 0) & (ids < q.shape[0])
    packed = jnp.take(jnp.asarray(q.data), jnp.where(exists, ids, 0), axis=0, mode="clip")
    rows = _decode_rows(packed, q, dtype)
    return jnp.where(exists[..., None], rows, jnp.array(jnp.nan, rows.dtype))


def permute_rows(q: QArray, order: Int[np.ndarray, " O"]) -> QArray:
    """Return `q` with its rows in another order: row i of the result is row `order[i]`.

    A row keeps its bytes, so its scales move with it and nothing is rounded.

    Args:
        q: The weight [out, in], of the layout "blocks".
        order: Each row number 0 to out - 1 once, known on the host.

    Raises:
        ValueError: `order` is no permutation of the rows, the weight is no matrix, or the layout
            keeps the scales elsewhere.
    """
    if q.format.layout != "blocks":
        raise ValueError(
            f"{q.format.name} keeps its scales apart ({q.format.layout}); reorder the rows before"
            " quantising"
        )
    _check_matrix(q)
    if not np.array_equal(np.sort(order), np.arange(q.shape[0])):
        raise ValueError(
            f"order has {order.size} entries, which are not the rows 0 to {q.shape[0] - 1} once"
            " each; use take_rows to select or repeat rows"
        )
    return dataclasses.replace(q, data=q.data[order])


def _check_matrix(q: QArray) -> None:
    if len(q.shape) != 2:
        raise ValueError(
            f"a {q.format.name} weight of shape {q.shape} has rows in each expert; take an expert"
            " first, replace(q, data=q.data[e], shape=q.shape[1:])"
        )


def _decode_rows(packed: Array, q: QArray, dtype: Any) -> Array:
    """Decode packed rows [..., row_bytes] of `q` into [..., in]."""
    num_blocks = q.shape[-1] // q.format.group
    blocks = packed.reshape(*packed.shape[:-1], num_blocks, q.format.block_bytes)
    weights = decode_blocks(jnp, blocks, q.format)
    return weights.reshape(*packed.shape[:-1], q.shape[-1]).astype(dtype)
