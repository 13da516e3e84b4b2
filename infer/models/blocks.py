"""The two blocks of a layer and how they join the residual stream; what differs between families
are fields of ModelConfig.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from infer.config import LayerConfig, ModelConfig, Norm, QkNorm, Residual
from infer.models.params import LayerParams
from infer.ops.activation import activate, gated_activation
from infer.ops.linear import linear
from infer.ops.norm import layer_norm, rms_norm
from infer.pytree import Leaf

KV = TypeVar("KV")

# cos and sin of the tokens' positions; None turns nothing
Turn = tuple[Array, Array] | None
# (configuration of the layer, q [T, N, H], k [T, K, H], v [T, K, H], how q and k are to be turned,
# sinks [N] or None, the layer's cache) -> (output [T, N, H], the layer's new cache)
Attend = Callable[[LayerConfig, Array, Array, Array, Turn, Array | None, KV], tuple[Array, KV]]


def run_layer(
    config: ModelConfig,
    layer: LayerConfig,
    w: LayerParams,
    x: Array,
    turn: Turn,
    attend: Attend[KV],
    cache: KV,
    implementation: str | None = None,
) -> tuple[Array, KV]:
    """Return the residual stream [T, D] after one layer, and the layer's new cache.

    Args:
        config: mechanisms and sizes.
        layer: window and rotation of this layer.
        w: its weights.
        x: the residual stream before it.
        turn: cos and sin of the tokens' positions; None turns nothing.
        attend: turns, stores keys and values, and attends.
        cache: what `attend` reads and writes.
        implementation: of the ops; None chooses.
    """
    norm = functools.partial(_norm, config, implementation)
    h = norm(x, w.attn_norm, w.attn_norm_bias) if config.pre_norms else x
    a, cache = _attention(config, layer, w, h, turn, attend, cache, implementation)
    y = x + a
    if config.residual is Residual.SEQUENTIAL:
        x = y
    if config.residual is not Residual.PARALLEL_ONE_NORM:
        h = norm(x, w.mlp_norm, w.mlp_norm_bias) if config.pre_norms else x
    return y + _mlp(config, w, h, implementation), cache


def norm(
    config: ModelConfig, x: Array, gain: Leaf, bias: Leaf, implementation: str | None = None
) -> Array:
    """Return `x` normalised over its last axis in the way of this model."""
    return _norm(config, implementation, x, gain, bias)


def _norm(
    config: ModelConfig, implementation: str | None, x: Array, gain: Leaf, bias: Leaf
) -> Array:
    if config.norm is Norm.LAYER:
        return layer_norm(x, gain, bias, config.norm_eps)
    return rms_norm(x, gain, config.norm_eps, implementation)


def scaled(x: Array, factor: float | None) -> Array:
    """Return x * factor, the factor in x's dtype; None is 1."""
    return x if factor is None else x * jnp.asarray(factor, x.dtype)


@jax.named_scope("attention")
def _attention(
    config: ModelConfig,
    layer: LayerConfig,
    w: LayerParams,
    h: Array,
    turn: Turn,
    attend: Attend[KV],
    cache: KV,
    implementation: str | None,
) -> tuple[Array, KV]:
    normed = lambda y, gain: rms_norm(y, gain, config.norm_eps, implementation)
    heads = lambda y: y.reshape(y.shape[0], -1, config.head_dim)
    q, k = linear(h, w.q, w.q_bias), linear(h, w.k, w.k_bias)
    v = heads(linear(h, w.v, w.v_bias))
    if config.qk_norm is QkNorm.FULL:
        q, k = normed(q, w.q_norm), normed(k, w.k_norm)
    q, k = heads(q), heads(k)
    if config.qk_norm is QkNorm.HEAD:
        q, k = normed(q, w.q_norm), normed(k, w.k_norm)
    o, cache = attend(layer, q, k, v, turn, w.sinks, cache)
    y = linear(o.reshape(o.shape[0], -1), w.o, w.o_bias)
    if config.post_norms:
        y = norm(config, y, w.post_attn_norm, w.post_attn_norm_bias, implementation)
    return scaled(y, config.residual_scale), cache


@jax.named_scope("mlp")
def _mlp(config: ModelConfig, w: LayerParams, h: Array, implementation: str | None) -> Array:
    act = config.activation.value
    up = linear(h, w.up, w.up_bias)
    if config.gated_mlp:
        inner = gated_activation(linear(h, w.gate, w.gate_bias), up, act, implementation)
    else:
        inner = activate(up, act)
    y = linear(inner, w.down, w.down_bias)
    if config.post_norms:
        y = norm(config, y, w.post_mlp_norm, w.post_mlp_norm_bias, implementation)
    return scaled(y, config.residual_scale)
