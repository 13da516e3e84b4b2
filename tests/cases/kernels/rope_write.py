"""RoPE and the write into pages at a decode step's and a prefill chunk's size."""

import jax
import jax.numpy as jnp

from infer.pallas.rope_write import rope_write, rope_write_reference
from tests.cases.kernels import KernelCase


def _case(model: str, tokens: int, heads: int, kv: int, width: int) -> KernelCase:
    num_pages, page_size = max(tokens, 512), 16

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        draw = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.bfloat16)
        angles = jax.random.uniform(keys[3], (tokens, width // 2), maxval=6.0)
        pool = jnp.zeros((num_pages, kv, page_size, width), jnp.bfloat16)
        token = jnp.arange(tokens, dtype=jnp.int32)
        return (
            draw(0, tokens, heads, width),
            draw(1, tokens, kv, width),
            draw(2, tokens, kv, width),
            jnp.cos(angles),
            jnp.sin(angles),
            token,
            token % page_size,
            pool,
            pool,
        )

    return KernelCase(
        kernel="rope_write",
        form="triton",
        shape=f"{model} t{tokens} bf16",
        make=make,
        run=rope_write,
        reference=rope_write_reference,
        names=("rope_write",),
        flops=3.0 * tokens * (heads + kv) * width,
        bytes=2.0 * tokens * (2 * heads + 4 * kv) * width + 4.0 * tokens * width,
        donate=(7, 8),
    )


SMOKE = _case("tiny", 3, 4, 2, 32)
CASES = (
    _case("llama-3-8b", 32, 32, 8, 128),
    _case("llama-3-8b", 2048, 32, 8, 128),
    _case("gemma-3-12b", 8, 16, 8, 256),
)
