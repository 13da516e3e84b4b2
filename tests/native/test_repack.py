"""Repacked weights: what they hold, what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.native import repack as repacking
from infer.native.linear import linear
from infer.native.repack import repack
from infer.quant.blocks import FORMATS as BLOCKS
from infer.quant.qarray import QArray
from tests.native.weights import FLOATS, FORMATS, PACKED, dense, random_weight


@pytest.mark.parametrize("name", FORMATS)
def test_about_the_same_bytes(name: str) -> None:
    weight = random_weight(name, (64, 512))
    # Q4_K's and Q5_K's scales and minima of 6 bits take a byte.
    assert 1 <= repack(weight).data.nbytes / weight.nbytes < (1.03 if name in PACKED else 1.001)


@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_is_lost(name: str) -> None:
    # The products with unit vectors are the weights: 127 times a code, over 127.
    weight = random_weight(name, (5, 256))
    packed = repack(weight)
    (y,) = linear(jnp.eye(256, dtype=jnp.float32) * 127, (packed,))
    np.testing.assert_allclose(y.T / 127, dense(weight), rtol=3e-7, atol=1e-7)


def test_weights_anywhere_in_memory() -> None:
    weight = random_weight("Q4_1", (40, 64))
    wide = np.zeros((40, 50), np.uint8)
    wide[:, 3:43] = weight.data
    want = repack(weight).data
    for data in (wide[:, 3:43], np.asfortranarray(weight.data), jnp.asarray(weight.data)):
        assert np.array_equal(repack(QArray.create(data, BLOCKS["Q4_1"], (40, 64))).data, want)


def test_what_has_no_kernel_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="weights in IQ4_NL"):
        repack(random_weight("IQ4_NL", (4, 32)))
    with pytest.raises(NotImplementedError, match="multiple of 32, not 48"):
        repack(jnp.zeros((4, 48), jnp.float32))
    with pytest.raises(NotImplementedError, match="int32"):
        repack(jnp.zeros((4, 32), jnp.int32))


def test_floats_keep_their_dtype() -> None:
    for name, dtype in FLOATS.items():
        assert repack(jnp.zeros((4, 32), dtype)).format == name


def test_no_second_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    zeros = repacking._aligned_zeros
    monkeypatch.setattr(repacking, "_aligned_zeros", lambda s: made.append(zeros(s)) or made[-1])
    packed = repack(random_weight("Q8_0", (4096, 256)))
    assert packed.data.unsafe_buffer_pointer() == made[0].ctypes.data
