"""Attention over a cache whose pages are quantised as a whole, when their last token is there.

A query reads the keys and values of its own page in floats, and those of the pages before it as
they are quantised.  Which is which follows from positions alone: nothing depends on the chunk that
a token came in, on drafts that fell, or on who shares the pages.

Source: KIVI, Liu et al. 2024, arXiv 2402.02750; there the floats are the last R tokens, here those
of the page in progress.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from infer.cache.pool import GroupedPool, write_whole_pages
from infer.ops import attention_xla, choice

Recent = tuple[Float[Array, "R K U2 H"], Float[Array, "R K U2 H"]]


def grouped_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    pools: tuple[GroupedPool, GroupedPool],
    recent: Recent,
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    slots: Int[Array, " B"],
    **options: Any,
) -> tuple[Float[Array, "B T N H"], tuple[GroupedPool, GroupedPool], Recent]:
    """Return causal attention of T queries a row, the pools with the pages that are complete now,
    and the recent tokens.

    Rows of one slot begin at pages, all but the one that begins first; at most U + 1 tokens a row
    may be taken back afterwards.

    Args:
        q: queries, turned.
        k: keys of the same tokens, turned.
        v: values.
        pools: of keys and of values.
        recent: each slot's last tokens, position p at p modulo 2U.
        page_table: pages of each row, P where there is none.
        positions: of each token, ascending by one within a row; negative for padding at the end.
        slots: of each row; one past the end is padding.
        options: of `infer.ops.attention.paged_attention`.
    """
    choice.record(choice.Choice("paged_attention", "xla", "pages are quantised as a whole"))
    size, num_pages = pools[0].shape[2], pools[0].shape[0]
    first, last = jnp.maximum(positions[:, 0], 0), positions.max(1)
    begin = first // size * size
    count = -(-(positions.shape[1] + size - 1) // size)  # pages that the tokens may touch
    aligned = lambda new, old: _from_page(
        new.swapaxes(1, 2), old, begin, first, last, slots, count * size
    )
    own = aligned(k, recent[0]), aligned(v, recent[1])
    nth = jnp.arange(count, dtype=jnp.int32)[None, :]
    complete = begin[:, None] + (nth + 1) * size - 1 <= last[:, None]
    column = begin[:, None] // size + nth
    ids = jnp.take_along_axis(page_table, column, axis=1, mode="clip")
    ids = jnp.where(complete & (column < page_table.shape[1]), ids, num_pages)
    pages = lambda x: x.reshape(*x.shape[:2], count, size, -1).swapaxes(1, 2)
    written = lambda pool, x: write_whole_pages(pool, pages(x), ids)
    new = written(pools[0], own[0]), written(pools[1], own[1])
    o = attention_xla.paged_attention(
        q, new[0], new[1], page_table, positions, recent=own, **options
    )
    kept = lambda old, x: _remembered(old, x, positions, slots)
    return o, new, (kept(recent[0], k), kept(recent[1], v))


def _from_page(
    new: Array, old: Array, begin: Array, first: Array, last: Array, slots: Array, length: int
) -> Float[Array, "B K S H"]:
    """Return the tokens from position `begin` of each row on: those before `first` from the recent
    ones, the others new; zeros from `last` on.
    """
    at = begin[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    take = lambda x, index: jnp.take_along_axis(x, index[:, None, :, None], axis=2, mode="clip")
    before = take(old.at[slots].get(mode="clip"), at % old.shape[2])
    now = take(new, jnp.maximum(at - first[:, None], 0)).astype(old.dtype)
    inside, is_new = at <= last[:, None], at >= first[:, None]
    of = lambda mask: mask[:, None, :, None]
    return jnp.where(of(inside), jnp.where(of(is_new), now, before), 0)


def _remembered(old: Array, new: Array, positions: Array, slots: Array) -> Array:
    """Return the recent tokens of each slot after `new` [B, T, K, H], the last ones, also where
    several rows are of one slot.
    """
    num_slots, room = old.shape[0], old.shape[2]
    ends = jnp.full(num_slots, -1, jnp.int32).at[slots].max(positions.max(1), mode="drop")
    end = ends.at[slots].get(mode="fill", fill_value=-1)[:, None]
    kept = (positions >= 0) & (positions > end - room)
    row = jnp.where(kept, jnp.broadcast_to(slots[:, None], kept.shape), num_slots)
    return old.at[row, :, positions % room].set(new.astype(old.dtype), mode="drop")
