"""The two blocks of a layer and how they join the residual stream; what differs between families
are fields of ModelConfig.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from infer.config import LayerConfig, ModelConfig, Norm, QkNorm, Residual
from infer.models.params import LayerParams
from infer.ops.activation import activate
from infer.ops.linear import PreNorm, gated_mlp, linears
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
    alone = not config.post_norms and config.residual_scale is None
    norm = functools.partial(before, config, implementation)
    sequential = config.residual is Residual.SEQUENTIAL
    h, rms = norm(x, w.attn_norm, w.attn_norm_bias)
    a, cache = attention(
        config, layer, w, h, rms, x if alone else None, turn, attend, cache, implementation
    )
    y = a if alone else x + a
    if sequential:
        h, rms = norm(y, w.mlp_norm, w.mlp_norm_bias)
        return mlp(config, w, h, rms, y, implementation), cache
    if config.residual is not Residual.PARALLEL_ONE_NORM:
        h, rms = norm(x, w.mlp_norm, w.mlp_norm_bias)
    return mlp(config, w, h, rms, y, implementation), cache


def before(
    config: ModelConfig, implementation: str | None, x: Array, gain: Leaf, bias: Leaf
) -> tuple[Array, PreNorm]:
    """Return what a block's products read, and the RMSNorm that is still to be done to it."""
    if not config.pre_norms:
        return x, None
    if config.norm is Norm.RMS:
        return x, (gain, config.norm_eps)
    return layer_norm(x, gain, bias, config.norm_eps), None


def normalised(
    config: ModelConfig,
    x: Array,
    gain: Leaf,
    bias: Leaf,
    implementation: str | None = None,
    *,
    beside: Any = None,
) -> Array:
    """Return `x` normalised over its last axis in the way of this model; `beside` as in
    `rms_norm`.
    """
    if config.norm is Norm.LAYER:
        return layer_norm(x, gain, bias, config.norm_eps)
    return rms_norm(x, gain, config.norm_eps, implementation, beside=beside)


def scaled(x: Array, factor: float | None) -> Array:
    """Return x * factor, the factor in x's dtype; None is 1."""
    return x if factor is None else x * jnp.asarray(factor, x.dtype)


@jax.named_scope("attention")
def attention(
    config: ModelConfig,
    layer: LayerConfig,
    w: LayerParams,
    h: Array,
    norm: PreNorm,
    residual: Array | None,
    turn: Turn,
    attend: Attend[KV],
    cache: KV,
    implementation: str | None,
) -> tuple[Array, KV]:
    """Return the block's output (+ residual), and the cache; `norm` is still to be done to `h`."""
    normed = lambda y, gain: rms_norm(y, gain, config.norm_eps, implementation, beside=w.q)
    heads = lambda y: y.reshape(y.shape[0], -1, config.head_dim)
    q, k, v = linears(
        h,
        (w.q, w.k, w.v),
        (w.q_bias, w.k_bias, w.v_bias),
        norm=norm,
        implementation=implementation,
    )
    if config.qk_norm is QkNorm.FULL:
        q, k = normed(q, w.q_norm), normed(k, w.k_norm)
    q, k = heads(q), heads(k)
    if config.qk_norm is QkNorm.HEAD:
        q, k = normed(q, w.q_norm), normed(k, w.k_norm)
    o, cache = attend(layer, q, k, heads(v), turn, w.sinks, cache)
    (y,) = linears(
        o.reshape(o.shape[0], -1),
        (w.o,),
        (w.o_bias,),
        residual=residual,
        implementation=implementation,
    )
    if config.post_norms:
        y = normalised(
            config, y, w.post_attn_norm, w.post_attn_norm_bias, implementation, beside=w.o
        )
    return scaled(y, config.residual_scale), cache


@jax.named_scope("mlp")
def mlp(
    config: ModelConfig,
    w: LayerParams,
    h: Array,
    norm: PreNorm,
    stream: Array,
    implementation: str | None,
) -> Array:
    """Return `stream` + the block's output of `h`, to which `norm` is still to be done."""
    act = config.activation.value
    alone = not config.post_norms and config.residual_scale is None
    # Fused where the residual is what the block reads.
    fused = alone and h is stream
    if config.gated_mlp:
        y = gated_mlp(
            h,
            (w.gate, w.up, w.down),
            (w.gate_bias, w.up_bias, w.down_bias),
            act,
            norm=norm,
            residual=fused,
            implementation=implementation,
        )
    else:
        (up,) = linears(h, (w.up,), (w.up_bias,), norm=norm, implementation=implementation)
        (y,) = linears(
            activate(up, act),
            (w.down,),
            (w.down_bias,),
            residual=stream if fused else None,
            implementation=implementation,
        )
    if config.post_norms:
        y = normalised(
            config, y, w.post_mlp_norm, w.post_mlp_norm_bias, implementation, beside=w.down
        )
    return y if fused else stream + scaled(y, config.residual_scale)
