"""The pool of n-grams against an ordered dict, and the window."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.spec import lookahead
from infer.spec.lookahead import candidates, empty_pool, pool_drafts, put, slide, window_ngrams

CAPACITY, N, MOST = 5, 3, 3
NGRAM = st.tuples(*[st.integers(0, 2)] * N)
STEP = st.lists(st.tuples(NGRAM, st.booleans()), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(STEP, STEP), min_size=1, max_size=4))
def test_the_pool_keeps_the_latest_different_n_grams(steps) -> None:
    pool = empty_pool(2, capacity=CAPACITY, n=N)
    want: list[OrderedDict] = [OrderedDict(), OrderedDict()]
    for step in steps:
        ngrams = jnp.asarray([[n for n, _ in row] for row in step], jnp.int32)
        valid = jnp.asarray([[v for _, v in row] for row in step])
        pool = jax.jit(put)(pool, ngrams, valid)
        for seen, row in zip(want, step, strict=True):
            for ngram, takes in row:
                if takes:
                    seen[ngram] = None
                    seen.move_to_end(ngram)
                if len(seen) > CAPACITY:
                    seen.popitem(last=False)
    for last in range(3):
        found = jax.jit(candidates, static_argnums=2)(pool, jnp.full(2, last, jnp.int32), MOST)
        for i, seen in enumerate(want):
            expected = [list(n[1:]) for n in reversed(seen) if n[0] == last][:MOST]
            assert found.tokens[i, : found.count[i]].tolist() == expected


def test_drafts_are_the_latest_continuation() -> None:
    pool = empty_pool(2, capacity=4, n=3)
    ngrams = jnp.asarray([[[0, 1, 2], [0, 3, 4]], [[5, 6, 7], [0, 8, 9]]], jnp.int32)
    pool = put(pool, ngrams, jnp.ones((2, 2), bool))
    drafts = pool_drafts(pool, jnp.asarray([0, 1], jnp.int32))
    assert drafts.count.tolist() == [2, 0]
    assert drafts.tokens.tolist() == [[3, 4], [0, 0]]


def test_a_window_slides_and_its_columns_are_n_grams() -> None:
    window = jnp.asarray([[[1, 2, 3], [4, 5, 6]]], jnp.int32)
    new = jnp.asarray([[7, 8, 9]], jnp.int32)
    assert window_ngrams(window, new).tolist() == [[[1, 4, 7], [2, 5, 8], [3, 6, 9]]]
    assert slide(window, new).tolist() == [[[4, 5, 6], [7, 8, 9]]]


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        empty_pool(1, capacity=0, n=3)
    with pytest.raises(ValueError, match="n 1"):
        empty_pool(1, capacity=1, n=1)
    with pytest.raises(ValueError, match="3 candidates of a pool of 2"):
        lookahead.candidates(empty_pool(1, capacity=2, n=3), jnp.zeros(1, jnp.int32), 3)
