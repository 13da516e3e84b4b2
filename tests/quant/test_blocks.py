"""Block decoders: literals worked by hand, then gguf-py as the oracle on random bytes."""

import struct
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.quant.blocks import FORMATS, decode_blocks, dequantize_numpy
from infer.quant.formats import GGML_TYPES
from infer.quant.iq_grids import GRIDS


def assert_same_bits(got, want):
    """Equal bit by bit, but for a NaN's payload."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == np.float32
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def decode(name: str, block: bytes) -> np.ndarray:
    """Weights of one block, the same from numpy and from JAX."""
    packed = np.frombuffer(block, np.uint8)
    host = decode_blocks(np, packed[None], FORMATS[name])[0]
    assert_same_bits(decode_blocks(jnp, jnp.asarray(packed), FORMATS[name]), host)
    return host


# One block of each format by hand.


def test_float_formats():
    assert decode("F32", struct.pack("<f", -1.5)).tolist() == [-1.5]
    assert decode("F16", b"\x01\x00").tolist() == [2.0**-24]  # the smallest subnormal
    assert decode("BF16", b"\x80\x3f").tolist() == [1.0]
    assert decode("BF16", b"\x01\x00").tolist() == [2.0**-133]  # a subnormal of float32


def test_q4_0_low_nibbles_come_first_and_zero_is_8():
    w = decode("Q4_0", struct.pack("<e", 0.5) + b"\x90" + b"\x8f" + b"\x88" * 14)
    assert w[[0, 16, 1, 17]].tolist() == [-4.0, 0.5, 3.5, 0.0]
    assert w[2:16].tolist() == [0.0] * 14


def test_q4_0_takes_a_negative_scale():
    w = decode("Q4_0", struct.pack("<e", -0.5) + b"\x00" * 16)
    assert w.tolist() == [4.0] * 32


def test_q4_1_adds_the_minimum():
    w = decode("Q4_1", struct.pack("<ee", 0.25, -2.0) + b"\xf1" + b"\x00" * 15)
    assert w[[0, 16, 1]].tolist() == [-1.75, 1.75, -2.0]


def test_q5_0_takes_its_fifth_bit_from_the_word():
    high = struct.pack("<I", 1 << 0 | 1 << 31)
    w = decode("Q5_0", struct.pack("<e", 1.0) + high + b"\x03" + b"\x00" * 14 + b"\x50")
    assert w[[0, 31, 15, 1]].tolist() == [3.0, 5.0, -16.0, -16.0]


def test_q5_1_adds_the_minimum():
    high = struct.pack("<I", 1 << 16)
    w = decode("Q5_1", struct.pack("<ee", 2.0, 1.0) + high + b"\x21" + b"\x00" * 15)
    assert w[[0, 16, 1]].tolist() == [3.0, 37.0, 1.0]


def test_q8_0_is_signed():
    w = decode("Q8_0", struct.pack("<e32b", 0.5, -128, 127, *range(30)))
    assert w[:5].tolist() == [-64.0, 63.5, 0.0, 0.5, 1.0]


# The 12 bytes hold scales 1, 2, 3, 4, 25, 42, 59, 12 and minima 5, 6, 7, 8, 17, 34, 51, 4.
PACKED_SCALES = bytes.fromhex("4182c304 4586c708 192a3b4c")
Q4_K_BLOCK = (
    struct.pack("<ee", 0.125, 0.0625)
    + PACKED_SCALES
    + bytes((37 * i + 11) % 256 for i in range(128))
)


def test_q4_k_unpacks_the_scales_of_the_upper_sub_blocks():
    """A block of random-looking bytes; all-zero test data hides misread 6-bit scales."""
    w = decode("Q4_K", Q4_K_BLOCK)
    assert w[[0, 1, 31, 32, 63, 64, 128, 224, 255]].tolist() == [
        1.0625,
        -0.3125,
        0.4375,
        -0.375,
        1.625,
        3.6875,
        33.3125,
        20.75,
        8.75,
    ]
    assert w.sum() == 4111.0


def test_q4_k_decodes_every_block_of_a_row():
    half = struct.pack("<e", 0.25) + Q4_K_BLOCK[2:]
    data = np.frombuffer(Q4_K_BLOCK + half, np.uint8)
    w = dequantize_numpy(data, FORMATS["Q4_K"], (1, 512))
    assert w[0, 0] == 1.0625  # .125 * 1 * 11 - .0625 * 5
    assert w[0, 256] == 2.4375  # .25 * 1 * 11 - .0625 * 5
    assert w[0, 511] == 17.75  # .25 * 12 * 6 - .0625 * 4
    assert w[0, 255] == 8.75


def test_q5_k_takes_bit_j_of_a_byte_for_sub_block_j():
    high = bytes([0b10000010] + [0] * 31)
    w = decode("Q5_K", struct.pack("<ee", 1.0, 1.0) + PACKED_SCALES + high + b"\x21" * 128)
    assert w[0] == 1 * 1 - 5
    assert w[32] == 2 * (2 + 16) - 6
    assert w[33] == 2 * 2 - 6
    assert w[224] == 12 * (2 + 16) - 4
    assert w[225] == 12 * 2 - 4


def test_q6_k_keeps_its_scale_last():
    low = b"\x21" + b"\x00" * 127
    high = b"\x01" + b"\x00" * 63
    scales = struct.pack("<16b", 2, 1, 0, 0, -1, *[0] * 11)
    w = decode("Q6_K", low + high + scales + struct.pack("<e", 1.0))
    assert w[0] == 2 * (17 - 32)
    assert w[1] == 2 * -32
    assert w[16] == -32
    assert w[64] == -1 * (2 - 32)  # the high nibble of byte 0
    assert w[65] == 32


def test_q2_k_and_q3_k():
    w = decode("Q2_K", b"\x32" + b"\x00" * 15 + b"\x03" * 64 + struct.pack("<ee", 1.0, 0.5))
    assert w[:17].tolist() == [2 * 3 - 0.5 * 3] * 16 + [0.0]
    # Sub-scale 0 is 33 - 32: nibble 1 of byte 0 under pair 2 of byte 8.
    packed = b"\x01" + b"\x00" * 7 + b"\x02" + b"\x00" * 3
    w = decode("Q3_K", b"\x01" * 16 + b"\x00" * 16 + b"\x02" * 64 + packed + struct.pack("<e", 1.0))
    assert w[:16].tolist() == [2.0] * 16  # bit set: nothing is taken off
    assert w[16:32].tolist() == [-32.0 * (2 - 4)] * 16


# Signs and points of the i-quants: point 0 of a set has the smallest value in every coordinate.


def test_iq2_xxs_has_an_even_number_of_minuses():
    word = 1 | 0b11 << 7 | 3 << 28  # signs of points 0 and 1, the scale of all four
    w = decode("IQ2_XXS", struct.pack("<eII", 1.0, 0, word) + b"\0" * 56)
    step = (3 + 0.5) / 4 * 8
    assert w[:8].tolist() == [-step, *[step] * 6, -step]  # one bit: the eighth makes it even
    assert w[8:16].tolist() == [-step, -step, *[step] * 6]
    assert w[16:32].tolist() == [step] * 16 and w[32:].tolist() == [1.0] * 224


def test_iq2_xs_keeps_signs_beside_the_code():
    words = struct.pack("<32H", 0b1 << 9, 511, *[0] * 30)
    w = decode("IQ2_XS", struct.pack("<e", 2.0) + words + b"\x10" + b"\0" * 7)
    assert w[:8].tolist() == [-2.0, *[2.0] * 6, -2.0]
    assert w[8:16].tolist() == [43 / 4] * 8  # the last point: the largest value everywhere
    assert w[16:32].tolist() == [2 * 1.5 / 4 * 8] * 16  # the high nibble is the next scale


def test_iq2_s_takes_two_high_bits_and_eight_signs():
    low = b"\xff" + b"\0" * 31
    signs = b"\x81\x01" + b"\0" * 30
    w = decode("IQ2_S", struct.pack("<e", 1.0) + low + signs + b"\x03" + b"\0" * 15)
    assert w[:8].tolist() == [-43 / 8, *[43 / 8] * 6, -43 / 8]  # point 1023
    assert w[8:16].tolist() == [-1.0, *[1.0] * 7]


def test_iq3_xxs_has_a_code_for_four():
    words = struct.pack("<8I", 1 | 1 << 28, *[0] * 7)
    w = decode("IQ3_XXS", struct.pack("<e", 1.0) + b"\0\0\0" + b"\0" * 61 + words)
    assert w[:8].tolist() == [-3.0, *[3.0] * 6, -3.0]
    assert w[32:].tolist() == [1.0] * 224


def test_iq3_s_takes_one_high_bit_and_odd_scales():
    signs = b"\x10" + b"\0" * 31
    w = decode(
        "IQ3_S",
        struct.pack("<e", 1.0) + b"\xff" + b"\0" * 63 + b"\1" + b"\0" * 7 + signs + b"\x52\0\0\0",
    )
    assert w[:4].tolist() == [5.0, 5.0, 75.0, 75.0]  # point 511; its scale is 2 * 2 + 1
    assert w[4:8].tolist() == [-5.0, 5.0, 5.0, 5.0]
    assert w[32:36].tolist() == [11.0] * 4  # the high nibble: 2 * 5 + 1


def test_iq1_s_shifts_by_an_eighth():
    words = struct.pack("<8H", 0x8000, 0x7000 | 7, *[0] * 6)
    w = decode("IQ1_S", struct.pack("<e", 1.0) + b"\0" * 4 + b"\xff" + b"\0" * 27 + words)
    assert w[:32].tolist() == [-1.125] * 32  # point 0 is -1 everywhere
    assert w[32:40].tolist() == [15 * 1.125] * 8  # point 2047 is +1, the scale 2 * 7 + 1
    assert w[64:].tolist() == [-0.875] * 192


def test_iq1_m_spreads_its_scale_over_four_words():
    words = struct.pack("<4H", 0b001, 0, 0xC000, 0x3000)  # 0x3c00 is 1.0
    high = b"\x80" + b"\0" * 15  # the second code shifts down
    w = decode("IQ1_M", b"\0" * 32 + high + words)
    assert w[:8].tolist() == [3 * -0.875] * 8
    assert w[8:16].tolist() == [3 * -1.125] * 8
    assert w[16:].tolist() == [-0.875] * 240


def test_iq4_values_are_uneven():
    w = decode("IQ4_NL", struct.pack("<e", 0.5) + b"\xf0" + b"\x88" * 15)
    assert w[[0, 16, 1]].tolist() == [-63.5, 56.5, 0.5]
    scales = struct.pack("<H4B", 0b0110, 0x10, 0, 0, 0)  # scales 32 + 0 and 16 + 1, the rest 0
    w = decode("IQ4_XS", struct.pack("<e", 1.0) + scales + b"\x80" * 16 + b"\x08" * 112)
    assert w[[0, 16]].tolist() == [0.0, 0.0]
    assert w[[32, 48]].tolist() == [-15.0, -15.0 * -127]
    assert w[[64, 80]].tolist() == [-32.0, -32.0 * -127]


# Ternary.


def test_tq1_0_has_five_digits_a_byte():
    """Digits 2, 0, 1, 2, 1 are the number 178 of 243, in a byte ceil(178 * 256 / 243) = 188."""
    w = decode("TQ1_0", bytes([188]) + b"\0" * 51 + struct.pack("<e", 0.5))
    assert w[[0, 32, 64, 96, 128]].tolist() == [0.5, -0.5, 0.0, 0.5, 0.0]
    assert w[1] == -0.5
    w = decode("TQ1_0", b"\0" * 48 + bytes([188]) + b"\0" * 3 + struct.pack("<e", 1.0))
    assert w[[240, 244, 248, 252]].tolist() == [1.0, -1.0, 0.0, 1.0]


def test_tq2_0_goes_through_planes_of_32():
    w = decode("TQ2_0", b"\x92" + b"\x55" * 63 + struct.pack("<e", 3.0))
    assert w[[0, 32, 64, 96]].tolist() == [3.0, -3.0, 0.0, 3.0]
    assert w[1:32].tolist() == [0.0] * 31


# Microscaling.

E2M1 = bytes.fromhex("1021324354657607" * 2)


def test_mxfp4_has_the_first_half_in_the_low_nibbles():
    w = decode("MXFP4", b"\x7f" + E2M1)
    assert w[:6].tolist() == [0, 0.5, 1, 1.5, 2, 3]
    assert w[16:22].tolist() == [0.5, 1, 1.5, 2, 3, 4]
    w = decode("MXFP4", b"\x7f" + b"\xf9" * 16)
    assert w[[0, 16]].tolist() == [-0.5, -6.0]


def test_mxfp4_scale_bytes_are_exponents():
    assert decode("MXFP4", b"\x82" + b"\x22" * 16).tolist() == [8.0] * 32  # 130
    tiny = decode("MXFP4", b"\x00" + b"\x12" * 16)
    assert tiny[[0, 16]].tolist() == [2.0**-127, 2.0**-128]  # subnormal, and not flushed
    assert np.isnan(decode("MXFP4", b"\xff" + b"\x20" * 16)).all()


def test_nvfp4_has_a_scale_for_each_sixteen():
    w = decode("NVFP4", bytes([0x38, 0x40, 0x01, 0x7E]) + b"\x72" * 32)
    assert w[:16].tolist() == [1.0] * 8 + [6.0] * 8  # 0x38 is 1
    assert w[16:32].tolist() == [2.0] * 8 + [12.0] * 8
    assert w[32] == 2.0**-9 and w[63] == 448 * 6.0
    assert decode("NVFP4", bytes([0x7F, 0x80, 0xB8, 0]) + b"\x22" * 32)[::16].tolist() == [
        0.0,
        0.0,
        1.0,  # bit 7 is not read
        0.0,
    ]


@pytest.mark.parametrize("name", GRIDS)
def test_points_are_gguf_pys(name):
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    eighths = 8 if name == "IQ1_S" else 1
    np.testing.assert_array_equal(GRIDS[name], theirs.grid[0, 0] * eighths)


# Random bytes against gguf-py.


def oracle(packed: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        w = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])
    if name == "MXFP4":  # the one difference: gguf-py takes the scale NaN for 2^128
        w.reshape(-1, 32)[packed.reshape(-1, 17)[:, 0] == 255] = np.nan
    return w


def oracle_decodes(format) -> bool:
    try:
        oracle(np.zeros((1, format.block_bytes), np.uint8), format.name)
    except NotImplementedError:
        return False
    return True


# Not only what we decode: a type that gguf-py learns is a test that fails until we do.
NUMBERS = ("I8", "I16", "I32", "I64", "F64")
DECODABLE = [f.name for f in GGML_TYPES.values() if f.name not in NUMBERS and oracle_decodes(f)]


def test_the_oracle_decodes_all_that_we_do():
    assert set(FORMATS) == set(DECODABLE) and len(DECODABLE) >= 26


@pytest.mark.parametrize("name", DECODABLE)
def test_random_bytes_decode_as_in_gguf_py(name):
    """Every bit pattern: infinite and NaN scales, subnormals, negative zeros."""
    format = FORMATS[name]
    rng = np.random.default_rng(7)
    num_rows, num_blocks = 5, max(16, 512 // format.group)
    packed = rng.integers(0, 256, (num_rows, num_blocks * format.block_bytes), np.uint8)
    if name == "MXFP4":  # each scale byte once at the least
        packed = packed.reshape(-1, 17)[np.arange(320) % 80]
        packed[:256, 0] = np.arange(256)
        num_blocks, packed = 64, packed.reshape(5, -1)
    shape = (num_rows, num_blocks * format.group)
    want = oracle(packed, name)
    assert want.shape == shape

    assert_same_bits(dequantize_numpy(packed, format, shape), want)

    blocks = packed.reshape(num_rows, num_blocks, format.block_bytes)
    eager = decode_blocks(jnp, jnp.asarray(blocks), format)
    jitted = jax.jit(lambda b: decode_blocks(jnp, b, format))(blocks)
    assert_same_bits(eager.reshape(shape), want)
    assert_same_bits(jitted.reshape(shape), want)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_only_the_sum_rounds(name):
    """The value is the exact one rounded once, so that no fused multiply-add can change it.

    In float64 every step is exact here: 22 bits of product, 50 bits of sum.
    """
    format = FORMATS[name]
    rng = np.random.default_rng(11)
    packed = rng.integers(0, 256, (64, format.block_bytes), np.uint8)
    at = 80 if name == "Q2_K" else 0
    packed[:, at : at + 4] = rng.uniform(-9, 9, (64, 2)).astype(np.float16).view(np.uint8)
    d, m = packed[:, at : at + 4].copy().view(np.float16).astype(np.float64).T

    def with_scales(d16, m16):
        part = packed.copy()
        part[:, at : at + 4] = np.stack([d16, m16], -1).astype(np.float16).view(np.uint8)
        return decode_blocks(np, part, format).astype(np.float64)

    one, zero = np.ones(64), np.zeros(64)
    exact = with_scales(one, zero) * d[:, None] + with_scales(zero, one) * m[:, None]
    np.testing.assert_array_equal(decode_blocks(np, packed, format), exact.astype(np.float32))


# The host path.


def test_host_path_casts_once_and_keeps_the_shape():
    rng = np.random.default_rng(3)
    packed = rng.integers(0, 60, (6, 34), np.uint8)
    want = dequantize_numpy(packed, FORMATS["Q8_0"], (2, 3, 32))
    assert want.shape == (2, 3, 32)
    half = dequantize_numpy(packed, FORMATS["Q8_0"], (2, 3, 32), np.float16)
    np.testing.assert_array_equal(half, want.astype(np.float16))
    scalar = dequantize_numpy(np.frombuffer(struct.pack("<f", 2.5), np.uint8), FORMATS["F32"], ())
    assert scalar.shape == () and scalar == 2.5


def test_host_path_decodes_across_chunks():
    format = FORMATS["Q4_0"]
    num_rows = 300  # 307,200 weights: no whole number of chunks
    packed = np.tile(np.arange(18, dtype=np.uint8), (num_rows, 32))
    packed[:, 1] = np.arange(num_rows) % 100  # another scale in each row's first block
    w = dequantize_numpy(packed, format, (num_rows, 1024))
    assert_same_bits(w, oracle(packed, "Q4_0"))


def test_host_path_needs_little_beside_the_result():
    packed = np.zeros((4096, 34 * 32), np.uint8)
    tracemalloc.start()
    try:
        w = dequantize_numpy(packed, FORMATS["Q8_0"], (4096, 1024))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert w.nbytes == 16 << 20
    assert peak < w.nbytes + (1 << 20)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 32), "68 bytes do not hold Q8_0 of shape \\(3, 32\\), which takes 102"),
        ((2, 31), "row of 31 weights is no whole number of Q8_0 blocks of 32"),
    ],
)
def test_host_path_refuses_a_shape_that_does_not_fit(shape, message):
    with pytest.raises(ValueError, match=message):
        dequantize_numpy(np.zeros((2, 34), np.uint8), FORMATS["Q8_0"], shape)


def test_a_format_without_a_decoder_is_named():
    q8_k = GGML_TYPES[15]
    with pytest.raises(ValueError, match=r"Q8_K \(blocks\) has no block decoder; use one of F32"):
        decode_blocks(np, np.zeros((1, 292), np.uint8), q8_k)
