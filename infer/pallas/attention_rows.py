"""What the flash attention kernels share: rows on flat token axes cut into blocks, and head widths
cut into tiles.

A program owns one block of queries (or of keys) of one row.  Which row that is, a table says that
plain jnp makes beforehand, so that one kernel serves dense batches and rows of any length on one
token axis.  Blocks are counted from each row's own first token, never from the array's: what a row
computes does not depend on its neighbours.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from infer.pallas.triton_call import load, store
from infer.pytree import Leaf, pytree_dataclass, static

LOG2E = 1.4426950408889634


@pytree_dataclass
class Side:
    """Rows of one token axis, that of queries or of keys."""

    first: Leaf  # int32 [R], each row's first token
    stored: Leaf  # int32 [R], tokens of output that it has
    real: Leaf  # int32 [R], how many of them are real; the rest are padding
    num_tokens: int = static()
    longest: int = static()  # no row stores more

    def num_blocks(self, size: int) -> int:
        """Return a bound on the number of blocks of `size` tokens in all rows."""
        rows = self.first.shape[0]
        return min(rows * -(-self.longest // size), self.num_tokens // size + rows)


class Rows(NamedTuple):
    """Rows of queries and the rows of keys that they look at."""

    queries: Side
    keys: Side


def dense_rows(
    batch: int, num_queries: int, num_keys: int, lengths: Int[Array, " B"] | None
) -> Rows:
    """Return the rows of arrays [B, T, ...] and [B, S, ...] with the first two axes merged."""

    def side(num_tokens: int) -> Side:
        full = jnp.full((batch,), num_tokens, jnp.int32)
        return Side(
            first=jnp.arange(batch, dtype=jnp.int32) * num_tokens,
            stored=full,
            real=full if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, num_tokens),
            num_tokens=batch * num_tokens,
            longest=num_tokens,
        )

    return Rows(side(num_queries), side(num_keys))


def ragged_rows(starts: Int[Array, " R"], num_tokens: int) -> Rows:
    """Return the rows [starts[r], starts[r + 1]) of one token axis; what is before the first and
    past the last are two more rows, all padding, so that their outputs are written too.
    """
    first = jnp.pad(jnp.clip(starts.astype(jnp.int32), 0, num_tokens), (1, 0))
    stored = jnp.diff(first, append=jnp.full((1,), num_tokens, jnp.int32))
    side = Side(
        first=first,
        stored=stored,
        real=stored.at[0].set(0).at[-1].set(0),
        num_tokens=num_tokens,
        longest=num_tokens,
    )
    return Rows(side, side)


def block_table(own: Side, other: Side, size: int, *, last_first: bool) -> Int[Array, "6 blocks"]:
    """Return what each program reads of its block: see `Block`.

    With `last_first` a row's blocks come in falling order: under a causal mask the last queries
    have most keys, and long programs should not start last.  Blocks that the bound has too many
    store nothing.
    """
    counts = (own.stored + (size - 1)) // size
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(own.num_blocks(size), dtype=jnp.int32)
    row = jnp.sum((index[:, None] >= ends[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    live = row < ends.shape[0]
    row = jnp.minimum(row, ends.shape[0] - 1)
    place = index - (ends - counts)[row]
    position = jnp.where(last_first, counts[row] - 1 - place, place) * size
    table = jnp.stack(
        [
            own.first[row],
            position,
            own.stored[row],
            own.real[row],
            other.first[row],
            other.real[row],
        ]
    )
    return jnp.where(live[None, :], table, 0)


class Block(NamedTuple):
    """One block of a row: its tokens' positions are `position`, `position + 1`, ..."""

    first: Array  # token of the row's position 0
    position: Array  # of the block's first token
    stored: Array  # positions from here on belong to other rows
    real: Array  # positions from here on are padding
    other_first: Array  # token of position 0 on the other axis
    other_real: Array  # real tokens of this row on the other axis


class Span(NamedTuple):
    """Blocks [lower, upper) of the other axis that a block meets; in one that is not `masked` all
    queries see all keys.
    """

    lower: Array
    upper: Array
    masked: bool


def read_block(table_ref: Any, index: Array) -> Block:
    """Load the entry of one block in a kernel."""
    return Block(*(load(table_ref, jnp.int32(field), index) for field in range(6)))


def tiles_of(width: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) of tiles that cover a head, each a power of two of at least 16.

    80 is 64 + 16 and 192 is 128 + 64: no work is done on padding, unless the width is no multiple
    of 16.
    """
    tiles, offset, rest = [], 0, -(-width // 16) * 16
    while rest:
        size = 1 << (rest.bit_length() - 1)
        tiles.append((offset, size))
        offset, rest = offset + size, rest - size
    return tuple(tiles)


def _columns(tile: tuple[int, int], head: Array, width: int) -> tuple[Array, Array | None]:
    offset, size = tile
    h = offset + jnp.arange(size, dtype=jnp.int32)[None, :]
    return head * width + h, None if offset + size <= width else h < width


def load_heads(ref: Any, tokens: Array, head: Array, width: int, mask: Any) -> tuple[Array, ...]:
    """Load tiles [tokens, size] of one head from a reference [T, heads * width]; 0 where `mask`
    [tokens] is False.
    """
    tiles = []
    for tile in tiles_of(width):
        column, inside = _columns(tile, head, width)
        where = None if mask is None else mask[:, None]
        if inside is not None:
            where = inside if where is None else where & inside
        other = None if where is None else 0.0
        tiles.append(load(ref, tokens[:, None], column, mask=where, other=other))
    return tuple(tiles)


def store_heads(
    ref: Any, tokens: Array, head: Array, width: int, values: Sequence[Array], mask: Array
) -> None:
    """Store tiles [tokens, size] of one head to a reference [T, heads * width]."""
    for tile, value in zip(tiles_of(width), values, strict=True):
        column, inside = _columns(tile, head, width)
        where = mask[:, None] if inside is None else mask[:, None] & inside
        store(ref, tokens[:, None], column, value=value.astype(ref.dtype), mask=where)


def visible(
    i: Array, j: Array, num_keys: Array, window: int | None, *, transposed: bool = False
) -> Array:
    """Return the mask [queries, keys] of what queries at i see of keys at j, or its transpose."""
    i, j = (i[None, :], j[:, None]) if transposed else (i[:, None], j[None, :])
    mask = (j <= i) & (j < num_keys)
    return mask if window is None else mask & (j > i - window)


def walk(body: Callable[..., Any], carry: Any, spans: Sequence[Span]) -> Any:
    """Run body(step, carry, masked) over the blocks of all spans."""
    for span in spans:
        step = functools.partial(body, masked=span.masked)
        carry = lax.fori_loop(span.lower, span.upper, step, carry)
    return carry


def tanh(x: Array) -> Array:
    """Return tanh to about 1e-7 by one exp2: the library's is a branch, the chip's own instruction
    is good to 5e-4 only.
    """
    return 1.0 - 2.0 / (jnp.exp2((2.0 * LOG2E) * x) + 1.0)


def ceil_div(x: Array, size: int) -> Array:
    """Return ceil(x / size) of x >= 0: `//` would test signs."""
    return lax.div(x + (size - 1), jnp.int32(size))


def floor_div(x: Array, size: int) -> Array:
    """Return floor(x / size) of x >= 0."""
    return lax.div(x, jnp.int32(size))
