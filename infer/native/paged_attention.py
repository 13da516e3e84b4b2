"""Causal attention on the CPU, paged or dense, in one operation.

A query's bits depend on its own keys alone: they are equal whether the query came alone or in a
chunk of any size, in any batch, with any number of threads, and on AVX2 as on AVX512.  Scores,
softmax and sums are float32 whatever the pools hold.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Shaped

from infer import native

# "All keys", larger than any position.
_NO_WINDOW = 2**40


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Shaped[Array, "P K U W"],
    v_pages: Shaped[Array, "P K U W"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "P K U"] | None = None,
    v_scales: Float[Array, "P K U"] | None = None,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries a row over that row's pages.

    Args:
        q: queries.
        k_pages: key pool, float32, bfloat16, float16, or data of `infer.quant.kv`: int8,
            float8_e4m3fn, or int4 as uint8 of width H/2; the queries' own keys are already written.
        v_pages: value pool.
        page_table: pages of each row; an entry outside [0, P) is no page, and its keys are not
            seen.
        positions: of each query in its sequence; negative for a query that is padding (its output
            is 0).
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        k_scales: of quantised keys, one a token and head.
        v_scales: of quantised values.
    """
    none = jnp.zeros(0, jnp.float32)
    scales = (none if x is None else x.astype(jnp.float32) for x in (k_scales, v_scales))
    operands = (q.astype(jnp.float32), k_pages, v_pages, *scales, page_table, positions)
    return _call("infer_paged_attention", q, operands, scale, window, softcap, sinks)


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries over S keys, both starting at position 0.

    The arguments are those of `paged_attention`.
    """
    return _call(
        "infer_dense_attention", q, (q.astype(jnp.float32), k, v), scale, window, softcap, sinks
    )


def _call(
    name: str,
    q: Array,
    operands: tuple[Array, ...],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    native.library()
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call(
        name, jax.ShapeDtypeStruct(q.shape, jnp.float32), vmap_method="sequential"
    )
    y = call(
        *operands,
        sinks,
        scale=np.float32(scale),
        softcap=np.float32(0 if softcap is None else softcap),
        window=np.int64(_NO_WINDOW if window is None else window),
    )
    return y.astype(q.dtype)
