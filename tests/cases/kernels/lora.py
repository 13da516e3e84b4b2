"""Adapters of each row: projections of an 8B Llama, ranks 8 to 64, one to 64 rows."""

import jax
import jax.numpy as jnp
from jax import Array

from infer.pallas.lora import lora, lora_reference
from tests.cases.kernels import KernelCase


def arguments(
    key: Array, rows: int, adapters: int, rank: int, width: int, out: int, dtype: str
) -> tuple[Array, ...]:
    """Return random y, x, a, b, scale and ids, one in N + 1 of them -1."""
    keys = jax.random.split(key, 6)
    return (
        jax.random.normal(keys[0], (rows, out), dtype),
        jax.random.normal(keys[1], (rows, width), dtype),
        jax.random.normal(keys[2], (adapters, rank, width), dtype) * width**-0.5,
        jax.random.normal(keys[3], (adapters, out, rank), dtype) * rank**-0.5,
        jax.random.uniform(keys[4], (adapters,), jnp.float32, 0.5, 2.0),
        jax.random.randint(keys[5], (rows,), -1, adapters),
    )


def _case(rows: int, adapters: int, rank: int, width: int, out: int, dtype: str) -> KernelCase:
    itemsize = jnp.dtype(dtype).itemsize
    used = min(rows, adapters)
    return KernelCase(
        kernel="lora",
        form="triton",
        shape=f"rank {rank} of {adapters} {rows}x{width}x{out} {dtype}",
        make=lambda key: arguments(key, rows, adapters, rank, width, out, dtype),
        run=lora,
        reference=lora_reference,
        names=("lora_shrink", "lora_expand"),
        flops=2.0 * rows * rank * (width + out),
        bytes=float(itemsize * (used * rank * (width + out) + rows * (width + 2 * out))),
    )


SMOKE = _case(3, 2, 8, 40, 24, "float32")
CASES = (
    _case(1, 8, 16, 4096, 4096, "bfloat16"),
    _case(32, 8, 16, 4096, 14336, "bfloat16"),
    _case(64, 32, 8, 4096, 4096, "bfloat16"),
    _case(32, 8, 64, 14336, 4096, "bfloat16"),
    _case(32, 8, 32, 4096, 4096, "float32"),
)
