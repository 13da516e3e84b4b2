"""Verification's rules: literals worked by hand, ragged and degenerate rows, refusals.

The proof by statistics is in test_exactness.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.sampling import History, Role, process_logits, sample
from infer.spec.rounds import Round, plain_keys, round_keys
from infer.spec.target import is_greedy, processed_logits, target_logits
from infer.spec.verify import Rule, residual, verify, verify_equal
from tests import typecheck
from tests.sampling.states import state_of

RULES = [Rule.TOKEN, Rule.BLOCK]


def _round(rows: int) -> Round:
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(5), i))(jnp.arange(rows))
    return Round(key=keys, choice=jnp.zeros(rows, jnp.int32), position=jnp.full(rows, 7, jnp.int32))


@functools.partial(jax.jit, static_argnames="rule")
def _verify(logits, drafts, probs, count, greedy, rule):
    round = _round(drafts.shape[0])
    return verify(logits, drafts, probs, count, greedy=greedy, round=round, rule=rule)


def _rows(values: list[float], *shape: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, jnp.float32), (*shape, len(values)))


@pytest.mark.parametrize("rule", RULES)
def test_a_hand_worked_pair(rule: Rule) -> None:
    """Target .5 .3 .2, draft .2 .5 .3, one draft: 0.7 stand, and the residual is all on id 0."""
    p, q, runs = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3], 100_000
    np.testing.assert_allclose(
        residual(_rows(p, 1), _rows(q, 1), jnp.ones(1)), [[0.3, 0, 0]], atol=1e-7
    )
    drafts = jax.random.categorical(jax.random.key(1), jnp.log(jnp.asarray(q)), shape=(runs, 1))
    drafts, none = drafts.astype(jnp.int32), jnp.zeros(runs, bool)
    one = jnp.ones(runs, jnp.int32)
    got = _verify(jnp.log(_rows(p, runs, 2)), drafts, _rows(q, runs, 1), one, none, rule)
    # Five standard deviations of 100,000 draws.
    assert float(got.num_accepted.mean(dtype=jnp.float32)) == pytest.approx(0.7, abs=0.0073)
    assert set(np.asarray(got.tokens[got.num_accepted == 0, 0]).tolist()) == {0}
    first = np.bincount(np.asarray(got.tokens[:, 0]), minlength=3) / runs
    np.testing.assert_allclose(first, p, atol=0.008)
    bonus = np.asarray(got.tokens[got.num_accepted == 1, 1])
    np.testing.assert_allclose(np.bincount(bonus, minlength=3) / len(bonus), p, atol=0.01)
    # An argmax draft is one-hot: taken for a draw from q it gives .4 .6 0.
    drafts = jnp.ones((runs, 1), jnp.int32)
    got = _verify(jnp.log(_rows(p, runs, 2)), drafts, None, one, none, rule)
    first = np.bincount(np.asarray(got.tokens[:, 0]), minlength=3) / runs
    np.testing.assert_allclose(first, p, atol=0.008)
    got = _verify(jnp.log(_rows(p, runs, 2)), drafts, _rows(q, runs, 1), one, none, rule)
    first = np.bincount(np.asarray(got.tokens[:, 0]), minlength=3) / runs
    np.testing.assert_allclose(first, [0.4, 0.6, 0], atol=0.008)


@pytest.mark.parametrize("probs", [None, [0.25, 0.25, 0.25, 0.25]])
@pytest.mark.parametrize("rule", list(Rule))
def test_ragged_rows_emit_accepted_drafts_then_one_token_then_padding(rule: Rule, probs) -> None:
    """The target is certain of 1, 2, 3, 0; rows differ in their drafts and their number."""
    certain = jnp.full((4, 4), -jnp.inf).at[jnp.arange(4), jnp.asarray([1, 2, 3, 0])].set(0.0)
    logits = jnp.broadcast_to(certain, (6, 4, 4))
    drafts = jnp.asarray([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3]])
    count = jnp.asarray([3, 2, 0, 3, 3, 9], jnp.int32)
    for greedy in (False, True):
        q = None if probs is None else _rows(probs, 6, 3)
        got = _verify(logits, drafts.astype(jnp.int32), q, count, jnp.full(6, greedy), rule)
        assert got.num_accepted.tolist() == [3, 2, 0, 1, 0, 3]
        assert got.count.tolist() == [4, 3, 1, 2, 1, 4]
        assert got.tokens.tolist() == [
            [1, 2, 3, 0],
            [1, 2, 3, 4],
            [1, 4, 4, 4],
            [1, 2, 4, 4],
            [1, 4, 4, 4],
            [1, 2, 3, 0],
        ]


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_not_a_number_at_the_edges(rule: Rule) -> None:
    inf = -np.inf
    rows = {
        "p equals q": ([0.0, 1.0, 2.0, inf], [0.09003057, 0.24472847, 0.66524096, 0.0], 2, 3),
        "both one-hot and equal": ([inf, inf, 5.0, inf], [0, 0, 1.0, 0], 2, 3),
        "both one-hot, apart": ([inf, 5.0, inf, inf], [0, 0, 1.0, 0], 2, 0),
        "a draft that q never draws": ([0.0, 0.0, 0.0, 0.0], [1.0, 0, 0, 0], 2, None),
        "a draft that p never draws": ([0.0, 0.0, inf, 0.0], [0, 0.1, 0.9, 0], 2, 0),
        "large logits": ([3e38, -3e38, 1e30, 0.0], [0.25] * 4, 0, 3),
    }
    logits = jnp.stack([_rows(p, 4) for p, _, _, _ in rows.values()])
    probs = jnp.stack([_rows(q, 3) for _, q, _, _ in rows.values()])
    drafts = jnp.asarray([[x] * 3 for _, _, x, _ in rows.values()], jnp.int32)
    count = jnp.full(len(rows), 3, jnp.int32)
    got = _verify(logits, drafts, probs, count, jnp.zeros(len(rows), bool), rule)
    for i, (name, (p, _, _, accepted)) in enumerate(rows.items()):
        if accepted is not None:
            assert int(got.num_accepted[i]) == accepted, name
        emitted = got.tokens[i, : got.count[i]].tolist()
        assert all(0 <= t < 4 and p[t] > inf for t in emitted), name


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("bad", [[np.nan, 0, 0], [-np.inf] * 3])
def test_a_position_without_a_distribution_ends_a_round_as_the_plain_draw_would(rule, bad) -> None:
    state = state_of(1, 3)
    history = _no_history(1)
    raw = jnp.asarray([[[0.0, -np.inf, -np.inf], bad, [0.0, 0, 0]]], jnp.float32)
    drafts = jnp.asarray([[0, 1]], jnp.int32)
    logits = target_logits(raw, state, history, drafts)
    got = _verify(logits, drafts, None, jnp.asarray([2], jnp.int32), is_greedy(state), rule)
    assert got.tokens.tolist() == [[0, 0, 3]]
    keys = plain_keys(_round(1), jnp.ones((1, 1), jnp.int32))[:, 0]
    assert sample(raw[:, 1], state, keys).tolist() == [0]


@pytest.mark.parametrize("probs", [None, [0.25] * 4])
@pytest.mark.parametrize("rule", RULES)
def test_ids_that_are_no_tokens_fall(rule: Rule, probs) -> None:
    logits, count = jnp.zeros((300, 3, 4)), jnp.full(300, 2, jnp.int32)
    q = None if probs is None else _rows(probs, 300, 2)
    drafts = jnp.tile(jnp.asarray([[-1, 0], [4, 0], [2**30, 0]], jnp.int32), (100, 1))
    got = _verify(logits, drafts, q, count, jnp.zeros(300, bool), rule)
    assert not got.num_accepted.any()
    assert set(np.asarray(got.tokens[:, 0]).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", RULES)
def test_the_token_before_a_position_without_a_distribution_has_its_own(rule: Rule) -> None:
    runs, p = 100_000, [0.1, 0.2, 0.3, 0.4]
    one = jnp.stack([jnp.log(_rows(p)), jnp.full(4, jnp.nan), jnp.zeros(4)])
    logits, q = jnp.broadcast_to(one, (runs, 3, 4)), _rows([0.25] * 4, runs, 2)
    drafts = jax.random.randint(jax.random.key(1), (runs, 2), 0, 4, jnp.int32)
    count = jnp.full(runs, 2, jnp.int32)
    got = _verify(logits, drafts, q, count, jnp.zeros(runs, bool), rule)
    first = np.bincount(np.asarray(got.tokens[:, 0]), minlength=4) / runs
    # Five standard deviations.
    np.testing.assert_allclose(first, p, atol=0.008)
    assert int(got.num_accepted.max()) == 1


def _no_history(rows: int, room: int = 8) -> History:
    zeros = jnp.zeros((rows, room), jnp.int32)
    none = jnp.zeros(rows, jnp.int32)
    return History(prompts=zeros, prompt_lens=none, generated=zeros, num_generated=none)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_row_without_drafts_is_a_plain_draw(rule: Rule) -> None:
    rows, vocab = 64, 50
    raw = jax.random.normal(jax.random.key(2), (rows, 3, vocab)) * 2
    state = state_of(rows, vocab, temperature=0.8, top_p=0.9)
    drafts = jnp.zeros((rows, 2), jnp.int32)
    logits = target_logits(raw, state, _no_history(rows), drafts)
    count = jnp.zeros(rows, jnp.int32)
    probs = _rows([1 / vocab] * vocab, rows, 2)
    got = _verify(logits, drafts, probs, count, is_greedy(state), rule)
    keys = plain_keys(_round(rows), jnp.zeros((rows, 1), jnp.int32))[:, 0]
    np.testing.assert_array_equal(got.tokens[:, 0], sample(raw[:, 0], state, keys))
    assert got.count.tolist() == [1] * rows


def test_coupled_rows_are_plain_draws_at_a_real_vocabularys_size() -> None:
    rows, k, vocab = 8, 3, 5_000
    raw = jax.random.normal(jax.random.key(3), (rows, k + 1, vocab)) * 3
    state = state_of(rows, vocab, temperature=[0.0, 1.0, 0.7, 1.3] * 2, top_p=0.95, top_k=40)
    drafts = jnp.zeros((rows, k), jnp.int32)
    logits = target_logits(raw, state, _no_history(rows), drafts)
    offset = jnp.broadcast_to(jnp.arange(k + 1, dtype=jnp.int32)[None, :], (rows, k + 1))
    keys = plain_keys(_round(rows), offset)
    drawn = jnp.stack([sample(raw[:, i], state, keys[:, i]) for i in range(k + 1)], axis=1)
    count = jnp.asarray([3, 3, 3, 3, 2, 1, 0, 3], jnp.int32)
    wrong = jnp.asarray([3, 3, 1, 0, 3, 3, 3, 2], jnp.int32)
    differs = jnp.arange(k, dtype=jnp.int32)[None, :] >= wrong[:, None]
    drafts = jnp.where(differs, (drawn[:, :k] + 1) % vocab, drawn[:, :k])
    got = _verify(logits, drafts, None, count, is_greedy(state), Rule.COUPLED)
    assert got.num_accepted.tolist() == [3, 3, 1, 0, 2, 1, 0, 2]
    for i in range(rows):
        assert got.tokens[i, : got.count[i]].tolist() == drawn[i, : got.count[i]].tolist()
    equal = verify_equal(drafts, drawn, count, vocab_size=vocab)
    np.testing.assert_array_equal(equal.tokens, got.tokens)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_penalties_count_every_accepted_draft(k: int, rule: Rule) -> None:
    """A 3.0, B 2.6, the rest 0, frequency 0.5: A B A B A B, though the drafts are all A."""
    state = state_of(1, 4, temperature=0.0, frequency=0.5)
    assert _greedy([3.0, 2.6, 0, 0], state, [0] * k, rule, 6) == [0, 1, 0, 1, 0, 1]
    # Drafts that are right are accepted, k at a time.
    assert (
        _greedy([3.0, 2.6, 0, 0], state, [0, 1, 0, 1][:k], rule, k + 1) == [0, 1, 0, 1, 0][: k + 1]
    )


@pytest.mark.parametrize("k", [1, 3])
def test_min_tokens_counts_tokens_not_rounds(k: int) -> None:
    state = state_of(1, 4, temperature=0.0, min_tokens=4)
    stop = jnp.zeros((1, 2), jnp.int32)
    state = type(state)(**(vars(state) | {"stop_ids": stop}))
    assert _greedy([3.0, 2.6, 0, 0], state, [1] * k, Rule.BLOCK, 6) == [1, 1, 1, 1, 0, 0]


def _greedy(row: list[float], state, drafts: list[int], rule: Rule, length: int) -> list[int]:
    raw = _rows(row, 1, len(drafts) + 1)
    proposed = jnp.asarray([drafts], jnp.int32)
    out: list[int] = []
    while len(out) < length:
        history = _no_history(1)
        generated = jnp.asarray([(out + [0] * 8)[:8]], jnp.int32)
        history = History(
            prompts=history.prompts,
            prompt_lens=history.prompt_lens,
            generated=generated,
            num_generated=jnp.asarray([len(out)], jnp.int32),
        )
        logits = target_logits(raw, state, history, proposed)
        count = jnp.asarray([len(drafts)], jnp.int32)
        got = _verify(logits, proposed, None, count, is_greedy(state), rule)
        out += got.tokens[0, : got.count[0]].tolist()
    return out[:length]


def test_each_position_is_processed_as_the_plain_step_with_its_history() -> None:
    rows, k, vocab = 3, 2, 6
    raw = jax.random.normal(jax.random.key(4), (rows, k + 1, vocab)) * 2
    state = state_of(rows, vocab, temperature=0.0, frequency=0.4, presence=0.2, repetition=1.5)
    word = jnp.broadcast_to(jnp.asarray([[[3, 5]]], jnp.int32), (rows, 1, 2))
    state = type(state)(**(vars(state) | {"bad_words": word}))
    history = History(
        prompts=jnp.asarray([[1], [2], [3]], jnp.int32),
        prompt_lens=jnp.asarray([1, 1, 0], jnp.int32),
        generated=jnp.asarray([[4, 9, 9], [9, 9, 9], [0, 1, 9]], jnp.int32),
        num_generated=jnp.asarray([1, 0, 2], jnp.int32),
    )
    drafts = jnp.asarray([[3, 5], [0, 3], [3, 1]], jnp.int32)
    mask = jnp.ones((rows, k + 1, vocab), bool).at[:, 1, 0].set(False)
    got = target_logits(raw, state, history, drafts, masks=mask)
    for i in range(k + 1):
        generated, number = history.generated, history.num_generated
        for j in range(i):
            at = jnp.arange(rows), number
            generated, number = generated.at[at].set(drafts[:, j], mode="drop"), number + 1
        past = History(
            prompts=history.prompts,
            prompt_lens=history.prompt_lens,
            generated=generated,
            num_generated=number,
        )
        want = process_logits(jnp.where(mask[:, i], raw[:, i], -jnp.inf), state, past)
        # The third row has room for one draft more: its last position is past max_tokens.
        sure = 2 if i == 2 else 3
        np.testing.assert_array_equal(got[:sure, i], want[:sure])


def test_packed_masks_are_those_of_booleans() -> None:
    rows, k, vocab = 2, 1, 70  # three words, the last with six tokens
    raw = jax.random.normal(jax.random.key(5), (rows, k + 1, vocab))
    mask = jax.random.bernoulli(jax.random.key(6), 0.5, raw.shape)
    padded = np.zeros((rows, k + 1, 96), bool)
    padded[..., :vocab] = mask
    words = np.packbits(padded.reshape(rows, k + 1, 3, 32), axis=-1, bitorder="little")
    packed = jnp.asarray(words.view(np.uint32)[..., 0])
    nothing = jnp.zeros((rows, 4), jnp.int32)
    history = History(nothing, nothing[:, 0], nothing, nothing[:, 0])
    processed = functools.partial(
        processed_logits, raw, state_of(rows, vocab), history, nothing[:, :k]
    )
    np.testing.assert_array_equal(processed(masks=packed), processed(masks=mask))
    with pytest.raises(ValueError, match=r"masks is uint32\[2, 2, 2\] for 70 tokens; .*, 3\]"):
        processed(masks=packed[..., :2])


def test_keys_of_a_round_are_all_different_and_depend_on_where_it_begins() -> None:
    start = _round(2)
    later = Round(key=start.key, choice=start.choice, position=start.position + 1)
    data = [
        jax.random.key_data(round_keys(r, 3, role)).reshape(-1, 2)
        for r in (start, later)
        for role in (Role.DRAFT, Role.ACCEPT, Role.RECOVER)
    ]
    data.append(
        jax.random.key_data(plain_keys(start, jnp.asarray([[0, 1]] * 2, jnp.int32))).reshape(-1, 2)
    )
    rows = [row.tobytes() for row in np.concatenate([np.asarray(d) for d in data])]
    assert len(set(rows)) == len(rows) == 2 * (2 * 3 * 3 + 2)


@pytest.mark.parametrize(
    ("logits", "drafts", "probs", "message"),
    [
        ((2, 1, 5), (2, 0), None, "k must be at least 1"),
        ((2, 3, 5), (2, 3), None, r"logits is \[2, 3, 5\] .* must be \[2, 4, V\]"),
        ((3, 4, 5), (2, 3), None, r"must be \[2, 4, V\]"),
        ((2, 4, 5), (2, 3), (2, 3, 6), "over 6 tokens and the target's over 5.*map"),
        ((2, 4, 5), (2, 3), (2, 4, 5), r"draft_probs is \[2, 4, 5\].*\[2, 3, 5\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(logits, drafts, probs, message) -> None:
    with typecheck.unchecked(), pytest.raises(ValueError, match=message):
        verify(
            jnp.zeros(logits),
            jnp.zeros(drafts, jnp.int32),
            None if probs is None else jnp.zeros(probs),
            jnp.zeros(drafts[0], jnp.int32),
            greedy=jnp.zeros(drafts[0], bool),
            round=_round(drafts[0]),
        )
