"""What paged attention kernels share: which keys a tile of queries sees, and the loop over them.

A tile is `rows` consecutive rows of one sequence and key/value head, numbered token * G + query
head of the group: with few tokens it holds the heads of all, with many heads a part of one token.
A row's arithmetic depends on the absolute numbers of its keys alone: blocks of `block_keys` keys
begin at their multiples, and a block that a row does not see changes none of its bits (m stays,
the factors are exp2(0) = 1 and 0).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton

from infer.pallas import kv_formats
from infer.pallas.triton_call import MASKED, load, power_of_two

# Scores are kept in units of log2: exp2 is the GPU's instruction.
LOG2E = 1.4426950408889634
_NEVER = 2**30  # later than any position


@dataclass(frozen=True, kw_only=True)
class TileSpec:
    """What a tile computes; static."""

    rows: int
    block_keys: int
    group: int  # query heads a key/value head
    capacity: int  # keys that a row of the page table holds
    drafted: int  # tokens of a tree, or 0
    scale: float
    window: int | None
    softcap: float | None


class Rows(NamedTuple):
    """Rows of a tile: token and query head of each, and which exist."""

    token: Array  # [rows]
    head: Array  # [rows]
    ok: Array  # [rows]


def rows_of_tile(tile: Array, kv_head: Array, num_tokens: int, spec: TileSpec) -> Rows:
    """Return the rows that tile number `tile` of a key/value head holds."""
    flat = tile * spec.rows + jnp.arange(spec.rows, dtype=jnp.int32)
    group = jnp.int32(spec.group)
    ok = flat < num_tokens * spec.group
    # Rows that do not exist keep places of their own: the interpreter writes a masked store's old
    # values back, and would undo a row that shared its place.
    return Rows(lax.div(flat, group), kv_head * spec.group + lax.rem(flat, group), ok)


def load_parts(ref: Any, indices: tuple[Any, ...], ok: Array, parts: int) -> tuple[Array, ...]:
    """Return `ref[indices]`, rows of vectors, cut into `parts` tiles along the last axis."""
    width = ref.shape[-1] // parts
    return tuple(load_columns(ref, indices, ok, part * width, width) for part in range(parts))


def load_columns(ref: Any, indices: tuple[Any, ...], ok: Array, first: int, width: int) -> Array:
    """Return columns first to first + width of `ref[indices]`, then zeros to a power of two."""
    h = jnp.arange(power_of_two(width, 16), dtype=jnp.int32)
    mask = ok[:, None] if h.size == width else ok[:, None] & (h < width)[None, :]
    cells = tuple(x[:, None] if jnp.ndim(x) else x for x in indices)
    return load(ref, *cells, (h + first)[None, :], mask=mask, other=jnp.zeros((), ref.dtype))


def key_range(
    i: Array,
    b: Array,
    refs: Mapping[str, Any],
    *,
    capacity: int,
    window: int | None,
    drafted: int,
) -> tuple[Array, Array]:
    """Return [start, end) that holds every key that queries at positions `i` (negative: none) see.

    Args:
        i: positions of queries of sequence `b`.
        b: sequence.
        refs: of which positions, and bounds where a row is limited further.
        capacity: keys that a row of the page table holds.
        window: visible keys, or None.
        drafted: tokens of a tree, in consecutive slots from the first query's position; 0 without.
    """
    end = jnp.max(i) + 1
    if drafted:
        end = jnp.where(end > 0, load(refs["positions"], b, jnp.int32(0)) + drafted, 0)
    end = jnp.minimum(end, capacity)
    start = jnp.int32(0)
    if window is not None:
        start = jnp.maximum(jnp.min(jnp.where(i >= 0, i, _NEVER)) - window + 1, 0)
    if "bounds" in refs:
        start = jnp.maximum(start, load(refs["bounds"], b, jnp.int32(0)))
        end = jnp.minimum(end, load(refs["bounds"], b, jnp.int32(1)))
    return start, end


def visible(
    i: Array, j: Array, rows: Rows, b: Array, refs: Mapping[str, Any], spec: TileSpec
) -> Array:
    """Return [rows, keys]: which key j each query at position i sees."""
    if "tree" not in refs:
        mask = j[None, :] <= i[:, None]
        return mask if spec.window is None else mask & (j[None, :] > i[:, None] - spec.window)
    # The tree's bits hold the window among drafted tokens, whose slots are not their positions.
    base = load(refs["positions"], b, jnp.int32(0))
    drafted = j - base
    mask = (drafted < 0)[None, :] & (i >= 0)[:, None]
    if spec.window is not None:
        mask = mask & (j[None, :] > i[:, None] - spec.window)
    for word in range(refs["tree"].shape[2]):
        ancestors = load(
            refs["tree"], b, rows.token, jnp.int32(word), mask=rows.ok, other=jnp.int32(0)
        )
        bit = drafted - 32 * word
        inside = (bit >= 0) & (bit < 32)
        shift = jnp.where(inside, bit, 0)
        seen = lax.shift_right_logical(
            jnp.broadcast_to(ancestors[:, None], mask.shape),
            jnp.broadcast_to(shift[None, :], mask.shape),
        )
        mask = mask | (inside[None, :] & ((seen & 1) == 1) & (i >= 0)[:, None])
    return mask


class Block(NamedTuple):
    """A block of keys and values, before scaling."""

    k: tuple[Array, ...]  # [keys, part]
    v: tuple[Array, ...]  # [keys, part]
    k_scale: Array | None  # [keys]
    v_scale: Array | None  # [keys]
    ok: Array  # [keys]: which were read


def find_pages(
    j: Array, start: Array, stop: Array, b: Array, table_ref: Any, num_pages: int, page_size: int
) -> tuple[Array, Array, Array]:
    """Return (page, slot in it, whether it may be read) of keys `j` of sequence `b`."""
    ok = (j >= start) & (j < stop)
    j = jnp.where(ok, j, 0)
    size = jnp.int32(page_size)
    page = load(table_ref, b, lax.div(j, size), mask=ok, other=jnp.int32(num_pages))
    return page, lax.rem(j, size), ok & (page >= 0) & (page < num_pages)


def load_block(
    j: Array,
    start: Array,
    stop: Array,
    b: Array,
    kv_head: Array,
    refs: Mapping[str, Any],
    dtype: jnp.dtype,
) -> Block:
    """Return keys and values of slots `j` in [start, stop) of sequence `b`.

    Nothing outside is read, nor a page that is none: its memory would be another's, stale, or
    nobody's, and 0 x NaN would poison the sum.
    """
    k_ref, v_ref = refs["k"], refs["v"]
    page, slot, ok = find_pages(j, start, stop, b, refs["table"], k_ref.shape[0], k_ref.shape[2])
    where = (page, kv_head, slot)
    read = lambda ref: tuple(
        x for data in load_parts(ref, where, ok, 1) for x in kv_formats.unpack(data, dtype)
    )
    scale = lambda name: (
        load(refs[name], *where, mask=ok, other=jnp.zeros((), refs[name].dtype)).astype(jnp.float32)
        if name in refs
        else None
    )
    return Block(read(k_ref), read(v_ref), scale("k_scales"), scale("v_scales"), ok)


def attend(
    q: tuple[Array, ...],
    start: Array,
    stop: Array,
    block_at: Callable[[Array], Block],
    visible_at: Callable[[Array], Array],
    spec: TileSpec,
    widths: tuple[int, ...],
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Return (m, l, acc) of the tile over keys in [start, stop), in blocks at their multiples.

    Args:
        q: [rows, part] each; parts of the width that are summed.
        start: first key.
        stop: one past the last key.
        block_at: keys and values of slots [block_keys].
        visible_at: the mask [rows, block_keys] of slots [block_keys].
        spec: what is computed.
        widths: of the tiles that acc consists of, as the block's v.
    """

    def body(step: Array, carry: Any) -> Any:
        m, total, acc = carry
        j = step * spec.block_keys + jnp.arange(spec.block_keys, dtype=jnp.int32)
        block = block_at(j)
        x = jnp.zeros((spec.rows, spec.block_keys), jnp.float32)
        for a, k in zip(q, block.k, strict=True):
            x = x + triton.dot(a, k, trans_b=True, allow_tf32=False)
        x = _scores(x, block.k_scale, spec)
        mask = block.ok[None, :] & visible_at(j)
        x = jnp.where(mask, x, MASKED)
        m_new = jnp.maximum(m, jnp.max(x, axis=1))
        # A row that sees nothing yet has m_new = MASKED, where exp2(0) would count masked keys.
        p = jnp.where(mask, jnp.exp2(x - m_new[:, None]), 0.0)
        rescale = jnp.exp2(m - m_new)
        total = total * rescale + jnp.sum(p, axis=1)
        weights = (p if block.v_scale is None else p * block.v_scale[None, :]).astype(q[0].dtype)
        acc = tuple(
            a * rescale[:, None] + triton.dot(weights, v, allow_tf32=False)
            for a, v in zip(acc, block.v, strict=True)
        )
        return m_new, total, acc

    zero = jnp.zeros((spec.rows,), jnp.float32)
    acc = tuple(jnp.zeros((spec.rows, width), jnp.float32) for width in widths)
    size = jnp.int32(spec.block_keys)
    return lax.fori_loop(
        lax.div(start, size),
        lax.div(stop + size - 1, size),
        body,
        (zero + MASKED, zero, acc),
    )


def _scores(x: Array, k_scale: Array | None, spec: TileSpec) -> Array:
    factor = spec.scale * (LOG2E if spec.softcap is None else 1.0)
    x = x * factor if k_scale is None else x * (k_scale * factor)[None, :]
    if spec.softcap is None:
        return x
    return jnp.tanh(x * (1.0 / spec.softcap)) * (spec.softcap * LOG2E)
