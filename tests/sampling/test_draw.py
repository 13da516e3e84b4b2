"""Sampling: filters against a sort-based reference, keys, ranges (cases S03, S04, S06, S08)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import RequestError
from infer.sampling import (
    Role,
    SamplingParams,
    SamplingState,
    draw_keys,
    filtered_logits,
    log_probabilities,
    mask_early_stops,
    request_keys,
    sample,
    seed_words,
    top_k_mask,
    top_log_probabilities,
    top_p_mask,
)
from tests.sampling.states import state_of

pytestmark = pytest.mark.kernels


def _kept(logits: list[float], **changes: object) -> list[int]:
    row = jnp.asarray([logits], jnp.float32)
    return np.flatnonzero(
        np.isfinite(filtered_logits(row, state_of(1, len(logits), **changes))[0])
    ).tolist()


def test_temperature_comes_before_the_filters() -> None:
    assert _kept([3, 2, 1], temperature=0.5, top_p=0.8) == [0]
    assert _kept([3, 2, 1], temperature=2.0, min_p=0.2) == [0, 1, 2]
    assert _kept([3, 2, 1], temperature=1.0, top_p=0.8) == [0, 1]


def test_top_p_is_of_the_row_that_top_k_left() -> None:
    assert _kept([3, 2, 1], top_k=2, top_p=0.7) == [0]
    assert _kept([3, 2, 1], top_p=0.7) == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-45])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    state = state_of(1, 3, temperature=temperature)
    assert sample(jnp.asarray([[1.0, 3, 2]]), state, state.key).tolist() == [1]


@pytest.mark.parametrize("top_k", [50, 0, -1, 3])
def test_a_top_k_that_is_off_or_past_the_vocabulary_keeps_all(top_k: int) -> None:
    assert _kept([1, 3, 2], top_k=top_k) == [0, 1, 2]


def test_greedy_rows_are_exact_beside_sampled_ones_and_ties_give_the_lowest_id() -> None:
    logits = jnp.asarray([[0.0, 5, 5, 1], [1.0, 1, 1, 1], [-0.0, 0.0, -1, -2]])
    state = state_of(3, 4, temperature=[0.0, 1.0, 0.0])
    tokens = sample(logits, state, state.key)
    assert int(tokens[0]) == 1
    assert int(tokens[2]) == 0


def _sorted_mask(row: np.ndarray, count: int | None, mass: float | None) -> np.ndarray:
    order = np.argsort(-row, kind="stable")
    keep = np.zeros(row.size, bool)
    if count is not None:
        keep[order[:count]] = True
    else:
        p = np.exp(row[order].astype(np.float64) - row.max())
        p /= p.sum()
        before = np.cumsum(p) - p
        keep[order[before < mass]] = True
    return keep


ROWS = st.lists(
    st.lists(
        st.sampled_from([-3.0, -1.5, -0.0, 0.0, 0.25, 1.0, 2.0, 7.5]), min_size=12, max_size=12
    ),
    min_size=2,
    max_size=2,
)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 14))
def test_top_k_equals_a_stable_sort_ties_included(rows, k) -> None:
    x = np.asarray(rows, np.float32)
    got = jax.jit(top_k_mask)(jnp.asarray(x), jnp.full(2, k, jnp.int32))
    np.testing.assert_array_equal(got, [_sorted_mask(r, k, None) for r in x])


@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from([1e-6, 0.123, 0.37, 0.5001, 0.8003, 0.95007, 1.0]))
def test_top_p_equals_a_stable_sort_ties_included(rows, p) -> None:
    x = np.asarray(rows, np.float32)
    got = jax.jit(top_p_mask)(jnp.asarray(x), jnp.full(2, p, jnp.float32))
    np.testing.assert_array_equal(got, [_sorted_mask(r, None, p) for r in x])


def test_top_p_is_exact_at_a_large_vocabulary() -> None:
    x = np.random.default_rng(0).standard_normal((2, 50_000)).astype(np.float32) * 2
    mask = np.asarray(top_p_mask(jnp.asarray(x), jnp.asarray([0.9, 0.5])))
    for row, p, kept in zip(x, (0.9, 0.5), mask, strict=True):
        want = _sorted_mask(row, None, p)
        # Float32 sums may move the edge by a token or two of probability 1e-6, never by more.
        assert abs(int(kept.sum()) - int(want.sum())) <= 2
        assert kept.sum() > 1000


@pytest.mark.parametrize("top_p", [1e-40, 1e-46, 0.0])
def test_a_vanishing_top_p_keeps_the_likeliest_token(top_p: float) -> None:
    assert _kept([1, 3, 2], top_p=top_p) == [1]


def test_frequencies_of_a_filtered_draw_are_its_probabilities() -> None:
    logits = jnp.broadcast_to(jnp.asarray([2.0, 1.0, 0.0, -1.0, -5.0]), (20_000, 5))
    state = state_of(20_000, 5, temperature=1.5, top_k=4, top_p=0.95)
    counts = np.bincount(
        sample(logits, state, draw_keys(state.key, *[jnp.zeros(20_000, jnp.int32)] * 2, Role.DRAW)),
        minlength=5,
    )
    p = np.exp(np.asarray([2.0, 1, 0, -1, -np.inf]) / 1.5)
    p /= p.sum()
    # top_p 0.95 drops nothing more: the mass before the fourth token is below it.
    assert p[:3].sum() < 0.95
    chi2 = float(((counts[:4] - 20_000 * p[:4]) ** 2 / (20_000 * p[:4])).sum())
    assert counts[4] == 0
    assert (
        chi2 < 16.3
    )  # 0.999 quantile, 3 degrees of freedom; the keys are fixed, so this cannot flicker


def test_log_probabilities_are_the_raw_models_whatever_the_temperature() -> None:
    logits = jnp.asarray([[2.0, 1, 0]])
    total = jax.nn.logsumexp(logits, axis=-1)
    ids, values = top_log_probabilities(logits, 3, total)
    np.testing.assert_allclose(values[0], [-0.40760596, -1.407606, -2.407606], rtol=1e-6)
    assert ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(
        log_probabilities(logits, jnp.asarray([1], jnp.int32), total), [-1.407606], rtol=1e-6
    )


def test_stop_ids_cannot_be_drawn_before_min_tokens() -> None:
    state = SamplingState(
        **(
            vars(state_of(2, 4, min_tokens=3))
            | {"stop_ids": jnp.asarray([[2, 4], [2, 4]], jnp.int32)}
        )
    )
    masked = mask_early_stops(jnp.zeros((2, 4)), state, jnp.asarray([2, 3], jnp.int32))
    np.testing.assert_array_equal(masked, [[0, 0, -np.inf, 0], [0, 0, 0, 0]])


def test_a_key_depends_on_seed_choice_position_and_role_alone() -> None:
    words, seeded = seed_words([42, None, 42, 2**40 + 7])
    keys = request_keys(jax.random.key(1), words, seeded, jnp.arange(4, dtype=jnp.int32))
    data = jax.random.key_data(keys)
    np.testing.assert_array_equal(data[0], jax.random.key_data(jax.random.key(42)))
    np.testing.assert_array_equal(data[0], data[2])
    np.testing.assert_array_equal(
        data[1], jax.random.key_data(jax.random.fold_in(jax.random.key(1), 1))
    )
    np.testing.assert_array_equal(data[3], [2**8, 7])
    zero, one = jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.int32)
    variants = [
        jax.random.key_data(draw_keys(keys, choice, position, role))
        for choice, position, role in (
            (zero, zero, Role.DRAW),
            (one, zero, Role.DRAW),
            (zero, one, Role.DRAW),
            (zero, zero, Role.ACCEPT),
        )
    ]
    assert len({np.asarray(v[0]).tobytes() for v in variants}) == 4


def test_a_key_of_another_kind_is_reduced_to_threefry() -> None:
    keys = request_keys(jax.random.key(3, impl="rbg"), *seed_words([None]), jnp.zeros(1, jnp.int32))
    assert jax.random.key_impl(keys) == "threefry2x32"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", 21),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field} is .*must be"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
