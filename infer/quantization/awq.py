"""AWQ's two searches: the scale of each input, and the share of each group's range.

    s = mean|x|^r / sqrt(max * min of it), r = 0, 1/20 .. 19/20: the r whose rounded weights change
        least what the block gives: attention, the feed-forward, or the one product of `o` or `down`
    c = 1, 1 - 1/20 .. 1 - 9/20 of the range: for each group the c with the least error of its
        product

Source: arXiv 2306.00978 and its reference implementation.  We differ where the error is that of one
product: it is over all calibration tokens, by their Gram matrix, not over a sample; and where a
model has norms after its blocks: they belong to the block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from infer.config import LayerConfig, ModelConfig, Residual
from infer.models import blocks, decoder
from infer.models.params import LayerParams
from infer.quant import rtn
from infer.quant.methods import AWQ
from infer.quant.qarray import dequantize
from infer.quantization.observe import Seen
from infer.quantization.recipe import readers

_RATIOS = 20
_SHARES = 10


@functools.partial(jax.jit, static_argnames=("config", "layer", "batch", "name", "method"))
def search_scale(
    config: ModelConfig,
    layer: LayerConfig,
    batch: int,
    name: str,
    method: AWQ,
    w: LayerParams,
    x: Float[Array, "T D"],
    turn: Any,
    seen: Seen,
) -> Float[Array, " I"]:
    """Return the scale of input `name` (of `recipe.readers`) of one layer.

    Args:
        config: of the model.
        layer: of the layer.
        batch: sequences in x.
        name: of the input.
        method: how the matrices that read it will be rounded.
        w: float weights of the layer.
        x: residual streams before it, `batch` sequences of equal length.
        turn: of their positions.
        seen: of the input, over the whole calibration text.
    """
    mean = seen.total / seen.count

    def scale_of(ratio: Array) -> Array:
        s = jnp.maximum(jnp.maximum(mean, 1e-30) ** ratio, 1e-4)
        return s / jnp.sqrt(s.max() * s.min())

    def rounded(ratio: Array) -> dict[str, Array]:
        s = scale_of(ratio)[None, :]
        of = lambda weight: dequantize(_pack(method, weight.astype(jnp.float32) * s)) / s
        return {m: of(getattr(w, m)) for m in readers(config)[name]}

    if name in ("o", "down"):

        def loss(ratio: Array) -> Array:
            error = rounded(ratio)[name] - getattr(w, name).astype(jnp.float32)
            by_row = jnp.einsum("oi,ij->oj", error, seen.gram, precision=lax.Precision.HIGHEST)
            return (by_row * error).sum()

    else:
        block = functools.partial(_block, config, layer, batch, name, x, turn)
        want = block(w)

        def loss(ratio: Array) -> Array:
            return jnp.mean((block(dataclasses.replace(w, **rounded(ratio))) - want) ** 2)

    ratios = jnp.asarray(np.arange(_RATIOS) / _RATIOS, jnp.float32)
    losses = lax.map(loss, ratios)
    # NaN is never the least.
    return scale_of(ratios[jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))])


def _pack(method: AWQ, w: Array) -> Any:
    return rtn.quantize_int(w, method.format_for((w.shape[0], w.shape[1])), method.convention)


def _block(
    config: ModelConfig,
    layer: LayerConfig,
    batch: int,
    name: str,
    x: Array,
    turn: Any,
    w: LayerParams,
) -> Float[Array, "T D"]:
    """Return what the block that reads input `name` ("attn" or "mlp") adds to the residual stream.

    Where attention and feed-forward read one norm's output, they are one block.
    """
    attend = decoder.dense_attend(config, batch, x.shape[0] // batch, "xla")
    y = jnp.zeros_like(x)
    if name == "attn":
        h, norm = blocks.before(config, "xla", x, w.attn_norm, w.attn_norm_bias)
        y, _ = blocks.attention(config, layer, w, h, norm, None, turn, attend, None, "xla")
        y = blocks.scaled(y, config.residual_scale)
    both = config.residual is Residual.PARALLEL_ONE_NORM
    if name == "mlp" or both:
        gain, bias = (w.attn_norm, w.attn_norm_bias) if both else (w.mlp_norm, w.mlp_norm_bias)
        h, norm = blocks.before(config, "xla", x, gain, bias)
        y = blocks.mlp(config, w, h, norm, y, "xla")
    return y.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("method",))
def search_clip(
    method: AWQ, w: Float[Array, "O I"], gram: Float[Array, "I I"]
) -> Float[Array, "R Q"]:
    """Return for each group the share of its range with which its product errs least.

    Args:
        method: how the weight will be rounded.
        w: weight, scaled already.
        gram: of its inputs, scaled already.
    """
    format = method.format_for((w.shape[0], w.shape[1]))
    group = format.group or w.shape[1]
    size = w.shape[1] // group
    inside = jnp.arange(size)
    g = gram.reshape(size, group, size, group)[inside, :, inside, :]  # [Q, g, g]

    def loss(share: Array) -> Array:
        packed = rtn.quantize_int(w, format, method.convention, share)
        error = (dequantize(packed) - w).reshape(-1, size, group)
        by_row = jnp.einsum("oqg,qgh,oqh->oq", error, g, error, precision=lax.Precision.HIGHEST)
        return by_row if format.rows else by_row.sum(0, keepdims=True)

    shares = jnp.asarray(1 - np.arange(_SHARES) / _RATIOS, jnp.float32)
    return shares[jnp.argmin(lax.map(loss, shares), axis=0)]
