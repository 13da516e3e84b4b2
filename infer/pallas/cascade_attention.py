"""Attention of rows that share their first pages: the shared keys are read once for all rows.

    (o_p, lse_p) over the shared keys, all rows' queries packed in one sequence of queries
    (o_s, lse_s) over each row's own keys
    o = (e^lse_p o_p + e^lse_s o_s) / (e^lse_p + e^lse_s)

Source: cascade inference, Ye et al. 2024 (FlashInfer); Hydragen, Juravsky et al. 2024, arXiv
2402.05099.  Both parts are `infer.pallas.paged_attention`: the first sees C groups of B/C rows as C
rows of (B/C) T queries, in tiles of `most_rows`.

A row's bits depend neither on the other rows of its group nor on the batch, but differ from those
of `paged_attention` without a shared prefix: the merge is another one.

Bytes: of a shared key 2 K H for every tile of a key/value head's queries, rather than for every
row; the rest, and FLOPs, as in `paged_attention`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from infer.pallas.argument_checks import as_int32, check_numbers, check_shapes
from infer.pallas.paged_attention import (
    PagedAttentionBlocks,
    check_arguments,
    most_rows,
    paged_attention,
)


def cascade_attention(
    q: Float[Array, "B T N H"],
    k_pages: Shaped[Array, "P K U W"],
    v_pages: Shaped[Array, "P K U W"],
    prefix_table: Int[Array, "C Mp"],
    prefix_lengths: Int[Array, " C"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "P K U"] | None = None,
    v_scales: Float[Array, "P K U"] | None = None,
    blocks: PagedAttentionBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Return causal attention of T queries a row over its group's keys and its own.

    Args:
        q: queries; rows c B/C to (c + 1) B/C are group c.
        k_pages: key pool in a format of `infer.pallas.kv_formats`.
        v_pages: value pool.
        prefix_table: pages of each group's shared keys, P where there is none.
        prefix_lengths: shared keys of each group; 0 where nothing is shared.
        page_table: all pages of each row as `paged_attention` takes them; those of the shared keys
            are not looked up.
        positions: of each query in its sequence; negative for padding (output 0).
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        k_scales: of 8- and 4-bit keys.
        v_scales: of 8- and 4-bit values.
        blocks: sizes of both parts; `block_rows` is that of the rows' own keys.
        interpret: run on any device, slowly.

    Raises:
        ValueError: rows that do not divide into the groups, or what `paged_attention` refuses.
        NotImplementedError: a pool's dtype that kernels do not read.
    """
    scale, window, softcap = check_numbers("cascade_attention", scale, window, softcap)
    check_arguments(
        "cascade_attention",
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        k_scales=k_scales,
        v_scales=v_scales,
        sinks=sinks,
    )
    check_shapes(
        "cascade_attention",
        prefix_table=(prefix_table, "C Mp"),
        prefix_lengths=(prefix_lengths, "C"),
    )
    for name, array in (("prefix_table", prefix_table), ("prefix_lengths", prefix_lengths)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"cascade_attention: {name} is {array.dtype}; give integers")
    prefix_lengths, positions = as_int32(prefix_lengths), as_int32(positions)
    batch, num_tokens, num_heads, width = q.shape
    groups, num_kv = prefix_table.shape[0], k_pages.shape[1]
    if batch % groups:
        raise ValueError(
            f"cascade_attention: {batch} rows are not a multiple of {groups} groups; give every "
            "group equally many rows (padding rows have negative positions)"
        )
    blocks = blocks or PagedAttentionBlocks.for_shape(
        batch, 0, num_kv=num_kv, width=width, pool_dtype=k_pages.dtype, q_dtype=q.dtype
    )
    together = (groups, batch // groups * num_tokens)
    begin = jnp.repeat(prefix_lengths, batch // groups)
    end = jnp.full_like(begin, page_table.shape[1] * k_pages.shape[2])
    options: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "return_lse": True,
        "out_dtype": jnp.float32,  # rounded once, after the merge
        "interpret": interpret,
    }
    shared, shared_lse = paged_attention(
        q.reshape(*together, num_heads, width),
        k_pages,
        v_pages,
        prefix_table,
        positions.reshape(together),
        bounds=jnp.stack([jnp.zeros_like(prefix_lengths), prefix_lengths], axis=1),
        # One size whatever the batch, so that a row's bits do not depend on it.
        blocks=dataclasses.replace(blocks, block_rows=most_rows(k_pages.dtype, q.dtype, width)),
        **options,
    )
    own, own_lse = paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        bounds=jnp.stack([begin, end], axis=1),
        sinks=sinks,
        blocks=blocks,
        **options,
    )
    o, _ = merge_two(shared.reshape(q.shape), shared_lse.reshape(q.shape[:3]), own, own_lse)
    return o.astype(q.dtype)


def merge_two(
    o: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    other: Float[Array, "B T N H"],
    other_lse: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return (o, lse) over the keys of both parts, which have none in common."""
    largest = jnp.maximum(lse, other_lse)
    # Of a query that sees nothing in either part, -inf - -inf would be NaN.
    m = jnp.where(jnp.isfinite(largest), largest, 0.0)
    a, b = jnp.exp(lse - m), jnp.exp(other_lse - m)
    total = jnp.maximum(a + b, jnp.finfo(jnp.float32).tiny)
    merged = (a / total)[..., None] * o + (b / total)[..., None] * other
    return merged, jnp.where(a + b > 0, m + jnp.log(total), -jnp.inf)


def cascade_attention_reference(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K U H"],
    v_pages: Float[Array, "P K U H"],
    prefix_table: Int[Array, "C Mp"],
    prefix_lengths: Int[Array, " C"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Return in float32 the attention of each row over one list of keys, shared ones first."""
    f32 = jnp.float32
    page_size, num_heads = k_pages.shape[2], q.shape[2]
    slots = jnp.arange(page_table.shape[1] * page_size, dtype=jnp.int32)
    rows_a_group = q.shape[0] // prefix_table.shape[0]

    def one_row(b: Array, q_TNH: Array, table_M: Array, i_T: Array) -> Array:
        c = b // rows_a_group
        shared = slots < prefix_lengths[c]
        in_prefix = jnp.minimum(slots // page_size, prefix_table.shape[1] - 1)
        page = jnp.where(shared, prefix_table[c, in_prefix], table_M[slots // page_size])
        seen = (slots[None, :] <= i_T[:, None]) & (page < k_pages.shape[0])[None, :]
        if window is not None:
            seen = seen & (i_T[:, None] - slots[None, :] < window)
        any_seen = jnp.any(seen, axis=0)[:, None, None]
        take = lambda pool: jnp.repeat(
            jnp.where(any_seen, pool.at[page, :, slots % page_size].get(mode="clip"), 0).astype(
                f32
            ),
            num_heads // pool.shape[1],
            axis=1,
        )
        x = jnp.einsum("tnh,snh->nts", q_TNH.astype(f32), take(k_pages), precision="highest")
        x = x * scale if softcap is None else softcap * jnp.tanh(x * scale / softcap)
        weights = jnp.where(seen[None], jnp.exp(x), 0.0)
        total = jnp.sum(weights, axis=-1)
        if sinks is not None:
            total = total + jnp.exp(sinks.astype(f32))[:, None]
        weights = weights / jnp.where(total > 0, total, 1.0)[..., None]
        return jnp.einsum("nts,snh->tnh", weights, take(v_pages), precision="highest")

    return jax.vmap(one_row)(jnp.arange(q.shape[0], dtype=jnp.int32), q, page_table, positions)
