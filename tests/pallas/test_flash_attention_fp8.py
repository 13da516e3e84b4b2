"""Attention in 8-bit floats: what it costs in accuracy, and what the rotation gives back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.flash_attention import FlashAttentionBlocks, flash_attention_reference
from infer.pallas.flash_attention_fp8 import flash_attention_fp8, quantize, rotation

pytestmark = pytest.mark.kernels

BLOCKS = FlashAttentionBlocks(block_queries=32, block_keys=16)
SCALE = 64**-0.5


def draw(outliers: str = "none") -> tuple[jax.Array, ...]:
    """Draw q, k, v [2, 75, 4 or 2, 64]."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v = (
        jax.random.normal(key, (2, 75, heads, 64))
        for key, heads in zip(keys[:3], (4, 2, 2), strict=True)
    )
    # Two channels that stand out in every token: what models have.
    channels = jnp.zeros((1, 1, 1, 64)).at[..., jnp.array([3, 40])].set(10.0)
    if outliers == "shifted":
        return q + channels, k + channels, v
    if outliers == "wide":
        return q * (1 + channels), k * (1 + channels), v
    return q, k, v


def error(outliers: str, **options: object) -> float:
    q, k, v = draw(outliers)
    run = functools.partial(flash_attention_fp8, scale=SCALE, blocks=BLOCKS, interpret=True)
    got = jax.jit(functools.partial(run, **options))(q, k, v)
    window = {key: value for key, value in options.items() if key == "window"}
    want, _ = flash_attention_reference(q, k, v, scale=SCALE, **window)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("width", [2, 16, 64, 128])
def test_the_rotation_is_orthogonal_and_spreads_one_channel_and_a_constant(width: int) -> None:
    matrix = rotation(width)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix[:, 0]), width**-0.5, rtol=1e-6)
    spread = np.abs(matrix @ np.ones(width))
    assert spread.max() <= 2**0.5 + 1e-6  # of a length of sqrt(width); 1 were quite flat


def test_quantize_keeps_the_largest_value_of_each_block() -> None:
    x = jax.random.normal(jax.random.key(1), (1, 40, 3, 16))
    low, scales = quantize(x, 16, rotate=False)
    assert scales.shape == (1, 3, 3)
    for block in range(3):
        part = slice(16 * block, 16 * block + 16)
        wide = low[:, part].astype(jnp.float32) * scales[:, :, block][:, None, :, None]
        top = jnp.max(jnp.abs(x[:, part]), axis=(1, 3))
        np.testing.assert_allclose(jnp.max(jnp.abs(wide), axis=(1, 3)), top, rtol=1e-6)
        # Three bits of mantissa: half a step is 1/16.
        np.testing.assert_allclose(wide, x[:, part], rtol=0.07, atol=1e-3)


def test_near_float32_without_outliers() -> None:
    assert error("none") < 0.05
    assert error("none", window=20) < 0.05


# Measured: 2.8 and 3.6 times.
@pytest.mark.parametrize(("outliers", "gain"), [("shifted", 2.0), ("wide", 2.5)])
def test_rotation_takes_away_the_error_of_outliers(outliers: str, gain: float) -> None:
    plain, rotated = error(outliers, rotate=False), error(outliers, rotate=True)
    print(f"{outliers}: error {plain:.4f}, rotated {rotated:.4f}")
    assert plain > gain * rotated


def test_what_does_not_work_says_why() -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match="3 heads, not a multiple of the 2"):
        flash_attention_fp8(q[:, :, :3], k, v, scale=SCALE)
    with pytest.raises(ValueError, match="width 48; use a power of two"):
        flash_attention_fp8(q[..., :48], k[..., :48], v, scale=SCALE)
