"""Drafters without a model, against plain Python over lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.sampling import History
from infer.spec.context import Context, append, context_of
from infer.spec.ngram import Occurrence, ngram_drafts
from infer.spec.suffix import suffix_drafts

SIZE = 12
# Few tokens, so that they repeat; what is past a length is one of them too, and must not be seen.
ROW = st.tuples(st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE), st.integers(0, SIZE))
ROWS = st.lists(ROW, min_size=4, max_size=4)


def _context(rows: list[tuple[list[int], int]]) -> Context:
    return Context(
        tokens=jnp.asarray([tokens for tokens, _ in rows], jnp.int32),
        lengths=jnp.asarray([length for _, length in rows], jnp.int32),
    )


def _lookup(text: list[int], k: int, low: int, high: int, first: bool) -> list[int]:
    for n in range(high, low - 1, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if ends:
            start = ends[0] if first else ends[-1]
            longer = list(text)
            for i in range(k):
                longer.append(longer[start + i])
            return longer[len(text) :]
    return []


@pytest.mark.parametrize("occurrence", list(Occurrence))
@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_prompt_lookup_is_a_search_from_the_longest_n_gram_down(occurrence, rows) -> None:
    find = _jitted(ngram_drafts, k=5, min_match=2, max_match=4, occurrence=occurrence)
    drafts = find(_context(rows))
    for i, (tokens, length) in enumerate(rows):
        want = _lookup(tokens[:length], 5, 2, 4, occurrence is Occurrence.FIRST)
        assert drafts.tokens[i, : drafts.count[i]].tolist() == want


@functools.lru_cache(maxsize=8)
def _jitted(function, **options):
    return jax.jit(functools.partial(function, **options))


def test_a_continuation_that_reaches_the_end_repeats_itself() -> None:
    drafts = ngram_drafts(_context([([7, 1, 2, 3, 1, 2] + [0] * 6, 6)]), k=7, max_match=2)
    assert drafts.tokens[0].tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_latest_or_first_occurrence() -> None:
    text = [([1, 2, 5, 1, 2, 6, 1, 2] + [0] * 4, 8)]
    latest = ngram_drafts(_context(text), k=2, max_match=2)
    first = ngram_drafts(_context(text), k=2, max_match=2, occurrence=Occurrence.FIRST)
    assert latest.tokens[0].tolist() == [6, 1]
    assert first.tokens[0].tolist() == [5, 1]


def _suffix(text: list[int], k: int, depth: int, factor: float, least: float) -> list[int]:
    for n in range(min(depth, len(text) - 1), 0, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if ends:
            break
    else:
        return []
    drafts, chance = [], np.float32(1)
    while len(drafts) < min(k, int(factor * n)):
        votes = [e for e in ends if e < len(text)]
        if not votes:
            break
        count = {t: sum(text[e] == t for e in votes) for t in range(3)}
        latest = {t: max([e for e in votes if text[e] == t], default=-1) for t in range(3)}
        best = max(range(3), key=lambda t: (count[t], latest[t]))
        chance *= np.float32(count[best]) / np.float32(len(votes))
        if chance < least:
            break
        drafts.append(best)
        ends = [e + 1 for e in votes if text[e] == best]
    return drafts


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_suffix_drafts_are_the_majority_of_earlier_occurrences(rows) -> None:
    find = _jitted(suffix_drafts, k=5, max_depth=4, spec_factor=1.5, min_token_prob=0.4)
    drafts = find(_context(rows))
    for i, (tokens, length) in enumerate(rows):
        want = _suffix(tokens[:length], 5, 4, 1.5, 0.4)
        assert drafts.tokens[i, : drafts.count[i]].tolist() == want


def test_a_vote_of_three_occurrences() -> None:
    text = [([9, 4, 9, 4, 9, 5, 9] + [0] * 5, 7)]
    # After 9: 4, 4, 5; after the two of "9 4": 9, 9; then 4 and 5, of which 5 is later.
    options = dict(k=3, max_depth=1, spec_factor=3.0)
    drafts = suffix_drafts(_context(text), **options, min_token_prob=0.6)
    assert drafts.tokens[0, : drafts.count[0]].tolist() == [4, 9]
    drafts = suffix_drafts(_context(text), **options, min_token_prob=0.3)
    assert drafts.tokens[0, : drafts.count[0]].tolist() == [4, 9, 5]


def test_a_context_is_prompt_and_output_and_grows_to_its_room() -> None:
    history = History(
        prompts=jnp.asarray([[1, 2, 3], [4, 0, 0]], jnp.int32),
        prompt_lens=jnp.asarray([3, 1], jnp.int32),
        generated=jnp.asarray([[7, 8], [9, 0]], jnp.int32),
        num_generated=jnp.asarray([2, 1], jnp.int32),
    )
    context = context_of(history)
    assert context.tokens[0, :5].tolist() == [1, 2, 3, 7, 8]
    assert context.tokens[1, :2].tolist() == [4, 9]
    assert context.lengths.tolist() == [5, 2]
    more = append(context, jnp.asarray([[5, 6], [5, 6]], jnp.int32), jnp.asarray([2, 1], jnp.int32))
    assert more.lengths.tolist() == [5, 3]
    assert more.tokens[0].tolist() == [1, 2, 3, 7, 8]
    assert more.tokens[1, :3].tolist() == [4, 9, 5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: ngram_drafts(c, k=0), "k is 0; it must be at least 1"),
        (lambda c: ngram_drafts(c, k=1, min_match=0), "min_match is 0"),
        (lambda c: ngram_drafts(c, k=1, min_match=4, max_match=3), "max_match 3"),
        (lambda c: suffix_drafts(c, k=0), "k is 0; it must be at least 1"),
        (lambda c: suffix_drafts(c, k=1, min_match=5, max_depth=4), "max_depth 4"),
        (lambda c: suffix_drafts(c, k=1, spec_factor=0.0), r"spec_factor is 0\.0"),
        (lambda c: suffix_drafts(c, k=1, min_token_prob=1.5), r"min_token_prob is 1\.5"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(_context([([0] * SIZE, SIZE)]))
