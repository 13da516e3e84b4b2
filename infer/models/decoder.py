"""The forward pass that every dense family shares.

Tokens lie on one flat axis T, whoever they belong to; attention is an argument.  The same code thus
serves a dense forward, a prefill chunk against pages, and a decode step: they differ only in the
`attend` they pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from infer.config import Activation, LayerConfig, ModelConfig
from infer.models.params import LayerParams, Params
from infer.ops.attention import dense_attention
from infer.ops.linear import embed, linear, linear_f32
from infer.ops.norm import rms_norm
from infer.ops.rope import apply_rope, rope_table

KV = TypeVar("KV")

# (configuration of the layer, q [T, N, H], k [T, K, H], v [T, K, H], the layer's cache)
# -> (output [T, N, H], the layer's new cache)
Attend = Callable[[LayerConfig, Array, Array, Array, KV], tuple[Array, KV]]

_ACTIVATIONS = {
    Activation.SILU: jax.nn.silu,
    Activation.GELU_TANH: lambda x: jax.nn.gelu(x, approximate=True),
    Activation.GELU: lambda x: jax.nn.gelu(x, approximate=False),
}


def hidden_states(
    params: Params,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    attend: Attend[KV],
    caches: Sequence[KV],
) -> tuple[Float[Array, "T D"], tuple[KV, ...]]:
    """Run all layers; return the residual stream before the final norm, and the layers' new caches.

    Args:
        params: weights.
        tokens: ids in [0, V).
        positions: of each token in its own sequence.
        attend: stores keys and values and attends; see `Attend`.
        caches: what `attend` reads and writes, one entry a layer (None for a dense forward).
    """
    config = params.config
    with jax.named_scope("embed"):
        x = embed(params.embed, tokens, params.dtype)
        if config.embedding_scale is not None:
            # The factor takes the activations' dtype first: in bfloat16 Gemma's sqrt(3072) is 55.5.
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
    # In order of first use, not a set: the program's text must not depend on the process's hashes,
    # or the compilation cache on disk misses.
    ropes = dict.fromkeys(layer.rope for layer in config.layers)
    tables = {rope: rope_table(rope, config.head_dim, positions) for rope in ropes}

    # A jit inside the trace: layers of one kind are traced once and called, instead of traced
    # anew for each; XLA inlines the calls.
    @functools.partial(jax.jit, static_argnums=0)
    def run_layer(
        layer: LayerConfig, weights: LayerParams, x: Array, cos: Array, sin: Array, cache: KV
    ) -> tuple[Array, KV]:
        a, cache = _attention(config, layer, weights, x, cos, sin, attend, cache)
        x = x + a
        return x + _mlp(config, weights, x), cache

    new = []
    for layer, weights, cache in zip(config.layers, params.layers, caches, strict=True):
        x, cache = run_layer(layer, weights, x, *tables[layer.rope], cache)
        new.append(cache)
    return x, tuple(new)


@jax.named_scope("attention")
def _attention(
    config: ModelConfig,
    layer: LayerConfig,
    w: LayerParams,
    x: Array,
    cos: Array,
    sin: Array,
    attend: Attend[KV],
    cache: KV,
) -> tuple[Array, KV]:
    h = rms_norm(x, w.attn_norm, config.norm_eps)
    heads = lambda y: y.reshape(y.shape[0], -1, config.head_dim)
    q = heads(linear(h, w.q, w.q_bias))
    k = heads(linear(h, w.k, w.k_bias))
    v = heads(linear(h, w.v, w.v_bias))
    if config.qk_norm:
        q = rms_norm(q, w.q_norm, config.norm_eps)
        k = rms_norm(k, w.k_norm, config.norm_eps)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    o, cache = attend(layer, q, k, v, cache)
    y = linear(o.reshape(o.shape[0], -1), w.o)
    if config.post_norms:
        y = rms_norm(y, w.post_attn_norm, config.norm_eps)
    return y, cache


@jax.named_scope("mlp")
def _mlp(config: ModelConfig, w: LayerParams, x: Array) -> Array:
    h = rms_norm(x, w.mlp_norm, config.norm_eps)
    gate = _ACTIVATIONS[config.activation](linear(h, w.gate))
    y = linear(gate * linear(h, w.up), w.down)
    if config.post_norms:
        y = rms_norm(y, w.post_mlp_norm, config.norm_eps)
    return y


def logits(params: Params, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
    """Return float32 logits of the residual stream `x`; ids past `num_tokens` are -inf."""
    config = params.config
    with jax.named_scope("head"):
        h = rms_norm(x, params.final_norm, config.norm_eps)
        y = linear_f32(h, params.embed if params.lm_head is None else params.lm_head)
        if config.final_softcap is not None:
            y = jnp.tanh(y / config.final_softcap) * config.final_softcap
        if config.num_tokens < config.vocab_size:
            real = jnp.arange(config.vocab_size, dtype=jnp.int32) < config.num_tokens
            y = jnp.where(real[None, :], y, -jnp.inf)
        return y


def forward(params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
    """Return logits at every position, without a cache: the definition that every cached path is
    tested against.
    """
    batch, length = tokens.shape
    config = params.config

    def attend(layer: LayerConfig, q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        split = lambda y: y.reshape(batch, length, *y.shape[1:])
        o = dense_attention(
            split(q),
            split(k),
            split(v),
            scale=config.softmax_scale,
            window=layer.window,
            softcap=config.attn_softcap,
        )
        return o.reshape(q.shape), cache

    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    x, _ = hidden_states(params, tokens.reshape(-1), positions, attend, (None,) * config.num_layers)
    return logits(params, x).reshape(batch, length, -1)


def score(params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S1"]:
    """Return log p(token t+1 | tokens 0..t) [B, S - 1], float32, differentiable in `params`.

    The distribution is the raw model's, before any temperature or filter.
    """
    y = jax.nn.log_softmax(forward(params, tokens)[:, :-1], axis=-1)
    return jnp.take_along_axis(y, tokens[:, 1:, None], axis=-1, mode="clip")[..., 0]
