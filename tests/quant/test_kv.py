"""Formats of cached keys and values against their definition in numpy, to the last bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from infer.quant.kv import KV_ALIASES, KV_FORMATS, dequantize_kv, format_of, quantize_kv
from tests.cases.kv import definition, heads, numbers

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("jit", [False, True])
def test_is_the_definition(kv_format: str, jit: bool) -> None:
    x = heads(64)
    run = jax.jit(quantize_kv, static_argnums=1) if jit else quantize_kv
    data, scale = run(jnp.asarray(x), kv_format)
    want, scales = definition(x, kv_format)
    assert data.dtype == want.dtype and format_of(data) == kv_format
    np.testing.assert_array_equal(scale, scales)
    np.testing.assert_array_equal(np.asarray(data).view(np.uint8), want.view(np.uint8))
    got = np.asarray(dequantize_kv(data, scale))
    np.testing.assert_array_equal(got, numbers(want, scales))


@pytest.mark.parametrize(("kv_format", "step"), [("int8", 127), ("int4", 7), ("float8_e4m3", 16)])
def test_what_is_read_is_near(kv_format: str, step: int) -> None:
    """Half a step of the largest number at most; of floats with 3 bits, a sixteenth of each."""
    x = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    got = np.asarray(dequantize_kv(*quantize_kv(jnp.asarray(x), kv_format)))
    largest = np.abs(x).max(-1, keepdims=True)
    most = np.abs(x) / step + largest * 2.0**-18 if step == 16 else 0.5001 * largest / step
    assert (np.abs(got - x) <= most).all()
    # The largest is exact, but for the rounding of the scale.
    at = np.abs(x).argmax(-1)[:, None]
    np.testing.assert_allclose(
        np.take_along_axis(got, at, -1), np.take_along_axis(x, at, -1), rtol=1e-6
    )


def test_what_is_read_is_quantised_to_itself() -> None:
    for kv_format in KV_FORMATS:
        x = np.random.default_rng(1).standard_normal((50, 32)).astype(np.float32)
        once = dequantize_kv(*quantize_kv(jnp.asarray(x), kv_format))
        twice = dequantize_kv(*quantize_kv(once, kv_format))
        np.testing.assert_allclose(twice, once, rtol=1e-6)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_head_that_is_no_number_is_read_as_none(kv_format: str) -> None:
    x = np.ones((3, 8), np.float32)
    x[0, 3], x[1, 0] = np.nan, -np.inf
    data, scale = quantize_kv(jnp.asarray(x), kv_format)
    assert np.isnan(scale[0]) and np.isinf(scale[1])
    if kv_format == "float8_e4m3":
        assert np.isfinite(np.asarray(data, np.float32)).all()
    read = np.asarray(dequantize_kv(data, scale))
    assert not np.isfinite(read[:2]).any() and np.isfinite(read[2]).all()


def test_aliases() -> None:
    x = jnp.ones((2, 4))
    for alias, name in KV_ALIASES.items():
        for a, b in zip(quantize_kv(x, alias), quantize_kv(x, name), strict=True):
            assert a.dtype == b.dtype
    assert quantize_kv(x, "fp8")[0].dtype == ml_dtypes.float8_e4m3fn
