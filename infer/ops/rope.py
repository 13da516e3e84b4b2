"""Rotary position embedding, half-split pairs: dimension i turns with dimension i + dim/2.

Source: Su et al. 2021, arXiv 2104.09864.  Frequencies are float64 on the host and float32 on the
device: at position 100,000 the float32 angle is off by less than 1e-2.  Checkpoints stored for
adjacent pairs are reordered by the loader.

Two scalings depend on how long the sequence is.  All keys of a sequence must turn by one set of
frequencies, the cached ones too, so the length that counts is the planned one, the span: it is
given with the positions, and one sequence keeps its span for life.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from infer.config import RopeConfig, RopeScaling, RopeScalingKind
from infer.ops.frequencies import attention_factor, inverse_frequencies


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
