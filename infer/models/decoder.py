"""The forward pass that every dense family shares.

Tokens lie on one flat axis T, whoever they belong to; attention is an argument.  The same code thus
serves a dense forward, a prefill chunk against pages, and a decode step: they differ only in the
`attend` they pass.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from infer.config import LayerConfig, ModelConfig, RopeConfig
from infer.models import blocks
from infer.models.blocks import KV, Attend
from infer.models.params import LayerParams, Params
from infer.ops.attention import dense_attention
from infer.ops.linear import embed, linear_f32
from infer.ops.rope import apply_rope, rope_table


def hidden_states(
    params: Params,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    attend: Attend[KV],
    caches: Sequence[KV],
    spans: Int[Array, " T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], tuple[KV, ...]]:
    """Run all layers; return the residual stream before the final norm, and the layers' new caches.

    Args:
        params: weights.
        tokens: ids in [0, V).
        positions: of each token in its own sequence.
        attend: stores keys and values and attends; see `Attend`.
        caches: what `attend` reads and writes, one entry a layer (None for a dense forward).
        spans: planned length of each token's sequence, prompt and new tokens; needed where rotary
            frequencies depend on it (dynamic NTK, LongRoPE; `config.ropes_by_length`), and the same
            for all tokens that share a cache.
        implementation: of the ops; None chooses.
    """
    config = params.config
    x = embed_tokens(params, tokens, positions)
    tables = rope_tables(config, positions, spans)

    # A jit inside the trace: layers of one kind are traced once and called, instead of traced
    # anew for each; XLA inlines the calls.
    @functools.partial(jax.jit, static_argnums=0)
    def run_layer(
        layer: LayerConfig,
        weights: LayerParams,
        x: Array,
        turn: blocks.Turn,
        cache: KV,
    ) -> tuple[Array, KV]:
        return blocks.run_layer(config, layer, weights, x, turn, attend, cache, implementation)

    new = []
    for layer, weights, cache in zip(config.layers, params.layers, caches, strict=True):
        x, cache = run_layer(layer, weights, x, tables[layer.rope], cache)
        new.append(cache)
    return x, tuple(new)


def embed_tokens(
    params: Params, tokens: Int[Array, " T"], positions: Int[Array, " T"]
) -> Float[Array, "T D"]:
    """Return the residual stream before the first layer; arguments as in `hidden_states`."""
    with jax.named_scope("embed"):
        x = embed(params.embed, tokens, params.dtype)
        # The factor takes the activations' dtype first: in bfloat16 Gemma's sqrt(3072) is 55.5.
        x = blocks.scaled(x, params.config.embedding_scale)
        if params.positions is not None:
            # A position past the table is NaN, not the last one's vector.
            x = x + params.positions.at[positions].get(mode="fill", fill_value=jnp.nan)
        return x


def rope_tables(
    config: ModelConfig, positions: Int[Array, " T"], spans: Int[Array, " T"] | None
) -> dict[RopeConfig | None, blocks.Turn]:
    """Return cos and sin for each kind of rotation in the model; see `hidden_states`."""
    # In order of first use, not a set: the program's text must not depend on the process's hashes,
    # or the compilation cache on disk misses.
    ropes = dict.fromkeys(layer.rope for layer in config.layers)
    return {
        rope: None if rope is None else rope_table(rope, config.head_dim, positions, spans)
        for rope in ropes
    }


def logits(
    params: Params, x: Float[Array, "T D"], implementation: str | None = None
) -> Float[Array, "T V"]:
    """Return float32 logits of the residual stream `x`; ids past `num_tokens` are -inf."""
    config = params.config
    with jax.named_scope("head"):
        weight = params.embed if params.lm_head is None else params.lm_head
        h = blocks.normalised(
            config,
            x,
            params.final_norm,
            params.final_norm_bias,
            implementation,
            beside=weight,
        )
        y = linear_f32(h, weight, None, implementation)
        y = blocks.scaled(y, config.logit_scale)
        if config.final_softcap is not None:
            y = jnp.tanh(y / config.final_softcap) * config.final_softcap
        if config.num_tokens < config.vocab_size:
            real = jnp.arange(config.vocab_size, dtype=jnp.int32) < config.num_tokens
            y = jnp.where(real[None, :], y, -jnp.inf)
        return y


def forward(
    params: Params,
    tokens: Int[Array, "B S"],
    spans: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S V"]:
    """Return logits at every position, without a cache: the definition that every cached path is
    tested against.

    Args:
        params: weights.
        tokens: ids in [0, V).
        spans: planned length of each sequence, for rotary scalings that depend on it; None is S.
            The forward that equals `generate` has prompt tokens + max_tokens.
        implementation: of the ops; None chooses.
    """
    x = dense_states(params, tokens, spans, implementation)
    return logits(params, x, implementation).reshape(*tokens.shape, -1)


def dense_states(
    params: Params,
    tokens: Int[Array, "B S"],
    spans: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Return the residual stream of all tokens, without a cache; arguments as in `forward`."""
    batch, length = tokens.shape
    config = params.config

    attend = dense_attend(config, batch, length, implementation)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    if spans is None:
        spans = jnp.full(batch, length, jnp.int32)
    x, _ = hidden_states(
        params,
        tokens.reshape(-1),
        positions,
        attend,
        (None,) * config.num_layers,
        jnp.repeat(spans, length),
        implementation,
    )
    return x


def dense_attend(
    config: ModelConfig, batch: int, length: int, implementation: str | None = None
) -> Attend[None]:
    """Return the attention of a forward without a cache: `batch` sequences of `length` tokens."""

    def attend(
        layer: LayerConfig,
        q: Array,
        k: Array,
        v: Array,
        turn: blocks.Turn,
        sinks: Array | None,
        cache: None,
    ) -> tuple[Array, None]:
        if turn is not None:
            q, k = apply_rope(q, *turn), apply_rope(k, *turn)
        split = lambda y: y.reshape(batch, length, *y.shape[1:])
        o = dense_attention(
            split(q),
            split(k),
            split(v),
            scale=config.softmax_scale,
            window=layer.window,
            softcap=config.attn_softcap,
            sinks=sinks,
            implementation=implementation,
        )
        return o.reshape(q.shape), cache

    return attend
