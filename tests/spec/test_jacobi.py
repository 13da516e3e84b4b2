"""The trajectory of Jacobi iteration and its n-grams, step by step."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.spec.drafters import Asked, Seen
from infer.spec.jacobi import Lookahead
from tests.models import tiny
from tests.typecheck import unchecked

V = 10
# A model that counts: after t comes t + 1.
_answers = lambda tokens: (np.asarray(tokens) + 1) % V


def _asked(last: list[int], most: list[int]) -> Asked:
    array = lambda x: jnp.asarray(x, jnp.int32)
    # Only these are looked at.
    return Asked(None, None, None, array(last), None, None, None, array(most), array(max(most)))


@pytest.fixture(autouse=True)
def _stand_ins() -> Iterator[None]:
    with unchecked():
        yield


def _round(draft: Lookahead, carry, last: int, most: int):
    """Run a round of one slot and of one that takes no part; return drafts, count and carry."""
    proposal, _, carry = draft.propose(
        tiny.llama(), None, carry, _asked([last, 0], [most, 0]), None
    )
    drafts = proposal.tokens[0, :most].tolist()
    fed = [last, *proposal.tokens[0].tolist()]
    answers = _answers(fed)
    accepted = 0
    while accepted < most and fed[accepted + 1] == answers[accepted]:
        accepted += 1
    logits = jax.nn.one_hot(jnp.stack([jnp.asarray(answers), jnp.zeros(len(fed), int)]), V)
    seen = Seen(
        rows=jnp.asarray([True, False]),
        x=None,
        logits=logits,
        tokens=jnp.asarray([fed, [5] * len(fed)], jnp.int32),
        fed=jnp.asarray([most + 1, 0], jnp.int32),
        emitted=None,
        count=jnp.asarray([accepted + 1, 0], jnp.int32),
    )
    carry = draft.observe(tiny.llama(), carry, seen, None)
    assert int(carry.pool.clock[1]) == 0
    return drafts, accepted, carry


def test_guesses_are_the_models_answers_and_their_ngrams_are_found_again() -> None:
    draft = Lookahead(k=3, n=3, pool=8)
    carry = draft.create(tiny.llama(), 2)
    # Nothing is known: the last token is repeated, and the answers to it are the guesses.
    drafts, accepted, carry = _round(draft, carry, 4, 3)
    assert (drafts, accepted) == ([4, 4, 4], 0)
    # Answer 5 came out; those to the drafts after it, 5 and 5, are guesses for what follows it.
    drafts, accepted, carry = _round(draft, carry, 5, 3)
    assert (drafts, accepted) == ([5, 5, 5], 0)
    # The trajectory so far: 4 was fed, 5 came out and was fed, 6 came out.
    ngrams = np.asarray(carry.pool.ngrams)[0][np.asarray(carry.pool.times)[0] > 0]
    assert ngrams.tolist() == [[4, 5, 6]]
    drafts, accepted, carry = _round(draft, carry, 6, 3)
    assert (drafts, accepted) == ([6, 6, 6], 0)
    # When 4 is the last token again, its n-gram is drafted, and guesses after it.
    drafts, accepted, carry = _round(draft, carry, 4, 3)
    assert drafts[:2] == [5, 6] and accepted >= 2


def test_drafts_that_were_not_fed_teach_nothing_and_a_new_request_forgets() -> None:
    draft = Lookahead(k=3, n=2, pool=8)
    _, _, carry = _round(draft, draft.create(tiny.llama(), 2), 4, 1)
    ngrams = np.asarray(carry.pool.ngrams)[0][np.asarray(carry.pool.times)[0] > 0]
    assert ngrams.tolist() == [[4, 5]]
    assert carry.guesses[0].tolist() == [5, -1, -1]
    fresh = draft.reset(carry, jnp.asarray([True, False]))
    jax.tree.map(np.testing.assert_array_equal, fresh, draft.create(tiny.llama(), 2))


def test_a_plain_pass_moves_the_guesses_on() -> None:
    draft = Lookahead(k=3, n=3, pool=8)
    _, _, carry = _round(draft, draft.create(tiny.llama(), 2), 4, 3)
    rows = jnp.asarray([True, False])
    seen = Seen(
        rows=rows,
        x=None,
        logits=None,
        tokens=jnp.asarray([[5], [0]], jnp.int32),
        fed=rows.astype(jnp.int32),
        emitted=None,
        count=rows.astype(jnp.int32),
    )
    moved = draft.observe(tiny.llama(), carry, seen, None)
    assert carry.guesses[0].tolist() == [5, 5, 5] and moved.guesses[0].tolist() == [5, 5, -1]
