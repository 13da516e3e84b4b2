"""The gate of an MLP at a decode step's and a prefill chunk's size."""

import jax
import jax.numpy as jnp

from infer.pallas.gated_activation import gated_activation, gated_activation_reference
from tests.cases.kernels import KernelCase


def _case(model: str, rows: int, width: int, activation: str) -> KernelCase:
    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 2)
        draw = lambda i: jax.random.normal(keys[i], (rows, width), jnp.bfloat16)
        return draw(0), draw(1)

    return KernelCase(
        kernel="gated_activation",
        form="triton",
        shape=f"{model} {activation} t{rows} bf16",
        make=make,
        run=lambda gate, up: gated_activation(gate, up, activation),
        reference=lambda gate, up: gated_activation_reference(gate, up, activation),
        names=("gated_activation",),
        flops=10.0 * rows * width,
        bytes=6.0 * rows * width,
    )


SMOKE = _case("tiny", 3, 100, "silu")
CASES = (
    _case("llama-3-8b", 32, 14336, "silu"),
    _case("llama-3-8b", 4096, 14336, "silu"),
    _case("gemma-3-12b", 32, 15360, "gelu_tanh"),
)
