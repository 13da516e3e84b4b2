"""How many drafts a round may have."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from infer.spec import policy
from infer.spec.policy import NOT_FORCED, Policy

TIERS = (0, 2, 6)


def _fresh(seconds: list[float], adaptive: bool = True) -> Policy:
    return policy.fresh(TIERS, jnp.asarray(seconds, jnp.float32), adaptive)


def _turn(known: Policy, count: list[int], accepted: list[int], adaptive: bool = True) -> Policy:
    return policy.learn(
        known,
        TIERS,
        limit=policy.limit_now(known),
        rows=jnp.ones(len(count), bool),
        count=jnp.minimum(jnp.asarray(count, jnp.int32), TIERS[int(policy.limit_now(known))]),
        accepted=jnp.minimum(jnp.asarray(accepted, jnp.int32), TIERS[int(policy.limit_now(known))]),
        adaptive=adaptive,
    )


def _after(known: Policy, turns: int, count: list[int], accepted: list[int]) -> list[int]:
    """Return the limit of each turn."""
    limits = []
    for _ in range(turns):
        limits.append(int(policy.limit_now(known)))
        known = _turn(known, count, accepted)
    return limits


def test_drafts_that_stand_are_worth_a_dear_round() -> None:
    assert _after(_fresh([1, 1.5, 3, 1]), 40, [6, 6], [6, 6]) == [2] * 40


def test_drafts_that_fall_are_given_up_and_tried_ever_more_rarely() -> None:
    limits = _after(_fresh([1, 1.5, 3, 1]), 400, [6, 6], [0, 0])
    assert limits[0] == 2 and limits[-1] == 0
    tried = np.flatnonzero(np.diff([int(x == 2) for x in limits]) == 1) + 1
    assert (np.diff(tried) > 16).all() and len(tried) < 8


def test_the_best_of_three_is_found() -> None:
    # Two of six stand: 3 tokens for 1.5 beat 3 for 3 and 1 for 1.
    limits = _after(_fresh([1, 1.5, 3, 1]), 100, [6], [2])
    assert limits[40:].count(1) > 50


def test_it_comes_back_when_drafts_begin_to_stand() -> None:
    known = _fresh([1, 1.3, 1.6, 1])
    for _ in range(60):
        known = _turn(known, [6], [0])
    assert int(known.limit) == 0
    assert _after(known, 300, [6], [6])[-1] == 2


def test_nothing_is_lost_where_no_draft_is_found() -> None:
    # The round runs in tier 0; only the drafter's own time counts, and it costs 1%.
    assert _after(_fresh([1, 2, 3, 1.01]), 60, [0], [0])[-1] == 2
    # A drafter that costs half a turn for nothing is given up.
    assert _after(_fresh([1, 2, 3, 1.5]), 60, [0], [0])[-1] == 0


def test_a_small_advantage_changes_nothing() -> None:
    known = dataclasses.replace(_fresh([1, 1.2, 9, 1]), limit=jnp.asarray(0, jnp.int32))
    known = dataclasses.replace(known, tokens=jnp.asarray([1.0, 1.24, 1.24]))
    assert int(_turn(known, [0], [0]).limit) == 0


def test_a_fixed_number_stays_and_a_forced_turn_teaches_nothing() -> None:
    known = _fresh([1, 5, 9, 1], adaptive=False)
    for _ in range(50):
        known = _turn(known, [6], [0], adaptive=False)
    assert int(policy.limit_now(known)) == 2
    forced = dataclasses.replace(_fresh([1, 5, 9, 1]), forced=jnp.asarray([2, 0], jnp.int32))
    assert int(policy.limit_now(forced)) == 2
    width, count = policy.width_for(forced, TIERS, jnp.asarray([3, 6], jnp.int32))
    assert int(width) == 0 and count.tolist() == [0, 0]
    after = _turn(forced, [6], [0])
    np.testing.assert_array_equal(after.tokens, forced.tokens)
    assert int(after.limit) == int(forced.limit) and NOT_FORCED == -1


def test_a_round_runs_in_the_smallest_tier_that_holds_its_drafts() -> None:
    for count, want in (([0, 0], 0), ([1, 0], 1), ([2, 2], 1), ([0, 3], 2), ([6, 6], 2)):
        width, kept = policy.width_for(_fresh([1, 1, 1, 1]), TIERS, jnp.asarray(count, jnp.int32))
        assert int(width) == want and kept.tolist() == count


def test_stated_costs() -> None:
    # Weights that take as long as 12 tokens: 4, 12 and 28 of them.
    assert policy.stated_seconds(TIERS, 4, 12) == [1.0, 1.5, 2.5, 1.0]
