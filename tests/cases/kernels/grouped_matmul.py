"""Experts' products: Mixtral 8x7B and gpt-oss 20B, decoding 32 tokens and prefilling 1,024."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from infer.pallas.grouped_matmul import grouped_matmul, grouped_matmul_reference
from tests.cases.kernels import KernelCase
from tests.cases.kernels.quantized_matmul import METHODS, packed

# Nested scales are one matrix's.
PLANAR = tuple(name for name in METHODS if name != "nf4 double")


def experts(name: str, shape: tuple[int, int, int], key: Array) -> Any:
    """Return the random weights of E experts [E, O, I], floats or packed."""
    if name in ("bfloat16", "float32"):
        return jax.random.normal(key, shape, name) * 0.02
    if name in PLANAR:
        return METHODS[name].pack_experts(jax.random.normal(key, shape, jnp.float32) * 0.02)
    flat = packed(name, shape[0] * shape[1], shape[2], key)
    return dataclasses.replace(flat, data=flat.data.reshape(*shape[:2], -1), shape=shape)


def _case(
    name: str, rows: int, shape: tuple[int, int, int], dtype: str, gated: bool = False
) -> KernelCase:
    def make(key: Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (rows, shape[2]), dtype)
        # A half of the experts has no tokens.
        chosen = jax.random.randint(keys[1], (rows,), 0, max(1, shape[0] // 2)) * 2
        sizes = jnp.bincount(chosen, length=shape[0]).astype(jnp.int32)
        more = (experts(name, shape, keys[3]),) if gated else ()
        return x, experts(name, shape, keys[2]), sizes, *more

    def run(x: Array, weight: Any, sizes: Array, *up: Any) -> Array:
        more = {"up": up[0], "activation": "silu"} if gated else {}
        return grouped_matmul(x, weight, sizes, **more)

    def reference(x: Array, weight: Any, sizes: Array, *up: Any) -> Array:
        return grouped_matmul_reference(x, weight, sizes, *up, *(("silu",) if gated else ()))

    words = f"{name} {rows}x{shape[2]} to {shape[0]}x{shape[1]} {dtype}"
    given = jax.eval_shape(make, jax.random.key(0))
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(given))
    return KernelCase(
        kernel="grouped_matmul",
        form="triton",
        shape=f"{words}{' gated' if gated else ''}",
        make=make,
        run=run,
        reference=reference,
        names=("grouped_matmul",),
        flops=2.0 * rows * shape[1] * shape[2] * (2 if gated else 1),
        bytes=float(size),
    )


SMOKE = _case("float32", 9, (4, 24, 64), "float32")
CASES = (
    _case("bfloat16", 64, (8, 14336, 4096), "bfloat16", gated=True),
    _case("bfloat16", 2048, (8, 4096, 14336), "bfloat16"),
    _case("Q4_K", 64, (8, 14336, 4096), "bfloat16"),
    _case("Q4_0", 64, (8, 14336, 4096), "bfloat16", gated=True),
    _case("MXFP4", 128, (32, 2880, 2880), "bfloat16", gated=True),
    _case("MXFP4", 4096, (32, 2880, 2880), "bfloat16"),
    _case("int4 g128", 64, (8, 14336, 4096), "bfloat16", gated=True),
    _case("int8 channel", 64, (8, 14336, 4096), "bfloat16"),
    _case("fp8 e4m3", 64, (8, 14336, 4096), "bfloat16", gated=True),
    _case("mxfp4", 128, (32, 2880, 2880), "bfloat16", gated=True),
    _case("nvfp4", 128, (32, 2880, 2880), "bfloat16"),
)
