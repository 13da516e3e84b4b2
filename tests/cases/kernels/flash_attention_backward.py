"""Gradients of prefill attention: training and scoring shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from infer.pallas import flash_attention as fa
from infer.pallas import flash_attention_backward as fb
from tests.cases.kernels import KernelCase
from tests.cases.kernels.flash_attention import (
    FAMILIES,
    GEMMA,
    GEMMA_27B,
    GPT_OSS,
    LLAMA,
    LLAMA_F32,
    MLA,
    PHI_2,
    PHI_3,
    TINY,
    Heads,
)


def _case(heads: Heads, capability: tuple[int, int]) -> KernelCase:
    shape = (heads.width, heads.values, heads.dtype, capability)
    kernel = functools.partial(
        fb.attention,
        blocks=fa.FlashAttentionBlocks.for_shape(*shape),
        backward_blocks=fb.FlashAttentionBackwardBlocks.for_shape(*shape),
    )

    def make(key: jax.Array) -> tuple[Any, ...]:
        inputs, output = jax.random.split(key)
        size = (heads.batch, heads.tokens, heads.heads, heads.values)
        return heads.make(inputs), jax.random.normal(output, size, jnp.dtype(heads.dtype))

    def gradients(function: Callable[..., Any], arrays: Any, do: jax.Array) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
            return function(q, k, v, sinks=sinks[0] if sinks else None, **heads.options)[0]

        return jax.vjp(attend, *arrays)[1](do)

    q, kv, o = heads.sizes
    return KernelCase(
        kernel="flash_attention_backward",
        form="triton",
        shape=f"{heads.shape} sm{capability[0]}x",
        make=make,
        run=functools.partial(gradients, kernel),
        reference=functools.partial(gradients, fa.flash_attention_reference),
        names=("flash_attention_dq", "flash_attention_dkv"),
        # Forward 1, backward 2.5 times (five products for two).
        flops=2.0 * heads.pairs * (4 * heads.width + 3 * heads.values),
        bytes=float((3 * q + 3 * kv + 3 * o) * jnp.dtype(heads.dtype).itemsize),
        error=2e-2,  # ds is rounded to the inputs' dtype before the last products
        chips=FAMILIES[capability],
    )


SMOKE = _case(TINY, (8, 0))
CASES = tuple(
    _case(heads, capability)
    for capability in FAMILIES
    for heads in (
        dataclasses.replace(LLAMA, batch=1, tokens=4096),
        GEMMA,
        GEMMA_27B,
        GPT_OSS,
        PHI_2,
        PHI_3,
        MLA,
        LLAMA_F32,
    )
)
