"""Causal attention: dense, and against a paged cache.

The visible keys of a query at position i are j <= i, and j > i - window where a window is set: W
keys in all, the query's own included.

A sink is one logit a head that takes part in the softmax like a key without a value:

    o = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))

It is neither scaled nor capped, and counts once, however keys are split into blocks.  Source: Xiao
et al. 2023, arXiv 2309.17453, with a learned logit in place of sink tokens.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int

from infer.cache.pool import Pool, QuantizedPool, dtype_of
from infer.ops import attention_xla
from infer.ops.choice import choose, target_gpu
from infer.pallas.tuned import tuned

# Rows of a tile that the kernel for few queries holds: queries of a row times heads a key/value
# head.  More of them are a prefill chunk.
_DECODE_ROWS = 64


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries over S keys, both starting at position 0, each head
    group sharing a key head.

    Scores, softmax and sums are float32; the result has q's dtype.  Differentiable in q, k, v and
    sinks in every form but "mosaic".

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        implementation: see `infer.ops.choice`.
    """
    options = _checked("dense_attention", q, k, v, sinks, scale, window, softcap)
    form = lambda run, **more: functools.partial(run, **options, **more)
    if 0 in q.shape or 0 in k.shape:
        implementation = "xla"  # nothing to run a kernel over
    return choose(
        "dense_attention",
        (q, k, v, sinks),
        xla=form(_dense_xla),
        kernels={
            "triton": form(_dense_triton, interpret=False),
            "mosaic": form(_dense_mosaic),
            "interpret": form(_dense_triton, interpret=True),
        },
        preferred=("triton",),
        implementation=implementation,
    )


def _dense_xla(q: Array, k: Array, v: Array, sinks: Array | None, **options: Any) -> Array:
    return attention_xla.dense_attention(q, k, v, sinks=sinks, **options)


def _dense_triton(q: Array, k: Array, v: Array, sinks: Array | None, **options: Any) -> Array:
    from infer.pallas.flash_attention_backward import attention

    return attention(q, k, v, sinks=sinks, **_flash_sizes(q, v), **options)[0]


def _flash_sizes(q: Array, v: Array) -> dict[str, Any]:
    """Return the flash kernels' block sizes for this chip: the measured ones, if any."""
    from infer.pallas.flash_attention import FlashAttentionBlocks
    from infer.pallas.flash_attention_backward import FlashAttentionBackwardBlocks

    gpu = target_gpu()
    shape = q.shape[-1], v.shape[-1], q.dtype, gpu.capability if gpu else None
    chip, key = gpu.chip if gpu else None, f"h{q.shape[-1]} {q.dtype}"
    forward, backward = (
        FlashAttentionBlocks.for_shape(*shape),
        FlashAttentionBackwardBlocks.for_shape(*shape),
    )
    return {
        "blocks": tuned(forward, "flash_attention", chip, key),
        "backward_blocks": tuned(backward, "flash_attention_backward", chip, key),
    }


def _dense_mosaic(q: Array, k: Array, v: Array, sinks: Array | None, **options: Any) -> Array:
    from infer.pallas.flash_attention_mosaic import flash_attention_mosaic

    return flash_attention_mosaic(q, k, v, sinks=sinks, **options)[0]


def _checked(
    op: str,
    q: Array,
    k: Array | Pool,
    v: Array | Pool,
    sinks: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> dict[str, Any]:
    """Return the static options after checking them, and that the arrays fit each other.

    The axis of heads of k is 1 in pools [P, K, U, H], else the last but one.
    """
    num_heads, num_kv = q.shape[-2], k.shape[1 if op == "paged_attention" else -2]
    if not num_kv or num_heads % num_kv or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{op}: q is {q.shape}, k {k.shape}; q's heads must be a multiple of k's, and as wide"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"{op}: sinks is {sinks.shape}; give one a head of q, ({num_heads},)")
    arrays = {"q": q, "k": k, "v": v}
    for name, array in arrays.items():
        if isinstance(array, QuantizedPool):
            continue
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} is {array.dtype}; use a floating dtype")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if isinstance(number, Tracer) or (name == "scale" and number is None):
            raise ValueError(f"{op}: {name} is {number!r:.60}; it must be a Python number")
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ValueError(f"{op}: {name} is {number}; it must be a finite number above 0")
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"{op}: window is {window}; it counts the query's own key: 1 to 2^31 - 1")
    return {
        "scale": float(scale),
        "window": None if window is None else int(window),
        "softcap": None if softcap is None else float(softcap),
    }


def ragged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    starts: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Return causal attention within rows of different lengths that lie on one token axis.

    Args:
        q: queries.
        k: keys.
        v: values.
        starts: first token of each row, ascending, and at the end the first token of none: tokens
            from there on are padding, whose output is 0.  A row may be empty.
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        implementation: see `infer.ops.choice`.
    """
    options = _checked("ragged_attention", q, k, v, sinks, scale, window, softcap)
    form = lambda run, **more: functools.partial(run, **options, **more)
    if 0 in q.shape:
        implementation = "xla"  # nothing to run a kernel over
    return choose(
        "ragged_attention",
        (q, k, v, starts.astype(jnp.int32), sinks),
        xla=form(_ragged_xla),
        kernels={
            "triton": form(_ragged_triton, interpret=False),
            "interpret": form(_ragged_triton, interpret=True),
        },
        preferred=("triton",),
        implementation=implementation,
    )


def _ragged_xla(
    q: Array, k: Array, v: Array, starts: Array, sinks: Array | None, **options: Any
) -> Array:
    return attention_xla.ragged_attention(q, k, v, starts, sinks=sinks, **options)


def _ragged_triton(
    q: Array, k: Array, v: Array, starts: Array, sinks: Array | None, **options: Any
) -> Array:
    from infer.pallas.flash_attention_backward import attention_ragged

    sizes = _flash_sizes(q, v)
    return attention_ragged(q, k, v, starts, sinks=sinks, **sizes, **options)[0]


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Pool,
    v_pages: Pool,
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries a row over that row's pages.

    Args:
        q: queries.
        k_pages: key pool, of floats or quantised; the queries' own keys are already written.
        v_pages: value pool, alike.
        page_table: pages of each row, P where there is none.
        positions: of each query in its sequence, ascending by one within a row; negative for a
            query that is padding, at the end of its row (its output is 0).
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        implementation: see `infer.ops.choice`.
    """
    options = _checked("paged_attention", q, k_pages, v_pages, sinks, scale, window, softcap)
    rows = q.shape[:2]
    if (
        positions.shape != rows
        or page_table.shape[:1] != rows[:1]
        or k_pages.shape != v_pages.shape
        or dtype_of(k_pages) != dtype_of(v_pages)
    ):
        raise ValueError(
            f"q is {q.shape}, positions {positions.shape}, page_table {page_table.shape}, the "
            f"pools {dtype_of(k_pages)}{k_pages.shape} and {dtype_of(v_pages)}{v_pages.shape}; "
            f"positions must be {rows}, the table have {rows[0]} rows, and the pools be alike"
        )
    form = lambda run, **more: functools.partial(run, **options, **more)
    page_table, positions = page_table.astype(jnp.int32), positions.astype(jnp.int32)
    group = q.shape[2] // k_pages.shape[1]
    few = q.shape[1] * group <= _DECODE_ROWS
    kernels = {
        "triton": form(_paged_triton, few=few, interpret=False),
        "interpret": form(_paged_triton, few=few, interpret=True),
        "native": form(_paged_native),
    }
    if not few:
        kernels["mosaic"] = form(_paged_mosaic)
    return choose(
        "paged_attention" if few else "paged_prefill",
        (q, k_pages, v_pages, page_table, positions, sinks),
        xla=form(_paged_xla),
        kernels=kernels,
        preferred=("triton",),
        implementation=implementation,
    )


def _paged_xla(
    q: Array,
    k_pages: Pool,
    v_pages: Pool,
    page_table: Array,
    positions: Array,
    sinks: Array | None,
    **options: Any,
) -> Array:
    return attention_xla.paged_attention(
        q, k_pages, v_pages, page_table, positions, sinks=sinks, **options
    )


def _paged_native(
    q: Array,
    k_pages: Pool,
    v_pages: Pool,
    page_table: Array,
    positions: Array,
    sinks: Array | None,
    **options: Any,
) -> Array:
    from infer.native.paged_attention import paged_attention as operation

    (k, k_scales), (v, v_scales) = map(_parts, (k_pages, v_pages))
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    return operation(q, k, v, page_table, positions, sinks=sinks, **scales, **options)


def _parts(pool: Pool) -> tuple[Array, Array | None]:
    """Return a pool's data, and its scales if it has any, as kernels take them."""
    return (pool.data, pool.scale) if isinstance(pool, QuantizedPool) else (pool, None)


def _paged_triton(
    q: Array,
    k_pages: Pool,
    v_pages: Pool,
    page_table: Array,
    positions: Array,
    sinks: Array | None,
    *,
    few: bool,
    **options: Any,
) -> Array:
    from infer.pallas import paged_attention as decode
    from infer.pallas import paged_prefill as prefill

    gpu, width = target_gpu(), q.shape[3]
    (k, k_scales), (v, v_scales) = map(_parts, (k_pages, v_pages))
    chip, key = gpu.chip if gpu else None, f"h{width} {k.dtype}"
    if few:
        sizes = decode.PagedAttentionBlocks.for_shape(
            q.shape[0],
            page_table.shape[1] * k.shape[2],
            num_kv=k.shape[1],
            width=width,
            pool_dtype=k.dtype,
            q_dtype=q.dtype,
        )
        sizes = tuned(sizes, "paged_attention", chip, key)
        kernel = functools.partial(decode.paged_attention, blocks=sizes)
    else:
        sizes = prefill.PagedPrefillBlocks.for_shape(
            width=width, pool_dtype=k.dtype, q_dtype=q.dtype, chip=chip
        )
        sizes = tuned(sizes, "paged_prefill", chip, key)
        kernel = functools.partial(prefill.paged_prefill, blocks=sizes)
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    return kernel(q, k, v, page_table, positions, sinks=sinks, **scales, **options)


def _paged_mosaic(
    q: Array,
    k_pages: Pool,
    v_pages: Pool,
    page_table: Array,
    positions: Array,
    sinks: Array | None,
    **options: Any,
) -> Array:
    from infer.pallas.paged_prefill_mosaic import paged_prefill_mosaic

    if isinstance(k_pages, QuantizedPool) or isinstance(v_pages, QuantizedPool):
        raise NotImplementedError(
            f"paged_prefill in mosaic reads no {dtype_of(k_pages)} pools, {k_pages.shape}; use "
            "'triton', or None, which chooses"
        )
    return paged_prefill_mosaic(q, k_pages, v_pages, page_table, positions, sinks=sinks, **options)
