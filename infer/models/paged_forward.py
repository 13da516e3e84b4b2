"""The forward pass against pages: what prefill, decode and verification have in common."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from infer.cache import paged
from infer.cache.paged import PagedCache
from infer.cache.pool import AnyPool, GroupedPool, QuantizedPool
from infer.config import LayerConfig
from infer.models import decoder
from infer.models.blocks import Turn
from infer.models.params import Params
from infer.ops.attention import paged_attention
from infer.ops.grouped_attention import grouped_attention
from infer.ops.rope import apply_rope, rope_write
from infer.quant.hadamard import transform


def through_layers(
    params: Params,
    cache: PagedCache,
    tokens: Int[Array, " N"],
    positions: Int[Array, "B T"],
    slots: Int[Array, " N"],
    page_table: Int[Array, "B M"],
    spans: Int[Array, " N"],
    implementation: str | None = None,
    *,
    first_layer: int = 0,
) -> tuple[Float[Array, "N D"], PagedCache]:
    """Write keys and values of all tokens into pages, attend, and return the residual stream and
    the cache.

    `positions` -1 and `slots` past the end mark padding, which writes nothing.
    `implementation` is that of the ops; None chooses.  The layers of `params` use the pools from
    `first_layer` on, as many as there are layers, and the others stay as they are: a cache may hold
    several models' keys and values of the same tokens.
    """
    config = params.config
    own = slice(first_layer, first_layer + config.num_layers)
    recent = (None,) * len(cache.k_pages) if cache.recent is None else cache.recent
    flat = positions.reshape(-1)
    pages = paged.page_of(cache.page_table, slots, flat, cache.num_pages, cache.page_size)

    def attend(
        layer: LayerConfig,
        q: Array,
        k: Array,
        v: Array,
        turn: Turn,
        sinks: Array | None,
        stored: tuple[AnyPool, AnyPool, Any],
    ):
        k_pool, v_pool, recent = stored
        options: dict[str, Any] = dict(
            scale=config.softmax_scale,
            window=layer.window,
            softcap=config.attn_softcap,
            sinks=sinks,
        )
        rows = lambda x: x.reshape(*positions.shape, *x.shape[1:])
        if isinstance(k_pool, GroupedPool):
            assert isinstance(v_pool, GroupedPool)
            if turn is not None:
                q, k = apply_rope(q, *turn), apply_rope(k, *turn)
            slot = slots.reshape(positions.shape)[:, 0]
            o, pools, recent = grouped_attention(
                rows(q),
                rows(k),
                rows(v),
                (k_pool, v_pool),
                recent,
                page_table,
                positions,
                slot,
                **options,
            )
            return o.reshape(q.shape), (*pools, recent)
        turned = isinstance(k_pool, QuantizedPool) and k_pool.turned
        if turned:  # after rotary embedding, which does not commute with it (QuaRot's R3)
            q, k, v, turn = _turned(q, k, v, turn)
        # Written first, read after: reading the old pool once the new one exists would copy it.
        assert not isinstance(v_pool, GroupedPool)
        q, k_pages, v_pages = rope_write(q, k, v, turn, pages, flat, k_pool, v_pool, implementation)
        o = paged_attention(
            rows(q),
            k_pages,
            v_pages,
            page_table,
            positions,
            implementation=implementation,
            **options,
        )
        o = o.reshape(q.shape)
        o = transform(o, o.shape[-1], back=True) if turned else o
        return o, (k_pages, v_pages, recent)

    x, pools = decoder.hidden_states(
        params,
        tokens,
        jnp.maximum(flat, 0),
        attend,
        tuple(zip(cache.k_pages[own], cache.v_pages[own], recent[own], strict=True)),
        spans,
        implementation,
    )
    k_pages, v_pages, new = zip(*pools, strict=True)
    put = lambda old, new: (*old[: own.start], *new, *old[own.stop :])
    return x, dataclasses.replace(
        cache,
        k_pages=put(cache.k_pages, k_pages),
        v_pages=put(cache.v_pages, v_pages),
        recent=None if cache.recent is None else put(recent, new),
    )


def _turned(q: Array, k: Array, v: Array, turn: Turn) -> tuple[Array, Array, Array, None]:
    """Return queries, keys and values of heads turned by a Hadamard matrix: scores stay, and sums
    of values are turned back.
    """
    if turn is not None:
        q, k = apply_rope(q, *turn), apply_rope(k, *turn)
    wide = lambda x: transform(x, x.shape[-1])
    return wide(q), wide(k), wide(v), None
