"""Masks and penalties against worked values (case S01), in any batch."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.errors import RequestError
from infer.sampling import History, SamplingParams, SamplingState, penalise, process_logits
from infer.sampling.process import ends_with
from tests.sampling.states import state_of

pytestmark = pytest.mark.kernels
LOGITS = [2.0, -1.0, 0.5, -0.5]


def _history(prompts: list[list[int]], generated: list[list[int]]) -> History:
    def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        width = max(map(len, rows)) + 2
        # What lies past the end is token 3: it must count for nothing.
        return (
            np.asarray([r + [3] * (width - len(r)) for r in rows], np.int32),
            np.asarray([len(r) for r in rows], np.int32),
        )

    (p, pl), (g, gl) = padded(prompts), padded(generated)
    return History(
        prompts=jnp.asarray(p),
        prompt_lens=jnp.asarray(pl),
        generated=jnp.asarray(g),
        num_generated=jnp.asarray(gl),
    )


def _change(state: SamplingState, **changes: object) -> SamplingState:
    return SamplingState(**(vars(state) | changes))


def test_repetition_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    logits = jnp.asarray([LOGITS] * 2)
    history = _history([[0, 1], [2]], [[], [0]])
    y = penalise(logits, state_of(2, 4, repetition=2.0), history)
    np.testing.assert_allclose(y, [[1, -2, 0.5, -0.5], [1, -1, 0.25, -0.5]])


def test_frequency_and_presence_count_generated_tokens_only() -> None:
    logits = jnp.asarray([LOGITS] * 2)
    history = _history([[0, 0, 2], [1]], [[1, 1, 1, 3], []])
    y = penalise(logits, state_of(2, 4, frequency=0.5, presence=0.25), history)
    np.testing.assert_allclose(y, [[2, -2.75, 0.5, -1.25], LOGITS])


def test_a_row_without_penalties_is_untouched_beside_one_with() -> None:
    logits = jnp.asarray([LOGITS] * 2)
    state = state_of(2, 4, repetition=[1.0, 2.0])
    y = process_logits(logits, state, _history([[0], [0]], [[1], [1]]))
    np.testing.assert_array_equal(y[0], LOGITS)
    np.testing.assert_allclose(y[1], [1, -2, 0.5, -0.5])


def test_bias_and_allowed_ids() -> None:
    allowed = jnp.asarray([[True, True, False, True], [True] * 4])
    state = _change(
        state_of(2, 4),
        bias_ids=jnp.asarray([[1, 4], [4, 4]], jnp.int32),
        bias=jnp.asarray([[5.0, 9.0], [9.0, 9.0]]),
        allowed=allowed,
    )
    y = process_logits(jnp.asarray([LOGITS] * 2), state, _history([[0], [0]], [[], []]))
    np.testing.assert_array_equal(y, [[2.0, 4.0, -np.inf, -0.5], LOGITS])


def test_a_bad_word_is_banned_only_after_its_beginning() -> None:
    v = 4
    words = jnp.asarray([[[v, v, 3], [v, 1, 2], [0, 1, 0]]] * 3, jnp.int32)
    state = _change(state_of(3, v), bad_words=words)
    history = _history([[1]] * 3, [[], [0], [0, 1]])
    y = process_logits(jnp.zeros((3, v)), state, history)
    banned = [sorted(np.flatnonzero(np.isneginf(row))) for row in np.asarray(y)]
    assert banned == [[3], [3], [0, 2, 3]]


def test_ends_with_never_matches_before_the_first_token() -> None:
    history = _history([[1]], [[2]])
    sequences = jnp.asarray([[[1, 2], [9, 2], [2, 2]]], jnp.int32)
    assert ends_with(history, sequences, 9).tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("prompt_logprobs", 21),
        ("allowed_token_ids", ()),
        ("stop", ("",)),
        ("bad_words", ("",)),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field} .*must"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
