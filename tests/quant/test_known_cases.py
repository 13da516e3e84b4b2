"""Numbers that other engines once got wrong, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.errors import ConfigError
from infer.quant import QArray, dequantize, rtn
from infer.quant.blocks import FORMATS
from infer.quant.methods import NF4

# Two of the 16 E2M1 codes a byte: nibbles 0, 1 .. 7, 0 low, one further high, twice.
E2M1_BYTES = bytes(16 * ((i + 1) % 8) + i % 8 for i in range(16))


def mxfp4(scale: int) -> np.ndarray:
    data = jnp.asarray(np.frombuffer(E2M1_BYTES, np.uint8)[None])
    scales = jnp.asarray([[scale]], jnp.uint8)
    return np.asarray(dequantize(QArray.planar(data, scales, rtn.FORMATS["MXFP4"], (1, 32))))[0]


def test_mxfp4_has_the_earlier_code_in_the_low_nibble():
    np.testing.assert_array_equal(mxfp4(127)[:6], [0, 0.5, 0.5, 1, 1, 1.5])
    np.testing.assert_array_equal(mxfp4(130), 8 * mxfp4(127))  # an exponent, not a number
    assert np.isnan(mxfp4(255)).all()
    data = jnp.asarray([[0xF9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], jnp.uint8)
    scales = jnp.asarray([[127]], jnp.uint8)
    got = dequantize(QArray.planar(data, scales, rtn.FORMATS["MXFP4"], (1, 32)))
    np.testing.assert_array_equal(got[0, :3], [-0.5, -6, 0])


def test_ggufs_mxfp4_has_the_first_sixteen_in_the_low_nibbles():
    block = np.frombuffer(bytes([127]) + E2M1_BYTES, np.uint8)[None]
    got = np.asarray(dequantize(QArray.create(block, FORMATS["MXFP4"], (1, 32))))[0]
    np.testing.assert_array_equal(got[:6], [0, 0.5, 1, 1.5, 2, 3])
    np.testing.assert_array_equal(got[16:22], [0.5, 1, 1.5, 2, 3, 4])


def test_a_block_of_nf4_at_the_end():
    x = np.arange(70, dtype=np.float32) - 35
    method = NF4(double=False)
    with pytest.raises(ConfigError, match="group_size 64 does not divide the width 70"):
        method.pack(jnp.asarray(x[None]))
    q = method.pack(jnp.asarray(x[None, :64]))
    assert float(q.scale[0, 0]) == 35
    assert int(q.data[0, 3]) == 0x11  # elements 6 and 7: -29 and -28, both -0.696 of 35
    # The last six are a block of their own: 29 and 30 of 34.
    tail = np.concatenate([x[64:], np.zeros(2, np.float32)])
    q = NF4(double=False, group_size=8).pack(jnp.asarray(tail[None]))
    np.testing.assert_allclose(dequantize(q)[0, :2], [24.580532, 34], rtol=1e-6)
    assert int(q.data[0, 2]) == 0xFF
