"""Rotary frequencies and rotation against worked values (cases M01, M02, M07, M15)."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.config import RopeConfig, RopeScaling, RopeScalingKind
from infer.ops.frequencies import attention_factor, inverse_frequencies, yarn_mscale
from infer.ops.rope import apply_rope, rope_table

pytestmark = pytest.mark.kernels

LLAMA3 = RopeScaling(
    kind=RopeScalingKind.LLAMA3,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_context=8192,
)


def test_llama3_scaling_leaves_fast_pairs_and_divides_slow_ones() -> None:
    plain = inverse_frequencies(RopeConfig(theta=5e5), 64)
    scaled = inverse_frequencies(RopeConfig(theta=5e5, scaling=LLAMA3), 64)
    np.testing.assert_allclose(
        scaled[15:19], [1.2905479e-3, 4.295568e-4, 9.7082878e-5, 1.9461638e-5], rtol=1e-7
    )
    np.testing.assert_array_equal(scaled[:15], plain[:15])


def test_the_divisor_tensor_of_a_gguf_file_gives_the_same_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(theta=5e5), 64)
    scaled = inverse_frequencies(RopeConfig(theta=5e5, scaling=LLAMA3), 64)
    divisors = plain / scaled
    np.testing.assert_allclose(divisors[14:19], [1, 1.6513292, 3.2922621, 9.666729, 32], rtol=1e-7)
    by_tensor = RopeScaling(kind=RopeScalingKind.DIVISORS, divisors=tuple(divisors.tolist()))
    np.testing.assert_allclose(
        inverse_frequencies(RopeConfig(theta=5e5, scaling=by_tensor), 64), scaled, rtol=1e-15
    )


def test_the_float32_angle_at_position_100000_is_off_by_less_than_a_hundredth() -> None:
    cos, _ = rope_table(
        RopeConfig(theta=5e5, scaling=LLAMA3), 64, jnp.asarray([100_000], jnp.int32)
    )
    assert abs(float(cos[0, 15]) - -0.96903748) < 1e-2
    unscaled, _ = rope_table(RopeConfig(theta=5e5), 64, jnp.asarray([100_000], jnp.int32))
    assert abs(float(unscaled[0, 15]) - 0.86962861) < 1e-2


def test_linear_scaling_is_of_the_full_layers_only() -> None:
    full = RopeConfig(theta=1e6, scaling=RopeScaling(kind=RopeScalingKind.LINEAR, factor=8.0))
    np.testing.assert_allclose(inverse_frequencies(full, 8)[:2], [0.125, 0.0039528471], rtol=1e-7)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=1e4), 8)[1], 0.1, rtol=1e-12)


def test_yarn_factor_on_cos_and_sin() -> None:
    ratio = RopeScaling(kind=RopeScalingKind.YARN, factor=40.0, mscale=0.707, mscale_all_dim=0.707)
    assert attention_factor(ratio) == 1.0
    # The part that goes into the softmax scale instead: 192^-0.5 m^2 for DeepSeek-V2-Lite.
    np.testing.assert_allclose(192**-0.5 * yarn_mscale(40.0, 0.707) ** 2, 0.11472139, rtol=1e-7)
    assert (
        attention_factor(RopeScaling(kind=RopeScalingKind.YARN, factor=4.0))
        == 0.1 * np.log(4.0) + 1
    )


def test_pairs_are_split_in_halves() -> None:
    q, k = np.array([1.0, 2, 3, 4], np.float32), np.array([4.0, 3, 2, 1], np.float32)
    turn = lambda x, position: np.asarray(
        apply_rope(
            jnp.asarray(x)[None, None],
            *rope_table(RopeConfig(theta=1e4), 4, jnp.asarray([position], jnp.int32)),
        )
    )[0, 0]
    np.testing.assert_allclose(turn(q, 5) @ turn(k, 2), -1.6155797, rtol=1e-5)
    # Rows permuted first (0, 2, 1, 3) are the adjacent-pair rotation of case M15.
    order = [0, 2, 1, 3]
    np.testing.assert_allclose(turn(q[order], 5) @ turn(k[order], 2), -0.76000217, rtol=1e-5)


def test_dimensions_past_the_rotary_ones_pass_unchanged() -> None:
    x = jnp.arange(12, dtype=jnp.float32).reshape(1, 2, 6)
    cos, sin = rope_table(RopeConfig(dim=4), 6, jnp.asarray([7], jnp.int32))
    y = apply_rope(x, cos, sin)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    assert not np.allclose(y[..., :4], x[..., :4])


def test_dynamic_scaling_raises_the_base_with_the_span() -> None:
    """dim 4, theta 100, factor 2, original 10: a span of 20 gives 100 * (2 * 20 / 10 - 1)^2 = 900,
    whose second frequency is 1/30; up to 10 it is 1/10.
    """
    scaling = RopeScaling(kind=RopeScalingKind.DYNAMIC, factor=2.0, original_context=10)
    rope = RopeConfig(theta=100.0, scaling=scaling)
    positions = jnp.asarray([3, 3, 3], jnp.int32)
    cos, sin = rope_table(rope, 4, positions, jnp.asarray([20, 10, 4], jnp.int32))
    np.testing.assert_allclose(sin[:, 1], np.sin([3 / 30, 0.3, 0.3]), rtol=1e-6)
    np.testing.assert_allclose(cos[:, 0], np.cos(3.0), rtol=1e-6)
    with pytest.raises(ValueError, match=r"dynamic rope scaling depends on .* pass spans"):
        rope_table(rope, 4, positions)


def test_longrope_takes_the_list_of_the_span() -> None:
    """ln 4 / ln 1024 = 0.2: the factor on cos and sin is sqrt(1.2), at every length."""
    scaling = RopeScaling(
        kind=RopeScalingKind.LONGROPE,
        factor=4.0,
        original_context=1024,
        short_factors=(1.0, 2.0),
        long_factors=(4.0, 8.0),
    )
    rope = RopeConfig(theta=100.0, scaling=scaling)
    spans = jnp.asarray([1024, 1025], jnp.int32)
    _, sin = rope_table(rope, 4, jnp.asarray([3, 3], jnp.int32), spans)
    want = np.sin(np.asarray([[3, 0.3 / 2], [3 / 4, 0.3 / 8]])) * 1.0954451
    np.testing.assert_allclose(sin, want, rtol=1e-6)
