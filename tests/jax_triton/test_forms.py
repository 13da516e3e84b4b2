"""The forms behind the ops, traced for a GPU that is described: what runs, and what is refused."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from infer.ops import choice
from infer.ops.linear import linear
from infer.ops.norm import rms_norm
from infer.ops.sample import sample
from infer.quant.qarray import QArray
from tests.cases.kernels.quantized_matmul import packed
from tests.jax_triton import interpreter
from tests.sampling.states import state_of

pytestmark = [pytest.mark.kernels, interpreter.needs_triton]

X = jnp.ones((3, 256), jnp.float32)


@pytest.fixture(autouse=True)
def h200() -> Iterator[None]:
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _ordered() -> QArray:
    """Return a weight whose columns stand in an order of their own."""
    weight = packed("int4 g32", 16, 256, jax.random.key(0))
    format = dataclasses.replace(weight.format, ordered=True)  # type: ignore[call-arg]
    return dataclasses.replace(weight, perm=jnp.arange(256, dtype=jnp.int32), format=format)


def test_the_ops_that_have_the_form_run_it_and_others_choose() -> None:
    state, keys = state_of(3, 256), jax.random.split(jax.random.key(0), 3)
    with choice.recording() as choices:
        y = jax.eval_shape(lambda x: linear(x, _ordered(), implementation="jax_triton"), X)
        tokens = jax.eval_shape(lambda x: sample(x, state, keys, "jax_triton"), X)
        jax.eval_shape(lambda x: rms_norm(x, X[0], 1e-6, "jax_triton"), X)
    assert (y.shape, y.dtype) == ((3, 16), jnp.float32)
    assert (tokens.shape, tokens.dtype) == ((3,), jnp.int32)
    assert [(c.op, c.implementation) for c in choices] == [
        ("linear", "jax_triton"),
        ("sample", "jax_triton"),
        ("rms_norm", "xla"),
    ]


def test_a_format_that_it_has_not_is_refused_by_name() -> None:
    weight = packed("Q4_K", 16, 256, jax.random.key(0))
    with pytest.raises(NotImplementedError, match=r"jax_triton: Q4_K .* Q4_0, .*; on NVIDIA H200"):
        jax.eval_shape(lambda x: linear(x, weight, implementation="jax_triton"), X)


def test_gradients_are_the_plain_forms_and_vmap_runs_row_by_row() -> None:
    loss = lambda x: jnp.sum(linear(x, _ordered(), implementation="jax_triton"))
    assert jax.eval_shape(jax.grad(loss), X).shape == X.shape
    assert jax.eval_shape(jax.vmap(loss), jnp.stack([X, X])).shape == (2,)
