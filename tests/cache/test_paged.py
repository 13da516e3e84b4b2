"""The page table and its allocator: literals, laws under random operations, and the sentinel (case
X01).
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.cache import paged
from infer.errors import CapacityError
from tests.models.tiny import llama_config

pytestmark = pytest.mark.kernels


def _cache(
    num_slots: int = 3, num_pages: int = 8, page_size: int = 16, pages_per_row: int = 4
) -> paged.PagedCache:
    return paged.create(
        llama_config(),
        num_rows=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_row=pages_per_row,
        dtype=jnp.dtype("float32"),
    )


def _need(*counts: int) -> jax.Array:
    return jnp.asarray(counts, jnp.int32)


def test_a_sequence_of_38_tokens_lies_in_pages_0_3_5() -> None:
    cache = _cache()
    # Pages 1, 2 and 4 are held by others, as in the picture of PagedAttention.
    cache, _ = paged.allocate(cache, _need(1, 0, 0))
    cache, _ = paged.allocate(cache, _need(0, 2, 0))
    cache, _ = paged.allocate(cache, _need(1, 0, 0))
    cache, _ = paged.allocate(cache, _need(0, 1, 0))
    cache, granted = paged.allocate(cache, _need(1, 0, 0))
    assert bool(granted.all())
    assert cache.page_table[0].tolist() == [0, 3, 5, 8]
    assert cache.page_table[1].tolist() == [1, 2, 4, 8]
    positions = _need(0, 15, 16, 31, 32, 37, 48)
    pages = paged.page_of(cache.page_table, jnp.zeros(7, jnp.int32), positions, 8, 16)
    assert pages.tolist() == [0, 0, 3, 3, 5, 5, 8]
    assert paged.pages_for(38, 16) * 16 - 38 <= 15
    paged.check_invariants(cache)


def test_minus_one_is_the_trap_and_the_length_is_the_sentinel() -> None:
    slots = jnp.zeros(4)
    assert slots.at[-1].set(7, mode="drop").tolist() == [0, 0, 0, 7]
    assert slots.at[4].set(7, mode="drop").tolist() == [0, 0, 0, 0]


def test_padding_rows_never_touch_the_last_page() -> None:
    cache = _cache(num_slots=8, num_pages=4)
    cache, _ = paged.allocate(cache, _need(1, 1, 1, 0, 0, 0, 0, 0))
    marker = cache.k_pages[0].at[3].set(42.0)
    rows = jnp.asarray([0, 1, 2, 8, 8, 8, 8, 8], jnp.int32)
    positions = jnp.asarray([5, 6, 7, -1, -1, -1, -1, -1], jnp.int32)
    pages = paged.page_of(cache.page_table, rows, positions, 4, 16)
    assert pages.tolist() == [0, 1, 2, 4, 4, 4, 4, 4]
    written = paged.write_tokens(marker, jnp.ones((8, 2, 8)), pages, positions)
    np.testing.assert_array_equal(written[3], 42.0)
    np.testing.assert_array_equal(written[jnp.arange(3), :, jnp.asarray([5, 6, 7])], 1.0)
    assert float(written[:3].sum()) == 3 * 2 * 8


def test_what_is_too_large_gets_nothing_and_sets_the_flag() -> None:
    cache, granted = paged.allocate(_cache(), _need(3, 4, 2))
    assert granted.tolist() == [True, True, False]
    assert bool(cache.overflow)
    assert paged.held_pages(cache).tolist() == [3, 4, 0]
    paged.check_invariants(cache)
    with pytest.raises(CapacityError, match=r"8 pages of 16 tokens, 1 free; ask for less"):
        paged.raise_if_overflow(cache, way_out="ask for less")


def test_a_row_never_outgrows_its_table() -> None:
    cache, granted = paged.allocate(_cache(), _need(5, 0, 0))
    assert granted.tolist() == [False, True, True]
    assert bool(cache.overflow)


def test_forks_share_pages_until_the_last_holder_is_released() -> None:
    cache, _ = paged.allocate(_cache(), _need(2, 0, 0))
    cache = paged.fork(cache, _need(0, 0, 0), _need(0, 2, 1))
    assert cache.page_table.tolist() == [[0, 1, 8, 8], [0, 1, 8, 8], [0, 8, 8, 8]]
    assert cache.page_refs.tolist()[:2] == [3, 2]
    assert cache.lengths.tolist() == [0, 0, 0]
    paged.check_invariants(cache)
    cache = paged.release(cache, jnp.asarray([True, False, True]))
    assert cache.page_refs.tolist()[:2] == [1, 1]
    cache = paged.release(cache, jnp.asarray([False, True, False]))
    assert cache.page_refs.tolist() == [0] * 8
    paged.check_invariants(cache)


OPERATION = st.one_of(
    st.tuples(st.just("allocate"), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
    st.tuples(st.just("release"), st.lists(st.booleans(), min_size=3, max_size=3)),
    st.tuples(st.just("fork"), st.integers(0, 2)),
)

_allocate, _release, _fork = jax.jit(paged.allocate), jax.jit(paged.release), jax.jit(paged.fork)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=12))
def test_the_law_holds_after_any_operations(operations) -> None:
    cache = _cache()
    for name, argument in operations:
        held = paged.held_pages(cache)
        if name == "allocate":
            before = int((cache.page_refs == 0).sum())
            cache, granted = _allocate(cache, jnp.asarray(argument, jnp.int32))
            taken = int((np.asarray(argument) * np.asarray(granted)).sum())
            assert int((cache.page_refs == 0).sum()) == before - taken
        elif name == "release":
            cache = _release(cache, jnp.asarray(argument))
        else:
            # Every empty row takes the full pages of row `argument`.
            shared = jnp.where(held == 0, held[argument], 0)
            cache = _fork(cache, jnp.full(3, argument, jnp.int32), shared)
        paged.check_invariants(cache)


def test_one_trace_serves_every_value() -> None:
    chex.clear_trace_counter()
    allocate = jax.jit(chex.assert_max_traces(paged.allocate, n=1))
    cache = _cache()
    for need in ((1, 0, 0), (0, 2, 1), (9, 9, 9)):
        cache, _ = allocate(cache, _need(*need))
