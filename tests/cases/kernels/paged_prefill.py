"""A chunk of 512 tokens at the end of 8192: Llama 3, gpt-oss, Gemma 2, and quantised caches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from infer.pallas.paged_attention import PagedAttentionBlocks
from infer.pallas.paged_prefill import (
    PagedPrefillBlocks,
    paged_prefill,
    paged_prefill_reference,
)
from tests.cases import paged
from tests.cases.kernels import CHIPS, KernelCase, Tuning

LLAMA = {"heads": 32, "kv": 8, "width": 128}
GPT_OSS = {"heads": 64, "kv": 8, "width": 64}
SMOL = {"heads": 9, "kv": 3, "width": 64}
GEMMA = {"heads": 16, "kv": 8, "width": 256}


_WORDS = {"bfloat16": "bf16", "float32": "f32"}


def _case(
    model: str,
    heads: dict[str, int],
    *,
    kv_format: str | None = None,
    sinks: bool = False,
    blocks: PagedPrefillBlocks | PagedAttentionBlocks | None = None,
    chips: tuple[str, ...] = CHIPS,
    names: tuple[str, ...] = ("paged_prefill",),
    tokens: int = 512,
    context: int = 8192,
    tuning: Tuning | None = None,
    dtype: str = "bfloat16",
    **options: Any,
) -> KernelCase:
    shape: dict[str, Any] = {
        "batch": 1, "tokens": tokens, "context": context, "kv_format": kv_format,
        "dtype": dtype, **heads
    }  # fmt: skip

    def named(args: tuple[jax.Array, ...]) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"scale": heads["width"] ** -0.5, **options}
        if kv_format is not None:
            kwargs |= {"k_scales": args[0], "v_scales": args[1]}
        if sinks:
            kwargs["sinks"] = jnp.linspace(-1.0, 3.0, heads["heads"], dtype=jnp.float32)
        return kwargs

    flops, num_bytes = paged.work(**shape, window=options.get("window"))
    return KernelCase(
        kernel="paged_prefill",
        form="triton",
        shape=f"{model} t{tokens} ctx{context} {kv_format or _WORDS[dtype]}",
        make=lambda key: paged.draw(key, **shape),
        run=lambda *a: paged_prefill(*a[:5], blocks=blocks, **named(a[5:])),
        reference=lambda *a: paged_prefill_reference(*a[:5], **named(a[5:]))[0],
        names=names,
        flops=flops,
        bytes=num_bytes,
        chips=chips,
        tuning=tuning,
    )


_TUNING = Tuning(
    key="h128 bfloat16",
    sizes=tuple(
        PagedPrefillBlocks(block_rows=rows, block_keys=keys, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in (
            (128, 32, 8, 2),
            (128, 64, 8, 2),
            (64, 64, 4, 2),
            (128, 64, 8, 3),
            (128, 128, 8, 2),
        )
    ),
    run=lambda sizes: functools.partial(paged_prefill, scale=128**-0.5, blocks=sizes),
)

SMOKE = _case("tiny", {"heads": 4, "kv": 2, "width": 32}, tokens=40, context=64)
CASES = (
    _case("llama-3-8b", LLAMA, tuning=_TUNING),
    _case(
        "llama-3-8b wide tiles",
        LLAMA,
        blocks=PagedPrefillBlocks.for_shape(width=128, chip="h200-141gb"),
        chips=("h200-141gb", "b200-180gb"),
    ),
    _case(
        "llama-3-8b as decode",
        LLAMA,
        blocks=PagedAttentionBlocks(block_rows=64),
        names=("paged_attention_split", "paged_attention_merge"),
    ),
    _case("gpt-oss-120b window", GPT_OSS, window=128, sinks=True),
    _case("gemma-2-9b window", GEMMA, window=4096, softcap=50.0),
    _case("llama-3-8b", LLAMA, kv_format="int8"),
    _case("llama-3-8b", LLAMA, kv_format="fp8"),
    _case("llama-3-8b", LLAMA, kv_format="int4"),
    _case("smollm2-135m", SMOL, context=2048, dtype="float32"),
    _case("llama-3-8b", LLAMA, context=2048, dtype="float32"),
    _case("gemma-2-9b", GEMMA, context=2048, dtype="float32"),
)
