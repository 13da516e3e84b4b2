"""RMSNorm at the widths of models from 135M to 70B parameters."""

import jax
import jax.numpy as jnp

from infer.pallas.rms_norm import rms_norm, rms_norm_reference
from tests.cases.kernels import KernelCase


def _case(rows: int, width: int, dtype: jnp.dtype, residual: bool) -> KernelCase:
    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (rows, width), dtype)
        gain = jax.random.normal(keys[1], (width,), dtype)
        return (
            (x, gain, jax.random.normal(keys[2], (rows, width), dtype)) if residual else (x, gain)
        )

    def run(x: jax.Array, gain: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rms_norm(x, gain, 1e-6, *rest)

    arrays = 4 if residual else 2
    return KernelCase(
        kernel="rms_norm",
        form="triton",
        shape=f"{rows}x{width} {jnp.dtype(dtype).name}{' residual' if residual else ''}",
        make=make,
        run=run,
        reference=_reference,
        names=("rms_norm",),
        flops=5.0 * rows * width,
        bytes=float(arrays * rows * width * jnp.dtype(dtype).itemsize),
    )


def _reference(x: jax.Array, gain: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rms_norm_reference(x, gain, 1e-6, *rest)


SMOKE = _case(3, 80, jnp.dtype("float32"), True)
CASES = (
    _case(32, 4096, jnp.dtype("bfloat16"), True),
    _case(8192, 4096, jnp.dtype("bfloat16"), True),
    _case(1, 8192, jnp.dtype("bfloat16"), True),
    _case(32, 576, jnp.dtype("float32"), False),
)
