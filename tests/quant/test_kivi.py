"""KIVI's groups: keys by channel over a page, values by token over 32 channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.quant.kivi import dequantize_pages, quantize_pages, value_group


def _numbers(*shape: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[..., 3] *= 50  # one wide channel, as keys have them
    return x


def definition(x: np.ndarray, bits: int, tokens: int, channels: int) -> np.ndarray:
    """What is read back, a group at a time."""
    y = np.empty_like(x)
    for n in np.ndindex(*x.shape[:-2]):
        for t in range(0, x.shape[-2], tokens):
            for c in range(0, x.shape[-1], channels):
                at = (*n, slice(t, t + tokens), slice(c, c + channels))
                low = np.float32(np.float16(x[at].min()))
                scale = np.float32(np.float16((x[at].max() - low) / np.float32(2**bits - 1)))
                code = np.clip(np.round((x[at] - low) / (scale or 1)), 0, 2**bits - 1)
                y[at] = code * scale + low
    return y


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("tokens", "channels"), [(8, 1), (1, 16), (4, 8)])
def test_pages_read_back_as_defined_with_and_without_jit(
    bits: int, tokens: int, channels: int
) -> None:
    x = _numbers(3, 2, 8, 16)
    run = lambda x: quantize_pages(x, bits, tokens, channels)
    data, scale, low = run(jnp.asarray(x))
    assert data.shape == (3, 2, 8, 16 * bits // 8) and data.dtype == jnp.uint8
    assert scale.shape == low.shape == (3, 2, 8 // tokens, 16 // channels)
    for a, b in zip(jax.jit(run)(x), (data, scale, low), strict=True):
        np.testing.assert_array_equal(a, b)
    have = dequantize_pages(data, scale, low, bits)
    np.testing.assert_allclose(have, definition(x, bits, tokens, channels), rtol=1e-6, atol=1e-6)


def test_keys_by_channel_keep_a_wide_channel_from_the_others() -> None:
    x = jnp.asarray(_numbers(4, 2, 16, 32))
    error = lambda tokens, channels: float(
        jnp.abs(dequantize_pages(*quantize_pages(x, 2, tokens, channels), 2) - x)[..., 8:].mean()
    )
    assert error(16, 1) < 0.5 * error(1, 32)


def test_equal_numbers_are_exact_and_what_is_no_number_is_seen() -> None:
    x = np.full((4, 2, 8), 0.5, np.float32)
    x[0, 0, 0], x[1, 1, 1], x[2, 0, 2] = np.nan, np.inf, 1e6  # beyond float16 too
    y = np.asarray(dequantize_pages(*quantize_pages(jnp.asarray(x), 2, 2, 1), 2))
    assert np.isnan(y[0, :, 0]).all() and np.isnan(y[1, :, 1]).all() and np.isnan(y[2, :, 2]).all()
    np.testing.assert_array_equal(y[3], x[3])


def test_a_value_has_groups_of_32_or_its_whole_head() -> None:
    assert [value_group(width) for width in (128, 64, 80, 20)] == [32, 32, 80, 20]
