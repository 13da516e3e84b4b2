"""How fast each pair of a rotary embedding turns: plain frequencies and what scalings make of them.

Float64 on the host.  No JAX in here: files are described, and converted, by frequencies too.
"""

import math

import numpy as np

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
