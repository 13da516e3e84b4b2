"""Rotary position embedding, half-split pairs: dimension i turns with dimension i + dim/2.

Source: Su et al. 2021, arXiv 2104.09864.  Frequencies are float64 on the host and float32 on the
device: at position 100,000 the float32 angle is off by less than 1e-2.  Checkpoints stored for
adjacent pairs are reordered by the loader.

Two scalings depend on how long the sequence is.  All keys of a sequence must turn by one set of
frequencies, the cached ones too, so the length that counts is the planned one, the span: it is
given with the positions, and one sequence keeps its span for life.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from infer.cache.paged import write_tokens
from infer.cache.pool import Pool, QuantizedPool
from infer.config import RopeConfig, RopeScaling, RopeScalingKind
from infer.ops.choice import Form, choose
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


def rope_write(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    turn: tuple[Float[Array, "T H2"], Float[Array, "T H2"]] | None,
    pages: Int[Array, " T"],
    positions: Int[Array, " T"],
    k_pages: Pool,
    v_pages: Pool,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N H"], Pool, Pool]:
    """Turn q and k, write k and v of each token at (page, position modulo U), and return q and the
    pools.

    Args:
        q: queries.
        k: keys.
        v: values.
        turn: cos and sin of the tokens' angles; None turns nothing.
        pages: of each token; P writes nothing.
        positions: of each token in its sequence.
        k_pages: key pool, of floats or quantised.
        v_pages: value pool, alike.
        implementation: see `infer.ops.choice`.
    """
    if turn is None:
        put = lambda pool, x: write_tokens(pool, x, pages, positions)
        return q, put(k_pages, k), put(v_pages, v)
    kernels: dict[str, Form] = {"native": _rope_write_native}
    # The Triton kernel writes floats only: quantised pools are written by XLA, which the record of
    # choices says.
    if not isinstance(k_pages, QuantizedPool):
        for name in ("triton", "interpret"):
            kernels[name] = functools.partial(_rope_write_triton, interpret=name == "interpret")
    return choose(
        "rope_write",
        (q, k, v, *turn, pages, positions, k_pages, v_pages),
        xla=_rope_write_xla,
        kernels=kernels,
        preferred=(),
        implementation=implementation,
    )


def _rope_write_xla(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    positions: Array,
    k_pages: Pool,
    v_pages: Pool,
) -> tuple[Array, Pool, Pool]:
    k_pages = write_tokens(k_pages, apply_rope(k, cos, sin), pages, positions)
    return apply_rope(q, cos, sin), k_pages, write_tokens(v_pages, v, pages, positions)


def _rope_write_native(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    positions: Array,
    k_pages: Pool,
    v_pages: Pool,
) -> tuple[Array, Pool, Pool]:
    from infer.native.rope_write import rope_write as operation

    args = (q, k, v, cos, sin, pages, positions)
    if isinstance(k_pages, QuantizedPool) and isinstance(v_pages, QuantizedPool):
        from infer.native.rope_write import rope_write_quantized

        pools = k_pages.data, v_pages.data, k_pages.scale, v_pages.scale
        q, k, v, k_scale, v_scale = rope_write_quantized(*args, *pools)
        put = lambda pool, data, scale: dataclasses.replace(pool, data=data, scale=scale)
        return q, put(k_pages, k, k_scale), put(v_pages, v, v_scale)
    assert not isinstance(k_pages, QuantizedPool) and not isinstance(v_pages, QuantizedPool)
    return operation(*args, k_pages, v_pages)


def _rope_write_triton(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    positions: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    from infer.pallas.rope_write import rope_write as kernel

    slots = positions % k_pages.shape[2]
    return kernel(q, k, v, cos, sin, pages, slots, k_pages, v_pages, interpret=interpret)
