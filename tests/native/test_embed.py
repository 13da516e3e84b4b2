"""Rows of packed weights are the rows of the dequantised ones, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.native.repack import repack
from infer.quant.blocks import FORMATS
from infer.quant.qarray import QArray, dequantize

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_those_of_dequantize(name: str) -> None:
    from infer.native.embed import embed

    rng = np.random.default_rng(len(name))
    rows, width = 37, 512
    data = rng.integers(0, 256, (rows, FORMATS[name].row_bytes(width)), np.uint8)
    # Scales that are numbers: exponents of random halves would be infinite now and then.
    size = FORMATS[name].block_bytes
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(name, (0, 2))
    for start in halves:
        data[:, start + 1 :: size] &= 0x3B
    weight = QArray.create(data, FORMATS[name], (rows, width))
    tokens = jnp.asarray([0, 36, 5, 17, 16, 15, 36], jnp.int32)
    got = embed(repack(weight), tokens)
    want = np.asarray(dequantize(weight))[np.asarray(tokens)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_of_floats(dtype: str) -> None:
    from infer.native.embed import embed

    w = jnp.asarray(np.random.default_rng(1).standard_normal((20, 64)), dtype)
    w = w.at[3, 4].set(6e-8)  # a subnormal half
    got = embed(repack(w), jnp.asarray([19, 3, -1, 25], jnp.int32))
    np.testing.assert_array_equal(got, w.astype(jnp.float32)[jnp.asarray([19, 3, 0, 19])])
