"""The plain XLA forms of attention; `infer.ops.attention` chooses between them and kernels.

The visible keys of a query at position i are j <= i, and j > i - window where a window is set: W
keys in all, the query's own included.

A sink is one logit a head that takes part in the softmax like a key without a value:

    o = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))

It is neither scaled nor capped, and counts once, however keys are split into blocks.  Source: Xiao
et al. 2023, arXiv 2309.17453, with a learned logit in place of sink tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from infer.cache.pool import AnyPool, read_pages

# Finite, so that a row without visible keys gives 0 / tiny rather than NaN, and small enough that
# exp() of it is 0.
_MASKED = -1e30
# Pages read in one trip of the loop over a sequence: 64 keys with 16-token pages keep XLA:CPU's
# dots busy.
_KEYS_PER_TRIP = 64


def visible(
    query_positions: Int[Array, "*B T"], key_positions: Int[Array, "*B S"], window: int | None
) -> Array:
    """Return the mask [..., T, S] of keys that each query may see."""
    i, j = query_positions[..., :, None], key_positions[..., None, :]
    mask = j <= i
    return mask if window is None else mask & (j > i - window)


def _softcapped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else jnp.tanh(scores / softcap) * softcap


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries over S keys, both starting at position 0, each head
    group sharing a key head.

    Scores, softmax and sums are float32; the result has q's dtype.
    """
    i = jnp.arange(q.shape[1], dtype=jnp.int32)
    mask = visible(i, jnp.arange(k.shape[1], dtype=jnp.int32), window)
    return _masked_attention(q, k, v, mask, scale, softcap, sinks)


def ragged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    starts: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """Return causal attention of each row of a flat token axis; every pair of tokens is scored, and
    those of two rows are masked.
    """
    i = jnp.arange(q.shape[0], dtype=jnp.int32)
    row = jnp.sum(i[:, None] >= starts[None, :], axis=1, dtype=jnp.int32)
    inside = i < starts[-1]
    same = (row[:, None] == row[None, :]) & inside[:, None] & inside[None, :]
    mask = visible(i, i, window) & same
    # A query without keys would get the mean of all: it gets 0.
    zeroed = lambda x: jnp.where(inside[:, None, None], x, 0)[None]
    o = _masked_attention(q[None], zeroed(k), zeroed(v), mask, scale, softcap, sinks)[0]
    return jnp.where(inside[:, None, None], o, 0)


def _masked_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    batch, num_queries, num_heads, width = q.shape
    num_kv = k.shape[2]
    q_BTKGH = q.reshape(batch, num_queries, num_kv, num_heads // num_kv, width)
    f32 = jnp.float32
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=f32, precision="highest"
    )
    scores = _softcapped(scores * scale, softcap)
    scores = jnp.where(mask[None, None, None], scores, _MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        # The sink as one more key, whose weight is then dropped.
        sink = sinks.astype(f32).reshape(1, num_kv, -1, 1, 1)
        column = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    o = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights.astype(v.dtype),
        v,
        preferred_element_type=f32,
        precision="highest",
    )
    return o.reshape(q.shape).astype(q.dtype)


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: AnyPool,
    v_pages: AnyPool,
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    recent: tuple[Float[Array, "B K R H"], Float[Array, "B K R H"]] | None = None,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries a row over that row's pages, by online softmax over
    blocks of pages.

    The number of blocks read is that of the row with the most visible keys, found at run time.
    With a window, blocks that no row can see are skipped at the front as well.

    Args:
        q: queries.
        k_pages: key pool; the queries' own keys are already written.
        v_pages: value pool.
        page_table: pages of each row, P where there is none.
        positions: of each query in its sequence; negative for a query that is padding (its output
            is 0).
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        recent: keys and values of the tokens from the beginning of the first query's page on.  If
            given, a query reads the keys of its own page there, and those of earlier pages only in
            the pools.
    """
    rows, num_queries, num_heads, width = q.shape
    _, num_kv, page_size, _ = k_pages.shape
    pages_per_trip = max(1, min(_KEYS_PER_TRIP // page_size, page_table.shape[1]))
    keys_per_trip = pages_per_trip * page_size
    # The table is padded to whole trips with a page that exists nowhere.
    pad = -page_table.shape[1] % pages_per_trip
    table = jnp.pad(page_table, ((0, 0), (0, pad)), constant_values=k_pages.shape[0])
    group = num_heads // num_kv
    q_BKMH = (
        (q.astype(jnp.float32) * scale)
        .reshape(rows, num_queries, num_kv, group, width)
        .transpose(0, 2, 1, 3, 4)
        .reshape(rows, num_kv, num_queries * group, width)
        .astype(q.dtype)
    )
    i_B1M1 = jnp.repeat(positions, group, axis=1)[:, None, :, None]
    end_B111 = jnp.max(positions, axis=1)[:, None, None, None]

    begin_B1M1 = i_B1M1 // page_size * page_size  # of the query's own page

    def block(trip: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        ids = lax.dynamic_slice_in_dim(table, trip * pages_per_trip, pages_per_trip, axis=1)
        gather = lambda pages: (
            read_pages(pages, ids).swapaxes(1, 2).reshape(rows, num_kv, keys_per_trip, width)
        )
        j = trip * keys_per_trip + jnp.arange(keys_per_trip, dtype=jnp.int32)[None, None, None, :]
        mask = j <= i_B1M1 if recent is None else j < begin_B1M1
        return fold(carry, gather(k_pages), lambda: gather(v_pages), j, mask)

    def fold(
        carry: tuple[Array, Array, Array],
        k: Array,
        v_of: Callable[[], Array],
        j: Array,
        mask: Array,
    ) -> tuple[Array, Array, Array]:
        m, total, acc = carry
        scores = jnp.einsum(
            "bkmh,bksh->bkms",
            q_BKMH,
            k.astype(q.dtype),
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        if window is not None:
            mask = mask & (j > i_B1M1 - window)
        scores = jnp.where(mask, _softcapped(scores, softcap), _MASKED)
        m_new = jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True))
        # A row that sees nothing yet has m_new = _MASKED, where exp(0) would count masked keys:
        # mask again.
        p = jnp.where(mask, jnp.exp(scores - m_new), 0.0)
        rescale = jnp.exp(m - m_new)
        # Keys past the row's last position are stale memory of another sequence: 0 x NaN would
        # poison this one.
        v = jnp.where(j.swapaxes(2, 3) <= end_B111, v_of(), 0).astype(q.dtype)
        update = jnp.einsum(
            "bkms,bksh->bkmh",
            p.astype(q.dtype),
            v,
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        return m_new, total * rescale + jnp.sum(p, axis=-1, keepdims=True), acc * rescale + update

    last = jnp.max(positions) // keys_per_trip + 1
    first = jnp.zeros((), last.dtype)
    if window is not None:
        live = jnp.where(positions >= 0, positions, jnp.iinfo(positions.dtype).max)
        first = jnp.maximum(jnp.min(live) - window + 1, 0) // keys_per_trip
    shape = (rows, num_kv, num_queries * group)
    if sinks is None:
        m, total = jnp.full((*shape, 1), _MASKED, jnp.float32), jnp.zeros((*shape, 1), jnp.float32)
    else:
        # The sum begins with the sink, exp(sink - m) = 1: counted once, whatever the blocks.
        m = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(1, num_kv, 1, group),
            (rows, num_kv, num_queries, group),
        ).reshape(*shape, 1)
        total = jnp.ones_like(m)
    start = (m, total, jnp.zeros((*shape, width), jnp.float32))
    carry = lax.fori_loop(first, last, block, start)
    if recent is not None:
        k, v = recent
        begin = jnp.maximum(positions[:, :1], 0) // page_size * page_size
        j = (begin + jnp.arange(k.shape[2], dtype=jnp.int32)[None, :])[:, None, None, :]
        carry = fold(carry, k, lambda: v, j, (j >= begin_B1M1) & (j <= i_B1M1))
    _, total, acc = carry
    o = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return (
        o.reshape(rows, num_kv, num_queries, group, width)
        .transpose(0, 2, 1, 3, 4)
        .reshape(q.shape)
        .astype(q.dtype)
    )
