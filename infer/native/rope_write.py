"""Rotary embedding and the write into the paged cache, on the CPU, in one operation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from infer import native


def rope_write(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cos: Float[Array, "T H2"],
    sin: Float[Array, "T H2"],
    pages: Int[Array, " T"],
    positions: Int[Array, " T"],
    k_pages: Float[Array, "P K U H"],
    v_pages: Float[Array, "P K U H"],
) -> tuple[Float[Array, "T N H"], Float[Array, "P K U H"], Float[Array, "P K U H"]]:
    """Turn the first 2 * H2 dimensions of q and k, write k and v of each token at (page, position
    modulo U), and return q and the pools.

    The pools are written in place where the caller gives them up (donates them), and copied
    otherwise.

    Args:
        q: queries.
        k: keys.
        v: values.
        cos: of the tokens' angles.
        sin: of the tokens' angles.
        pages: of each token; an id outside [0, P) writes nothing.
        positions: of each token in its sequence.
        k_pages: key pool, float32, bfloat16 or float16.
        v_pages: value pool.
    """
    operands = _floats(q, k, v, cos, sin, pages, positions)
    return _call("infer_rope_write", q, operands, (k_pages, v_pages))


def rope_write_quantized(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cos: Float[Array, "T H2"],
    sin: Float[Array, "T H2"],
    pages: Int[Array, " T"],
    positions: Int[Array, " T"],
    k_data: Shaped[Array, "P K U W"],
    v_data: Shaped[Array, "P K U W"],
    k_scales: Float[Array, "P K U"],
    v_scales: Float[Array, "P K U"],
) -> tuple[
    Float[Array, "T N H"],
    Shaped[Array, "P K U W"],
    Shaped[Array, "P K U W"],
    Float[Array, "P K U"],
    Float[Array, "P K U"],
]:
    """Do what `rope_write` does with pools in a format of `infer.quant.kv`, and return q, data and
    scales.

    Args:
        q: queries.
        k: keys.
        v: values.
        cos: of the tokens' angles.
        sin: of the tokens' angles.
        pages: of each token; an id outside [0, P) writes nothing.
        positions: of each token in its sequence.
        k_data: keys, int8 or float8_e4m3fn of width H, or int4 as uint8 of width H/2.
        v_data: values, alike.
        k_scales: of the keys, float32.
        v_scales: of the values, float32.
    """
    operands = _floats(q, k, v, cos, sin, pages, positions)
    return _call("infer_rope_write_quantized", q, operands, (k_data, v_data, k_scales, v_scales))


def _floats(q: Array, k: Array, v: Array, *others: Array) -> tuple[Array, ...]:
    return *(x.astype(jnp.float32) for x in (q, k, v)), *others


def _call(name: str, q: Array, operands: tuple[Array, ...], pools: tuple[Array, ...]) -> Any:
    native.library()
    like = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    call = jax.ffi.ffi_call(
        name,
        (like(q, jnp.float32), *(like(pool, pool.dtype) for pool in pools)),
        input_output_aliases={len(operands) + i: 1 + i for i in range(len(pools))},
        vmap_method="sequential",
    )
    turned, *pools_out = call(*operands, *pools)
    return turned.astype(q.dtype), *pools_out
