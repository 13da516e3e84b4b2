"""GPTQ: columns are rounded in order, and each one's error is made up for by those that follow.

With H = 2 X X^T / n of the layer's inputs and U the upper Cholesky factor of its inverse:

    q_j = round(w_j),  e = (w_j - q_j) / U_jj,  w_k -= e U_jk  for k > j

Source: arXiv 2210.17323, algorithm 1.  Scales of a group are taken from the weights as they are
when the group begins: updated by all blocks before, not yet by the columns of its own block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

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
    """
    w = w.astype(jnp.float32)
    out, width = w.shape
    dead = jnp.diagonal(h) == 0
    h = jnp.where(jnp.diag(dead), jnp.float32(1), h)
    w = jnp.where(dead[None, :], jnp.float32(0), w)
    group = format.group or width
    whole = not format.group  # one scale a row, or one for all
    if whole or static_groups:
        grid = rtn.quantize_int(w, format, convention)
        scale_RQ = grid.scale.astype(jnp.float32)
        zero_RQ = grid.zero
        if zero_RQ is None:
            zero_RQ = jnp.full(scale_RQ.shape, np.uint8(1 << (format.bits - 1)))
        fixed_scale = rtn.spread(scale_RQ, format, (out, width))
        fixed_zero = rtn.spread(zero_RQ, format, (out, width))
    order = order_by_energy(h) if act_order else jnp.arange(width, dtype=jnp.int32)
    w, h = w[:, order], h[order][:, order]
    if whole or static_groups:
        fixed_scale, fixed_zero = fixed_scale[:, order], fixed_zero[:, order]
    factor, ok = inverse_factor(h, damping)

    # Blocks are of whole groups or whole parts of one.
    block = _BLOCK if group % _BLOCK == 0 or _BLOCK % group == 0 else group
    restricted = format.symmetric and convention == "restricted"
    count = -(-width // block)
    pad = count * block - width
    w = jnp.pad(w, ((0, 0), (0, pad)))
    # The columns that pad have no error and no influence.
    factor = jnp.pad(factor, ((0, pad), (0, pad)))
    factor = factor + jnp.diag((jnp.arange(width + pad) >= width).astype(jnp.float32))
    if whole or static_groups:
        fixed_scale = jnp.pad(fixed_scale, ((0, 0), (0, pad)), constant_values=1)
        fixed_zero = jnp.pad(fixed_zero, ((0, 0), (0, pad)))

    def run_block(b: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        w, q, scales, zeros = carry
        start = b * block
        part = lax.dynamic_slice_in_dim(w, start, block, 1)
        u = lax.dynamic_slice(factor, (start, start), (block, block))
        if whole or static_groups:
            scale = lax.dynamic_slice_in_dim(fixed_scale, start, block, 1)
            zero = lax.dynamic_slice_in_dim(fixed_zero, start, block, 1)
        elif group <= block:
            scale, zero = _params(part.reshape(out, block // group, group), format, convention)
            scale, zero = (jnp.repeat(y, group, 1) for y in (scale, zero))
        else:  # a group of several blocks: its scale is found when it begins
            ahead = lax.dynamic_slice_in_dim(jnp.pad(w, ((0, 0), (0, group))), start, group, 1)
            new = _params(ahead[:, None], format, convention)
            before = jnp.maximum(start - block, 0)
            old = tuple(lax.dynamic_slice_in_dim(y, before, 1, 1) for y in (scales, zeros))
            begins = start % group == 0
            scale, zero = (
                jnp.broadcast_to(jnp.where(begins, x, y), (out, block))
                for x, y in zip(new, old, strict=True)
            )

        def column(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            part, codes, errors = state
            take = lambda y: lax.dynamic_slice_in_dim(y, j, 1, 1)
            value, s, z = take(part), take(scale), take(zero)
            code = rtn.int_codes(value, s, z, format.bits, restricted)
            rounded = (code.astype(jnp.float32) - z.astype(jnp.float32)) * s
            row = lax.dynamic_slice_in_dim(u, j, 1, 0)
            error = (value - rounded) / lax.dynamic_slice_in_dim(row, j, 1, 1)
            later = jnp.arange(block, dtype=jnp.int32)[None, :] > j
            part = part - jnp.where(later, error * row, jnp.float32(0))
            put = lambda y, new: lax.dynamic_update_slice_in_dim(y, new, j, 1)
            return part, put(codes, code), put(errors, error)

        blank = jnp.zeros((out, block), jnp.float32)
        part, codes, errors = lax.fori_loop(
            0, block, column, (part, jnp.zeros((out, block), jnp.uint8), blank)
        )
        rows = lax.dynamic_slice_in_dim(factor, start, block, 0)
        beyond = jnp.arange(width + pad, dtype=jnp.int32)[None, :] >= start + block
        update = jnp.einsum("ob,bi->oi", errors, rows, precision=lax.Precision.HIGHEST)
        w = w - jnp.where(beyond, update, jnp.float32(0))
        put = lambda y, new: lax.dynamic_update_slice_in_dim(y, new, start, 1)
        return w, put(q, codes), put(scales, scale), put(zeros, zero)

    blank = jnp.zeros((out, width + pad), jnp.float32)
    none = jnp.zeros((out, width + pad), jnp.uint8)
    _, q, scales, zeros = lax.fori_loop(0, count, run_block, (w, none, blank, none))
    q = q[:, :width]
    if whole or static_groups:
        scale, zero = scale_RQ, zero_RQ
        q = jnp.zeros_like(q).at[:, order].set(q)
    else:
        scale, zero = scales[:, :width:group], zeros[:, :width:group]
    packed = rtn.from_codes(q, scale, None if format.symmetric else zero, format)
    if act_order and not static_groups:
        packed = QArray(
            packed.data, packed.scale, packed.zero, perm=order, format=format, shape=(out, width)
        )
    return packed, ok


def _params(values: Array, format: PlanarFormat, convention: str) -> tuple[Array, Array]:
    return rtn.int_params(values, format.bits, format.symmetric, convention, format.scale_dtype)
