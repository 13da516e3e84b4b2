"""Chunked prefill over pages on Hopper at serving shapes."""

import jax
import jax.numpy as jnp

from infer.ops.attention import paged_attention
from infer.pallas.paged_prefill_mosaic import paged_prefill_mosaic
from tests.cases.kernels import KernelCase


def _case(
    shape: str,
    *,
    batch: int = 1,
    chunk: int = 2048,
    context: int = 8192,
    heads: int = 32,
    kv_heads: int = 8,
    width: int = 128,
    page_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> KernelCase:
    """Make the last `chunk` tokens of `context` the queries of every row."""
    dtype = jnp.bfloat16
    static = {"scale": width**-0.5, "window": window, "softcap": softcap}
    pages_per_row = context // page_size
    num_pages = batch * pages_per_row

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 5)
        pool = (num_pages, kv_heads, page_size, width)
        table = jax.random.permutation(keys[3], num_pages).reshape(batch, pages_per_row)
        positions = jnp.arange(context - chunk, context, dtype=jnp.int32)
        args = (
            jax.random.normal(keys[0], (batch, chunk, heads, width), dtype),
            jax.random.normal(keys[1], pool, dtype),
            jax.random.normal(keys[2], pool, dtype),
            table.astype(jnp.int32),
            jnp.broadcast_to(positions[None], (batch, chunk)),
        )
        return (*args, jax.random.normal(keys[4], (heads,))) if sinks else args

    def call(op: object, *args: jax.Array) -> jax.Array:
        assert callable(op)
        return op(*args[:5], sinks=args[5] if sinks else None, **static)

    seen = min(window or context, context)
    pairs = chunk * (seen - (chunk - 1) / 2 if seen == context else seen)
    elements = 2 * chunk * heads * width + 2 * min(context, seen + chunk) * kv_heads * width
    return KernelCase(
        kernel="paged_prefill_mosaic",
        form="mosaic",
        shape=f"{shape} {jnp.dtype(dtype).name}",
        make=make,
        run=lambda *args: call(paged_prefill_mosaic, *args),
        reference=lambda *args: call(paged_attention, *args),
        names=("paged_prefill_mosaic",),
        flops=4.0 * batch * heads * width * pairs,
        bytes=float(batch * elements * jnp.dtype(dtype).itemsize),
        chips=("h200-141gb",),
    )


CASES = (
    _case("llama-3-8b b1 chunk2048 ctx8192 u16"),
    _case("llama-3-8b b4 chunk2048 ctx8192 u64", batch=4, page_size=64),
    _case("llama-3.2-1b b1 chunk2048 ctx8192 u16", width=64),
    _case(
        "gemma-2-9b local b1 chunk2048 ctx8192 u16", heads=16, width=256, window=4096, softcap=50.0
    ),
    _case("gpt-oss-20b local b1 chunk2048 ctx8192 u16", heads=64, width=64, window=128, sinks=True),
)
