"""The two blocks of a layer and how they join the residual stream; what differs between families
are fields of ModelConfig.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from infer.config import Activation, LayerConfig, ModelConfig, Norm, QkNorm, Residual
from infer.models.params import LayerParams
from infer.ops.linear import linear
from infer.ops.norm import layer_norm, rms_norm
from infer.ops.rope import apply_rope
from infer.pytree import Leaf

KV = TypeVar("KV")

# (configuration of the layer, q [T, N, H], k [T, K, H], v [T, K, H], sinks [N] or None, the layer's
# cache) -> (output [T, N, H], the layer's new cache)
Attend = Callable[[LayerConfig, Array, Array, Array, Array | None, KV], tuple[Array, KV]]

_ACTIVATIONS = {
    Activation.SILU: jax.nn.silu,
    Activation.GELU_TANH: lambda x: jax.nn.gelu(x, approximate=True),
    Activation.GELU: lambda x: jax.nn.gelu(x, approximate=False),
}


def run_layer(
    config: ModelConfig,
    layer: LayerConfig,
    w: LayerParams,
    x: Array,
    turn: tuple[Array, Array] | None,
    attend: Attend[KV],
    cache: KV,
) -> tuple[Array, KV]:
    """Return the residual stream [T, D] after one layer, and the layer's new cache.

    Args:
        config: mechanisms and sizes.
        layer: window and rotation of this layer.
        w: its weights.
        x: the residual stream before it.
        turn: cos and sin of the tokens' positions; None turns nothing.
        attend: stores keys and values and attends.
        cache: what `attend` reads and writes.
    """
    h = norm(config, x, w.attn_norm, w.attn_norm_bias) if config.pre_norms else x
    a, cache = _attention(config, layer, w, h, turn, attend, cache)
    y = x + a
    if config.residual is Residual.SEQUENTIAL:
        x = y
    if config.residual is not Residual.PARALLEL_ONE_NORM:
        h = norm(config, x, w.mlp_norm, w.mlp_norm_bias) if config.pre_norms else x
    return y + _mlp(config, w, h), cache


def norm(config: ModelConfig, x: Array, gain: Leaf, bias: Leaf) -> Array:
    """Return `x` normalised over its last axis in the way of this model."""
    if config.norm is Norm.LAYER:
        return layer_norm(x, gain, bias, config.norm_eps)
    return rms_norm(x, gain, config.norm_eps)


def scaled(x: Array, factor: float | None) -> Array:
    """Return x * factor, the factor in x's dtype; None is 1."""
    return x if factor is None else x * jnp.asarray(factor, x.dtype)


@jax.named_scope("attention")
def _attention(
    config: ModelConfig,
    layer: LayerConfig,
    w: LayerParams,
    h: Array,
    turn: tuple[Array, Array] | None,
    attend: Attend[KV],
    cache: KV,
) -> tuple[Array, KV]:
    heads = lambda y: y.reshape(y.shape[0], -1, config.head_dim)
    q, k = linear(h, w.q, w.q_bias), linear(h, w.k, w.k_bias)
    v = heads(linear(h, w.v, w.v_bias))
    if config.qk_norm is QkNorm.FULL:
        q, k = rms_norm(q, w.q_norm, config.norm_eps), rms_norm(k, w.k_norm, config.norm_eps)
    q, k = heads(q), heads(k)
    if config.qk_norm is QkNorm.HEAD:
        q, k = rms_norm(q, w.q_norm, config.norm_eps), rms_norm(k, w.k_norm, config.norm_eps)
    if turn is not None:
        q, k = apply_rope(q, *turn), apply_rope(k, *turn)
    o, cache = attend(layer, q, k, v, w.sinks, cache)
    y = linear(o.reshape(o.shape[0], -1), w.o, w.o_bias)
    if config.post_norms:
        y = norm(config, y, w.post_attn_norm, w.post_attn_norm_bias)
    return scaled(y, config.residual_scale), cache


@jax.named_scope("mlp")
def _mlp(config: ModelConfig, w: LayerParams, h: Array) -> Array:
    act = _ACTIVATIONS[config.activation]
    up = linear(h, w.up, w.up_bias)
    inner = act(linear(h, w.gate, w.gate_bias)) * up if config.gated_mlp else act(up)
    y = linear(inner, w.down, w.down_bias)
    if config.post_norms:
        y = norm(config, y, w.post_mlp_norm, w.post_mlp_norm_bias)
    return scaled(y, config.residual_scale)
