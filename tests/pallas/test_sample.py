"""The sampler as one kernel, interpreted, against sorting and against the plain XLA form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.sample import SampleBlocks, sample, sample_reference
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels

BLOCKS = SampleBlocks(block_vocab=1024, num_warps=4)
KERNEL = jax.jit(functools.partial(sample, interpret=True, blocks=BLOCKS))
REFERENCE = jax.jit(sample_reference)


def _rows(rng: np.random.Generator, vocab: int, kind: str, rows: int = 16):
    x = rng.standard_normal((rows, vocab)).astype(np.float32) * rng.choice([0.5, 3, 20])
    if kind == "ties":
        x = np.round(x)
    elif kind == "masked":
        x[:, rng.permutation(vocab)[: vocab // 2]] = -np.inf
    elif kind == "flat":
        x[:] = 1.5
    elif kind == "one":
        x[:] = -np.inf
        x[np.arange(rows), rng.integers(0, vocab, rows)] = 2.0
    f32 = lambda values: jnp.asarray(rng.choice(values, rows), jnp.float32)
    return (
        jnp.asarray(x),
        f32([0, 0.1, 1, 2]),
        jnp.asarray(rng.choice([-1, 0, 1, 5, 50, vocab - 1, vocab, vocab + 5], rows), jnp.int32),
        f32([1, 0.9037, 0.5037, 0.1037, 1e-6]),  # no edge that rounding decides
        f32([0, 0, 0.05, 1]),
        jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)),
    )


@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "flat", "one"])
@pytest.mark.parametrize("vocab", [5000, 100])
def test_draws_what_sorting_would(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(len(kind) + vocab)
    for _ in range(4):
        args = _rows(rng, vocab, kind)
        np.testing.assert_array_equal(KERNEL(*args), REFERENCE(*args))


def test_a_row_alone_draws_the_same() -> None:
    args = _rows(np.random.default_rng(7), 5000, "plain")
    together = np.asarray(KERNEL(*args))
    for b in range(0, 16, 5):
        alone = KERNEL(*(x[b : b + 1] for x in args))
        assert int(alone[0]) == together[b]


def test_half_precision_logits_are_widened() -> None:
    x, *rest = _rows(np.random.default_rng(9), 100, "plain")
    x = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(KERNEL(x, *rest), REFERENCE(x.astype(jnp.float32), *rest))


def test_literal_sets() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: which tokens ever come up."""
    x = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]], jnp.float32))
    draws = 64
    keys = jax.random.bits(jax.random.key(0), (draws, 2), jnp.uint32)

    def seen(top_k: int, top_p: float, min_p: float) -> set[int]:
        full = lambda value, dtype: jnp.full((draws,), value, dtype)
        tokens = KERNEL(
            jnp.tile(x, (draws, 1)),
            full(1.0, jnp.float32),
            full(top_k, jnp.int32),
            full(top_p, jnp.float32),
            full(min_p, jnp.float32),
            keys,
        )
        return set(np.asarray(tokens).tolist())

    assert seen(0, 1.0, 0.0) == {0, 1, 2, 3}
    assert seen(2, 1.0, 0.0) == {1, 3}
    assert seen(0, 0.65, 0.0) == {1, 3}
    assert seen(0, 0.75, 0.0) == {1, 3, 2}
    # Of the two that top_k keeps, renormalised to 4/7 and 3/7, the first reaches 0.5.
    assert seen(2, 0.5, 0.0) == {1}
    assert seen(0, 1.0, 0.6) == {1, 3}
    assert seen(1, 1.0, 0.0) == {1}


def test_a_logit_that_is_no_number_is_never_drawn() -> None:
    x = jnp.zeros((2, 33), jnp.float32).at[:, 5].set(jnp.nan).at[:, 9].set(4.0)
    f32 = lambda *values: jnp.asarray(values, jnp.float32)
    off = jnp.zeros(2, jnp.int32)
    keys = jnp.zeros((2, 2), jnp.uint32)
    tokens = KERNEL(x, f32(0, 1), off, f32(1, 1), f32(0, 1), keys)
    np.testing.assert_array_equal(tokens, [9, 9])


def test_rows_that_do_not_fit_are_refused() -> None:
    args = _rows(np.random.default_rng(1), 100, "plain")
    for index, message in ((1, "temperature is"), (2, "top_k is"), (5, "key_data is")):
        wrong = [x[:3] if i == index else x for i, x in enumerate(args)]
        with unchecked(), pytest.raises(ValueError, match=message):
            sample(*wrong, interpret=True)
    with pytest.raises(ValueError, match="num_warps is 3"):
        SampleBlocks(num_warps=3)


def test_refuses_what_it_cannot() -> None:
    args = _rows(np.random.default_rng(1), 100, "plain")
    with jax.threefry_partitionable(False):
        with pytest.raises(NotImplementedError, match="jax_threefry_partitionable"):
            sample(*args, interpret=True)
    with pytest.raises(ValueError, match="power of two"):
        SampleBlocks(block_vocab=1000)
