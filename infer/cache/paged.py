"""A paged key/value cache as an immutable pytree, with a vectorised allocator that runs inside jit.

Keys and values live in pools of P pages of U tokens.  A row of the page table lists the pages of
one sequence, in order.  Source: Kwon et al. 2023, arXiv 2309.06180.

Sentinels.  A table entry without a page is P, one past the end, never -1: JAX wraps negative
indices even under mode="drop", and a write to "page -1" would land in another sequence's last page.
Writes drop, reads clip and are masked.

The law.  `page_refs[p]` is the number of table entries that hold page p; 0 means free.  There is no
list of free pages: their ids come from a cumulative sum over `page_refs == 0`.  `check_invariants`
states the law for tests.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from infer.cache.pool import GroupedPool, Pool, create_pools, encoded
from infer.config import ModelConfig
from infer.errors import CapacityError
from infer.pytree import Leaf, pytree_dataclass


@pytree_dataclass
class PagedCache:
    """State of the cache; one entry of `k_pages` and `v_pages` per layer, of one model or of
    several one after the other.
    """

    k_pages: tuple[Leaf, ...]  # L x Pool [P, K, U, H], each of its own
    v_pages: tuple[Leaf, ...]  # L x Pool [P, K, U, H]
    page_table: Leaf  # int32 [B, M], P where there is no page
    lengths: Leaf  # int32 [B], tokens of each row whose keys and values are in the cache
    page_refs: Leaf  # int32 [P], 0 = free
    overflow: Leaf  # bool [], an allocation found too few free pages
    # Where pages are quantised as a whole (`GroupedPool`): L x (keys, values) of each row's last
    # tokens, float32 [B, K, 2U, H], position p at p modulo 2U.
    recent: Leaf = None

    @property
    def num_pages(self) -> int:
        """P, pages in the pool; also the sentinel of the page table."""
        return self.page_refs.shape[0]

    @property
    def page_size(self) -> int:
        """U, tokens in a page."""
        return self.k_pages[0].shape[2]


def create(
    config: ModelConfig,
    *,
    num_rows: int,
    num_pages: int,
    page_size: int,
    pages_per_row: int,
    dtype: DTypeLike,
    more: Sequence[ModelConfig] = (),
    num_writers: int | None = None,
) -> PagedCache:
    """Return an empty cache: zeroed pools, no pages held.

    Args:
        config: gives layers, key/value heads and head width.
        num_rows: rows of the page table (B).
        num_pages: pages in the pool (P).
        page_size: tokens in a page (U).
        pages_per_row: longest row of the table (M).
        dtype: of keys and values, a name of `infer.cache.pool.KV_DTYPES` or a dtype.
        more: models whose keys and values of the same tokens lie in the same pages; their layers
            come after those of `config`, in order.
        num_writers: the first rows, which tokens are written for; None is all.

    Raises:
        ConfigError: no such dtype, or heads that it cannot hold.
    """
    shapes = [
        (num_pages, model.num_kv_heads, page_size, model.head_dim)
        for model in (config, *more)
        for _ in model.layers
    ]
    k_pages, v_pages = zip(*(create_pools(shape, dtype) for shape in shapes), strict=True)
    recent = None
    if isinstance(k_pages[0], GroupedPool):
        writers = num_rows if num_writers is None else num_writers
        zeros = lambda heads, width: jnp.zeros((writers, heads, 2 * page_size, width))
        recent = tuple((zeros(k, h), zeros(k, h)) for _, k, _, h in shapes)
    return PagedCache(
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=jnp.full((num_rows, pages_per_row), num_pages, jnp.int32),
        lengths=jnp.zeros(num_rows, jnp.int32),
        page_refs=jnp.zeros(num_pages, jnp.int32),
        overflow=jnp.zeros((), bool),
        recent=recent,
    )


def pages_for(num_tokens: Array | int, page_size: int) -> Array | int:
    """Return ceil(num_tokens / page_size), the pages that so many tokens need."""
    return -(-num_tokens // page_size)


def free_page_ids(page_refs: Int[Array, " P"]) -> tuple[Int[Array, " P"], Int[Array, ""]]:
    """Return the ids of the free pages in ascending order, padded with P, and how many there
    are.
    """
    num_pages = page_refs.shape[0]
    free = page_refs == 0
    rank = jnp.cumsum(free, dtype=jnp.int32) - 1
    ids = jnp.full(num_pages, num_pages, jnp.int32)
    ids = ids.at[jnp.where(free, rank, num_pages)].set(
        jnp.arange(num_pages, dtype=jnp.int32), mode="drop"
    )
    return ids, rank[-1] + 1


def held_pages(cache: PagedCache) -> Int[Array, " B"]:
    """Return the number of pages in each row of the table."""
    return jnp.sum(cache.page_table < cache.num_pages, axis=1, dtype=jnp.int32)


def allocate(
    cache: PagedCache, need: Int[Array, " B"], skip: Int[Array, " B"] | None = None
) -> tuple[PagedCache, Bool[Array, " B"]]:
    """Append `need[b]` fresh pages to each row b, after `skip[b]` columns left for `fork` to fill.

    Rows are served in order.  A row that finds too few free pages, or would outgrow its table, gets
    none, and so does every row after it that asks for any; `overflow` is then set.  Nothing is ever
    half-allocated.

    Returns:
        The new cache, and for each row whether it has what it asked for.
    """
    num_pages, pages_per_row = cache.num_pages, cache.page_table.shape[1]
    start = held_pages(cache) if skip is None else held_pages(cache) + skip
    ids, available = free_page_ids(cache.page_refs)
    taken = jnp.cumsum(need, dtype=jnp.int32)
    fits = (taken <= available) & (start + need <= pages_per_row)
    granted = (need == 0) | (jnp.cumsum(~fits & (need > 0), dtype=jnp.int32) == 0)
    column = jnp.arange(pages_per_row, dtype=jnp.int32)[None, :]
    first = (taken - need - start)[:, None]
    is_new = granted[:, None] & (column >= start[:, None]) & (column < (start + need)[:, None])
    fresh = ids.at[first + column].get(mode="clip")
    table = jnp.where(is_new, fresh, cache.page_table)
    refs = cache.page_refs.at[jnp.where(is_new, fresh, num_pages)].add(1, mode="drop")
    overflow = cache.overflow | ~jnp.all(granted)
    return dataclasses.replace(cache, page_table=table, page_refs=refs, overflow=overflow), granted


def release(cache: PagedCache, rows: Bool[Array, " B"]) -> PagedCache:
    """Give back all pages of the marked rows and set their lengths to 0; shared pages live on in
    other rows.
    """
    dropped = jnp.where(rows[:, None], cache.page_table, cache.num_pages)
    return dataclasses.replace(
        cache,
        page_table=jnp.where(rows[:, None], cache.num_pages, cache.page_table),
        page_refs=cache.page_refs.at[dropped].add(-1, mode="drop"),
        lengths=jnp.where(rows, 0, cache.lengths),
    )


def fork(cache: PagedCache, source: Int[Array, " B"], num_shared: Int[Array, " B"]) -> PagedCache:
    """Let row b begin with the first `num_shared[b]` pages of row `source[b]`, by reference.

    Rows with `num_shared` 0 are left alone; the others must hold no pages in those columns.  A page
    has one owner unless nobody writes to it: a row that will write shares full pages only.  Lengths
    stay as they are.
    """
    num_pages, pages_per_row = cache.num_pages, cache.page_table.shape[1]
    column = jnp.arange(pages_per_row, dtype=jnp.int32)[None, :]
    shared = column < num_shared[:, None]
    parent_table = cache.page_table.at[source].get(mode="clip")
    taken = jnp.where(shared, parent_table, num_pages)
    return dataclasses.replace(
        cache,
        page_table=jnp.where(shared, parent_table, cache.page_table),
        page_refs=cache.page_refs.at[taken].add(1, mode="drop"),
    )


def copy_pages(cache: PagedCache, source: Int[Array, " N"], target: Int[Array, " N"]) -> PagedCache:
    """Copy the contents of page `source[n]` to page `target[n]`, in every layer; a target of P
    copies nothing.
    """
    copied = lambda pages: pages.at[target].set(pages.at[source].get(mode="clip"), mode="drop")
    k_pages, v_pages = jax.tree.map(copied, (cache.k_pages, cache.v_pages))
    return dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages)


def reorder(cache: PagedCache, source: Int[Array, " B"]) -> PagedCache:
    """Let each row b go on as row `source[b]` was, sharing all its pages by reference.

    Pages that no row has any more are free.  Before a row writes, `own_next_page`.
    """
    table = cache.page_table[source]
    refs = cache.page_refs.at[cache.page_table].add(-1, mode="drop")
    return dataclasses.replace(
        cache,
        page_table=table,
        page_refs=refs.at[table].add(1, mode="drop"),
        lengths=cache.lengths[source],
        recent=jax.tree.map(lambda x: x[source], cache.recent),
    )


def own_next_page(cache: PagedCache, rows: Bool[Array, " B"]) -> tuple[PagedCache, Int[Array, ""]]:
    """Give each marked row a page of its own for its next token: copy on write.

    At a border of pages that is a fresh one.  Of the rows that share a page, the first keeps it if
    no unmarked row has it, and each other gets a copy.  `overflow` is set where the pool is too
    small, and nothing is copied.

    Returns:
        The new cache, and the number of pages copied.
    """
    num_rows, pages_per_row = cache.page_table.shape
    index = jnp.arange(num_rows, dtype=jnp.int32)
    column = jnp.minimum(cache.lengths // cache.page_size, pages_per_row - 1)
    page = jnp.where(rows, cache.page_table[index, column], cache.num_pages)
    has_page = page < cache.num_pages
    same = (page[:, None] == page[None, :]) & has_page[:, None]
    rank = jnp.sum(same & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)
    refs = cache.page_refs.at[page].get(mode="fill", fill_value=0)
    # All but the last of its owners: who copies lets go of the original.
    copied = has_page & (rank < refs - 1)
    wanted = copied | (rows & ~has_page)
    ids, available = free_page_ids(cache.page_refs)
    nth = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    fits = nth[-1] < available
    copied, wanted = copied & fits, wanted & fits
    fresh = jnp.where(wanted, ids.at[nth].get(mode="clip"), cache.num_pages)
    cache = copy_pages(cache, page, jnp.where(copied, fresh, cache.num_pages))
    refs = cache.page_refs.at[jnp.where(copied, page, cache.num_pages)].add(-1, mode="drop")
    table = cache.page_table.at[index, jnp.where(wanted, column, pages_per_row)].set(
        fresh, mode="drop"
    )
    cache = dataclasses.replace(
        cache,
        page_table=table,
        page_refs=refs.at[fresh].add(1, mode="drop"),
        overflow=cache.overflow | ~fits,
    )
    return cache, jnp.sum(copied, dtype=jnp.int32)


def page_of(
    page_table: Int[Array, "B M"],
    rows: Int[Array, " N"],
    positions: Int[Array, " N"],
    num_pages: int,
    page_size: int,
) -> Int[Array, " N"]:
    """Return the page that holds each (row, position); P for a row past the table or a position
    past its pages.
    """
    num_rows, pages_per_row = page_table.shape
    column = positions // page_size
    page = page_table.at[rows, column].get(mode="clip")
    valid = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (column < pages_per_row)
    return jnp.where(valid, page, num_pages)


def write_tokens(
    pool: Pool,
    values: Float[Array, "N K H"],
    page_ids: Int[Array, " N"],
    positions: Int[Array, " N"],
) -> Pool:
    """Write one token's keys (or values) at each (page, position modulo U); a page id of P writes
    nothing.
    """
    slots = positions % pool.shape[2]
    put = lambda pages, x: pages.at[page_ids, :, slots].set(x, mode="drop")
    return jax.tree.map(put, pool, encoded(pool, values))


def write_pages(pool: Pool, values: Float[Array, "N U K H"], page_ids: Int[Array, " N"]) -> Pool:
    """Write N whole pages; a page id of P writes nothing."""
    put = lambda pages, x: pages.at[page_ids].set(x, mode="drop")
    return jax.tree.map(put, pool, encoded(pool, values.swapaxes(1, 2)))


def check_invariants(cache: PagedCache) -> None:
    """Raise AssertionError if the pool's accounts are wrong.  For tests, on concrete arrays."""
    num_pages = cache.num_pages
    table, refs, lengths = map(np.asarray, (cache.page_table, cache.page_refs, cache.lengths))
    assert ((table >= 0) & (table <= num_pages)).all(), (
        "a table entry is neither a page nor the sentinel"
    )
    counted = np.bincount(table[table < num_pages].ravel(), minlength=num_pages)
    assert (refs == counted).all(), (
        f"page_refs {refs.tolist()} but the table holds {counted.tolist()}"
    )
    held = (table < num_pages).sum(1)
    prefix = np.arange(table.shape[1])[None, :] < held[:, None]
    assert ((table < num_pages) == prefix).all(), "a row of the table has a hole"
    assert (lengths <= held * cache.page_size).all(), (
        f"lengths {lengths.tolist()} exceed the pages held"
    )


def raise_if_overflow(cache: PagedCache, *, way_out: str) -> None:
    """Raise CapacityError if an allocation failed.  Outside jit only."""
    if bool(jax.device_get(cache.overflow)):
        free = int(np.sum(np.asarray(cache.page_refs) == 0))
        raise CapacityError(
            f"the page pool is full: {cache.num_pages} pages of {cache.page_size} tokens, {free} "
            f"free; {way_out}"
        )
