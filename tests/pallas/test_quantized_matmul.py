"""Products with packed weights as one kernel, interpreted, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.quantized_matmul import (
    QuantizedMatmulBlocks,
    quantized_matmul,
    quantized_matmul_reference,
)
from infer.quant.methods import RTN, LLMInt8
from tests.cases.kernels.quantized_matmul import NAMES, packed

pytestmark = pytest.mark.kernels

# 80 rows do not fill tiles of 32, and 512 columns are cut unevenly.
OUT, WIDTH = 80, 512
BLOCKS = QuantizedMatmulBlocks(block_out=32, splits=3)


def _x(rows: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal((rows, WIDTH)), dtype)


def _error(y: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name: str) -> None:
    weight, x = packed(name, OUT, WIDTH, jax.random.key(3)), _x(5)
    y = quantized_matmul(x, weight, blocks=BLOCKS, interpret=True)
    assert y.shape == (5, OUT) and y.dtype == jnp.float32
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    weight, x = packed("int4 g64 zero", OUT, WIDTH, jax.random.key(4)), _x(16, "bfloat16")
    y = quantized_matmul(x, weight, interpret=True)
    for rows in (1, 3):
        alone = quantized_matmul(x[5 : 5 + rows], weight, interpret=True)
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(y[5 : 5 + rows]))


def test_many_rows_take_larger_tiles() -> None:
    weight, x = packed("Q8_0", OUT, WIDTH, jax.random.key(5)), _x(70, "bfloat16")
    y = quantized_matmul(x, weight, interpret=True)
    # bfloat16 products are exact in float32, so only the order of sums differs.
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


def test_rows_that_are_no_whole_number_of_steps() -> None:
    method = RTN(bits=8, group_size="channel")
    w = jax.random.normal(jax.random.key(6), (24, 200), jnp.float32)
    x = _x(2)[:, :200]
    with pytest.raises(NotImplementedError, match="group that is a power of two"):
        # 200 columns are no whole number of steps of 128, and their scale is the row's: refused
        # rather than read past the end.
        quantized_matmul(x, method.pack(w), interpret=True)


@pytest.mark.parametrize(
    "method",
    [RTN(bits=3, group_size=64), RTN(bits=4, group_size=16), LLMInt8()],
    ids=["3 bits", "groups of 16", "rounded activations"],
)
def test_what_it_cannot_do_is_named(method: object) -> None:
    w = jax.random.normal(jax.random.key(6), (16, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"in Triton: .* of shape \(16, 128\) is not"):
        quantized_matmul(_x(1)[:, :128], method.pack(w), interpret=True)  # type: ignore[attr-defined]


def test_refuses_shapes_that_do_not_fit() -> None:
    weight = packed("Q8_0", OUT, WIDTH, jax.random.key(5))
    with pytest.raises(ValueError, match=r"x must be \[T, I\]"):
        quantized_matmul(_x(2)[:, :64], weight, interpret=True)
    with pytest.raises(ValueError, match="block_out is 48; use a power of two"):
        QuantizedMatmulBlocks(block_out=48)
