"""Masks, biases and penalties as one kernel, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.process_logits import (
    ProcessLogitsBlocks,
    process_logits,
    process_logits_reference,
)
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

BLOCKS = ProcessLogitsBlocks(block=64)
KERNEL = jax.jit(functools.partial(process_logits, blocks=BLOCKS, interpret=True))


def _case(vocab: int = 150, rows: int = 3):
    rng = np.random.default_rng(vocab)
    ids = lambda count: jnp.asarray(rng.integers(0, vocab + 1, (rows, count)), jnp.int32)
    f32 = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    counts = rng.integers(0, 3, (rows, vocab)) * 2 + rng.integers(0, 2, (rows, vocab))
    return dict(
        logits=f32(rows, vocab).at[0, 0].set(-jnp.inf),
        banned=ids(4),
        bias_ids=ids(5).at[:, 1].set(7).at[:, 2].set(7),  # one id twice: both count
        bias=f32(rows, 5),
        mask=jnp.asarray(rng.integers(0, 2**32, (rows, 5), dtype=np.uint32)),
        counts=jnp.asarray(counts * rng.integers(0, 2, (rows, vocab)), jnp.int32),
        penalties=jnp.asarray([[1.0, 0, 0], [1.3, 0.5, 0.25], [0.5, -1, 2]], jnp.float32),
    )


@pytest.mark.parametrize("drop", [(), ("mask",), ("counts", "penalties")])
def test_equals_the_reference(drop: tuple[str, ...]) -> None:
    args = {name: None if name in drop else value for name, value in _case().items()}
    y, want = KERNEL(**args), process_logits_reference(**args)
    np.testing.assert_allclose(y, want, **tolerance("float32", 1))
    alone = KERNEL(**{name: None if x is None else x[1:2] for name, x in args.items()})
    np.testing.assert_array_equal(alone[0], np.asarray(y)[1])


def test_nothing_asked_changes_nothing() -> None:
    case = _case()
    empty = jnp.zeros((3, 0), jnp.int32)
    y = KERNEL(case["logits"], empty, empty, jnp.zeros((3, 0), jnp.float32))
    np.testing.assert_array_equal(y, case["logits"])


def test_values_worked_by_hand() -> None:
    """Repetition 2, frequency 0.5, presence 0.25; 4 and -4 were generated twice, 1 was not."""
    none = jnp.full((1, 1), 3, jnp.int32)
    y = KERNEL(
        jnp.asarray([[4.0, -4.0, 1.0]], jnp.float32),
        none,
        none,
        jnp.zeros((1, 1), jnp.float32),
        counts=jnp.asarray([[4, 5, 0]], jnp.int32),
        penalties=jnp.asarray([[2.0, 0.5, 0.25]], jnp.float32),
    )
    np.testing.assert_allclose(y, [[2 - 1 - 0.25, -8 - 1 - 0.25, 1.0]])


def test_refuses_what_does_not_fit() -> None:
    case = _case()
    with pytest.raises(ValueError, match="4 words of 32 bits for a vocabulary of 150; it needs 5"):
        process_logits(**(case | {"mask": case["mask"][:, :4]}), interpret=True)
    with pytest.raises(ValueError, match="go together"):
        process_logits(**(case | {"penalties": None}), interpret=True)
