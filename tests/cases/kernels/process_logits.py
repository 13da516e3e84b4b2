"""Masks, biases and penalties over the vocabularies of Llama 3 and Gemma 3."""

import jax
import jax.numpy as jnp

from infer.pallas.process_logits import process_logits, process_logits_reference
from tests.cases.kernels import KernelCase


def _case(model: str, rows: int, vocab: int, mask: bool, penalties: bool) -> KernelCase:
    def make(key: jax.Array) -> tuple[jax.Array | None, ...]:
        keys = jax.random.split(key, 7)
        ids = lambda i, count: jax.random.randint(keys[i], (rows, count), 0, vocab, jnp.int32)
        return (
            jax.random.normal(keys[0], (rows, vocab), jnp.float32),
            ids(1, 4),
            ids(2, 16),
            jax.random.normal(keys[3], (rows, 16), jnp.float32),
            jax.random.bits(keys[4], (rows, -(-vocab // 32)), jnp.uint32) if mask else None,
            jax.random.randint(keys[5], (rows, vocab), 0, 4, jnp.int32) if penalties else None,
            jax.random.uniform(keys[6], (rows, 3), minval=0.5) if penalties else None,
        )

    # -inf minus -inf is no number: what is compared is finite.
    finite = lambda x: jnp.where(jnp.isneginf(x), 0.0, x)
    words = "".join([" mask" if mask else "", " penalties" if penalties else ""])
    return KernelCase(
        kernel="process_logits",
        form="triton",
        shape=f"{model} b{rows} v{vocab}{words}",
        make=make,
        run=process_logits,
        reference=process_logits_reference,
        names=("process_logits",),
        flops=40.0 * rows * vocab,
        bytes=rows * vocab * (8.0 + mask / 8 + 4 * penalties),
        compare=finite,
    )


SMOKE = _case("tiny", 3, 300, True, True)
CASES = (
    _case("llama-3", 32, 128256, True, True),
    _case("llama-3", 256, 128256, True, False),
    _case("gemma-3", 1, 262144, False, True),
)
