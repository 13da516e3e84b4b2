"""Attention of many query tokens a row over a paged cache: a prefill chunk, Pallas-Triton.

    o_i = sum_j exp(x_ij - m_i) v_j / (exp(sink - m_i) + sum_j exp(x_ij - m_i)),
    x_ij = softcap(scale q_i·k_j),   j <= i,   j > i - window

by online softmax over blocks of keys.  Source: FlashAttention-2, Dao 2023, arXiv 2307.08691; Kwon
et al. 2023, arXiv 2309.06180.

Grid (tiles, K, B).  A program owns `block_rows` rows, tokens times the query heads of one key/value
head, and reads the pages that one of them sees: from the window's first key to the last token's
own.  The tiles with most keys start first.

Two laws of bits:

* `paged_prefill`: a token's bits depend on its own keys and the blocks' sizes.  They do not depend
  on the batch, the table's width or the chunk, but differ from those of `paged_attention`, which
  sums splits apart.
* `paged_prefill(..., blocks=PagedAttentionBlocks(block_rows=R))`: the decode kernel in tiles of R
  rows, hence its splits, its tile and its merge: a token has the same bits whether it came in a
  chunk of 1, 7 or 64, or in a decode step with the same blocks.  The price is the traffic of
  splits, 2 T N (H + 2) S / split_keys floats, and smaller tiles.

Both hold bit for bit in the interpreter (tested).  On a GPU they rest on this: a program's code is
the same for every chunk, since tile, block and split sizes are static; a row of a matrix product
and of a reduction depends on no other row; and no order depends on scheduling (no atomics).  The
row's place in the tile changes with the chunk, so a GPU whose matrix unit summed rows in different
orders would break it; none is known to.

Bytes: 2 S K H a tile of rows, at most; 2 T N H of queries and results.  FLOPs: 4 T S N H a row,
half of that where all keys are the chunk's own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, Shaped

from infer.pallas import kv_formats, paged_tile
from infer.pallas.argument_checks import as_int32, check_blocks, check_numbers
from infer.pallas.paged_attention import (
    PagedAttentionBlocks,
    check_arguments,
    check_tiles,
    in_float32,
    paged_attention,
    paged_attention_reference,
)
from infer.pallas.paged_tile import LOG2E, TileSpec
from infer.pallas.triton_call import load, power_of_two, store, triton_call

# The same mathematics, and the same plain form.
paged_prefill_reference = paged_attention_reference


# With instructions that multiply from shared memory, which leaves registers for wider tiles.
_LARGE = ("h100-80gb", "h200-141gb", "b200-180gb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPrefillBlocks:
    """Sizes of a program's work, and how Triton compiles it."""

    block_rows: int = 128
    block_keys: int = 32
    num_warps: int = 8
    num_stages: int = 2

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        check_blocks(self, "block_rows", "block_keys")

    @classmethod
    def for_shape(
        cls,
        *,
        width: int,
        pool_dtype: Any = jnp.bfloat16,
        q_dtype: Any = jnp.bfloat16,
        chip: str | None = None,
    ) -> "PagedPrefillBlocks":
        """Return sizes for heads of `width`; they depend on neither batch nor chunk.

        Without a chip's name they are such that no chip of the gate spills registers.
        """
        dtype = jnp.dtype(pool_dtype)
        if in_float32(dtype, q_dtype):
            return cls(
                block_rows=32 if width <= 64 else 16,
                block_keys=32 if width <= 128 else 16,
                num_warps=8 if width <= 128 or dtype == jnp.uint8 else 4,
                num_stages=1,
            )
        if dtype == jnp.uint8:
            return cls(block_rows=64, num_stages=1)
        if width > 128:
            return cls(block_rows=64)
        if chip in _LARGE and width > 64:
            return cls(block_keys=64)
        return cls(block_rows=128 if dtype.itemsize > 1 else 64)


def _prefill_kernel(*refs: Any, names: tuple[str, ...], spec: TileSpec) -> None:
    # inputs: q [B, T, N, H], k and v [P, K, U, H], table [B, M], positions [B, T], and where used
    #   k_scales, v_scales [P, K, U], sinks [N]
    # outputs: o [B, T, N, H], lse [B, T, N] where asked for
    ref = dict(zip(names, refs, strict=True))
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    kv_head, b = pl.program_id(1), pl.program_id(2)
    rows = paged_tile.rows_of_tile(tile, kv_head, ref["positions"].shape[1], spec)
    i = load(ref["positions"], b, rows.token, mask=rows.ok, other=jnp.int32(-1))
    start, end = paged_tile.key_range(
        i, b, ref, capacity=spec.capacity, window=spec.window, drafted=0
    )
    parts = kv_formats.num_parts(ref["k"].dtype)
    q = paged_tile.load_parts(ref["q"], (b, rows.token, rows.head), rows.ok, parts)
    part_width = ref["q"].shape[3] // parts
    block = power_of_two(part_width, 16)
    m, total, acc = paged_tile.attend(
        q,
        start,
        end,
        lambda j: paged_tile.load_block(j, start, end, b, kv_head, ref, q[0].dtype),
        lambda j: paged_tile.visible(i, j, rows, b, ref, spec),
        spec,
        (block,) * parts,
    )
    if "sinks" in ref:
        zero = jnp.zeros((), ref["sinks"].dtype)
        sink = load(ref["sinks"], rows.head, mask=rows.ok, other=zero).astype(jnp.float32) * LOG2E
        m_new = jnp.maximum(m, sink)
        rescale = jnp.exp2(m - m_new)
        m, total = m_new, total * rescale + jnp.exp2(sink - m_new)
        acc = tuple(a * rescale[:, None] for a in acc)
    inverse = 1.0 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    h = jnp.arange(block, dtype=jnp.int32)
    mask = rows.ok[:, None] & (h < part_width)[None, :]
    for part, a in enumerate(acc):
        at = (b, rows.token[:, None], rows.head[:, None], (h + part * part_width)[None, :])
        store(ref["o"], *at, value=(a * inverse[:, None]).astype(ref["o"].dtype), mask=mask)
    if "lse" in ref:
        # Of a query that sees nothing: the logarithm of 0.
        lse = jnp.where(total > 0, (m + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)
        store(ref["lse"], b, rows.token, rows.head, value=lse, mask=rows.ok)


def paged_prefill(
    q: Float[Array, "B T N H"],
    k_pages: Shaped[Array, "P K U W"],
    v_pages: Shaped[Array, "P K U W"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Float[Array, "P K U"] | None = None,
    v_scales: Float[Array, "P K U"] | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    blocks: PagedPrefillBlocks | PagedAttentionBlocks | None = None,
    interpret: bool = False,
) -> Any:
    """Return causal attention of T queries a row over that row's pages, [B, T, N, H].

    Args:
        q: queries.
        k_pages: key pool in a format of `infer.pallas.kv_formats`; the queries' own keys are
            already written.
        v_pages: value pool.
        page_table: pages of each row, P (or any number outside the pool) where there is none.
        positions: of each query; negative for padding (output 0).  A tile reads the keys up to its
            last position, so neighbouring queries are best near each other; any order is right.
        scale: factor on q·k.
        window: visible keys, the query's own included; None for all.
        softcap: bound of scores by tanh, or None.
        sinks: a logit a head that joins the denominator only, or None.
        k_scales: of 8- and 4-bit keys.
        v_scales: of 8- and 4-bit values.
        return_lse: return (o, lse), see `paged_attention`.
        out_dtype: of o; q's by default.
        blocks: the kernel's sizes; those of the decode kernel choose its law of bits.
        interpret: run on any device, slowly.

    Raises:
        ValueError: shapes that do not fit each other, or numbers that fit no attention.
        NotImplementedError: a dtype or a head width that kernels do not serve.
    """
    if isinstance(blocks, PagedAttentionBlocks):
        return paged_attention(
            q,
            k_pages,
            v_pages,
            page_table,
            positions,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            k_scales=k_scales,
            v_scales=v_scales,
            return_lse=return_lse,
            out_dtype=out_dtype,
            blocks=blocks,
            interpret=interpret,
        )
    scale, window, softcap = check_numbers("paged_prefill", scale, window, softcap)
    check_arguments(
        "paged_prefill",
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        k_scales=k_scales,
        v_scales=v_scales,
        sinks=sinks,
    )
    page_table, positions = as_int32(page_table), as_int32(positions)
    blocks = blocks or PagedPrefillBlocks.for_shape(
        width=q.shape[3], pool_dtype=k_pages.dtype, q_dtype=q.dtype
    )
    check_tiles("paged_prefill", q, k_pages, blocks.block_rows, blocks)
    batch, num_tokens, num_heads, _ = q.shape
    num_kv, page_size = k_pages.shape[1:3]
    spec = TileSpec(
        rows=blocks.block_rows,
        block_keys=blocks.block_keys,
        group=num_heads // num_kv,
        capacity=page_table.shape[1] * page_size,
        drafted=0,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    given = {
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "table": page_table,
        "positions": positions,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "sinks": sinks,
    }
    inputs = {name: array for name, array in given.items() if array is not None}
    out = {"o": jax.ShapeDtypeStruct(q.shape, jnp.dtype(out_dtype or q.dtype))}
    if return_lse:
        out["lse"] = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    results = triton_call(
        functools.partial(_prefill_kernel, names=(*inputs, *out), spec=spec),
        *inputs.values(),
        name="paged_prefill",
        grid=(-(-num_tokens * spec.group // spec.rows), num_kv, batch),
        out_shape=tuple(out.values()),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )
    return results if return_lse else results[0]
