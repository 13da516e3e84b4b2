"""Decode of 32 rows that share a prompt of 4096 tokens: Llama 3."""

import functools

import jax
import jax.numpy as jnp

from infer.pallas.cascade_attention import cascade_attention, cascade_attention_reference
from tests.cases import paged
from tests.cases.kernels import KernelCase


def _case(model: str, heads: dict[str, int], rows: int, shared: int, own: int) -> KernelCase:
    shape = {"batch": rows, "tokens": 1, "context": shared + own, **heads}
    options = {"scale": heads["width"] ** -0.5}

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, table, positions = paged.draw(key, **shape)
        prefix = table[:1, : shared // paged.PAGE_SIZE]
        return q, k, v, prefix, jnp.full((1,), shared, jnp.int32), table, positions

    flops, all_bytes = paged.work(**shape)
    shared_bytes = 4.0 * shared * heads["kv"] * heads["width"]
    return KernelCase(
        kernel="cascade_attention",
        form="triton",
        shape=f"{model} b{rows} shared{shared} own{own} bf16",
        make=make,
        run=functools.partial(cascade_attention, **options),
        reference=functools.partial(cascade_attention_reference, **options),
        names=("paged_attention_split", "paged_attention_merge"),
        flops=flops,
        bytes=all_bytes - (rows - 1) * shared_bytes,
    )


SMOKE = _case("tiny", {"heads": 4, "kv": 2, "width": 32}, 2, 32, 16)
CASES = (_case("llama-3-8b", {"heads": 32, "kv": 8, "width": 128}, 32, 4096, 1024),)
