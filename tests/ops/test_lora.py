"""Adapters of each row: the forms agree, gradients, what is refused and what is chosen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops import choice
from infer.ops.lora import LoraAdapters, lora
from infer.pallas.triton_call import interpreted
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels

WIDTH, OUT, COUNT = 40, 24, 3


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def pair(seed: int, rank: int) -> tuple[jax.Array, jax.Array]:
    return draw(seed, rank, WIDTH), draw(seed + 50, OUT, rank)


PAIRS = [pair(1, 8), pair(2, 16), pair(3, 4)]
SCALES = [2.0, 0.5, 1.0]
ADAPTERS = LoraAdapters.create(PAIRS, SCALES)


def batch(ids: list[int]) -> tuple[Any, ...]:
    return draw(4, len(ids), OUT), draw(5, len(ids), WIDTH), ADAPTERS, jnp.asarray(ids, jnp.int32)


def by_hand(y: Any, x: Any, ids: list[int]) -> np.ndarray:
    """The formula in float64, each adapter of its own rank."""
    rows = np.asarray(y, np.float64).copy()
    for t, number in enumerate(ids):
        if number >= 0:
            a, b = (np.asarray(m, np.float64) for m in PAIRS[number])
            rows[t] += SCALES[number] * (b @ (a @ np.asarray(x[t], np.float64)))
    return rows


# No more rows than adapters, and more: the two plain forms.
@pytest.mark.parametrize("ids", [[2, -1, 2], [1, -1, 0, 1, 0, -1, 0]])
def test_forms_are_those_of_the_formula(ids: list[int]) -> None:
    y, x, adapters, numbers = batch(ids)
    for name in ("xla", "interpret"):
        with choice.recording() as choices:
            got = lora(y, x, adapters, numbers, name)
        assert choices == [choice.Choice("lora", name)]
        np.testing.assert_allclose(got, by_hand(y, x, ids), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(got[1], y[1])


@pytest.mark.parametrize("count", [2, 7])
def test_the_plain_form_keeps_rows_apart(count: int) -> None:
    y, x, adapters, ids = batch([0, 5, 0, -1, 0, -2, 0][:count])
    other = jax.tree.map(lambda leaf: leaf.at[1:].set(jnp.nan), adapters)
    got = lora(y, x, other, ids, "xla")
    assert (
        np.isnan(got).all(axis=1).tolist()
        == [False, True, False, False, False, True, False][:count]
    )
    want = lora(y, x, adapters, ids, "xla")
    np.testing.assert_array_equal(got, want)


def test_bfloat16_products_with_one_cast() -> None:
    y, x, adapters, ids = batch([1, -1, 0, 1, 2])
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (y, x, adapters.a, adapters.b))
    y, x, a, b = low
    adapters = LoraAdapters(a=a, b=b, scale=adapters.scale)
    plain, kernel = (lora(y, x, adapters, ids, name) for name in ("xla", "interpret"))
    assert plain.dtype == kernel.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        plain.astype(jnp.float32), kernel.astype(jnp.float32), rtol=1e-2, atol=1e-2
    )


def test_gradients_are_those_of_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every float operand, through the Triton form with its kernel interpreted."""
    y, x, adapters, ids = batch([1, -1, 0, 1, 0])

    def loss(name: str | None, *floats: jax.Array) -> jax.Array:
        y, x, a, b, scale = floats
        return jnp.sum(jnp.sin(lora(y, x, LoraAdapters(a, b, scale), ids, name)))

    def formula(*floats: jax.Array) -> jax.Array:
        y, x, a, b, scale = floats
        own = jnp.where(ids < 0, 0, ids)
        inner = jnp.einsum("ti,tri->tr", x, a[own])
        more = scale[own][:, None] * jnp.einsum("tr,tor->to", inner, b[own])
        return jnp.sum(jnp.sin(y + jnp.where(ids[:, None] < 0, 0.0, more)))

    floats = (y, x, adapters.a, adapters.b, adapters.scale)
    want = jax.grad(formula, argnums=range(5))(*floats)
    monkeypatch.setattr(choice, "_check_gpu", lambda name, implementation: None)
    with interpreted():
        got = jax.grad(lambda *floats: loss("triton", *floats), argnums=range(5))(*floats)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-3)  # the scale's are sums that cancel


def test_what_a_gpu_chooses() -> None:
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    for rows, name in ((64, "triton"), (65, "xla")):
        args = batch([0] * rows)
        with jax.sharding.use_abstract_mesh(mesh), choice.recording() as choices:
            jax.eval_shape(lora, *args)
        assert [(c.op, c.implementation) for c in choices] == [("lora", name)]
    wide = LoraAdapters.create([pair(1, 80)], [1.0])
    y, x, _, ids = batch([0])
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match=r"rank 80, x of .*; on NVIDIA H200"):
            jax.eval_shape(lambda *args: lora(*args, implementation="triton"), y, x, wide, ids)


def test_adapters_are_a_pytree_and_no_rows_are_no_work() -> None:
    y, x, adapters, ids = batch([1, 0, 2, 1])
    assert adapters.a.shape == (COUNT, 16, WIDTH) and adapters.b.shape == (COUNT, OUT, 16)
    got = jax.jit(lora, static_argnames="implementation")(y, x, adapters, ids)
    np.testing.assert_allclose(got, by_hand(y, x, [1, 0, 2, 1]), rtol=1e-4, atol=1e-4)
    assert lora(y[:0], x[:0], adapters, ids[:0]).shape == (0, OUT)
    low = LoraAdapters.create(PAIRS, SCALES, jnp.bfloat16)
    assert (low.a.dtype, low.scale.dtype) == (jnp.bfloat16, jnp.float32)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="there are 0 adapters and 0 scales"):
        LoraAdapters.create([], [])
    with pytest.raises(ValueError, match="there are 3 adapters and 1 scales"):
        LoraAdapters.create(PAIRS, [1.0])
    a, b = pair(1, 8)
    for wrong in ((a, b[:, :7]), (a[:, :39], b), (a, b[:23]), (a[0], b), (a[:0], b[:, :0])):
        with pytest.raises(ValueError, match=r"adapter 1 has .*; they must be \[r, I\] and"):
            LoraAdapters.create([(a, b), wrong], [1.0, 1.0])
    y, x, adapters, ids = batch([0, 1])
    with unchecked():
        with pytest.raises(ValueError, match=r"with x \(2, 39\) and y \(2, 24\) they must be"):
            lora(y, x[:, :39], adapters, ids)
        with pytest.raises(ValueError, match=r"ids \(1,\); they must have one row for each"):
            lora(y, x, adapters, ids[:1])
