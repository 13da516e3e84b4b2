"""Prefill attention on Hopper at serving shapes: whole prompts, windows, softcaps and sinks."""

import functools

import jax
import jax.numpy as jnp

from infer.ops.attention import dense_attention
from infer.pallas.flash_attention_mosaic import flash_attention_mosaic
from tests.cases.kernels import KernelCase

_CHIPS = ("h200-141gb",)


def _visible_pairs(tokens: int, window: int | None) -> float:
    width = min(window or tokens, tokens)
    return width * (width + 1) / 2 + (tokens - width) * width


def _case(
    shape: str,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    value_width: int | None = None,
    dtype: jnp.dtype = jnp.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> KernelCase:
    value_width = value_width or width
    static = {"scale": width**-0.5, "window": window, "softcap": softcap}

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        q = jax.random.normal(keys[0], (batch, tokens, heads, width), dtype)
        k = jax.random.normal(keys[1], (batch, tokens, kv_heads, width), dtype)
        v = jax.random.normal(keys[2], (batch, tokens, kv_heads, value_width), dtype)
        return (q, k, v, jax.random.normal(keys[3], (heads,))) if sinks else (q, k, v)

    def run(*args: jax.Array) -> jax.Array:
        q, k, v, *rest = args
        return flash_attention_mosaic(q, k, v, sinks=rest[0] if rest else None, **static)[0]

    def reference(*args: jax.Array) -> jax.Array:
        # A sequence at a time, and values padded to the keys' width: what plain XLA can hold.
        q, k, v, *rest = args
        attend = functools.partial(dense_attention, sinks=rest[0] if rest else None, **static)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width - value_width)))
        row = lambda x: attend(*(array[None] for array in x))[0]
        return jax.lax.map(row, (q, k, v))[..., :value_width]

    arrays = heads * (width + value_width) + kv_heads * (width + value_width)
    pairs = batch * heads * _visible_pairs(tokens, window)
    return KernelCase(
        kernel="flash_attention_mosaic",
        form="mosaic",
        shape=f"{shape} {jnp.dtype(dtype).name}",
        make=make,
        run=run,
        reference=reference,
        names=("flash_attention_mosaic",),
        flops=2.0 * pairs * (width + value_width),
        bytes=float(batch * tokens * arrays * jnp.dtype(dtype).itemsize),
        chips=_CHIPS,
    )


CASES = (
    _case("llama-3-8b b2 t8192", 2, 8192, 32, 8, 128),
    _case("llama-3-8b b2 t8192", 2, 8192, 32, 8, 128, dtype=jnp.float16),
    _case("llama-3-8b b1 t1000", 1, 1000, 32, 8, 128),
    _case("llama-3.2-1b b2 t8192", 2, 8192, 32, 8, 64),
    _case("softcap-window b1 t8192 h128", 1, 8192, 32, 16, 128, window=4096, softcap=50.0),
    _case("gemma-2-9b local b1 t8192", 1, 8192, 16, 8, 256, window=4096, softcap=50.0),
    _case("gpt-oss-20b local b1 t8192", 1, 8192, 64, 8, 64, window=128, sinks=True),
    _case("phi-3-mini b1 t4096 h96", 1, 4096, 32, 32, 96),
    _case("phi-2 b1 t2048 h80", 1, 2048, 32, 32, 80),
    _case("deepseek-v2-lite b1 t4096 h192/128", 1, 4096, 16, 16, 192, value_width=128),
)
