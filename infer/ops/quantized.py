"""Products with a QArray in plain XLA: decoded a tile of rows at a time, activations rounded as the
weight's format says.

No more than a tile of a matrix is ever there as floats.  What the activations' rounding means:

    int8      s = max|x| / 127 over the token, x' = s clip(round(x / s), -127, 127)
    e4m3      s = max|x| / 448 over the token, or over each 128 inputs of it
    static    s is stored with the weight
    outliers  entries of magnitude 6 and more stay as they are, the others are int8 under the
              largest of the rest.  LLM.int8() takes a whole column out where one token of the batch
              has such an entry; here each token decides for itself, so that no result depends on
              what else is in the batch, and no entry is rounded that LLM.int8() would not round.

Source: LLM.int8() (arXiv 2208.07339); SmoothQuant (arXiv 2211.10438) for int8 with one scale a
token; DeepSeek-V3, section 3.3 (arXiv 2412.19437) for blocks of 128.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int8

from infer.quant import codes
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray, dequantize_tile, scales
from infer.quant.rtn import quotient

# Weights of one tile: 2 MB as float32.
_TILE = 1 << 19
OUTLIER = 6.0


def quantized_product(x: Float[Array, "T I"], weight: QArray) -> Float[Array, "T O"]:
    """Return x' @ dequantize(weight).T in float32, x' the activations as the format rounds them.

    Products are taken in x's dtype; between int8 activations and integers with a scale a channel
    they are exact.

    Args:
        x: activations.
        weight: packed [out, in].
    """
    format = weight.format
    if weight.perm is not None:  # the codes stay in their order, and the activations take it
        x, weight = jnp.take(x, weight.perm, axis=1), dataclasses.replace(weight, perm=None)
    if not isinstance(format, PlanarFormat) or not format.activations:
        return _tiled(weight, lambda w: _dot(x, w), x.dtype)
    if format.activations in ("int8", "int8_static") and format.code == "int" and not format.group:
        return _integers(x.astype(jnp.float32), weight, format)
    rounded = round_activations(x.astype(jnp.float32), format.activations, weight.act_scale)
    rounded = rounded.astype(x.dtype)
    return _tiled(weight, lambda w: _dot(rounded, w), x.dtype)


def round_activations(
    x: Float[Array, "T I"], how: str, act_scale: Float[Array, ""] | None = None
) -> Float[Array, "T I"]:
    """Return the activations x', float32.

    Args:
        x: activations, float32.
        how: the format's `activations`, not "".
        act_scale: of the weight, where that is static.
    """
    if how == "outliers":
        outlier = jnp.abs(x) >= OUTLIER
        q, s = int8_activations(jnp.where(outlier, 0.0, x))
        return jnp.where(outlier, x, q.astype(jnp.float32) * s)
    if how in ("int8", "int8_static"):
        q, s = int8_activations(x, act_scale)
        return q.astype(jnp.float32) * s
    if how == "e4m3_128":
        width = x.shape[1]
        blocks = jnp.pad(x, ((0, 0), (0, -width % 128))).reshape(x.shape[0], -1, 128)
        return _e4m3(blocks, None).reshape(x.shape[0], -1)[:, :width]
    assert how in ("e4m3", "e4m3_static"), how
    return _e4m3(x, act_scale)


def int8_activations(
    x: Float[Array, "T I"], scale: Array | None = None
) -> tuple[Int8[Array, "T I"], Float[Array, "T 1"]]:
    """Return codes and scales of activations: a scale a token, or the one that is given."""
    if scale is None:
        s = quotient(jnp.abs(x).max(-1, keepdims=True), 127.0)
        s = jnp.where(s == 0, jnp.float32(1), s)
    else:
        s = jnp.broadcast_to(scale, (x.shape[0], 1))
    return jnp.clip(jnp.round(quotient(x, s)), -127, 127).astype(jnp.int8), s


def _e4m3(x: Float[Array, "*B g"], scale: Array | None) -> Float[Array, "*B g"]:
    if scale is None:
        most = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-4)
        s = quotient(most, codes.LARGEST["e4m3"])
    else:
        s = jnp.broadcast_to(scale, (*x.shape[:-1], 1))
    largest = codes.LARGEST["e4m3"]  # a cast of what is more would give NaN
    return (
        jnp.clip(quotient(x, s), -largest, largest).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        * s
    )


def _dot(x: Array, w: Array) -> Float[Array, "T O"]:
    return jnp.einsum(
        "ti,oi->to", x, w, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def _tiled(
    weight: QArray, product: Callable[[Array], Array], dtype: jnp.dtype
) -> Float[Array, "T O"]:
    """Return the products with all rows of `weight`, a tile of them after the other."""
    out, width = weight.shape
    size = max(16, _TILE // width // 16 * 16)
    if out <= size:
        return product(dequantize_tile(weight, 0, out, dtype))
    count = out // size
    starts = jnp.arange(count, dtype=jnp.int32) * size
    y = lax.map(lambda start: product(dequantize_tile(weight, start, size, dtype)), starts)
    y = y.swapaxes(0, 1).reshape(y.shape[1], -1)
    if count * size < out:
        rest = product(dequantize_tile(weight, count * size, out - count * size, dtype))
        y = jnp.concatenate([y, rest], axis=1)
    return y


def _integers(x: Float[Array, "T I"], weight: QArray, format: PlanarFormat) -> Array:
    """Return the products of int8 activations with integers, summed exactly in int32."""
    q, s = int8_activations(x, weight.act_scale)
    # With fewer rows XLA's CPU product of int8 is many times slower.
    rows = q.shape[0]
    q = jnp.pad(q, ((0, max(0, 8 - rows)), (0, 0)))
    coded = codes.unpack(jnp.asarray(weight.data), format.bits, weight.shape[1])
    w = (coded - np.uint8(1 << (format.bits - 1))).astype(jnp.int8)  # modulo 256
    sums = jnp.einsum("ti,oi->to", q, w, preferred_element_type=jnp.int32)[:rows]
    if not format.symmetric:
        less = weight.zero.astype(jnp.int32) - (1 << (format.bits - 1))
        sums = sums - q[:rows].astype(jnp.int32).sum(-1, keepdims=True) * less.reshape(1, -1)
    return sums.astype(jnp.float32) * s * scales(weight).reshape(1, -1)
