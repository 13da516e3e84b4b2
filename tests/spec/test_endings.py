"""Stop ids and lengths inside the tokens of a round."""

import jax
import jax.numpy as jnp

from infer.spec.endings import cut
from infer.spec.verify import Verified
from tests.sampling.states import state_of


def test_a_sequence_ends_at_its_first_stop_or_its_last_allowed_token() -> None:
    vocab = 9
    rows = {
        # tokens, generated before, min_tokens, max_tokens: count, stopped, finished
        "no end": ([1, 2, 3], 0, 0, 9, (3, False, False)),
        "a stop inside": ([1, 8, 3], 0, 0, 9, (2, True, True)),
        "the second kind of stop, first": ([7, 8, 3], 0, 0, 9, (1, True, True)),
        "a stop before min_tokens": ([8, 2, 3], 0, 2, 9, (3, False, False)),
        "a stop at min_tokens": ([1, 8, 3], 0, 2, 9, (2, True, True)),
        "the last allowed": ([1, 2, 3], 4, 0, 6, (2, False, True)),
        "a stop that is also the last": ([1, 8, 3], 4, 0, 6, (2, True, True)),
        "a stop after the last": ([1, 2, 8], 4, 0, 6, (2, False, True)),
        "padding is no stop": ([1], 0, 0, 9, (1, False, False)),
    }
    padded = [row[0] + [vocab] * (4 - len(row[0])) for row in rows.values()]
    counts = jnp.asarray([len(row[0]) for row in rows.values()], jnp.int32)
    state = state_of(
        len(rows),
        vocab,
        min_tokens=[row[2] for row in rows.values()],
        max_tokens=[row[3] for row in rows.values()],
    )
    stops = jnp.broadcast_to(jnp.asarray([[8, 7, vocab]], jnp.int32), (len(rows), 3))
    state = type(state)(**(vars(state) | {"stop_ids": stops}))
    verified = Verified(
        num_accepted=counts - 1, tokens=jnp.asarray(padded, jnp.int32), count=counts
    )
    before = jnp.asarray([row[1] for row in rows.values()], jnp.int32)
    got = jax.jit(cut)(verified, state, before)
    for i, (name, row) in enumerate(rows.items()):
        found = int(got.count[i]), bool(got.stopped[i]), bool(got.finished[i])
        assert found == row[4], name
