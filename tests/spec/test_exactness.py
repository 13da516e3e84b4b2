"""Speculation's output has exactly the target's distribution: proof by statistics.

32,768 requests a setting run to four tokens, over one to four rounds each; the joint distribution
of the tokens (256 cells) is compared with an enumeration in float64.  The rate of false alarms is
1e-4 for the whole file: 28 comparisons at 3.6e-6 each, half of it for chi-square and half for total
variation.  Keys are fixed and nothing is repeated.  Wrong rules, which differ by little, must fail
the same test at the same number of runs.
"""

import functools

import jax
import numpy as np
import pytest

from infer.sampling import Role, draw_keys
from infer.spec import rounds, verify
from infer.spec.verify import Rule
from tests.spec import stub_pair
from tests.spec.agreement import Agreement, compare
from tests.spec.stub_pair import SETTINGS, Drafter, K, L, V

RUNS = 32_768
FALSE_ALARMS = 1e-4 / 28
EXACT = [Drafter.SAMPLED, Drafter.SAME, Drafter.POINT]
JUDGED = [Rule.TOKEN, Rule.BLOCK]


@functools.lru_cache(maxsize=1)
def _state():
    return stub_pair.states(SETTINGS, RUNS)


@functools.lru_cache(maxsize=1)
def _expected() -> list[np.ndarray]:
    return [stub_pair.exact(setting) for setting in SETTINGS]


def _agreements(tokens: np.ndarray) -> list[Agreement]:
    cells = np.asarray(tokens) @ V ** np.arange(L - 1, -1, -1)
    counts = [np.bincount(c, minlength=V**L) for c in cells.reshape(len(SETTINGS), RUNS)]
    return [
        compare(c, p, false_alarms=FALSE_ALARMS) for c, p in zip(counts, _expected(), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("drafter", EXACT)
@pytest.mark.parametrize("rule", JUDGED)
def test_output_distribution_is_exactly_the_target(rule: Rule, drafter: Drafter) -> None:
    tokens, accepted, drafted = stub_pair.speculate(_state(), rule=rule, drafter=drafter)
    for setting, agreement in zip(SETTINGS, _agreements(tokens), strict=True):
        assert agreement.holds(FALSE_ALARMS), (setting, agreement)
    # The drafts matter: some stand and some do not.  Of the one-hot ones, poor guesses, 6% do.
    assert 0.05 < int(accepted) / int(drafted) < 1


@pytest.mark.slow
@pytest.mark.optimized
def test_a_coupled_drafter_gives_plain_seeded_sampling_token_for_token() -> None:
    tokens, accepted, drafted = stub_pair.speculate(
        _state(), rule=Rule.COUPLED, drafter=Drafter.COUPLED
    )
    np.testing.assert_array_equal(tokens, stub_pair.plain(_state()))
    assert int(accepted) / int(drafted) > 0.3
    for setting, agreement in zip(SETTINGS, _agreements(tokens), strict=True):
        assert agreement.holds(FALSE_ALARMS), (setting, agreement)


@pytest.mark.slow
@pytest.mark.optimized
def test_block_verification_accepts_more_than_the_token_rule() -> None:
    accepted = [
        int(stub_pair.speculate(_state(), rule=rule, drafter=Drafter.SAMPLED)[1]) for rule in JUDGED
    ]
    assert accepted[1] > accepted[0]


def _residual_is_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, q, weight: p)


def _residual_through_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.residual
    soft = lambda p, q, weight: jax.nn.softmax(right(p, q, weight), axis=-1)
    monkeypatch.setattr(verify, "residual", soft)


def _recovery_with_the_drafts_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(round: rounds.Round, accepted: jax.Array) -> jax.Array:
        of_drafts = rounds.round_keys(round, K + 1, Role.DRAFT)
        return of_drafts[np.arange(of_drafts.shape[0]), accepted]

    monkeypatch.setattr(verify, "recovery_keys", keys)


def _a_key_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(round: rounds.Round, count: int, role: Role) -> jax.Array:
        at = lambda i: draw_keys(round.key, round.choice, round.position + i, role)
        return jax.vmap(at, out_axes=1)(jax.numpy.arange(count, dtype=jax.numpy.int32))

    monkeypatch.setattr(rounds, "round_keys", keys)
    monkeypatch.setattr(verify, "round_keys", keys)


def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch


WRONG = {
    "q at 1, drafts drawn at 0.7": (_nothing, Rule.TOKEN, dict(q_temperature=0.7)),
    "q at 1, drafts drawn at 0.7, blocks": (_nothing, Rule.BLOCK, dict(q_temperature=0.7)),
    "an argmax draft as if drawn": (
        _nothing,
        Rule.TOKEN,
        dict(raw_q=True, drafter=Drafter.POINT),
    ),
    "residual = p": (_residual_is_p, Rule.TOKEN, {}),
    "softmax of the residual": (_residual_through_softmax, Rule.TOKEN, {}),
    "recovery with the draft's noise": (_recovery_with_the_drafts_noise, Rule.TOKEN, {}),
    "blocks with a key a position": (_a_key_a_position, Rule.BLOCK, {}),
}


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, rule, options = WRONG[name]
    mistake(monkeypatch)
    options = dict(drafter=Drafter.SAMPLED, rule=rule) | options
    # Traced anew, with the mistake in it.
    run = jax.jit(functools.partial(stub_pair.speculate.__wrapped__, **options))
    found = _agreements(run(_state())[0])
    assert not all(agreement.holds(FALSE_ALARMS) for agreement in found), found
