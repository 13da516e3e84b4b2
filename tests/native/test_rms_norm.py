"""RMSNorm as an operation of its own: near the plain form, with the same bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.native.repack import repack
from infer.native.rms_norm import rms_norm as kernel
from infer.ops import norm
from infer.ops.choice import recording


@pytest.mark.parametrize("width", [1, 15, 16, 64, 576, 640, 1001])
def test_near_the_plain_form_and_a_row_has_the_same_bits_in_any_batch(width: int) -> None:
    rng = np.random.default_rng(width)
    x = jnp.asarray(3 * rng.standard_normal((130, width)), jnp.float32)
    gain = jnp.asarray(rng.standard_normal(width), jnp.float32)
    whole = np.asarray(kernel(x, gain, 1e-6))
    np.testing.assert_allclose(whole, norm._rms_norm_xla(x, gain, eps=1e-6), rtol=2e-6, atol=1e-7)
    for rows in (1, 4, 5, 20):
        np.testing.assert_array_equal(kernel(x[:rows], gain, 1e-6), whole[:rows])


def test_zeros_infinities_and_no_numbers() -> None:
    x = jnp.asarray([[0.0] * 20, [np.nan] + [1.0] * 19, [1e-42] * 20, [1e30] * 20], jnp.float32)
    got = np.asarray(kernel(x, jnp.ones(20), 1e-6))
    assert (got[0] == 0).all() and np.isnan(got[1]).all()
    np.testing.assert_allclose(got[2], 1e-42 / 1e-3, rtol=1e-2)
    assert (got[3] == 0).all()  # the mean of squares is infinite, as in the plain form


def test_it_runs_beside_packed_weights_alone() -> None:
    x, gain = jnp.ones((2, 3, 32)), jnp.ones(32)
    packed = repack(jnp.ones((16, 32)))
    for beside, want in ((None, "xla"), (jnp.ones((16, 32)), "xla"), (packed, "native")):
        with recording() as choices:
            y = jax.jit(lambda x: norm.rms_norm(x, gain, 1e-6, beside=beside))(x)  # noqa: B023
        assert [c.implementation for c in choices] == [want] and y.shape == x.shape
    with pytest.raises(NotImplementedError, match="x of bfloat16, not float32"):
        kernel(x[0].astype(jnp.bfloat16), gain, 1e-6)
