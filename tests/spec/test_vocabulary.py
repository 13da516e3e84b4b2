"""A drafter of another vocabulary, on a tiny pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.errors import ConfigError
from infer.sampling import Role
from infer.spec import vocabulary
from infer.spec.rounds import Round, round_keys
from infer.spec.verify import Rule, verify
from tests import typecheck
from tests.spec.agreement import compare

DRAFT = [b"a", b"b", b"zz", None, b"c", b"a"]
TARGET = [b"c", b"x", b"a", None, b"b"]
MAP = vocabulary.intersect(DRAFT, TARGET)


def test_equal_bytes_are_the_same_token() -> None:
    assert MAP.to_target.tolist() == [2, 4, 5, 5, 0, 5]
    assert MAP.to_draft.tolist() == [4, 6, 0, 6, 1]
    tokens = jnp.asarray([[0, 1, 2], [4, 5, 3]], jnp.int32)
    assert vocabulary.tokens_on_target(MAP, tokens).tolist() == [[2, 4, 5], [0, 5, 5]]


def test_the_drafter_reads_what_it_lacks_by_its_last_bytes() -> None:
    target = [b"c", b"xzz", b"a", None, b"xab", b"x"]
    mapping = vocabulary.intersect(DRAFT, target, missing=3)
    ids = jnp.arange(6, dtype=jnp.int32)
    assert vocabulary.tokens_on_draft(mapping, ids).tolist() == [4, 2, 0, 3, 1, 3]


def test_a_distribution_over_common_tokens_is_renormalised_and_moved() -> None:
    logits = jnp.log(jnp.asarray([[0.1, 0.2, 0.3, 0.1, 0.1, 0.2]]))
    probs = jax.nn.softmax(vocabulary.common_logits(MAP, logits), axis=-1)
    np.testing.assert_allclose(probs, [[0.25, 0.5, 0, 0, 0.25, 0]], rtol=1e-6)
    np.testing.assert_allclose(
        vocabulary.probs_on_target(MAP, probs), [[0.25, 0, 0.25, 0, 0.5]], rtol=1e-6
    )
    moved = jax.nn.softmax(vocabulary.logits_on_target(MAP, logits), axis=-1)
    np.testing.assert_allclose(moved, [[0.25, 0, 0.25, 0, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_output_is_the_targets_though_the_drafter_lacks_two_of_its_tokens(rule: Rule) -> None:
    runs, k, false_alarms = 30_000, 2, 1e-6
    p = np.asarray([0.1, 0.3, 0.2, 0.25, 0.15])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (runs, k + 1, 5))
    zero = jnp.zeros(runs, jnp.int32)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(zero + jnp.arange(runs))
    start = Round(key=keys, choice=zero, position=zero)
    theirs = vocabulary.common_logits(MAP, jnp.asarray([1.0, 0.2, 2.0, 0.1, 0.5, 1.0]))
    draw = jax.vmap(jax.vmap(lambda key: jax.random.categorical(key, theirs)))
    drafts = vocabulary.tokens_on_target(
        MAP, draw(round_keys(start, k, Role.DRAFT)).astype(jnp.int32)
    )
    q = vocabulary.probs_on_target(MAP, jax.nn.softmax(theirs))
    result = verify(
        logits,
        drafts,
        jnp.broadcast_to(q, (runs, k, 5)),
        jnp.full(runs, k, jnp.int32),
        greedy=jnp.zeros(runs, bool),
        round=start,
        rule=rule,
    )
    first = np.bincount(np.asarray(result.tokens[:, 0]), minlength=5)
    assert compare(first, p, false_alarms=false_alarms).holds(false_alarms)
    # The drafter's mass on common tokens meets the target's; the rest can never stand.
    assert 0 < int(result.num_accepted.sum()) < 0.45 * runs * k


def test_vocabularies_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="2 tokens and the target's 1 have none in common"):
        vocabulary.intersect([b"a", None], [b"b"])
    with pytest.raises(ValueError, match=r"missing is 6; .*0 to 5"):
        vocabulary.intersect(DRAFT, TARGET, missing=6)
    with pytest.raises(ValueError, match="logits are over 5 tokens and the map's drafter has 6"):
        vocabulary.common_logits(MAP, jnp.zeros((1, 5)))
    zero = jnp.zeros(1, jnp.int32)
    start = Round(key=jax.random.key(0)[None], choice=zero, position=zero)
    with typecheck.unchecked(), pytest.raises(ValueError, match=r"over 6 tokens .* over 5.*map"):
        verify(
            jnp.zeros((1, 3, 5)),
            jnp.zeros((1, 2), jnp.int32),
            jnp.zeros((1, 2, 6)),
            jnp.asarray([2], jnp.int32),
            greedy=jnp.zeros(1, bool),
            round=start,
        )
