"""Products with packed weights: the output projection of an 8B Llama, every format, one to 256
rows; and with what stands around the products of a layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from infer.pallas.quantized_matmul import quantized_matmul, quantized_matmul_reference
from infer.quant.blocks import FORMATS
from infer.quant.methods import FP8, MX, NF4, NVFP4, RTN
from infer.quant.qarray import QArray
from tests.cases.kernels import KernelCase

# Where a block has float16 scales.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip

METHODS: dict[str, Any] = {
    "int8 channel": RTN(bits=8, group_size="channel"),
    "int4 g32": RTN(bits=4, group_size=32),
    "int4 g64 zero": RTN(bits=4, group_size=64, symmetric=False),
    "int4 g128": RTN(bits=4, group_size=128),
    "nf4 double": NF4(),
    "fp8 e4m3": FP8(),
    "mxfp4": MX(),
    "nvfp4": NVFP4(),
}
NAMES = (*METHODS, *_HALVES)


def packed(name: str, out: int, width: int, key: Array) -> QArray:
    """Return a random weight of the format `name`."""
    if name in METHODS:
        return METHODS[name].pack(jax.random.normal(key, (out, width), jnp.float32) * 0.02)
    format = FORMATS[name]
    keys = jax.random.split(key, 3)
    shape = (out, width // format.group, format.block_bytes)
    data = jax.random.bits(keys[0], shape, jnp.uint8)
    for i, at in enumerate(_HALVES[name]):
        scale = jax.random.uniform(keys[1 + i], shape[:2], jnp.float32, 0.001, 0.01)
        halves = jax.lax.bitcast_convert_type(scale.astype(jnp.float16), jnp.uint8)
        data = data.at[:, :, at : at + 2].set(halves)
    if name == "MXFP4":
        data = data.at[:, :, 0].set(data[:, :, 0] % 8 + 118)
    return QArray(data.reshape(out, -1), format=format, shape=(out, width))


def _case(name: str, rows: int, out: int, width: int, dtype: str) -> KernelCase:
    def make(key: Array) -> tuple[Array, QArray]:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (rows, width), dtype), packed(name, out, width, two)

    weight = jax.eval_shape(make, jax.random.key(0))[1]
    return KernelCase(
        kernel="quantized_matmul",
        form="triton",
        shape=f"{name} {rows}x{width}x{out} {dtype}",
        make=make,
        run=quantized_matmul,
        reference=quantized_matmul_reference,
        names=("quantized_matmul",),
        flops=2.0 * rows * out * width,
        bytes=float(_bytes(weight) + rows * (width * jnp.dtype(dtype).itemsize + out * 4)),
    )


def _bytes(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _fused_case(
    name: str,
    rows: int,
    out: int,
    width: int,
    dtype: str,
    words: str,
) -> KernelCase:
    """Return a case with what `words` names: norm, bias, residual, silu or gelu_tanh."""
    parts = words.split()
    activation = next((word for word in parts if word in ("silu", "gelu_tanh")), None)

    def make(key: Array) -> tuple[Array, QArray, dict[str, Any]]:
        keys = jax.random.split(key, 6)
        more: dict[str, Any] = {}
        if "norm" in parts:
            more["gain"] = jax.random.uniform(keys[2], (width,), jnp.float32, 0.5, 1.5)
        if "bias" in parts:
            more["bias"] = jax.random.normal(keys[3], (out,), dtype)
        if "residual" in parts:
            more["residual"] = jax.random.normal(keys[4], (rows, out), dtype)
        if activation:
            more["up"] = packed(name, out, width, keys[5])
        x = jax.random.normal(keys[0], (rows, width), dtype)
        return x, packed(name, out, width, keys[1]), more

    fixed: dict[str, Any] = {"activation": activation} if activation else {}
    fixed |= {"eps": 1e-5} if "norm" in parts else {}
    given = jax.eval_shape(make, jax.random.key(0))
    return KernelCase(
        kernel="quantized_matmul",
        form="triton",
        shape=f"{name} {words} {rows}x{width}x{out} {dtype}",
        make=make,
        run=lambda x, w, more: quantized_matmul(x, w, dtype=dtype, **fixed, **more),
        reference=lambda x, w, more: quantized_matmul_reference(x, w, **fixed, **more),
        names=("quantized_matmul",),
        flops=2.0 * rows * out * width * (2 if activation else 1),
        bytes=float(_bytes(given) + rows * out * jnp.dtype(dtype).itemsize),
    )


SMOKE = _case("int4 g32", 2, 24, 64, "float32")
CASES = (
    *(_case(name, 16, 4096, 4096, "bfloat16") for name in NAMES),
    _case("int4 g128", 1, 14336, 4096, "bfloat16"),
    _case("int4 g128", 256, 4096, 4096, "bfloat16"),
    _case("Q4_K", 256, 4096, 4096, "bfloat16"),
    _fused_case("Q4_K", 1, 4096, 4096, "bfloat16", "norm"),
    _fused_case("int4 g128", 16, 4096, 4096, "bfloat16", "norm bias"),
    _fused_case("Q6_K", 1, 4096, 14336, "bfloat16", "residual"),
    _fused_case("Q4_K", 1, 14336, 4096, "bfloat16", "norm silu"),
    _fused_case("int4 g128", 16, 14336, 4096, "bfloat16", "norm silu"),
    _fused_case("int8 channel", 64, 4096, 4096, "bfloat16", "norm bias residual"),
    _fused_case("nvfp4", 64, 14336, 4096, "bfloat16", "norm gelu_tanh"),
)
