"""Pools of 8 and 4 bits: written by hand, and read by the paged kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas import kv_formats
from infer.pallas.paged_attention import (
    PagedAttentionBlocks,
    paged_attention,
    paged_attention_reference,
)
from infer.quant.kv import quantize_kv
from tests.pallas.paged_cases import f32, paged_case, quantized
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

LAST = [-1, 0, 32, 89]


@pytest.mark.parametrize(
    ("kv_format", "scale_dtype", "width", "dtype"),
    [
        ("int8", "float32", 32, "float32"),
        ("fp8", "bfloat16", 32, "bfloat16"),
        ("int4", "float32", 80, "float32"),
    ],
)
def test_decode_reads_8_and_4_bits(
    kv_format: str, scale_dtype: str, width: int, dtype: str
) -> None:
    case = paged_case(LAST, heads=4, kv=2, width=width, dtype=dtype)
    bits, scales = quantized(case, kv_format, scale_dtype)
    options = {"scale": 0.3, "softcap": 5.0}
    blocks = PagedAttentionBlocks(block_keys=16, split_keys=32)
    o = jax.jit(functools.partial(paged_attention, blocks=blocks, interpret=True, **options))(
        *bits, **scales
    )
    reference = jax.jit(functools.partial(paged_attention_reference, **options))
    want, _ = reference(*bits, **scales)
    np.testing.assert_allclose(f32(o), f32(want), **tolerance(dtype, 90))
    # The reference read the same bits; what they stand for is near the unquantised numbers.
    exact, _ = reference(*case)
    error = np.linalg.norm(f32(o) - f32(exact)) / np.linalg.norm(f32(exact))
    assert error < {"int8": 0.02, "fp8": 0.06, "int4": 0.2}[kv_format]


def test_all_e4m3_numbers_and_nibbles_are_read_exactly() -> None:
    e4m3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    e4m3 = e4m3[np.isfinite(e4m3.astype(np.float32))]
    assert e4m3.size == 254
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        (read,) = kv_formats.unpack(jnp.asarray(e4m3), jnp.dtype(dtype))
        np.testing.assert_array_equal(f32(read), e4m3.astype(np.float32))
    low, high = kv_formats.unpack(jnp.asarray([0x1F, 0x28, 0xF1], jnp.uint8), jnp.dtype("float32"))
    np.testing.assert_array_equal(low, [7, 0, -7])
    np.testing.assert_array_equal(high, [-7, -6, 7])


def test_quantize_kv_by_hand() -> None:
    x = jnp.asarray([[1.0, -1.9, 0.5, 4.0], [0.0, 0.0, 0.0, 0.0]], jnp.float32)
    data, scales = quantize_kv(x, "int8")
    np.testing.assert_array_equal(data, [[32, -60, 16, 127], [0, 0, 0, 0]])
    np.testing.assert_allclose(scales, [4 / 127, 0])
    data, scales = quantize_kv(x, "int4")
    # 1.75, -3.325, 0.875, 7 round to 2, -3, 1, 7; low nibbles are the first half.
    np.testing.assert_array_equal(data, [[10 | 9 << 4, 5 | 15 << 4], [8 | 8 << 4, 8 | 8 << 4]])
    np.testing.assert_allclose(scales, [4 / 7, 0])
    data, scales = quantize_kv(x, "fp8", jnp.bfloat16)
    assert data.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.bfloat16
    np.testing.assert_allclose(f32(data[0]) * f32(scales[0]), f32(x[0]), rtol=2**-4)
    with pytest.raises(ValueError, match="use int8, int4, float8_e4m3"):
        quantize_kv(x, "int3")
    with pytest.raises(ValueError, match="even head width, not 3"):
        quantize_kv(x[:, :3], "int4")
