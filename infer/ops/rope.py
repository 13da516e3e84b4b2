"""Rotary position embedding, half-split pairs: dimension i turns with dimension i + dim/2.

Source: Su et al. 2021, arXiv 2104.09864.  Frequencies are float64 on the host and float32 on the
device: at position 100,000 the float32 angle is off by less than 1e-2.  Checkpoints stored for
adjacent pairs are reordered by the loader.

Two scalings depend on how long the sequence is.  All keys of a sequence must turn by one set of
frequencies, the cached ones too, so the length that counts is the planned one, the span: it is
given with the positions, and one sequence keeps its span for life.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from infer.config import RopeConfig, RopeScaling, RopeScalingKind


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the angular speed of each pair, float64 [dim / 2], scaling applied; of the scalings
    that depend on a length, what holds up to the original context.
    """
    dim = rope.dim or head_dim
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.scaling is None:
        return plain
    return _SCALED[rope.scaling.kind](plain, rope.scaling, rope.theta, dim)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor that YaRN and LongRoPE put on cos and sin (1 for every other kind).

    Source: Peng et al. 2023, arXiv 2309.00071, section 3.4; DeepSeek's mscale ratio as in
    transformers.  LongRoPE: Ding et al. 2024, arXiv 2402.13753, at every length as in transformers.
    """
    if scaling is None or scaling.kind not in (RopeScalingKind.YARN, RopeScalingKind.LONGROPE):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind is RopeScalingKind.LONGROPE:
        grown = max(math.log(scaling.factor), 0.0)
        return math.sqrt(1 + grown / math.log(scaling.original_context))
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 mscale ln(factor) + 1, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _linear(plain: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    return plain / s.factor


def _divisors(plain: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    return plain / np.asarray(s.divisors, np.float64)


def _llama3(plain: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    """Divide long wavelengths, keep short ones, blend between.  Source: Llama 3.1 model card,
    `rope_scaling`.
    """
    wavelength = 2 * np.pi / plain
    span = s.high_freq_factor - s.low_freq_factor
    blend = np.clip((s.original_context / wavelength - s.low_freq_factor) / span, 0.0, 1.0)
    return (1 - blend) * plain / s.factor + blend * plain


def _yarn(plain: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    """Interpolate slow dimensions, keep fast ones, ramp between.  Source: arXiv 2309.00071, section
    3.2.
    """

    def dimension(turns: float) -> float:
        return dim * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return plain / s.factor * ramp + plain * (1 - ramp)


def _short(plain: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    return plain / np.asarray(s.short_factors, np.float64)


def _unscaled(plain: np.ndarray, s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    return plain


_SCALED = {
    RopeScalingKind.LINEAR: _linear,
    RopeScalingKind.DIVISORS: _divisors,
    RopeScalingKind.LLAMA3: _llama3,
    RopeScalingKind.YARN: _yarn,
    RopeScalingKind.DYNAMIC: _unscaled,
    RopeScalingKind.LONGROPE: _short,
}


def _long(short: Array, scaling: RopeScaling, spans: Array) -> Array:
    """Return the frequencies [..., H2] of sequences of `spans` [..., 1] tokens.

    `short` are those of short sequences.
    DYNAMIC raises the base to theta * (factor * span / original - factor + 1)^(dim / (dim - 2))
    beyond the original context ("dynamic NTK", as in transformers).  LONGROPE takes the other list
    of divisors.
    """
    if scaling.kind is RopeScalingKind.LONGROPE:
        ratio = np.asarray(scaling.short_factors) / np.asarray(scaling.long_factors)
        long = short * jnp.asarray(ratio, jnp.float32).reshape((1,) * (spans.ndim - 1) + (-1,))
        return jnp.where(spans > scaling.original_context, long, short)
    half = short.shape[-1]
    length = jnp.maximum(spans, scaling.original_context).astype(jnp.float32)
    growth = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    # growth^(dim / (dim - 2)) to the power of -2i / dim
    exponent = -jnp.arange(half, dtype=jnp.float32) / (half - 1)
    return short * growth ** exponent.reshape((1,) * (spans.ndim - 1) + (-1,))


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    positions: Int[Array, "*B"],
    spans: Int[Array, "*B"] | None = None,
) -> tuple[Float[Array, "*B H2"], Float[Array, "*B H2"]]:
    """Return cos and sin [..., dim / 2] of the angles at `positions`, float32, YaRN's or LongRoPE's
    factor applied.

    Args:
        rope: base, scaling, dimensions.
        head_dim: width of a head.
        positions: of each token in its sequence.
        spans: planned length of each token's whole sequence, prompt and new tokens, the same for
            all its tokens.  Counts only where `rope.by_length`.

    Raises:
        ValueError: the scaling depends on the span, and there is none.
    """
    inverse = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)
    inverse = inverse.reshape((1,) * positions.ndim + (-1,))
    if rope.scaling is not None and rope.by_length:
        if spans is None:
            raise ValueError(
                f"{rope.scaling.kind.value} rope scaling depends on the sequence's planned length; "
                "pass spans"
            )
        inverse = _long(inverse, rope.scaling, spans[..., None])
    angles = positions.astype(jnp.float32)[..., None] * inverse
    factor = attention_factor(rope.scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "*B N H"], cos: Float[Array, "*B H2"], sin: Float[Array, "*B H2"]
) -> Float[Array, "*B N H"]:
    """Turn the first 2 * H2 dimensions of every head of `x`; the rest passes unchanged.  Float32
    inside.
    """
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    a, b, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    c, s = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1).astype(x.dtype)
