"""Normalisation by the root mean square, and by mean and variance."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from infer.native.repack import Packed
from infer.ops.choice import Form, choose, with_xla_gradient


def rms_norm(
    x: Float[Array, "*B D"],
    gain: Float[Array, " D"],
    eps: float,
    implementation: str | None = None,
    *,
    beside: Any = None,
) -> Float[Array, "*B D"]:
    """Return x / sqrt(mean(x^2) + eps) * gain, computed in float32 and cast once to x's dtype.

    `beside` is a weight of the same block: where it is packed for native operations, the norm is
    one too, and a row has the same bits in any batch.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.  `gain` is the effective factor: where a
    checkpoint stores w and the model uses 1 + w (Gemma), the loader has added the one, in float32.
    """
    if gain.shape != x.shape[-1:]:
        raise ValueError(f"gain is {gain.shape}; with x {x.shape} it must be {x.shape[-1:]}")
    xla = functools.partial(_rms_norm_xla, eps=eps)
    kernel = lambda interpret: with_xla_gradient(
        functools.partial(_rms_norm_triton, eps=eps, interpret=interpret), xla
    )
    native: dict[str, Form] = {}
    if isinstance(beside, Packed):
        native["native"] = functools.partial(_rms_norm_native, eps=eps)
    return choose(
        "rms_norm",
        (x, gain),
        xla=xla,
        kernels={"triton": kernel(False), "interpret": kernel(True)} | native,
        preferred=(),  # XLA fuses the whole of it
        implementation=implementation,
    )


def _rms_norm_native(x: Array, gain: Array, *, eps: float) -> Array:
    from infer.native.rms_norm import rms_norm as kernel

    return kernel(x.reshape(-1, x.shape[-1]), gain, eps).reshape(x.shape)


def _rms_norm_triton(x: Array, gain: Array, *, eps: float, interpret: bool) -> Array:
    from infer.pallas.rms_norm import rms_norm as kernel

    rows = x.reshape(-1, x.shape[-1])
    return kernel(rows, gain, eps, interpret=interpret)[0].reshape(x.shape)


def _rms_norm_xla(x: Array, gain: Array, *, eps: float) -> Array:
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    y = x32 * inverse * gain.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*B D"], gain: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*B D"]:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * gain (+ bias), in float32, cast once to x's
    dtype.

    Source: Ba et al. 2016, arXiv 1607.06450.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    along = lambda w: w.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    y = centred * inverse * along(gain)
    return (y if bias is None else y + along(bias)).astype(x.dtype)
