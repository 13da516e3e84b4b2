"""The hand-written sampler in Triton's interpreter draws what sorting and the Pallas form do."""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas import sample as pallas
from tests.jax_triton import interpreter
from tests.pallas.test_sample import _rows
from tests.typecheck import unchecked

pytestmark = [pytest.mark.kernels, interpreter.needs_triton]

VOCAB = 100  # three blocks of 32, and 4 ids of a fourth
REFERENCE = jax.jit(pallas.sample_reference)
PALLAS = jax.jit(functools.partial(pallas.sample, interpret=True))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return interpreter.load("sample", monkeypatch)


def _sample(kernel: ModuleType, *args: jax.Array) -> jax.Array:
    return kernel.sample(*args, blocks=kernel.SampleBlocks(block_vocab=32, num_warps=1))


@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "flat", "one"])
def test_draws_what_sorting_and_the_pallas_form_do(kernel: ModuleType, kind: str) -> None:
    args = _rows(np.random.default_rng(len(kind)), VOCAB, kind, rows=8)
    tokens = _sample(kernel, *args)
    np.testing.assert_array_equal(tokens, REFERENCE(*args))
    np.testing.assert_array_equal(tokens, PALLAS(*args))


def test_a_row_alone_draws_the_same_and_half_precision_is_widened(kernel: ModuleType) -> None:
    x, *rest = _rows(np.random.default_rng(9), VOCAB, "plain", rows=4)
    x = x.astype(jnp.float16)
    together = _sample(kernel, x, *rest)
    np.testing.assert_array_equal(together, REFERENCE(x.astype(jnp.float32), *rest))
    alone = _sample(kernel, *(a[2:3] for a in (x, *rest)))
    assert int(alone[0]) == int(together[2])


def test_a_logit_that_is_no_number_is_never_drawn(kernel: ModuleType) -> None:
    x = jnp.zeros((2, 33), jnp.float32).at[:, 5].set(jnp.nan).at[:, 9].set(4.0)
    f32 = lambda *values: jnp.asarray(values, jnp.float32)
    off, keys = jnp.zeros(2, jnp.int32), jnp.zeros((2, 2), jnp.uint32)
    tokens = _sample(kernel, x, f32(0, 1), off, f32(1, 1), f32(0, 1), keys)
    np.testing.assert_array_equal(tokens, [9, 9])


def test_refuses_what_does_not_fit(kernel: ModuleType) -> None:
    args = _rows(np.random.default_rng(1), VOCAB, "plain")
    for index, message in ((1, "temperature is"), (2, "top_k is"), (5, "key_data is")):
        wrong = [x[:3] if i == index else x for i, x in enumerate(args)]
        with unchecked(), pytest.raises(ValueError, match=message):
            kernel.sample(*wrong)
    with pytest.raises(ValueError, match="block_vocab is 1000; use a power of two"):
        kernel.SampleBlocks(block_vocab=1000)
    with jax.threefry_partitionable(False):
        with pytest.raises(NotImplementedError, match="jax_threefry_partitionable"):
            kernel.sample(*args)
