"""GPTQ beside a rewrite in float64, from the paper's algorithm; tests/quant/test_goldens.py has
another package's numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.quant import rtn
from infer.quant.formats import PlanarFormat
from infer.quant.gptq import gptq, hessian, inverse_factor, order_by_energy
from infer.quant.qarray import QArray, dequantize


@functools.cache
def case(width: int = 256, rows: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight, correlated inputs of which channel 5 is dead, and their Hessian."""
    rng = np.random.default_rng(width)
    w = rng.standard_normal((rows, width)).astype(np.float32)
    mix = 0.2 * rng.standard_normal((width, width)) + np.eye(width)
    x = (rng.standard_normal((900, width)) @ mix).astype(np.float32)
    x[:, 5] = 0
    return w, x, np.asarray(hessian(jnp.asarray(x))) * (2 / 900)


def run(w: np.ndarray, h: np.ndarray, format: PlanarFormat, **options: object) -> QArray:
    q, ok = gptq(jnp.asarray(w), jnp.asarray(h), jnp.float32(0.01), format=format, **options)
    assert bool(ok)
    return q


def reference(
    w: np.ndarray,
    h: np.ndarray,
    format: PlanarFormat,
    convention: str = "full",
    order: np.ndarray | None = None,
    static: bool = False,
) -> np.ndarray:
    """Algorithm 1 of arXiv 2210.17323 without its lazy batches: column after column, float64.  Only
    the scales are ours, which tests/quant/test_rtn.py has by hand; a group's are those of the
    weights when its block of columns begins.
    """
    w, h = w.astype(np.float64), h.astype(np.float64)
    width = w.shape[1]
    group = format.group or width
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0

    def params(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s, z = rtn.int_params(
            jnp.asarray(values, jnp.float32),
            format.bits,
            format.symmetric,
            convention,
            format.scale_dtype,
        )
        return np.asarray(s, np.float64), np.asarray(z, np.float64)

    order = np.arange(width) if order is None else order
    original = w.copy()
    w, h = w[:, order], h[order][:, order]
    h += 0.01 * np.mean(np.diag(h)) * np.eye(width)
    inverse = np.linalg.inv(h)
    decoded = np.zeros_like(w)
    block = 128 if group % 128 == 0 or 128 % group == 0 else group
    stale = w.copy()
    for j in range(width):
        if j % block == 0:
            stale = w.copy()
        if static or not format.group:
            first = order[j] // group * group
            s, z = params(original[:, first : first + group])
        elif j % group == 0:
            s, z = params(stale[:, j : j + group])
        least = 1 if convention == "restricted" and format.symmetric else 0
        code = np.clip(np.round(w[:, j] / s) + z, least, 2**format.bits - 1)
        decoded[:, j] = (code - z) * s
        # Equations 2 and 3: the columns that are left, and the inverse without this one.
        error = (w[:, j] - decoded[:, j]) / inverse[j, j]
        w[:, j + 1 :] -= error[:, None] * inverse[j, j + 1 :]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    back = np.zeros_like(decoded)
    back[:, order] = decoded
    return back


def output_error(w: np.ndarray, x: np.ndarray, q: np.ndarray) -> float:
    return float(np.mean(((q.astype(np.float64) - w) @ x.T.astype(np.float64)) ** 2))


@pytest.mark.parametrize(
    "width, group, bits, symmetric, convention, ordered, static",
    [
        (256, 64, 4, True, "full", False, False),
        (256, 64, 3, False, "full", True, False),
        (256, 64, 4, True, "restricted", True, True),
        (256, 0, 4, False, "full", False, False),
        (192, 96, 2, False, "full", False, False),  # 96: blocks of one group
        (512, 256, 4, True, "no_clipping", False, False),  # groups of two blocks
    ],
)
def test_gptq_is_the_papers_in_float64(width, group, bits, symmetric, convention, ordered, static):
    w, x, h = case(width)
    format = rtn.int_format(bits, group, symmetric=symmetric, scale_dtype="float32")
    q = run(w, h, format, convention=convention, act_order=ordered, static_groups=static)
    diagonal = np.where(np.diag(h) == 0, np.float32(1), np.diag(h))
    order = np.argsort(-diagonal, kind="stable") if ordered else None
    want = reference(w, h, format, convention, order, static)
    got = np.asarray(dequantize(q))
    # A weight on the edge of two codes falls otherwise in float32, and what it pushes to those
    # that follow changes some of them: few differ, and the result is as good.
    assert np.mean(np.abs(got - want) < 1e-4) > 0.99
    np.testing.assert_allclose(output_error(w, x, got), output_error(w, x, want), rtol=0.02)
    plain = np.asarray(dequantize(rtn.quantize_int(jnp.asarray(w), format, convention)))
    assert output_error(w, x, got) < 0.8 * output_error(w, x, plain)
    assert (q.perm is not None) == (ordered and not static)


def test_inputs_that_are_not_correlated_leave_plain_rounding():
    w, _, _ = case()
    h = np.eye(256, dtype=np.float32)
    format = rtn.int_format(4, 64)
    want = rtn.quantize_int(jnp.asarray(w), format)
    got = run(w, h, format)
    np.testing.assert_array_equal(got.data, want.data)
    np.testing.assert_array_equal(got.scale, want.scale)


def test_a_dead_input_is_zero():
    w, _, h = case()
    assert h[5, 5] == 0
    q = run(w, h, rtn.int_format(4, 64))
    np.testing.assert_array_equal(dequantize(q)[:, 5], 0)


def test_an_order_of_columns_is_kept_and_undone():
    w, _, h = case()
    q = run(w, h, rtn.int_format(4, 64), act_order=True)
    h1 = jnp.where(jnp.diag(jnp.diagonal(h) == 0), 1, h)
    np.testing.assert_array_equal(q.perm, order_by_energy(h1))
    assert sorted(np.asarray(q.perm).tolist()) == list(range(256))
    # Decoded, a column is near the weight's own column, not near another.
    got = np.asarray(dequantize(q))
    matrix = (got / np.linalg.norm(got, axis=0).clip(1e-9)).T @ (w / np.linalg.norm(w, axis=0))
    alive = np.arange(256) != 5
    assert np.mean(matrix.argmax(1)[alive] == np.arange(256)[alive]) > 0.97


def test_equal_energies_keep_their_order():
    assert order_by_energy(jnp.diag(jnp.asarray([2.0, 3, 2, 3]))).tolist() == [1, 3, 0, 2]


def test_a_singular_hessian_is_said_not_hidden():
    w, _, _ = case()
    ones = np.ones((256, 256), np.float32) * 1e8  # all inputs equal
    _, ok = inverse_factor(jnp.asarray(ones), 1e-12)
    assert not bool(ok)
    q, ok = gptq(
        jnp.asarray(w), jnp.asarray(ones), jnp.float32(1e-12), format=rtn.int_format(4, 64)
    )
    assert not bool(ok)
    q, ok = gptq(jnp.asarray(w), jnp.asarray(ones), jnp.float32(0.01), format=rtn.int_format(4, 64))
    assert bool(ok) and np.isfinite(np.asarray(dequantize(q))).all()


def test_the_factor_is_that_of_the_damped_inverse():
    _, _, h = case()
    h = np.where(np.diag(np.diag(h) == 0), np.float32(1), h)
    factor, ok = inverse_factor(jnp.asarray(h), 0.01)
    assert bool(ok)
    damped = h.astype(np.float64) + 0.01 * np.mean(np.diag(h)) * np.eye(256)
    want = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(factor, want, atol=2e-3 * np.abs(want).max())
    assert np.all(np.tril(np.asarray(factor), -1) == 0)


def test_layers_in_a_stack_are_those_one_by_one():
    w, _, h = case()
    format = rtn.int_format(4, 64)
    one = jax.jit(lambda a: gptq(a, jnp.asarray(h), jnp.float32(0.01), format=format)[0])
    stack = jnp.stack([jnp.asarray(w), jnp.asarray(w[::-1].copy())])
    both = jax.jit(jax.vmap(one))(stack)
    for i in (0, 1):
        alone = one(stack[i])
        assert np.mean(np.asarray(both.data[i]) == np.asarray(alone.data)) > 0.99


def test_twice_is_the_same():
    w, _, h = case()
    a, b = (run(w, h, rtn.int_format(4, 64)) for _ in range(2))
    np.testing.assert_array_equal(a.data, b.data)
