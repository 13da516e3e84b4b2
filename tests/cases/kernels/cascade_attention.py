"""Decode of 32 rows that share a prompt of 4096 tokens: Llama 3."""

import functools

import jax
import jax.numpy as jnp

from infer.pallas.cascade_attention import cascade_attention, cascade_attention_reference
from tests.cases import paged
from tests.cases.kernels import KernelCase

_ROWS, _SHARED, _OWN = 32, 4096, 1024
_HEADS = {"heads": 32, "kv": 8, "width": 128}


def _make(key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 2)
    q, k, v, table, positions = paged.draw(
        keys[0], batch=_ROWS, tokens=1, context=_SHARED + _OWN, **_HEADS
    )
    prefix = table[:1, : _SHARED // paged.PAGE_SIZE]
    lengths = jnp.full((1,), _SHARED, jnp.int32)
    return q, k, v, prefix, lengths, table, positions


_OPTIONS = {"scale": 128**-0.5}
_FLOPS, _ALL_BYTES = paged.work(batch=_ROWS, tokens=1, context=_SHARED + _OWN, **_HEADS)
_SHARED_BYTES = 4.0 * _SHARED * _HEADS["kv"] * _HEADS["width"]

CASES = (
    KernelCase(
        kernel="cascade_attention",
        form="triton",
        shape="llama-3-8b b32 shared4096 own1024 bf16",
        make=_make,
        run=functools.partial(cascade_attention, **_OPTIONS),
        reference=functools.partial(cascade_attention_reference, **_OPTIONS),
        names=("paged_attention_split", "paged_attention_merge"),
        flops=_FLOPS,
        bytes=_ALL_BYTES - (_ROWS - 1) * _SHARED_BYTES,
    ),
)
