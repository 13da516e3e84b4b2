"""Many tokens with packed weights on Hopper: the projections of Llama-3-8B."""

import jax
from jax import Array

from infer.pallas.quantized_matmul_mosaic import (
    quantized_matmul_mosaic,
    quantized_matmul_mosaic_reference,
)
from infer.quant.methods import RTN
from infer.quant.qarray import QArray
from tests.cases.kernels import KernelCase

METHODS = {
    "int4 g128": RTN(bits=4, group_size=128),
    "int8 channel": RTN(bits=8, group_size="channel"),
    "int8 g128": RTN(bits=8, group_size=128),
    "int4 channel": RTN(bits=4, group_size="channel"),
}
# Inputs and outputs of the attention's projections, of gate and up, and of down.
_PROJECTIONS = ((4096, 4096), (4096, 14336), (14336, 4096))
_ROWS = (64, 512, 4096)


def arrays(name: str, rows: int, out: int, width: int, dtype: str, key: Array) -> tuple:
    """Return random activations and a random weight."""
    one, two = jax.random.split(key)
    weight: QArray = METHODS[name].pack(jax.random.normal(two, (out, width)) * 0.02)
    return jax.random.normal(one, (rows, width), dtype), weight


def _case(name: str, rows: int, width: int, out: int, dtype: str = "bfloat16") -> KernelCase:
    make = lambda key: arrays(name, rows, out, width, dtype, key)
    weight = jax.eval_shape(make, jax.random.key(0))[1]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weight))
    return KernelCase(
        kernel="quantized_matmul_mosaic",
        form="mosaic",
        shape=f"{name} {rows}x{width}x{out} {dtype}",
        make=make,
        run=quantized_matmul_mosaic,
        reference=quantized_matmul_mosaic_reference,
        names=("quantized_matmul_mosaic",),
        flops=2.0 * rows * out * width,
        bytes=float(size + rows * (2 * width + 4 * out)),
        chips=("h200-141gb",),
    )


CASES = (
    *(_case("int4 g128", rows, width, out) for rows in _ROWS for width, out in _PROJECTIONS),
    *(
        _case("int8 channel", rows, width, out)
        for rows, (width, out) in zip(_ROWS, _PROJECTIONS, strict=True)
    ),
    _case("int8 g128", 512, 4096, 4096),
    # A number of tokens that fills no tile.
    _case("int4 g128", 1000, 4096, 4096, "float16"),
)
