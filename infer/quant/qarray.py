"""The quantised array: packed bytes, the numbers that scale them, and the law that decodes them.

Two layouts.  *blocks*: GGUF's own bytes, row by row, kept as they are in the file.  *planar*:
codes, scales and zero points in arrays of their own (`formats.PlanarFormat` has the law).
`dequantize` is the definition of a QArray's value; every fast path is tested against it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from infer.pytree import Leaf, pytree_dataclass, static
from infer.quant import codes
from infer.quant.blocks import decode_blocks
from infer.quant.formats import NESTED_GROUP, Format, PlanarFormat
from infer.quant.hadamard import transform


@pytree_dataclass
class NestedScale:
    """Scales that are quantised themselves: `DYNAMIC[codes] * absmax + offset`, 8 bits each.

    Source: QLoRA, section 3 (arXiv 2305.14314): double quantisation; the map as in bitsandbytes.
    """

    codes: Leaf  # uint8 [R, Q]
    absmax: Leaf  # float32 [ceil(R * Q / 256)]
    offset: Leaf  # float32 []: the mean of the scales

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.codes.nbytes + self.absmax.nbytes + self.offset.nbytes


@pytree_dataclass
class QArray:
    """A weight [out, in] in packed form.

    The weights of E experts, which one operation
    reads, are one QArray of shape (E, out, in), each of its parts with a leading axis [E].  There
    are no other leading axes: a stack of layers is a tuple of QArrays.
    """

    data: Leaf  # uint8 [(E,) out, row_bytes]
    scale: Leaf = None  # planar: [R, Q], R and Q as of PlanarFormat.grid, or a NestedScale
    zero: Leaf = None  # planar, not symmetric: uint8 [R, Q]
    global_scale: Leaf = None  # float32 []: on top of scales that are e4m3
    perm: Leaf = None  # int32 [in]: column j of the codes is input perm[j]
    act_scale: Leaf = None  # float32 []: of activations whose scale is static
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
                " build the planar form with QArray.planar"
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

    @classmethod
    def planar(
        cls,
        data: Any,
        scale: Any,
        format: PlanarFormat,
        shape: tuple[int, ...],
        *,
        zero: Any = None,
        global_scale: Any = None,
        perm: Any = None,
        act_scale: Any = None,
    ) -> "QArray":
        """Return the weight of these parts after checking that they belong together.

        Args:
            data: uint8 [out, format.row_bytes(in)].
            scale: [R, Q] of format.grid(shape), in the format's dtype; e8m0 and e4m3 as bytes.
            format: the law.
            shape: (out, in); of experts (E, out, in), all parts with a leading [E], in a format
                without order, turning, nested scales and rounding of activations.
            zero: uint8 [R, Q] where the format is not symmetric.
            global_scale: float32 [] where scales are e4m3.
            perm: int32 [in], where the format is ordered.
            act_scale: float32 [] where the scale of activations is static.

        Raises:
            ValueError: they do not belong together.
        """
        q = cls(data, scale, zero, global_scale, perm, act_scale, format=format, shape=shape)  # type: ignore[arg-type]
        problems = _planar_problems(q, format)
        if problems:
            raise ValueError(f"{format.name} of shape {tuple(shape)}: {'; '.join(problems)}")
        return q

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, scales included."""
        parts = (self.data, self.scale, self.zero, self.global_scale, self.perm, self.act_scale)
        return sum(p.nbytes for p in parts if p is not None)


def _planar_problems(q: QArray, format: PlanarFormat) -> list[str]:
    """Return what does not fit, a line each."""
    lead, shape = tuple(q.shape)[:-2], tuple(q.shape)[-2:]
    if len(q.shape) not in (2, 3) or min(q.shape) < 1:
        return ["a QArray is a matrix (out, in), or experts' (E, out, in), of at least one weight"]
    if lead and (format.ordered or format.rotated or format.activations):
        return ["experts have no order of inputs, no turned inputs and no rounded activations"]
    if lead and format.scale_dtype == "nested":
        return ["experts have no nested scales"]
    if format.rotated and shape[1] % format.rotated:
        return [f"blocks of {format.rotated} inputs are turned, which do not divide {shape[1]}"]
    grid = format.grid(shape)
    stored = {"e8m0": "uint8", "e4m3": "uint8"}.get(format.scale_dtype, format.scale_dtype)
    want: dict[str, tuple[Any, str, tuple[int, ...]] | None] = {
        "data": (q.data, "uint8", (shape[0], format.row_bytes(shape[1]))),
        "zero": None if format.symmetric else (q.zero, "uint8", grid),
        "global_scale": (q.global_scale, "float32", ()) if format.scale_dtype == "e4m3" else None,
        "act_scale": (q.act_scale, "float32", ()) if "static" in format.activations else None,
    }
    if format.scale_dtype == "nested":
        if not isinstance(q.scale, NestedScale):
            return [f"scale is a {type(q.scale).__name__}, and must be a NestedScale"]
        count = grid[0] * grid[1]
        want["scale.codes"] = (q.scale.codes, "uint8", grid)
        want["scale.absmax"] = (q.scale.absmax, "float32", (-(-count // NESTED_GROUP),))
        want["scale.offset"] = (q.scale.offset, "float32", ())
    else:
        want["scale"] = (q.scale, stored, grid)
    want["perm"] = (q.perm, "int32", (shape[1],)) if format.ordered else None
    problems = []
    for name, entry in want.items():
        if entry is None:
            if getattr(q, name) is not None:
                problems.append(f"{name} has no place in this format")
            continue
        array, dtype, size = entry
        size = (*lead, *size)
        if array is None:
            problems.append(f"{name} is missing; it must be {dtype} {list(size)}")
        elif str(array.dtype) != dtype or tuple(array.shape) != size:
            problems.append(
                f"{name} is {array.dtype} {list(array.shape)}; it must be {dtype} {list(size)}"
            )
    return problems


def dequantize(q: QArray, dtype: Any = jnp.float32) -> Float[Array, "*E O I"]:
    """Return the weight [out, in], or [E, out, in], of `q`, computed in float32 and cast once to
    `dtype`.

    Raises:
        ValueError: The format has no decoder.
    """
    if isinstance(q.format, PlanarFormat):
        if len(q.shape) == 3:
            return jax.vmap(lambda one: dequantize(one, dtype))(_batched(q))
        return _decode_planar(q, jnp.asarray(q.data), q.format, None).astype(dtype)
    return _decode_rows(jnp.asarray(q.data), q, dtype)


def expert_of(q: QArray, expert: Int[Array, ""]) -> QArray:
    """Return the matrix [out, in] of one expert; the number must be one of 0 to E - 1."""
    take = lambda x: lax.dynamic_index_in_dim(jnp.asarray(x), expert, keepdims=False)
    return jax.tree.map(take, _batched(q))


def _batched(q: QArray) -> QArray:
    """Return experts' weights as a batch of matrices, for `jax.vmap`."""
    return jax.tree.map(jnp.asarray, dataclasses.replace(q, shape=q.shape[1:]))


def dequantize_tile(q: QArray, start: Any, size: int, dtype: Any) -> Float[Array, "S I"]:
    """Return rows [start, start + size) of `dequantize(q)`, decoding only those.

    Args:
        q: the weight.
        start: int32 [], may be traced; the tile must lie inside.
        size: rows, static.
        dtype: of the result.
    """
    data = lax.dynamic_slice_in_dim(jnp.asarray(q.data), start, size)
    if isinstance(q.format, PlanarFormat):
        rows = start + jnp.arange(size, dtype=jnp.int32)
        return _decode_planar(q, data, q.format, rows).astype(dtype)
    return _decode_rows(data, q, dtype)


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
    known = jnp.where(exists, ids, 0)
    packed = jnp.take(jnp.asarray(q.data), known, axis=0, mode="clip")
    if isinstance(q.format, PlanarFormat):
        rows = _decode_planar(q, packed, q.format, known).astype(dtype)
    else:
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


def stored(q: QArray) -> QArray:
    """Return the weight whose columns are those that the codes of `q` stand for: not put in order,
    not turned back (`infer.ops.quantized.in_basis` has the activations for it).
    """
    if is_plain(q):
        return q
    format = dataclasses.replace(q.format, ordered=False, rotated=0)  # type: ignore[call-arg]
    return dataclasses.replace(q, perm=None, format=format)


def is_plain(q: QArray) -> bool:
    """Return whether the codes stand for the weight's own columns, in order and not turned."""
    return q.perm is None and not is_turned(q)


def is_turned(q: QArray) -> bool:
    """Return whether the codes stand for columns that a Hadamard matrix has turned."""
    return isinstance(q.format, PlanarFormat) and bool(q.format.rotated)


def scales(q: QArray) -> Float[Array, "R Q"]:
    """Return the scales of a planar weight as float32, those of its scales multiplied in."""
    return _scales(q, slice(None))


def _scales(q: QArray, at: Any) -> Array:
    """Return the scales of the rows `at` of the grid, float32 [..., Q]."""
    assert isinstance(q.format, PlanarFormat)
    if q.format.scale_dtype == "nested":
        return denested(q.scale)[at]
    stored = jnp.asarray(q.scale)[at]
    if q.format.scale_dtype == "e8m0":
        return power_of_two(stored)
    if q.format.scale_dtype == "e4m3":
        return codes.values(stored, "e4m3") * q.global_scale
    return stored.astype(jnp.float32)


def denested(scale: NestedScale) -> Float[Array, "R Q"]:
    """Return nested scales as float32: product and sum are each rounded, with and without jit."""
    coded = jnp.asarray(scale.codes)
    absmax = jnp.repeat(jnp.asarray(scale.absmax), NESTED_GROUP)[: coded.size].reshape(coded.shape)
    levels = jnp.take(jnp.asarray(codes.DYNAMIC), coded, axis=0, mode="clip")
    # The last level is 1; the choice keeps the compiler from fusing product and sum, which would
    # round once.
    return jnp.where(coded == 255, absmax, levels * absmax) + scale.offset


def power_of_two(e8m0: Array) -> Float[Array, "*B"]:
    """Return 2^(e - 127) of E8M0 bytes, float32; 255 is NaN.

    Built from bits: exp2 of a compiler may round, and 2^-127 is subnormal.
    """
    bits = jnp.where(e8m0 == 0, np.uint32(1 << 22), e8m0.astype(jnp.uint32) << 23)
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(e8m0 == 255, jnp.float32(jnp.nan), value)


def _decode_planar(q: QArray, data: Array, format: PlanarFormat, rows: Array | None) -> Array:
    """Decode codes [..., row_bytes], which are the rows `rows` [...] of `q` (None: all, in order),
    into float32 [..., in], the columns as the weight has them: in order, turned back.
    """
    w = _planar_values(q, data, format, rows)
    if q.perm is not None:
        w = jnp.take(w, jnp.argsort(jnp.asarray(q.perm)), axis=-1)
    return transform(w, format.rotated, back=True) if format.rotated else w


def _planar_values(q: QArray, data: Array, format: PlanarFormat, rows: Array | None) -> Array:
    """Decode likewise, the columns in the order in which the codes are stored."""
    width = q.shape[1]
    coded = codes.unpack(data, format.bits, width)
    span = format.rows or q.shape[0]
    at = jnp.arange(q.shape[0], dtype=jnp.int32) // span if rows is None else rows // span
    group = format.group or width
    spread = lambda y: jnp.repeat(y, group, axis=-1, total_repeat_length=None)[..., :width]
    if format.code == "int":
        zero = np.uint8(1 << (format.bits - 1))
        minus = zero if format.symmetric else spread(jnp.asarray(q.zero)[at])
        w = (coded.astype(jnp.int16) - minus.astype(np.int16)).astype(jnp.float32)
    else:
        w = codes.values(coded, format.code)
    return w * spread(_scales(q, at))


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
