"""Decode and verification over pages: Llama 3, gpt-oss and Gemma 2, and caches of 8 and 4 bits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from infer.pallas.paged_attention import (
    PagedAttentionBlocks,
    paged_attention,
    paged_attention_reference,
)
from tests.cases import paged
from tests.cases.kernels import KernelCase, Tuning

LLAMA = {"heads": 32, "kv": 8, "width": 128}
GPT_OSS = {"heads": 64, "kv": 8, "width": 64}
SMOL = {"heads": 9, "kv": 3, "width": 64}
GEMMA = {"heads": 16, "kv": 8, "width": 256}


_WORDS = {"bfloat16": "bf16", "float32": "f32"}


def _case(
    model: str,
    heads: dict[str, int],
    batch: int,
    context: int,
    *,
    tokens: int = 1,
    kv_format: str | None = None,
    sinks: bool = False,
    tree: bool = False,
    tune: bool = False,
    dtype: str = "bfloat16",
    **options: Any,
) -> KernelCase:
    shape: dict[str, Any] = {
        "batch": batch, "tokens": tokens, "context": context, "kv_format": kv_format,
        "dtype": dtype, **heads
    }  # fmt: skip

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        args = paged.draw(key, **shape)
        # Token t's parent is (t - 1) // 2: a binary tree of drafts.
        return (*args, _binary_tree(batch, tokens)) if tree else args

    def named(args: tuple[jax.Array, ...]) -> dict[str, Any]:
        extra = list(args)
        kwargs: dict[str, Any] = {"scale": heads["width"] ** -0.5, **options}
        if kv_format is not None:
            kwargs |= {"k_scales": extra.pop(0), "v_scales": extra.pop(0)}
        if tree:
            kwargs["tree"] = extra.pop(0)
        if sinks:
            kwargs["sinks"] = jnp.linspace(-1.0, 3.0, heads["heads"], dtype=jnp.float32)
        return kwargs

    flops, num_bytes = paged.work(**shape, window=options.get("window"))
    words = [model, f"b{batch}", f"ctx{context}", *([f"t{tokens}"] if tokens > 1 else [])]
    words += ["tree"] if tree else []
    return KernelCase(
        kernel="paged_attention",
        form="triton",
        shape=" ".join([*words, kv_format or _WORDS[dtype]]),
        make=make,
        run=lambda *a: paged_attention(*a[:5], **named(a[5:])),
        reference=lambda *a: paged_attention_reference(*a[:5], **named(a[5:]))[0],
        names=("paged_attention_split", "paged_attention_merge"),
        flops=flops,
        bytes=num_bytes,
        tuning=_TUNING if tune else None,
    )


def _with_sizes(sizes: PagedAttentionBlocks) -> Callable[..., jax.Array]:
    return functools.partial(paged_attention, scale=LLAMA["width"] ** -0.5, blocks=sizes)


_TUNING = Tuning(
    key="h128 bfloat16",
    sizes=tuple(
        PagedAttentionBlocks(block_keys=keys, split_keys=split, num_warps=warps, num_stages=stages)
        for keys, split, warps, stages in (
            (64, 256, 4, 2),
            (64, 512, 4, 2),
            (64, 1024, 4, 2),
            (64, 256, 4, 3),
            (128, 512, 8, 2),
            (32, 256, 2, 3),
        )
    ),
    run=_with_sizes,
)


def _binary_tree(batch: int, tokens: int) -> jax.Array:
    seen = [[False] * tokens for _ in range(tokens)]
    for t in range(tokens):
        ancestor = t
        while ancestor > 0:
            seen[t][ancestor] = True
            ancestor = (ancestor - 1) // 2
        seen[t][0] = True
    return jnp.broadcast_to(jnp.asarray(seen)[None], (batch, tokens, tokens))


SMOKE = _case("tiny", {"heads": 4, "kv": 2, "width": 32}, 2, 64)
CASES = (
    _case("llama-3-8b", LLAMA, 32, 8192, tune=True),
    _case("llama-3-8b", LLAMA, 1, 32768),
    _case("llama-3-8b", LLAMA, 256, 1024),
    _case("llama-3-8b", LLAMA, 32, 8192, tokens=5),
    _case("llama-3-8b", LLAMA, 8, 4096, tokens=31, tree=True),
    _case("gpt-oss-120b window", GPT_OSS, 32, 8192, window=128, sinks=True),
    _case("gpt-oss-120b", GPT_OSS, 32, 8192, sinks=True),
    _case("gemma-2-9b window", GEMMA, 32, 8192, window=4096, softcap=50.0),
    _case("llama-3-8b", LLAMA, 32, 8192, kv_format="int8"),
    _case("llama-3-8b", LLAMA, 32, 8192, kv_format="fp8"),
    _case("llama-3-8b", LLAMA, 32, 8192, kv_format="int4"),
    _case("llama-3-8b", LLAMA, 32, 8192, kv_format="fp8", tokens=5),
    _case("llama-3-8b", LLAMA, 8, 8192, kv_format="fp8", tokens=16),
    _case("llama-3-8b", LLAMA, 32, 8192, kv_format="int4", tokens=5),
    _case("smollm2-135m", SMOL, 32, 2048, dtype="float32"),
    _case("smollm2-135m", SMOL, 32, 2048, dtype="float32", tokens=5),
    _case("llama-3-8b", LLAMA, 32, 2048, dtype="float32"),
    _case("llama-3-8b", LLAMA, 32, 2048, dtype="float32", tokens=5),
    _case("gemma-2-9b", GEMMA, 32, 2048, dtype="float32", tokens=8),
)
