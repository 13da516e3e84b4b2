"""Causal attention of a chunk of each sequence over its pages, on Hopper.  Pallas Mosaic GPU.

    o[t] = sum_j softmax_j(cap(scale q[t]·k[j])) v[j]  over  max(0, i - window + 1) <= j <= i,
    i = positions[t],  key j in row j mod U of page page_table[j div U]

The maths, its sources and the pipeline stand in `hopper_attention`; paged keys and values: Kwon et
al. 2023, arXiv 2309.06180.

Grid (N, B, ceil(T / 128)): a block owns 128 queries of one head of one sequence, the last queries
first.  The fetching warpgroup reads the page table and copies page by page, `block_k` / U pages a
slot.  A page P (none), or one past the sequence's end, lies outside the pool, where TMA writes
zeros; rows of the last page past the end are zeroed in shared memory before v is used, as 0 x NaN
of stale memory would poison the sum.
FLOPs: 4 N H (visible pairs).  Bytes: q once in, o once out, and a sequence's visible keys and
values once a key head and tile, mostly from L2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from infer.pallas.hopper_attention import (
    BLOCK_Q,
    NUM_CONSUMERS,
    PRODUCER,
    HopperBlocks,
    KeyRange,
    Scores,
    Shared,
    check_attention,
    columns_of,
    consume,
    produce,
    shared_memory,
    whole_tiles,
)
from infer.pallas.mosaic_call import (
    TILE_ROWS,
    WARPGROUP,
    WARPGROUP_ROWS,
    across,
    iota,
    mosaic_call,
    tile_columns,
)


def _kernel(
    *refs: Any, scores: Scores, group: int, num_kv: int, with_sinks: bool, interpret: bool
) -> None:
    # inputs: [B, T, N H], [P K, U, H], [P K, U, H of values], [B, M], [B, 2], sinks [N] or none
    q_ref, k_ref, v_ref, table_ref, span_ref, *rest = refs
    sinks_ref, *rest = rest if with_sinks else (None, *rest)
    # outputs: [B, T, N H of values]
    o_ref, *scratch = rest
    shared = Shared(*scratch)
    head, batch = lax.axis_index("heads"), lax.axis_index("batch")
    tile = lax.axis_size("tiles") - 1 - lax.axis_index("tiles")
    warpgroup = lax.axis_index(WARPGROUP)

    first = span_ref[batch, 0] + tile * BLOCK_Q
    end = span_ref[batch, 1]
    # A tile of padding reads nothing.
    end = jnp.where(first < end, end, 0)
    # Computed on each side: values held across the branch would be spilled.
    key_range = lambda: KeyRange.of(first, end, scores.window, shared.k.shape[1])

    def producer() -> None:
        keys = key_range()
        kv_head = lax.div(head, jnp.int32(group))
        fetch = functools.partial(
            _fetch_pages, table_ref=table_ref, batch=batch, head=kv_head, num_kv=num_kv, end=end
        )

        def fetch_keys(block: Array, slot: Array) -> None:
            fetch(k_ref, shared.k.at[slot], shared.k_loaded.at[slot], block)

        def fetch_values(block: Array, slot: Array) -> None:
            v, loaded = shared.v.at[slot], shared.v_loaded.at[slot]
            kept = end - block * v.shape[0]

            @pl.when(kept >= v.shape[0])
            def _() -> None:
                fetch(v_ref, v, loaded, block)

            @pl.when(kept < v.shape[0])
            def _() -> None:
                fetch(v_ref, v, shared.v_raw, block)
                plgpu.barrier_wait(shared.v_raw)
                _clear_rows(v, kept)
                for _ in range(v.shape[0] // v_ref.shape[1]):
                    plgpu.barrier_arrive(loaded)

        produce(keys, shared, fetch_keys, fetch_values)

    def consumer() -> None:
        keys, me = key_range(), warpgroup
        rows = pl.ds(tile * BLOCK_Q + me * WARPGROUP_ROWS, WARPGROUP_ROWS)
        source = q_ref.at[batch, rows, columns_of(head, shared.q.shape[2])]
        plgpu.copy_gmem_to_smem(source, shared.q.at[me], shared.q_loaded.at[me])
        sink = None if sinks_ref is None else sinks_ref[head]
        o, _ = consume(keys, first, end, scores, sink, shared, interpret=interpret)
        position = iota((WARPGROUP_ROWS,), 0) + (first + me * WARPGROUP_ROWS)
        o = jnp.where(across(position, o.shape) < end, o, 0.0)
        out = (shared.q if shared.o is None else shared.o).at[me]
        out[...] = o.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, o_ref.at[batch, rows, columns_of(head, o.shape[1])])
        plgpu.wait_smem_to_gmem(0)

    # One branch: what only one side needs is not held in registers through the other.
    lax.cond(warpgroup == PRODUCER, producer, consumer)


def _fetch_pages(
    pool: Any,
    target: Any,
    loaded: Any,
    block: Array,
    *,
    table_ref: Any,
    batch: Array,
    head: Array,
    num_kv: int,
    end: Array,
) -> None:
    """Copy the pages of one block of keys, or of values, into their rows of `target`."""
    page_size = pool.shape[1]
    last = jnp.int32(table_ref.shape[1] - 1)
    nowhere = jnp.int32(pool.shape[0] // num_kv)
    pages_per_block = target.shape[0] // page_size
    for i in range(pages_per_block):
        index = block * pages_per_block + i
        page = table_ref[batch, jnp.minimum(index, last)]
        page = jnp.where((index <= last) & (index * page_size < end), page, nowhere)
        rows = pl.ds(i * page_size, page_size)
        plgpu.copy_gmem_to_smem(pool.at[page * num_kv + head], target.at[rows], loaded)


def _clear_rows(ref: Any, kept: Array) -> None:
    """Write zeros over the rows of `ref` from `kept` on, in pieces that few registers hold."""
    rows, columns = ref.shape
    shape = (WARPGROUP_ROWS, tile_columns(columns, ref.dtype))
    for row in range(0, rows, shape[0]):

        @pl.when(kept < row + shape[0])
        def _(row: int = row) -> None:
            inside = iota(shape, 0) < kept - row
            for column in range(0, columns, shape[1]):
                piece = ref.at[pl.ds(row, shape[0]), pl.ds(column, shape[1])]
                piece[...] = jnp.where(inside, piece[...], jnp.zeros((), ref.dtype))

    plgpu.commit_smem()


def paged_prefill_mosaic(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K U H"],
    v_pages: Float[Array, "P K U Hv"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    blocks: HopperBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N Hv"]:
    """Return causal attention of T queries a row over that row's pages.

    Scores, softmax and sums are float32; weights are rounded to v's dtype for the product.  With a
    softcap the GPU's tanh is approximate (2^-11 relative).

    Args:
        q: queries, bfloat16 or float16; H a multiple of 16, up to 256.
        k_pages: key pool; the queries' own keys are already written.  U divides the block of keys.
        v_pages: value pool, of the same or a smaller width.
        page_table: pages of each row, P where there is none.
        positions: of each query in its sequence.  Within a row they are consecutive: only the first
            and the number of those that are not negative are read.  Negative ones are padding, at
            the row's end or the whole row; the output there is 0.
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: shapes that do not belong together.
        NotImplementedError: a dtype, a width or a page size that this form does not serve.
    """
    batch, num_queries, num_heads, width = q.shape
    _, num_kv, page_size, value_width = v_pages.shape
    blocks = blocks or HopperBlocks.for_shape(width)
    check_attention("paged_prefill", q, k_pages, v_pages, num_kv, blocks)
    if page_size % TILE_ROWS or blocks.block_k % page_size:
        raise NotImplementedError(
            f"paged_prefill in Mosaic: pages of {page_size} tokens; the form serves multiples of "
            f"{TILE_ROWS} that divide block_k {blocks.block_k}"
        )
    q_BTX = whole_tiles(q)
    count = jnp.sum((positions >= 0).astype(jnp.int32), axis=1)
    first = jnp.maximum(positions[:, 0], 0)
    span_B2 = jnp.stack([first, first + count], axis=1).astype(jnp.int32)
    kernel = functools.partial(
        _kernel,
        scores=Scores(scale=scale, window=window, softcap=softcap),
        group=num_heads // num_kv,
        num_kv=num_kv,
        with_sinks=sinks is not None,
        interpret=interpret,
    )
    (o,) = mosaic_call(
        kernel,
        q_BTX,
        # Pages and heads are one axis, as TMA of a tile has 5 in all.
        k_pages.reshape(-1, page_size, width),
        v_pages.reshape(-1, page_size, value_width),
        page_table.astype(jnp.int32),
        span_B2,
        *() if sinks is None else (sinks.astype(jnp.float32),),
        name="paged_prefill_mosaic",
        grid={"heads": num_heads, "batch": batch, "tiles": -(-num_queries // BLOCK_Q)},
        out_shape=[jax.ShapeDtypeStruct((*q_BTX.shape[:2], num_heads * value_width), q.dtype)],
        scratch=shared_memory(
            blocks,
            width,
            value_width,
            q.dtype,
            copies=blocks.block_k // page_size,
            stale_values=True,
        ),
        num_warpgroups=NUM_CONSUMERS + 1,
        interpret=interpret,
    )
    return o[:, :num_queries].reshape(batch, num_queries, num_heads, value_width)


def paged_prefill_mosaic_reference(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    positions: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Compute the same in float32, every page gathered and the whole score matrix held."""
    rows, _, num_heads, _ = q.shape
    num_pages, num_kv, page_size, _ = k_pages.shape
    group = num_heads // num_kv
    j = jnp.arange(page_table.shape[1] * page_size)
    written = (j[None, :] <= jnp.max(positions, axis=1)[:, None])[:, None, :, None]

    def gather(pages: Array) -> Array:
        x = pages[jnp.minimum(page_table, num_pages - 1)].astype(jnp.float32)  # [B, M, K, U, H]
        x = x.transpose(0, 2, 1, 3, 4).reshape(rows, num_kv, j.size, -1)
        return jnp.repeat(jnp.where(written, x, 0.0), group, axis=1)

    k, v = gather(k_pages), gather(v_pages)
    logits = jnp.einsum("btnh,bnsh->bnts", q.astype(jnp.float32), k, precision="highest") * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    behind = positions[:, :, None] - j[None, None, :]
    seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    weights = jnp.where(seen[:, None], jnp.exp(logits), 0.0)
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32))[None, :, None]
    o = jnp.einsum("bnts,bnsh->btnh", weights, v, precision="highest")
    return o / jnp.where(total > 0, total, 1.0).transpose(0, 2, 1)[..., None]
