"""RMS norm against worked values (case M09)."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.norm import layer_norm, rms_norm

pytestmark = pytest.mark.kernels


def test_a_unit_gain_divides_by_the_root_mean_square() -> None:
    y = rms_norm(jnp.asarray([1.0, 2, -3, 4]), jnp.ones(4), 1e-6)
    np.testing.assert_allclose(y, [0.36514837, 0.73029673, -1.095445, 1.4605935], rtol=1e-6)


def test_bfloat16_is_rounded_once_at_the_end() -> None:
    x = jnp.asarray([1.0, 2, -3, 4], jnp.bfloat16)
    gain = jnp.full(4, 1.0123291, jnp.float32)  # 1 + bfloat16(0.0123), added in float32
    exact = rms_norm(x.astype(jnp.float32), gain, 1e-6)
    np.testing.assert_array_equal(rms_norm(x, gain, 1e-6), exact.astype(jnp.bfloat16))


def test_a_row_of_zeros_stays_zero() -> None:
    np.testing.assert_array_equal(rms_norm(jnp.zeros((2, 4)), jnp.ones(4), 1e-6), np.zeros((2, 4)))


def test_layer_norm_by_hand() -> None:
    """[1, 2, -3, 4] has mean 1 and variance 26/4: deviations [0, 1, -4, 3] / 2.5495098."""
    x = jnp.asarray([1.0, 2, -3, 4])
    bias = jnp.asarray([1.0, 0, 0, 0])
    want = np.asarray([0, 0.39223227, -1.5689291, 1.1766968])
    np.testing.assert_allclose(layer_norm(x, jnp.ones(4), None, 1e-9), want, atol=1e-6)
    y = layer_norm(x, jnp.full(4, 2.0), bias, 1e-9)
    np.testing.assert_allclose(y, 2 * want + np.asarray(bias), atol=1e-6)
