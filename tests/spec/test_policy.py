"""How many drafts a round may have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.spec import policy
from infer.spec.policy import NOT_FORCED, Policy

TIERS = (0, 2, 6)
ANY = jnp.float32(np.inf)  # of the last row, where requests wait


def _fresh(seconds: list[float], adaptive: bool = True) -> Policy:
    return policy.fresh(TIERS, jnp.asarray(seconds, jnp.float32), adaptive)


@functools.partial(jax.jit, static_argnames="adaptive")
def _after(
    known: Policy, count: Array, accepted: Array, adaptive: bool = True
) -> tuple[Policy, Array, Array]:
    """Return what is known after a turn whose drafts would stand as `accepted` says, its limit and
    the tier that it ran in.
    """
    rows, limit = jnp.ones(count.shape, bool), policy.limit_now(known)
    offered = jnp.minimum(count, jnp.asarray(TIERS, jnp.int32)[limit])
    width, kept = policy.width_for(known, TIERS, rows, offered, ANY, adaptive=adaptive)
    known = policy.learn(
        known,
        TIERS,
        limit=limit,
        rows=rows,
        count=kept,
        accepted=jnp.minimum(accepted, kept),
        aside=(width == 0) & (offered > 0),
        matched=accepted > 0,
        adaptive=adaptive,
    )
    return known, limit, width


def _turn(known: Policy, count: list[int], accepted: list[int], adaptive: bool = True) -> Policy:
    return _after(known, jnp.asarray(count), jnp.asarray(accepted), adaptive)[0]


def _turns(
    known: Policy, turns: int, count: list[int], accepted: list[int]
) -> tuple[list[int], list[int]]:
    """Return limit and tier of each turn."""
    limits, widths = [], []
    for _ in range(turns):
        known, limit, width = _after(known, jnp.asarray(count), jnp.asarray(accepted))
        limits.append(int(limit))
        widths.append(int(width))
    return limits, widths


def _width(known: Policy, count: list[int], least: float = np.inf) -> int:
    rows, given = jnp.ones(len(count), bool), jnp.asarray(count)
    return int(policy.width_for(known, TIERS, rows, given, jnp.float32(least), adaptive=True)[0])


def test_drafts_that_stand_are_worth_a_dear_round() -> None:
    limits, widths = _turns(_fresh([1, 1.5, 3, 1]), 60, [6, 6], [6, 6])
    assert limits == [2] * 60 and 0 not in widths and widths[-30:] == [2] * 30


def test_drafts_that_fall_are_left_aside() -> None:
    limits, widths = _turns(_fresh([1, 1.5, 3, 1]), 400, [6, 6], [0, 0])
    assert widths[0] > 0 and sum(w > 0 for w in widths) < 8
    assert limits == [2] * 400  # asking costs nothing


def test_a_drafter_that_costs_is_given_up_and_tried_ever_more_rarely() -> None:
    limits, _ = _turns(_fresh([1, 1.8, 3.3, 1.3]), 400, [6, 6], [0, 0])
    assert limits[0] == 2 and limits[-1] == 0
    tried = np.flatnonzero(np.diff([int(x == 2) for x in limits]) == 1) + 1
    assert (np.diff(tried) > 16).all() and len(tried) < 8


def test_the_best_of_three_is_found() -> None:
    # Two of six stand: 3 tokens for 1.5 beat 3 for 3 and 1 for 1.
    _, widths = _turns(_fresh([1, 1.5, 3, 1]), 100, [6], [2])
    assert widths[40:].count(1) > 50


def test_it_comes_back_when_drafts_begin_to_stand() -> None:
    known = _fresh([1, 1.3, 1.6, 1.2])
    for _ in range(60):
        known = _turn(known, [6], [0])
    assert int(known.limit) == 0
    limits, widths = _turns(known, 400, [6], [6])
    assert limits[-1] == 2 and widths[-1] == 2


def test_nothing_is_lost_where_no_draft_is_found() -> None:
    # The round runs in tier 0; only the drafter's own time counts, and it costs 1%.
    assert _turns(_fresh([1, 2, 3, 1.01]), 60, [0], [0])[0][-1] == 2
    # A drafter that costs half a turn for nothing is given up.
    assert _turns(_fresh([1, 2, 3, 1.5]), 60, [0], [0])[0][-1] == 0


def test_a_small_advantage_changes_nothing() -> None:
    # Both ways: 1.2 tokens for 1.2, within 2% of one for one.
    for limit in (0, 2):
        known = dataclasses.replace(
            _fresh([1, 1.2, 9, 1]),
            limit=jnp.asarray(limit, jnp.int32),
            tokens=jnp.float32(1.2),
            share=jnp.asarray([0, 1, 0, 0], jnp.float32),
        )
        assert int(_turn(known, [0], [0]).limit) == limit


def test_a_fixed_number_stays_and_a_forced_turn_teaches_nothing() -> None:
    known = _fresh([1, 5, 9, 1], adaptive=False)
    for _ in range(50):
        known = _turn(known, [6], [0], adaptive=False)
    assert int(policy.limit_now(known)) == 2
    forced = dataclasses.replace(_fresh([1, 5, 9, 1]), forced=jnp.asarray([2, 0], jnp.int32))
    assert int(policy.limit_now(forced)) == 2
    two = jnp.ones(2, bool)
    width, count = policy.width_for(forced, TIERS, two, jnp.asarray([3, 6]), ANY, adaptive=True)
    assert int(width) == 0 and count.tolist() == [0, 0]
    after = _turn(forced, [6], [0])
    np.testing.assert_array_equal(after.tokens, forced.tokens)
    assert int(after.limit) == int(forced.limit) and NOT_FORCED == -1


def test_a_round_runs_in_the_smallest_tier_that_holds_its_drafts() -> None:
    for count, want in (([0, 0], 0), ([1, 0], 1), ([2, 2], 1), ([0, 3], 2), ([6, 6], 2)):
        for adaptive in (True, False):  # where rounds cost no more than turns
            two, given = jnp.ones(2, bool), jnp.asarray(count, jnp.int32)
            known = _fresh([1, 1, 1, 1])
            width, kept = policy.width_for(known, TIERS, two, given, ANY, adaptive=adaptive)
            assert int(width) == want and kept.tolist() == count


def test_drafts_of_few_rows_do_not_pay_for_a_pass_of_all() -> None:
    known = _fresh([1, 1.5, 2.5, 1])
    # S = 0.5, 0.45, ...: two drafts bring 0.95, six 2.34.
    np.testing.assert_allclose(policy.survival(known)[:2], [0.5, 0.45], rtol=1e-6)
    assert _width(known, [6, 6, 0, 0]) == 0  # (4 + 4.69) / 2.5 and (4 + 1.9) / 1.5 are below 4
    assert _width(known, [6, 6, 6, 0]) == 1  # (4 + 2.85) / 1.5 = 4.6
    assert _width(known, [6, 6, 6, 6]) == 2  # 13.4 / 2.5 = 5.4
    rows = jnp.asarray([True, False, False, False])
    one = policy.width_for(known, TIERS, rows, jnp.asarray([6] * 4), ANY, adaptive=True)
    assert int(one[0]) == 2 and one[1].tolist() == [6, 0, 0, 0]


def test_a_round_must_pay_for_the_last_row() -> None:
    known = _fresh([1, 1.5, 2.5, 1])
    assert _width(known, [6, 6, 6, 6]) == 2  # (4 + 9.4) / 2.5 = 5.4
    assert _width(known, [6, 6, 6, 6], least=1.4) == 0
    assert _width(known, [6, 6, 6, 6], least=2.0) == 1  # of the dear round it is 2 / 2.5
    assert _width(known, [6, 6, 6, 6], least=2.6) == 2


def test_drafts_that_are_left_aside_tell_whether_first_ones_stand() -> None:
    costs = [1, 2.5, 4, 1]
    closed = _fresh(costs)
    for _ in range(20):
        closed = _turn(closed, [2, 2], [0, 0])
    assert policy.survival(closed)[0] < 0.1 and _width(closed, [6, 6]) == 0
    _, widths = _turns(closed, 60, [6, 6], [6, 6])
    assert 2 < widths.index(2) < 40  # its first round comes of turns without one


def test_what_is_not_observed_is_forgotten() -> None:
    known = _fresh([1, 1, 1, 1])
    for _ in range(20):
        known = _turn(known, [6], [0])
    assert policy.survival(known)[0] < 0.2
    for _ in range(800):
        known = _turn(known, [0], [0])
    np.testing.assert_allclose(policy.survival(known)[0], 0.5, atol=0.05)


def test_stated_costs() -> None:
    # Weights that take as long as 12 tokens: 4, 12 and 28 of them.
    assert policy.stated_seconds(TIERS, 4, 12) == [1.0, 1.5, 2.5, 1.0]


def test_a_row_is_trusted_as_its_own_drafts_stood() -> None:
    known = _fresh([1, 1, 1, 1])
    judged = lambda trust, accepted: policy.trusted(
        known,
        trust,
        count=jnp.asarray([6, 6, 0, 0, 0]),
        accepted=jnp.asarray(accepted),
        aside=jnp.asarray([False, False, True, True, False]),
        matched=jnp.asarray([False, False, True, False, True]),
    )
    trust = judged(jnp.ones(5), [6, 0, 0, 0, 0])
    # Six of 2.34 count double, as does a first draft of one half; none is 0; the last has none.
    np.testing.assert_allclose(trust, [1.25, 0.75, 1.25, 0.75, 1.0])
    for _ in range(30):
        trust = judged(trust, [6, 0, 0, 0, 0])
    np.testing.assert_allclose(trust, [2, 0, 2, 0, 1], atol=1e-3)
