"""8-bit products: projections of an 8B Llama in W8A8 and FP8, blocks of DeepSeek-V3."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from infer.ops.quantized import e4m3_activations, int8_activations
from infer.pallas.scaled_matmul import scaled_matmul, scaled_matmul_reference
from infer.quant.methods import FP8, RTN
from infer.quant.qarray import QArray
from tests.cases.kernels import CHIPS, KernelCase

METHODS: dict[str, Any] = {
    "int8": RTN(bits=8, group_size="channel", activations="int8"),
    "fp8 channel": FP8(activations="token"),
    "fp8 tensor": FP8(granularity="tensor", activations="token"),
    "fp8 128x128": FP8(granularity="block", activations="block"),
}
# Tensor cores multiply E4M3 from Ada on.
_FP8_CHIPS = tuple(chip for chip in CHIPS if chip != "a100-80gb")


def arrays(name: str, rows: int, out: int, width: int, key: Array) -> tuple[Array, Array, QArray]:
    """Return codes and scales of random activations, and a random weight."""
    one, two = jax.random.split(key)
    x = jax.random.normal(one, (rows, width), jnp.float32)
    weight = METHODS[name].pack(jax.random.normal(two, (out, width), jnp.float32) * 0.02)
    if name == "int8":
        return *int8_activations(x), weight
    return *e4m3_activations(x, 128 if "128" in name else None), weight


def _case(name: str, rows: int, out: int, width: int) -> KernelCase:
    size = out * width + rows * width + 4 * rows * out
    return KernelCase(
        kernel="scaled_matmul",
        form="triton",
        shape=f"{name} {rows}x{width}x{out}",
        make=lambda key: arrays(name, rows, out, width, key),
        run=scaled_matmul,
        reference=scaled_matmul_reference,
        names=("scaled_matmul",),
        flops=2.0 * rows * out * width,
        bytes=float(size),
        chips=CHIPS if name == "int8" else _FP8_CHIPS,
    )


SMOKE = _case("int8", 2, 24, 160)
CASES = (
    _case("int8", 16, 4096, 4096),
    _case("int8", 512, 4096, 4096),
    _case("fp8 channel", 16, 4096, 4096),
    _case("fp8 channel", 512, 4096, 4096),
    _case("fp8 tensor", 16, 4096, 4096),
    _case("fp8 128x128", 16, 2048, 7168),
    _case("fp8 128x128", 512, 2048, 7168),
)
