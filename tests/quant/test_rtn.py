"""Rounding to nearest: scales by hand, the law of the error, and what breaks quantisers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.quant import codes, rtn
from infer.quant.formats import PlanarFormat
from infer.quant.methods import FP8, MX, NF4, NVFP4, RTN, LLMInt8, Method
from infer.quant.qarray import QArray, dequantize, power_of_two, scales, take_rows

METHODS: dict[str, Method] = {
    "int8": RTN(bits=8, group_size="channel"),
    "int6": RTN(bits=6, group_size=64, scale_dtype="bfloat16"),
    "int5": RTN(bits=5, group_size=32, symmetric=False),
    "int4": RTN(bits=4, group_size=64),
    "int4-restricted": RTN(bits=4, group_size=64, convention="restricted"),
    "int4-signed": RTN(bits=4, group_size=32, convention="signed"),
    "int4-no-clipping": RTN(bits=4, group_size="channel", convention="no_clipping"),
    "int3": RTN(bits=3, group_size=64, symmetric=False, scale_dtype="float32"),
    "int2": RTN(bits=2, group_size="tensor", symmetric=False),
    "llm.int8": LLMInt8(),
    "fp8": FP8(),
    "fp8-e5m2": FP8(code="e5m2", granularity="tensor"),
    "fp8-block": FP8(granularity="block"),
    "nf4": NF4(),
    "nf4-plain": NF4(double=False),
    "fp4": NF4(levels="fp4", group_size=32),
    "mxfp4": MX(),
    "mxfp6": MX(code="e2m3", scale_rule="even"),
    "mxfp6-e3m2": MX(code="e3m2", scale_rule="ceil"),
    "mxfp8": MX(code="e4m3", scale_rule="rceil"),
    "nvfp4": NVFP4(),
}
SHAPE = (24, 192)


@functools.cache
def weight(seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(0.05 * rng.standard_normal(SHAPE), jnp.float32)


@functools.cache
def compiled(name: str):
    return jax.jit(METHODS[name].pack)


def same(a: QArray, b: QArray) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- Scales by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convention, scale, want",
    [
        # h = 8.  The largest magnitude is 6, of -6; the largest number 3.
        ("full", 6 / 7.5, [-6, 3, 1]),
        ("restricted", 6 / 7, [-6, 3, 1]),
        ("signed", 6 / 8, [-6, 3, 1]),
        ("no_clipping", 6 / 8, [-6, 3, 1]),
    ],
)
def test_symmetric_scales_by_hand(convention, scale, want):
    numbers = jnp.asarray([[-6.0, 3.0, 1.0]], jnp.float32)
    got, zero = rtn.int_params(numbers, 4, True, convention)
    np.testing.assert_allclose(got, [scale], rtol=1e-7)
    assert zero.tolist() == [8]
    coded = rtn.int_codes(numbers, got[:, None], zero[:, None], 4, convention == "restricted")
    by_hand = np.clip(np.round(np.array(want) / scale), -8, 7) + 8
    np.testing.assert_array_equal(coded[0], by_hand)


def test_the_scale_of_the_textbook():
    # s = max|w| / (2^(b-1) - 1), z = 0.
    for bits in (2, 3, 4, 5, 6, 8):
        got, _ = rtn.int_params(jnp.asarray([[0.5, -1.0]]), bits, True, "restricted")
        np.testing.assert_allclose(got, [1 / (2 ** (bits - 1) - 1)], rtol=1e-7)


def test_conventions_differ_where_the_largest_is_positive():
    numbers = jnp.asarray([[6.0, -3.0]], jnp.float32)
    scale = {c: float(rtn.int_params(numbers, 4, True, c)[0][0]) for c in rtn.CONVENTIONS}
    assert scale["signed"] == -0.75  # GGUF's: the largest number gets the code -8
    np.testing.assert_allclose(scale["no_clipping"], 6 / 7)
    packed = rtn.quantize_int(jnp.tile(numbers, (1, 4)), rtn.int_format(4), "signed")
    np.testing.assert_allclose(dequantize(packed)[0, :2], [6, -3], rtol=1e-3)


def test_asymmetric_ranges_hold_zero():
    scale, zero = rtn.int_params(jnp.asarray([[1.0, 4.0], [-4.0, -1.0], [-1.0, 2.0]]), 4, False)
    np.testing.assert_allclose(scale, [4 / 15, 4 / 15, 3 / 15], rtol=1e-6)
    assert zero.tolist() == [0, 15, 5]


def test_a_convention_that_is_not_there():
    with pytest.raises(ValueError, match="convention is 'half'; use full, restricted"):
        rtn.int_params(jnp.ones((1, 4)), 4, True, "half")


@pytest.mark.parametrize(
    "rule, want",
    [
        ("floor", [127, 127, 127, 126]),
        ("ceil", [128, 128, 127, 127]),
        ("even", [127, 128, 127, 126]),
        ("rceil", [128, 128, 127, 126]),
    ],
)
def test_powers_of_two_by_hand(rule, want):
    # E2M1, whose largest number is 6 = 1.5 * 2^2.
    most = jnp.asarray([6.9, 7, 4, 3], jnp.float32)
    assert rtn.e8m0_scale(most, "e2m1", rule).tolist() == want


def test_an_e8m0_byte_is_an_exponent():
    got = np.asarray(power_of_two(jnp.asarray([127, 130, 126, 254, 1, 255], jnp.uint8)))
    np.testing.assert_array_equal(got[:5], [1, 8, 0.5, 2.0**127, 2.0**-126])
    assert np.isnan(got[5])


def test_a_rule_that_is_not_there():
    with pytest.raises(ValueError, match="scale_rule is 'round'; use floor, ceil, even, rceil"):
        rtn.e8m0_scale(jnp.ones(2), "e2m1", "round")


# ---- The law of the error -----------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [64, "channel", "tensor"])
@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_the_mean_square_error_is_a_twelfth_of_the_squared_step(bits, granularity):
    # Uniform numbers, so that the law holds at 2 bits as well; no_clipping, so that none is cut
    # off.  Of n samples the mean of u^2, u uniform in [-1/2, 1/2], has the standard deviation
    # 1 / sqrt(180 n) around 1 / 12.
    rng = np.random.default_rng(bits)
    w = jnp.asarray(rng.uniform(-1, 1, (64, 512)), jnp.float32)
    method = RTN(bits=bits, group_size=granularity, convention="no_clipping", scale_dtype="float32")
    q = method.pack(w)
    step = np.asarray(rtn.spread(scales(q), q.format, (64, 512)), np.float64)
    error = (np.asarray(dequantize(q), np.float64) - np.asarray(w)) / step
    assert np.abs(error).max() <= 0.5 + 1e-5
    law = 5 / np.sqrt(180 * w.size)
    # The range is a whole number of steps but for its upper half step, and the largest number of a
    # group lies on a code: with L levels and g numbers the mean is off by order 1 / g.
    group = {"channel": 512, "tensor": 512 * 64}.get(granularity, granularity)
    assert abs(np.mean(error**2) - 1 / 12) < law + 0.2 / group


def test_half_the_step_is_a_quarter_of_the_error():
    w = weight()
    mse = [
        float(jnp.mean((dequantize(RTN(bits=b, group_size=64).pack(w)) - w) ** 2))
        for b in (4, 5, 6)
    ]
    np.testing.assert_allclose([mse[0] / mse[1], mse[1] / mse[2]], 4, rtol=0.2)


# ---- Any method ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_codes_are_equal_with_and_without_jit(name):
    same(METHODS[name].pack(weight()), compiled(name)(weight()))


@pytest.mark.parametrize("name", METHODS)
def test_layers_in_a_stack_are_those_one_by_one(name):
    stacked = jax.vmap(METHODS[name].pack)(jnp.stack([weight(0), weight(1)]))
    for i in (0, 1):
        same(jax.tree.map(lambda x, i=i: x[i], stacked), compiled(name)(weight(i)))


@pytest.mark.parametrize("name", METHODS)
def test_the_bytes_are_those_of_the_formula(name):
    q = compiled(name)(weight())
    assert q.nbytes == q.format.num_bytes(SHAPE)
    assert isinstance(q.format, PlanarFormat)
    parts = dict(zero=q.zero, global_scale=q.global_scale)
    QArray.planar(q.data, q.scale, q.format, q.shape, **parts)  # its own check


@pytest.mark.parametrize("name", METHODS)
def test_what_was_decoded_is_coded_to_itself(name):
    q = compiled(name)(weight())
    value = dequantize(q)
    again = dequantize(compiled(name)(value))
    if name in ("nf4", "fp4", "int8", "int4", "int6", "int4-no-clipping"):
        # The scale moves where the largest number is no code, or where it was rounded itself: near
        # (half of a step that may be a twelfth larger, and its rounding), not equal.
        step = np.asarray(rtn.spread(scales(q), q.format, SHAPE))
        assert np.all(np.abs(again - value) <= 0.6 * np.abs(step) + 1e-7)
    else:
        np.testing.assert_allclose(again, value, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_no_number_is_further_than_its_neighbours(name):
    # Under the scale that is stored, no other code is nearer than the one that was taken.
    q = compiled(name)(weight())
    step = np.asarray(rtn.spread(scales(q), q.format, SHAPE), np.float64)
    w = np.asarray(weight(), np.float64)
    if q.format.code == "int":
        least = 1 if getattr(METHODS[name], "convention", "restricted") == "restricted" else 0
        zero = 1 << (q.format.bits - 1)
        if not q.format.symmetric:
            zero = np.asarray(rtn.spread(q.zero, q.format, SHAPE), int)[..., None]
            least = 0
        levels = np.arange(least, 1 << q.format.bits) - zero
    else:
        levels = codes.LEVELS[q.format.code]
        levels = levels[np.isfinite(levels)].astype(np.float64)
    best = np.abs(step[..., None] * levels - w[..., None]).min(-1)
    np.testing.assert_allclose(np.abs(np.asarray(dequantize(q)) - w), best, atol=3e-7)


@pytest.mark.parametrize("name", METHODS)
def test_zeros_an_outlier_and_small_and_large_numbers(name):
    w = np.array(weight())
    w[0] = 0
    w[1, :64] = 0
    w[2, 7] = 40
    w[3] *= np.float32(1e-30)
    q = compiled(name)(jnp.asarray(w))
    got = np.asarray(dequantize(q))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_array_equal(got[1, :64], 0)
    # 2 bits reach the outlier within a third of the range; a tensor's minimum shifts it.
    np.testing.assert_allclose(got[2, 7], 40, rtol=0.26 if name.startswith("mxfp4") else 0.15)
    same(q, METHODS[name].pack(jnp.asarray(w)))


@pytest.mark.parametrize("name", METHODS)
def test_a_matrix_of_zeros(name):
    np.testing.assert_array_equal(dequantize(compiled(name)(jnp.zeros(SHAPE))), 0)


@pytest.mark.parametrize("bits, convention", [(8, "full"), (4, "signed")])
def test_scales_that_float16_has_few_bits_for_clip_nothing(bits, convention):
    """Steps of float16 there are 2^-24: the scale is the next one that reaches the whole range."""
    format, half = rtn.int_format(bits, 16), 2 ** (bits - 1)
    jitted = jax.jit(rtn.quantize_int, static_argnums=(1, 2))
    for largest in (3e-4, 1e-5, 2e-6, 1e-7):
        w = np.linspace(-1, 0.9, 64, dtype=np.float32).reshape(4, 16) * np.float32(largest)
        got = rtn.quantize_int(jnp.asarray(w), format, convention)
        scale = np.abs(np.asarray(got.scale, np.float64))
        exact = np.abs(w).max(1, keepdims=True) / (half if convention == "signed" else half - 0.5)
        assert (scale >= exact * (1 - 1e-6)).all() and (scale - exact < 2.0**-24).all()
        assert (np.abs(np.asarray(dequantize(got)) - w) <= scale * 0.5 + 1e-12).all()
        np.testing.assert_array_equal(got.data, jitted(jnp.asarray(w), format, convention).data)


@pytest.mark.parametrize("name", ["int4-restricted", "nf4-plain", "fp8", "mxfp8", "nvfp4", "int3"])
def test_numbers_near_the_ends_of_float32(name):
    if name == "int4-restricted":  # scales in float16 overflow; the driver refuses them by name
        assert not np.isfinite(np.asarray(compiled(name)(weight() * 1e30).scale)).all()
        return
    for factor in (1e36, 1e-30):
        w = weight() * np.float32(factor)
        got = np.asarray(dequantize(compiled(name)(w)))
        assert np.isfinite(got).all()
        relative = np.linalg.norm(got / factor - weight()) / np.linalg.norm(weight())
        assert relative < 0.2


def test_blocks_at_ragged_edges():
    # 24 x 192 in blocks of 128 x 128: one row of two blocks, the second of them 24 x 64.
    q = compiled("fp8-block")(weight())
    assert q.scale.shape == (1, 2)
    w = np.asarray(weight())
    want = [np.abs(w[:, :128]).max() / 448, np.abs(w[:, 128:]).max() / 448]
    np.testing.assert_allclose(q.scale[0], want, rtol=1e-6)
    alone = FP8(granularity="block").pack(weight()[:, 128:])
    np.testing.assert_array_equal(dequantize(q)[:, 128:], dequantize(alone))


def test_a_width_of_eight():
    w = weight()[:, :8]
    for bits in (2, 3, 4, 5, 6, 8):
        q = RTN(bits=bits, group_size=8).pack(w)
        assert q.data.shape == (24, bits) and q.scale.shape == (24, 1)
        assert q.nbytes == 24 * (bits + 2)
        np.testing.assert_array_equal(take_rows(q, np.array([5])), dequantize(q)[5:6])


def test_a_share_of_the_range_clips():
    w = jnp.asarray([[-8.0, 4.0, 1.0, 0.5, 2.0, 0.0, 1.0, 3.0]])
    q = rtn.quantize_int(w, rtn.int_format(4, scale_dtype="float32"), "restricted", 0.5)
    np.testing.assert_allclose(scales(q), [[4 / 7]])
    np.testing.assert_allclose(dequantize(q)[0, 0], -4, rtol=1e-6)


@pytest.mark.parametrize("code", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
@pytest.mark.parametrize("rule", rtn.E8M0_RULES)
def test_a_block_of_zeros_has_codes_of_zero(code, rule):
    # Its scale is 2^-127, by which XLA's CPU, to which subnormals are 0, cannot divide.
    q = MX(code=code, scale_rule=rule).pack(jnp.zeros((8, 32)))
    np.testing.assert_array_equal(q.data, 0)
    np.testing.assert_array_equal(q.scale, 0)


def test_a_quotient_is_rounded_once():
    a = np.random.default_rng(0).standard_normal((4, 96)).astype(np.float32)
    scale = np.abs(a).max(1, keepdims=True) / np.float32(7)
    for b in (7.5, 57344.0, scale):
        want = a / np.float32(b)
        x = jnp.asarray(a)
        constant = jax.jit(lambda a, b=b: rtn.quotient(a, b))
        for got in (rtn.quotient(x, b), jax.jit(rtn.quotient)(x, b), constant(x)):
            np.testing.assert_array_equal(got, want)
    ends = jnp.asarray([np.inf, -np.inf, np.nan, 0], jnp.float32)
    np.testing.assert_array_equal(rtn.quotient(ends, 3.0), ends)


def test_a_group_of_nvfp4_far_below_the_others_keeps_its_largest_numbers():
    # The scale that would be right, 0.4 * 2^-9, is stored as 2^-9 and not as 0.
    w = np.zeros((1, 32), np.float32)
    w[0, 0] = 6 * 448  # global scale 1
    w[0, 16:19] = np.float32(6 * 0.4 * 2**-9) * np.array([1, -0.5, 0.01], np.float32)
    q = NVFP4().pack(jnp.asarray(w))
    assert float(q.global_scale) == 1 and q.scale.tolist() == [[0x7E, 1]]
    np.testing.assert_array_equal(dequantize(q)[0, 16:19] * 2**9, [2, -1, 0])
