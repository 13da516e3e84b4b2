"""Products with packed 4-bit weights in the hand-written kernel, at shapes of an 8B Llama."""

import jax
import jax.numpy as jnp
from jax import Array

from infer.pallas.quantized_matmul import quantized_matmul_reference
from infer.quant.methods import RTN
from infer.quant.qarray import QArray
from tests.cases.kernels import KernelCase, quantized_matmul

NAMES = ("int4 g32", "int4 g64", "int4 g128", "Q4_0")


def packed(name: str, out: int, width: int, key: Array) -> QArray:
    """Return a random weight of the format `name`."""
    if name == "Q4_0":
        return quantized_matmul.packed(name, out, width, key)
    method = RTN(bits=4, group_size=int(name.removeprefix("int4 g")))
    return method.pack(jax.random.normal(key, (out, width), jnp.float32) * 0.02)


def _run(x: Array, weight: QArray) -> Array:
    from infer.jax_triton.quantized_matmul import quantized_matmul as kernel  # imports triton

    return kernel(x, weight)


def _case(name: str, rows: int, out: int, width: int) -> KernelCase:
    def make(key: Array) -> tuple[Array, QArray]:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (rows, width), "bfloat16"), packed(name, out, width, two)

    weight = jax.tree.leaves(jax.eval_shape(make, jax.random.key(0))[1])
    return KernelCase(
        kernel="quantized_matmul",
        form="jax_triton",
        shape=f"{name} {rows}x{width}x{out} bfloat16",
        make=make,
        run=_run,
        reference=quantized_matmul_reference,
        names=("quantized_matmul_kernel",),
        flops=2.0 * rows * out * width,
        bytes=float(sum(x.size * x.dtype.itemsize for x in weight) + rows * (width * 2 + out * 4)),
    )


CASES = (
    *(_case(name, 16, 4096, 4096) for name in NAMES),
    _case("int4 g128", 1, 14336, 4096),
    _case("int4 g128", 256, 4096, 4096),
)
