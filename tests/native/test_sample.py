"""The native draw and log-sum-exp against the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from infer.native.sample import logsumexp, sample
from infer.ops import choice
from infer.ops.sample import sample as op
from infer.sampling import GREEDY_BELOW, SamplingState
from tests.sampling import states

# temperature, top_k, top_p, min_p
_PARAMETERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 5, 1.0, 0.0),
    (0.8, 0, 0.95, 0.0),
    (1.0, 50, 0.9, 0.0),
    (1.5, 0, 1.0, 0.1),
    (0.7, 40, 0.8, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (30.0, 0, 0.7, 0.0),  # nearly flat: an edge that lies in many
    (1.0, 100_000, 0.9999999, 0.0),
    (0.02, 900, 0.99, 0.0),  # most lie below the range of the bins
]


def state_of(parameters: list[tuple[float, int, float, float]]) -> SamplingState:
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = dict(zip(names, map(list, zip(*parameters, strict=True)), strict=True))
    return states.state_of(len(parameters), 1, **columns)


def _draws(form: str, logits: Array, state: SamplingState, count: int) -> np.ndarray:
    """Return int32 [count, B]: one draw of all rows for each of `count` keys."""
    rows = logits.shape[0]

    @jax.jit
    def one(i: Array) -> Array:
        keys = jax.random.split(jax.random.key(i), rows)
        return op(logits, state, keys, form)

    return np.stack([np.asarray(one(jnp.int32(i))) for i in range(count)])


@pytest.mark.parametrize("vocab", [7, 16, 1000, 4096, 20_011])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_tokens_are_those_of_the_plain_form(vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    rows = len(_PARAMETERS)
    logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    logits = np.where(rng.random((rows, vocab)) < 0.1, -np.inf, logits)
    logits[:, 3] = 1
    state = state_of(_PARAMETERS)
    count = 60 if vocab <= 4096 else 12
    native = _draws("native", jnp.asarray(logits), state, count)
    plain = _draws("xla", jnp.asarray(logits), state, count)
    assert np.array_equal(native, plain)
    assert len(np.unique(native[:, 1])) > 1


def test_ties_at_the_edge_are_kept_from_the_lowest_id_up() -> None:
    logits = np.zeros((12, 5000), np.float32)
    logits[:, [4500, 77]] = 2
    state = state_of([(1.0, 4, 1.0, 0.0)] * 4 + [(1.0, 0, 0.01, 0.0)] * 4 + [(1, 9, 0.7, 0)] * 4)
    drawn = _draws("native", jnp.asarray(logits), state, 60)
    assert set(drawn[:, :4].ravel()) == {4500, 77, 0, 1}
    assert np.array_equal(drawn, _draws("xla", jnp.asarray(logits), state, 60))


def test_rows_without_an_answer_do_not_disturb_others() -> None:
    rng = np.random.default_rng(0)
    clean = rng.standard_normal((6, 4500), np.float32)
    logits = clean.copy()
    logits[1, 7], logits[3], logits[4, 4400] = np.nan, -np.inf, np.inf
    logits[1, 4499] = np.nan
    for parameters in [(1.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0), (0.0, 0, 1.0, 0.0)]:
        state = state_of([parameters] * 6)
        got, want = (_draws("native", jnp.asarray(x), state, 10) for x in (logits, clean))
        assert np.array_equal(got[:, [0, 2, 5]], want[:, [0, 2, 5]])
        assert got.min() >= 0 and got.max() < 4500


def test_rows_without_an_answer_have_the_token_of_the_plain_form() -> None:
    rng = np.random.default_rng(4)
    rows, vocab = 12, 9003
    logits = rng.standard_normal((rows, vocab), np.float32)
    nan, inf = np.nan, np.inf
    for row, places in enumerate(
        [
            {9002: nan},
            {8: nan, 5000: nan},
            {4096: nan, 17: inf},
            {17: nan, 4096: inf},
            {5000: inf},
            {5000: inf, 4999: inf},
            {3: -nan, 2: -inf},
            {0: nan},
        ]
    ):
        for at, value in places.items():
            logits[row, at] = value
    logits[8] = -inf
    logits[9] = nan
    logits[10] = inf
    for parameters in [(1.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (1.0, 0, 0.5, 0.1), (0, 0, 1, 0)]:
        state = state_of([parameters] * rows)
        native, plain = (_draws(name, jnp.asarray(logits), state, 5) for name in ("native", "xla"))
        assert native.tolist() == plain.tolist()
        if parameters[0] == 0:
            want = [9002, 8, 4096, 17, 5000, 4999, 3, 0, 0, 0, 0, int(np.argmax(logits[11]))]
            assert native.tolist() == [want] * 5
        else:
            assert not native[:, :11].any()


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((8, 9000), np.float32) * 2)
    keys = jax.random.split(jax.random.key(3), 8)
    data = jax.random.key_data(keys)
    columns = [jnp.full(8, v, t) for v, t in ((0.9, "float32"), (30, "int32"), (0.9, "float32"))]
    args = lambda s: (logits[s], *(c[s] for c in columns), jnp.zeros(8)[s], data[s])
    draw = lambda s: sample(*args(s), greedy_below=GREEDY_BELOW)
    whole = draw(slice(None))
    assert [int(draw(slice(i, i + 1))[0]) for i in range(8)] == whole.tolist()


def test_a_greedy_row_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((2, 9000), np.float32)
    logits[0, [8999, 4097, 4096]] = 1
    logits[1] = -1e30
    got = _draws("native", jnp.asarray(logits), state_of([(0.0, 0, 1.0, 0.0)] * 2), 1)
    assert got.tolist() == [[4096, 0]]


def test_logsumexp() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((7, 10_001)) * 5).astype(np.float32)
    x[1, 9] = np.nan
    x[2], x[3, :5000] = -np.inf, -np.inf
    x[4, 10_000] = np.inf
    x[5] = 80
    y = logsumexp(jnp.asarray(x))
    np.testing.assert_allclose(y, jax.nn.logsumexp(jnp.asarray(x), axis=-1), rtol=1e-6)
    for row in range(7):
        alone = logsumexp(jnp.asarray(x[row : row + 1]))
        assert np.array_equal(alone[0], y[row], equal_nan=True)
    assert logsumexp(jnp.zeros((0, 5), jnp.float32)).shape == (0,)
    np.testing.assert_allclose(logsumexp(jnp.full((1, 1), 3.5, jnp.float32)), [3.5])


def test_another_noise_falls_back_to_the_plain_form() -> None:
    logits = jnp.zeros((2, 50), jnp.float32)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    with pytest.raises(NotImplementedError, match="partitionable threefry"):
        op(logits, state_of([(1.0, 0, 1.0, 0.0)] * 2), keys, "native")
    with choice.recording() as chosen:
        op(logits, state_of([(1.0, 0, 1.0, 0.0)] * 2), keys)
    assert [c.implementation for c in chosen] == ["xla"]


def test_the_distribution_is_that_of_the_parameters() -> None:
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -1.0], np.float32)
    count = 20_000
    state = state_of([(0.7, 4, 1.0, 0.0)] * count)
    keys = jax.random.split(jax.random.key(5), count)
    drawn = op(jnp.asarray(np.tile(logits, (count, 1))), state, keys, "native")
    counts = np.bincount(np.asarray(drawn), minlength=6)
    p = np.exp(logits[:4] / 0.7)
    want = count * p / p.sum()
    assert counts[4:].sum() == 0
    # 0.999 quantile, 3 degrees of freedom; the keys are fixed, so this cannot flicker
    assert ((counts[:4] - want) ** 2 / want).sum() < 16.3


def test_operands_that_do_not_fit_are_errors() -> None:
    f32, int32 = jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.int32)
    call = jax.ffi.ffi_call("infer_sample", jax.ShapeDtypeStruct((2,), jnp.int32))
    keys, logits = jnp.zeros((2, 2), jnp.uint32), jnp.zeros((2, 8), jnp.float32)
    below = np.float32(0)
    for operands, message in [
        ((logits, f32[:1], f32, f32, int32, keys), "temperature"),
        ((logits, f32, f32, f32, f32, keys), "top_k"),
        ((logits, f32, f32, f32, int32, keys[:1]), "keys"),
        ((logits[0], f32, f32, f32, int32, keys), "logits"),
        ((logits[:, :0], f32, f32, f32, int32, keys), "at least one id"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(*operands, greedy_below=below))
    with pytest.raises((NotImplementedError, TypeError), match="bfloat16"):
        logsumexp(logits.astype(jnp.bfloat16))
