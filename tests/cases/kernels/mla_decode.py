"""Decode over latents 512 + 64 wide: DeepSeek-V2-Lite and DeepSeek-V3."""

import functools

import jax
import jax.numpy as jnp

from infer.pallas.mla_decode import mla_decode, mla_decode_reference
from tests.cases import paged
from tests.cases.kernels import KernelCase

_RANK, _ROTATED = 512, 64
_WORDS = {"bfloat16": "bf16", "float32": "f32"}


def _case(
    model: str, heads: int, batch: int, context: int, tokens: int = 1, dtype: str = "bfloat16"
) -> KernelCase:
    width = _RANK + _ROTATED

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        table = paged.scattered(keys[1], batch, context)
        return (
            jax.random.normal(keys[0], (batch, tokens, heads, width), dtype),
            jax.random.normal(keys[2], (table.size, paged.PAGE_SIZE, width), dtype),
            table,
            paged.last_positions(batch, tokens, context),
        )

    # The scale of heads of 128 + 64, before absorption.
    options = {"rank": _RANK, "scale": 192**-0.5}
    return KernelCase(
        kernel="mla_decode",
        form="triton",
        shape=f"{model} b{batch} ctx{context}{f' t{tokens}' if tokens > 1 else ''} {_WORDS[dtype]}",
        make=make,
        run=functools.partial(mla_decode, **options),
        reference=lambda *args: mla_decode_reference(*args, **options)[0],
        names=("mla_decode_split", "paged_attention_merge"),
        flops=2.0 * batch * tokens * heads * context * (2 * _RANK + _ROTATED),
        bytes=float(jnp.dtype(dtype).itemsize)
        * batch
        * (context * width + tokens * heads * (width + _RANK)),
    )


SMOKE = _case("tiny", 16, 2, 64)
CASES = (
    _case("deepseek-v2-lite", 16, 32, 8192),
    _case("deepseek-v2-lite", 16, 1, 32768),
    _case("deepseek-v3", 128, 32, 8192),
    _case("deepseek-v3", 128, 1, 32768),
    _case("deepseek-v3", 128, 32, 4096, tokens=2),
    _case("deepseek-v2-lite", 16, 32, 2048, dtype="float32"),
)
