"""The draw over the vocabularies of Llama 3, Qwen 3 and Gemma 3."""

import jax
import jax.numpy as jnp

from infer.pallas.sample import sample, sample_reference
from tests.cases.kernels import KernelCase


def _case(model: str, rows: int, vocab: int) -> KernelCase:
    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 6)
        logits = 3 * jax.random.normal(keys[0], (rows, vocab), jnp.float32)
        row = jnp.arange(rows, dtype=jnp.int32)
        return (
            logits,
            jnp.where(row % 4 == 3, 0.0, jax.random.uniform(keys[1], (rows,), minval=0.5)),
            jnp.where(row % 2 == 0, jax.random.randint(keys[2], (rows,), 1, 200), 0),
            jax.random.uniform(keys[3], (rows,), minval=0.5),
            jnp.where(row % 3 == 0, 0.05, 0.0),
            jax.random.bits(keys[4], (rows, 2), jnp.uint32),
        )

    # Each of the two filters searches its edge in about 5 passes; 3 more find the maximum, sum and
    # draw.
    return KernelCase(
        kernel="sample",
        form="triton",
        shape=f"{model} b{rows} v{vocab}",
        make=make,
        run=sample,
        reference=sample_reference,
        names=("sample",),
        flops=15.0 * 13 * rows * vocab,
        bytes=4.0 * rows * vocab,
        error=0.0,
    )


SMOKE = _case("tiny", 4, 300)
CASES = (
    _case("llama-3", 32, 128256),
    _case("qwen-3", 256, 151936),
    _case("gemma-3", 1, 262144),
)
