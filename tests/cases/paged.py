"""Arguments of paged attention at serving shapes, drawn by a pure function."""

import jax
import jax.numpy as jnp

from infer.quant.kv import quantize_kv

PAGE_SIZE = 16
# Bytes of a number in a quantised cache.
NUMBER_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}


def scattered(key: jax.Array, batch: int, context: int) -> jax.Array:
    """Return a page table [B, M] whose rows hold `context` tokens in pages of random order."""
    pages = -(-context // PAGE_SIZE)
    return jax.random.permutation(key, batch * pages).reshape(batch, pages).astype(jnp.int32)


def last_positions(batch: int, tokens: int, context: int) -> jax.Array:
    """Return positions [B, T] of the last tokens of full contexts."""
    i = jnp.arange(context - tokens, context, dtype=jnp.int32)
    return jnp.broadcast_to(i[None, :], (batch, tokens))


def draw(
    key: jax.Array,
    *,
    batch: int,
    tokens: int,
    heads: int,
    kv: int,
    width: int,
    context: int,
    kv_format: str | None = None,
    dtype: str = "bfloat16",
) -> tuple[jax.Array, ...]:
    """Return q, pools, page table and positions, and scales where there are any."""
    keys = jax.random.split(key, 4)
    q = jax.random.normal(keys[0], (batch, tokens, heads, width), dtype)
    table = scattered(keys[1], batch, context)
    shape = (table.size, kv, PAGE_SIZE, width)
    pools = [jax.random.normal(k, shape, dtype) for k in keys[2:]]
    args = (table, last_positions(batch, tokens, context))
    if kv_format is None:
        return (q, *pools, *args)
    (k, k_scales), (v, v_scales) = (quantize_kv(pool, kv_format) for pool in pools)
    return (q, k, v, *args, k_scales, v_scales)


def work(
    *,
    batch: int,
    tokens: int,
    heads: int,
    kv: int,
    width: int,
    context: int,
    kv_format: str | None = None,
    window: int | None = None,
    dtype: str = "bfloat16",
) -> tuple[float, float]:
    """Return FLOPs and bytes of a call: scores and sums, each visible key and value read once."""
    seen = sum(min(i + 1, window or i + 1) for i in range(context - tokens, context))
    keys = min(context, (window or context) + tokens - 1)
    scales = 0 if kv_format is None else 4
    size = jnp.dtype(dtype).itemsize
    number = size if kv_format is None else NUMBER_BYTES[kv_format]
    cache = 2.0 * batch * keys * kv * (width * number + scales)
    return 4.0 * batch * heads * width * seen, cache + 2.0 * size * batch * tokens * heads * width
