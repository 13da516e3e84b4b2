"""GPTQ: columns are rounded in order, and each one's error is made up for by those that follow.

With H = 2 X X^T / n of the layer's inputs and U the upper Cholesky factor of its inverse:

    q_j = round(w_j),  e = (w_j - q_j) / U_jj,  w_k -= e U_jk  for k > j

Source: arXiv 2210.17323, algorithm 1.  Scales of a group are taken from the weights as they are
when the group begins: updated by all blocks before, not yet by the columns of its own block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt8

from infer.quant import rtn
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray

_BLOCK = 128


def hessian(x: Float[Array, "T I"]) -> Float[Array, "I I"]:
    """Return the sum of x x^T over tokens; 2 / n of it is the Hessian of the squared error."""
    x = x.astype(jnp.float32)
    return jnp.einsum("ti,tj->ij", x, x, precision=lax.Precision.HIGHEST)


def inverse_factor(
    h: Float[Array, "I I"], damping: float | Array
) -> tuple[Float[Array, "I I"], Bool[Array, ""]]:
    """Return the upper Cholesky factor of the damped inverse of `h`, and whether it exists.

    JAX's Cholesky of a matrix that is not positive gives NaN, not an error.

    Args:
        h: symmetric, without dead columns (a zero on the diagonal).
        damping: share of the mean of the diagonal that is added to it.
    """
    size = h.shape[0]
    h = h + damping * jnp.mean(jnp.diagonal(h)) * jnp.eye(size, dtype=h.dtype)
    low = jnp.linalg.cholesky(h)
    inverse = jax.scipy.linalg.cho_solve((low, True), jnp.eye(size, dtype=h.dtype))
    # Symmetric in exact arithmetic; the factor reads one half.
    factor = jnp.linalg.cholesky((inverse + inverse.T) / 2).T
    return factor, jnp.isfinite(factor).all()


def order_by_energy(h: Float[Array, "I I"]) -> Int[Array, " I"]:
    """Return the columns by falling diagonal of the Hessian, equal ones in their own order."""
    return jnp.argsort(-jnp.diagonal(h), stable=True).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("format", "convention", "act_order", "static_groups"))
def gptq(
    w: Float[Array, "O I"],
    h: Float[Array, "I I"],
    damping: Float[Array, ""],
    *,
    format: PlanarFormat,
    convention: str = "full",
    act_order: bool = False,
    static_groups: bool = False,
    clip: Float[Array, "R Q"] | Float[Array, ""] | float = 1.0,
) -> tuple[QArray, Bool[Array, ""]]:
    """Return `w` rounded to integers of this format, and whether the factorisation succeeded.

    Args:
        w: weight.
        h: sum of x x^T over the calibration tokens.
        damping: see `inverse_factor`.
        format: code "int".
        convention: of symmetric scales.
        act_order: columns by falling energy; `perm` of the result says which, unless the groups
            are static.
        static_groups: scales from the original weight.
        clip: share of each group's range that is kept, where scales are from the original weight.
    """
    w = w.astype(jnp.float32)
    out, width = w.shape
    dead = jnp.diagonal(h) == 0
    h = jnp.where(jnp.diag(dead), jnp.float32(1), h)
    w = jnp.where(dead[None, :], jnp.float32(0), w)
    # A scale a row, or one for all, is found at once too.
    static = static_groups or not format.group
    fixed = _fixed_grid(w, format, convention, clip) if static else None
    order = order_by_energy(h) if act_order else jnp.arange(width, dtype=jnp.int32)
    factor, ok = inverse_factor(h[order][:, order], damping)
    grid = None
    if fixed is not None:
        grid = tuple(rtn.spread(y, format, (out, width))[:, order] for y in fixed)
    q, scales, zeros = _all_blocks(w[:, order], factor, grid, format, convention)
    if fixed is not None:
        scales, zeros = fixed
        q = jnp.zeros_like(q).at[:, order].set(q)
    else:
        scales, zeros = scales[:, :: format.group], zeros[:, :: format.group]
    packed = rtn.from_codes(q, scales, None if format.symmetric else zeros, format)
    if act_order and fixed is None:
        format = dataclasses.replace(format, name=f"{format.name}-ORDERED", ordered=True)
        packed = dataclasses.replace(packed, perm=order, format=format)
    return packed, ok


def _fixed_grid(
    w: Array, format: PlanarFormat, convention: str, clip: Array | float
) -> tuple[Array, Array]:
    """Return scales float32 and zero points uint8 [R, Q] of the weight as it is."""
    grid = rtn.quantize_int(w, format, convention, clip)
    middle = jnp.full(grid.scale.shape, np.uint8(1 << (format.bits - 1)))
    return grid.scale.astype(jnp.float32), middle if grid.zero is None else grid.zero


def _all_blocks(
    w: Float[Array, "O I"],
    factor: Float[Array, "I I"],
    grid: tuple[Array, ...] | None,
    format: PlanarFormat,
    convention: str,
) -> tuple[UInt8[Array, "O I"], Float[Array, "O I"], UInt8[Array, "O I"]]:
    """Return codes, and scales and zero points by column, of a weight in the order of its columns.

    Args:
        w: weight.
        factor: of `inverse_factor`, in the same order.
        grid: scales and zero points by column, None where they come from the updated weight.
        format: code "int".
        convention: of symmetric scales.
    """
    out, width = w.shape
    group = format.group or width
    # Blocks are of whole groups or whole parts of one.
    block = _BLOCK if group % _BLOCK == 0 or _BLOCK % group == 0 else group
    restricted = format.symmetric and convention == "restricted"
    params = lambda values: rtn.int_params(
        values, format.bits, format.symmetric, convention, format.scale_dtype
    )
    pad = -width % block
    w = jnp.pad(w, ((0, 0), (0, pad)))
    # The columns that pad have no error and no influence.
    factor = jnp.pad(factor, ((0, pad), (0, pad)))
    factor = factor + jnp.diag((jnp.arange(width + pad) >= width).astype(jnp.float32))
    if grid is not None:
        grid = tuple(jnp.pad(y, ((0, 0), (0, pad)), constant_values=1) for y in grid)

    def params_of(w: Array, part: Array, start: Array, scales: Array, zeros: Array) -> Any:
        """Return scale and zero point of each column of a block [out, block]."""
        cut = lambda y, size=block, at=start: lax.dynamic_slice_in_dim(y, at, size, 1)
        if grid is not None:
            return tuple(map(cut, grid))
        if group <= block:
            found = params(part.reshape(out, block // group, group))
            return tuple(jnp.repeat(y, group, 1) for y in found)
        # A group of several blocks: its scale is found when it begins.
        new = params(cut(jnp.pad(w, ((0, 0), (0, group))), group)[:, None])
        before = jnp.maximum(start - block, 0)
        old = [cut(y, 1, before) for y in (scales, zeros)]
        of_group = (jnp.where(start % group == 0, x, y) for x, y in zip(new, old, strict=True))
        return tuple(jnp.broadcast_to(y, (out, block)) for y in of_group)

    def run_block(b: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        w, q, scales, zeros = carry
        start = b * block
        part = lax.dynamic_slice_in_dim(w, start, block, 1)
        scale, zero = params_of(w, part, start, scales, zeros)
        within = lax.dynamic_slice(factor, (start, start), (block, block))
        codes, errors = _columns(part, within, scale, zero, format.bits, restricted)
        rows = lax.dynamic_slice_in_dim(factor, start, block, 0)
        beyond = jnp.arange(width + pad, dtype=jnp.int32)[None, :] >= start + block
        update = jnp.einsum("ob,bi->oi", errors, rows, precision=lax.Precision.HIGHEST)
        put = lambda y, new: lax.dynamic_update_slice_in_dim(y, new, start, 1)
        w = w - jnp.where(beyond, update, jnp.float32(0))
        return w, put(q, codes), put(scales, scale), put(zeros, zero)

    none = jnp.zeros((out, width + pad), jnp.uint8)
    state = (w, none, jnp.zeros((out, width + pad), jnp.float32), none)
    _, *found = lax.fori_loop(0, (width + pad) // block, run_block, state)
    q, scales, zeros = (y[:, :width] for y in found)
    return q, scales, zeros


def _columns(
    part: Float[Array, "O b"],
    factor: Float[Array, "b b"],
    scale: Float[Array, "O b"],
    zero: UInt8[Array, "O b"],
    bits: int,
    restricted: bool,
) -> tuple[UInt8[Array, "O b"], Float[Array, "O b"]]:
    """Return codes and errors of the columns of one block, each made up for by those after it."""
    out, block = part.shape

    def column(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        part, codes, errors = state
        take = lambda y: lax.dynamic_slice_in_dim(y, j, 1, 1)
        value, s, z = take(part), take(scale), take(zero)
        code = rtn.int_codes(value, s, z, bits, restricted)
        rounded = (code.astype(jnp.float32) - z.astype(jnp.float32)) * s
        row = lax.dynamic_slice_in_dim(factor, j, 1, 0)
        error = (value - rounded) / lax.dynamic_slice_in_dim(row, j, 1, 1)
        later = jnp.arange(block, dtype=jnp.int32)[None, :] > j
        part = part - jnp.where(later, error * row, jnp.float32(0))
        put = lambda y, new: lax.dynamic_update_slice_in_dim(y, new, j, 1)
        return part, put(codes, code), put(errors, error)

    state = (part, jnp.zeros((out, block), jnp.uint8), jnp.zeros((out, block), jnp.float32))
    _, codes, errors = lax.fori_loop(0, block, column, state)
    return codes, errors
