"""RoPE and the write into pages as one kernel, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.rope import apply_rope
from infer.pallas.rope_write import rope_write, rope_write_reference
from tests.tolerances import tolerance
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels

KERNEL = jax.jit(functools.partial(rope_write, interpret=True))


def _case(heads: int, kv: int, width: int, half: int, dtype: str, pages: list[int]):
    rng = np.random.default_rng(width + half)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    count, num_pages, page_size = len(pages), 5, 3
    angles = jnp.asarray(rng.uniform(0, 7, (count, half)), jnp.float32)
    pool = jnp.full((num_pages, kv, page_size, width), jnp.nan, dtype)
    return (
        draw(count, heads, width),
        draw(count, kv, width),
        draw(count, kv, width),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(pages, jnp.int32),
        jnp.arange(count, dtype=jnp.int32) % page_size,
        pool,
        pool,
    )


@pytest.mark.parametrize(
    ("heads", "kv", "width", "half", "dtype"),
    [(6, 2, 16, 8, "float32"), (3, 3, 80, 10, "float32"), (4, 1, 64, 32, "bfloat16")],
)
def test_equals_the_reference(heads: int, kv: int, width: int, half: int, dtype: str) -> None:
    # Page 5 is one past the end: nothing is written for that token.
    args = _case(heads, kv, width, half, dtype, [0, 3, 5, 1])
    f32 = lambda x: np.asarray(x, np.float32)
    for got, want in zip(KERNEL(*args), rope_write_reference(*args), strict=True):
        np.testing.assert_allclose(f32(got), f32(want), **tolerance(dtype, 2))
    np.testing.assert_allclose(
        f32(KERNEL(*args)[0]), f32(apply_rope(args[0], *args[3:5])), **tolerance(dtype, 2)
    )


def test_a_token_without_a_page_touches_no_memory() -> None:
    """Case X01: neither -1 nor one past the end may reach another sequence's last page."""
    args = _case(2, 1, 16, 8, "float32", [-1, 5, 6])
    _, k_pages, v_pages = KERNEL(*args)
    assert np.isnan(k_pages).all() and np.isnan(v_pages).all()


def test_refuses_more_angles_than_a_head_has() -> None:
    args = _case(2, 1, 16, 9, "float32", [0])
    with pytest.raises(ValueError, match="9 angles, a head of width 16 has at most 8"):
        rope_write(*args, interpret=True)


@pytest.mark.parametrize("index", range(1, 9))
def test_refuses_arrays_that_do_not_fit(index: int) -> None:
    """On a GPU one of them would be read, or written, past its end."""
    args = list(_case(2, 1, 16, 8, "float32", [0, 1]))
    args[index] = args[index][..., :1] if index > 6 else args[index][:1]
    with unchecked(), pytest.raises(ValueError, match=r"with q .* it must be"):
        rope_write(*args, interpret=True)
