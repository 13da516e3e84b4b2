"""Prefill attention in 8-bit floats; Ampere has no such type."""

import functools
from typing import Any

import jax

from infer.pallas.flash_attention import flash_attention_reference
from infer.pallas.flash_attention_fp8 import flash_attention_fp8
from tests.cases.kernels import CHIPS, KernelCase
from tests.cases.kernels.flash_attention import LLAMA, TINY, Heads


def _case(heads: Heads) -> KernelCase:
    options: dict[str, Any] = {"scale": heads.width**-0.5, "window": heads.window}

    def reference(*arrays: jax.Array) -> jax.Array:
        return flash_attention_reference(*arrays, **options)[0]

    q, kv, o = heads.sizes
    return KernelCase(
        kernel="flash_attention_fp8",
        form="triton",
        shape=heads.shape,
        make=heads.make,
        run=functools.partial(flash_attention_fp8, **options),
        reference=reference,
        names=("flash_attention_fp8",),
        flops=2.0 * heads.pairs * (heads.width + heads.values),
        bytes=float(q + kv + 2 * o),
        error=5e-2,
        chips=tuple(chip for chip in CHIPS if not chip.startswith("a100")),
    )


SMOKE = _case(TINY)
CASES = (_case(LLAMA),)
