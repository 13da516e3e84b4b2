"""Codes in bytes, and the numbers they stand for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.quant import codes

WIDTHS = (2, 3, 4, 5, 6, 8)
DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_is_undone_and_takes_its_bits(bits):
    rng = np.random.default_rng(bits)
    given = rng.integers(0, 1 << bits, (3, 40), np.uint8)
    data = codes.pack(jnp.asarray(given), bits)
    assert data.dtype == jnp.uint8 and data.shape == (3, 40 * bits // 8)
    np.testing.assert_array_equal(codes.unpack(data, bits, 40), given)
    np.testing.assert_array_equal(jax.jit(codes.pack, static_argnums=1)(given, bits), data)
    back = jax.jit(codes.unpack, static_argnums=(1, 2))(data, bits, 40)
    np.testing.assert_array_equal(back, given)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(WIDTHS), st.lists(st.integers(0, 255), min_size=8, max_size=8))
def test_any_eight_codes_come_back(bits, numbers):
    given = jnp.asarray(np.array(numbers, np.uint8) & ((1 << bits) - 1))
    np.testing.assert_array_equal(codes.unpack(codes.pack(given, bits), bits, 8), given)


@pytest.mark.parametrize(
    "bits, want",
    [
        (2, [0b11_10_01_00, 0b00_01_10_11]),
        # The plane of the low two bits, then that of the third.
        (3, [0b11_10_01_00, 0b00_01_10_11, 0b1111_0000]),
        (4, [0x10, 0x32, 0x54, 0x76]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_order_of_bits_by_hand(bits, want):
    given = {2: [0, 1, 2, 3, 3, 2, 1, 0], 3: [0, 1, 2, 3, 7, 6, 5, 4]}.get(bits, list(range(8)))
    data = codes.pack(jnp.asarray(np.array(given, np.uint8)), bits)
    np.testing.assert_array_equal(data, np.array(want, np.uint8))


@pytest.mark.parametrize("code", DTYPES)
def test_small_floats_are_those_of_ml_dtypes(code):
    table = codes.LEVELS[code]
    want = np.arange(len(table), dtype=np.uint8).view(DTYPES[code]).astype(np.float32)
    np.testing.assert_array_equal(table, want)
    assert codes.LARGEST[code] == float(ml_dtypes.finfo(DTYPES[code]).max)


@pytest.mark.parametrize("code", DTYPES)
def test_nearest_rounds_as_ml_dtypes_and_saturates(code):
    table = codes.LEVELS[code]
    finite = np.sort(table[np.isfinite(table)])
    between = (finite[1:] + finite[:-1]) / 2  # ties
    x = np.concatenate(
        [
            finite,
            between,
            np.nextafter(between, np.float32(np.inf)),
            np.nextafter(between, np.float32(-np.inf)),
            np.random.default_rng(0).standard_normal(2000).astype(np.float32),
        ]
    )
    x = x[(np.abs(x) >= 1e-37) | (x == 0)]  # subnormals below are zeros to the compiled program
    got = codes.nearest(jnp.asarray(x), code)
    want = x.astype(DTYPES[code]).view(np.uint8)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jax.jit(codes.nearest, static_argnums=1)(x, code), want)
    largest = codes.LARGEST[code]
    over = jnp.asarray([largest * 1.06, largest * 4, 3e38, -3e38], jnp.float32)
    values = codes.values(codes.nearest(over, code), code)
    np.testing.assert_array_equal(values, [largest, largest, largest, -largest])


@pytest.mark.parametrize("code", ["nf4", "fp4"])
def test_nearest_level_is_the_nearest(code):
    table = codes.LEVELS[code].astype(np.float64)
    x = np.linspace(-1.2, 1.2, 4001).astype(np.float32)
    got = table[np.asarray(codes.nearest(jnp.asarray(x), code))]
    best = np.abs(x[:, None].astype(np.float64) - table).min(1)
    np.testing.assert_allclose(np.abs(x - got), best, atol=1e-7)


def test_widths_that_there_are_not():
    with pytest.raises(ValueError, match=r"bits is 7; use 2, 3, 4, 5, 6 or 8"):
        codes.checked_bits(7)
