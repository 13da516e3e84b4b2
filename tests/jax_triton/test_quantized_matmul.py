"""Products with packed 4-bit weights in the hand-written kernel, in Triton's interpreter, against
the definition.  The interpreter keeps bfloat16 as bits that it does not multiply: float32 and
float16 here, bfloat16 on a GPU (scripts/gpu_check.py).
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.quantized_matmul import quantized_matmul_reference
from infer.quant import rtn
from infer.quant.methods import RTN
from tests.cases.kernels.quantized_matmul_jax_triton import NAMES, packed
from tests.jax_triton import interpreter

pytestmark = [pytest.mark.kernels, interpreter.needs_triton]

# 80 rows do not fill tiles of 32, and 512 columns are cut unevenly.
OUT, WIDTH = 80, 512


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return interpreter.load("quantized_matmul", monkeypatch)


def _x(rows: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal((rows, WIDTH)), dtype)


def _error(y: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(kernel: ModuleType, name: str, dtype: str) -> None:
    weight, x = packed(name, OUT, WIDTH, jax.random.key(3)), _x(5, dtype)
    blocks = kernel.QuantizedMatmulBlocks(block_out=32, splits=3)
    y = kernel.quantized_matmul(x, weight, blocks=blocks)
    assert y.shape == (5, OUT) and y.dtype == jnp.float32
    # Products are exact in float32, so only the order of sums differs.
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


def test_scales_of_float32_and_a_ragged_last_group(kernel: ModuleType) -> None:
    """200 columns are three groups of 64 and 8 columns of a fourth."""
    w = jax.random.normal(jax.random.key(6), (24, 200), jnp.float32)
    weight = rtn.quantize_int(w, rtn.int_format(4, 64, scale_dtype="float32"))
    x = _x(2)[:, :200]
    y = kernel.quantized_matmul(x, weight)
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


def test_a_row_has_the_same_bits_in_any_batch(kernel: ModuleType) -> None:
    weight, x = packed("int4 g64", OUT, WIDTH, jax.random.key(4)), _x(16, "float16")
    y = np.asarray(kernel.quantized_matmul(x, weight))
    for rows in (1, 3):
        alone = kernel.quantized_matmul(x[5 : 5 + rows], weight)
        np.testing.assert_array_equal(np.asarray(alone), y[5 : 5 + rows])


def test_many_rows_take_larger_tiles(kernel: ModuleType) -> None:
    weight, x = packed("int4 g128", OUT, WIDTH, jax.random.key(5)), _x(70, "float16")
    y = kernel.quantized_matmul(x, weight)
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


@pytest.mark.parametrize(
    "method",
    [
        RTN(bits=8, group_size=64),
        RTN(bits=4, group_size=16),
        RTN(bits=4, group_size="channel"),
        RTN(bits=4, group_size=64, symmetric=False),
        RTN(bits=4, group_size=64, activations="int8"),
    ],
    ids=["8 bits", "groups of 16", "rows", "zero points", "rounded activations"],
)
def test_what_it_cannot_do_is_named(kernel: ModuleType, method: RTN) -> None:
    w = jax.random.normal(jax.random.key(6), (16, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"in jax_triton: .* of shape \(16, 128\) is not"):
        kernel.quantized_matmul(_x(1)[:, :128], method.pack(w))


def test_refuses_what_does_not_fit(kernel: ModuleType) -> None:
    weight = packed("Q4_0", OUT, WIDTH, jax.random.key(5))
    with pytest.raises(ValueError, match=r"x must be \[T, I\]"):
        kernel.quantized_matmul(_x(2)[:, :64], weight)
    with pytest.raises(NotImplementedError, match="with x of int32; it takes floats"):
        kernel.quantized_matmul(_x(2).astype(jnp.int32), weight)
    with pytest.raises(ValueError, match="block_out is 48; use a power of two"):
        kernel.QuantizedMatmulBlocks(block_out=48)
    with pytest.raises(ValueError, match="num_warps is 3"):
        kernel.QuantizedMatmulBlocks(num_warps=3)
