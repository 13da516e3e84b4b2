"""Products of 8-bit activations and weights as one kernel, interpreted, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.linear import linear
from infer.ops.quantized import int8_activations
from infer.pallas.scaled_matmul import ScaledMatmulBlocks, scaled_matmul, scaled_matmul_reference
from infer.quant.methods import FP8, RTN, LLMInt8
from tests.cases.kernels.scaled_matmul import METHODS, arrays

pytestmark = pytest.mark.kernels

OUT, WIDTH = 80, 320  # fill neither tiles nor steps


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_definition(name: str) -> None:
    x, scale, weight = arrays(name, 5, OUT, WIDTH, jax.random.key(3))
    y = scaled_matmul(x, scale, weight, interpret=True)
    assert y.shape == (5, OUT) and y.dtype == jnp.float32
    np.testing.assert_allclose(y, scaled_matmul_reference(x, scale, weight), rtol=2e-5, atol=2e-5)


def test_integers_are_exact_and_their_bits_depend_on_no_tile() -> None:
    x, scale, weight = arrays("int8", 5, OUT, WIDTH, jax.random.key(4))
    y = scaled_matmul(x, scale, weight, interpret=True)
    w = np.asarray(weight.data).astype(np.int64) - 128
    sums = np.asarray(x).astype(np.int64) @ w.T
    by_hand = sums.astype(np.float32) * (np.asarray(weight.scale).T * np.asarray(scale))
    np.testing.assert_array_equal(np.asarray(y), by_hand)
    blocks = ScaledMatmulBlocks(block_out=16, block_rows=32)
    other = scaled_matmul(x[2:4], scale[2:4], weight, blocks=blocks, interpret=True)
    np.testing.assert_array_equal(np.asarray(other), np.asarray(y[2:4]))


@pytest.mark.parametrize("name", ["int8", "fp8 128x128"])
def test_the_op_rounds_activations_and_takes_the_kernel(name: str) -> None:
    _, _, weight = arrays(name, 1, OUT, WIDTH, jax.random.key(5))
    x = jax.random.normal(jax.random.key(6), (3, WIDTH), jnp.float32)
    y = linear(x, weight, implementation="interpret")
    np.testing.assert_allclose(y, linear(x, weight, implementation="xla"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [RTN(bits=8, group_size=64), RTN(bits=8, symmetric=False), FP8(code="e5m2"), LLMInt8()],
    ids=["groups", "zero points", "e5m2", "nested or outliers"],
)
def test_what_it_cannot_do_is_named(method: object) -> None:
    weight = method.pack(jnp.ones((16, 128), jnp.float32))  # type: ignore[attr-defined]
    if weight.format.activations == "outliers":
        with pytest.raises(NotImplementedError, match="in Triton: "):
            linear(jnp.ones((2, 128)), weight, implementation="interpret")
        return
    x, scale = int8_activations(jnp.ones((2, 128), jnp.float32))
    with pytest.raises(NotImplementedError, match=r"in Triton: .* of shape \(16, 128\) has no"):
        scaled_matmul(x, scale, weight, interpret=True)


def test_refuses_arrays_that_do_not_belong_together() -> None:
    x, scale, weight = arrays("int8", 2, OUT, WIDTH, jax.random.key(3))
    with pytest.raises(ValueError, match=r"pass int8 \[T, 320\]"):
        scaled_matmul(x.astype(jnp.float8_e4m3fn), scale, weight, interpret=True)
    with pytest.raises(ValueError, match="block_rows is 8; use a power of two"):
        ScaledMatmulBlocks(block_rows=8)
