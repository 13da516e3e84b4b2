"""RMSNorm with the residual addition, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.norm import rms_norm as plain
from infer.pallas.rms_norm import RmsNormBlocks, rms_norm, rms_norm_reference
from tests.tolerances import tolerance
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels


def _arrays(rows: int, width: int, dtype: str):
    rng = np.random.default_rng(width)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    return draw(rows, width), draw(width), draw(rows, width)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width"), [(5, 576), (1, 64), (3, 3000)])
def test_equals_the_reference_and_the_plain_form(rows: int, width: int, dtype: str) -> None:
    x, gain, residual = _arrays(rows, width, dtype)
    kernel = jax.jit(functools.partial(rms_norm, eps=1e-5, interpret=True))
    for r in (None, residual):
        y, total = kernel(x, gain, residual=r)
        want, want_total = rms_norm_reference(x, gain, 1e-5, r)
        f32 = lambda a: np.asarray(a, np.float32)
        np.testing.assert_allclose(f32(y), f32(want), **tolerance(dtype, 4))
        np.testing.assert_array_equal(f32(total), f32(want_total))
        np.testing.assert_allclose(
            f32(y), f32(plain(want_total, gain, 1e-5)), **tolerance(dtype, 4)
        )
        np.testing.assert_array_equal(f32(kernel(x, gain, residual=r)[0]), f32(y))
        alone, _ = kernel(x[-1:], gain, residual=None if r is None else r[-1:])
        np.testing.assert_array_equal(f32(alone[0]), f32(y[-1]))


def test_value_worked_by_hand() -> None:
    x = jnp.asarray([[1.0, 2.0, -3.0, 4.0]], jnp.float32)
    y, _ = rms_norm(x, jnp.ones(4, jnp.float32), 1e-6, interpret=True)
    np.testing.assert_allclose(y, [[0.36514837, 0.73029673, -1.095445, 1.4605935]], rtol=1e-6)


def test_refuses_rows_that_no_program_holds() -> None:
    x, gain, _ = _arrays(1, 20000, "float32")
    with pytest.raises(NotImplementedError, match=r"\(1, 20000\) of float32"):
        rms_norm(x, gain, 1e-6, interpret=True)


def test_blocks_grow_with_the_width() -> None:
    assert RmsNormBlocks.for_shape(576).block_rows == 2
    assert RmsNormBlocks.for_shape(8192) == RmsNormBlocks(block_rows=1, num_warps=8)


def test_refuses_arrays_that_do_not_fit() -> None:
    x, gain, residual = _arrays(2, 64, "float32")
    with unchecked(), pytest.raises(ValueError, match=r"gain must be \(64,\)"):
        rms_norm(x, gain[:32], 1e-6, interpret=True)
    with unchecked(), pytest.raises(ValueError, match="residual like x"):
        rms_norm(x, gain, 1e-6, residual[:1], interpret=True)
    with pytest.raises(ValueError, match="num_warps is 3"):
        RmsNormBlocks(num_warps=3)
