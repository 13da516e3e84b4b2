"""RoPE and the write into pages in one native operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import native
from infer.native.rope_write import rope_write
from infer.ops import rope
from tests.tolerances import tolerance


def _case(
    heads: int, kv: int, width: int, half: int, pages: list[int], dtype="float32", pool="float32"
):
    rng = np.random.default_rng(width + half)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    count, num_pages, page_size = len(pages), 5, 3
    angles = jnp.asarray(rng.uniform(0, 7, (count, half)), jnp.float32)
    pools = [jnp.full((num_pages, kv, page_size, width), jnp.nan, pool) for _ in range(2)]
    return (
        draw(count, heads, width),
        draw(count, kv, width),
        draw(count, kv, width),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(pages, jnp.int32),
        jnp.arange(100, 100 + count, dtype=jnp.int32),
        *pools,
    )


@pytest.mark.parametrize(
    ("heads", "kv", "width", "half"),
    [(6, 2, 16, 8), (3, 3, 80, 10), (4, 1, 64, 32), (8, 1, 256, 64), (2, 1, 9, 0), (2, 2, 7, 3)],
)
@pytest.mark.parametrize("pool", ["float32", "bfloat16", "float16"])
def test_equals_the_plain_form(heads: int, kv: int, width: int, half: int, pool: str) -> None:
    args = _case(heads, kv, width, half, [0, 3, 5, 1, 4], pool=pool)
    got = jax.jit(rope_write)(*args)
    want = rope._rope_write_xla(*args)
    f32 = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(got[0], want[0], **tolerance("float32", 2))
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x.dtype == pool
        np.testing.assert_allclose(f32(x), f32(y), **tolerance(pool, 1))
    # Values are only converted: to the last bit.
    np.testing.assert_array_equal(f32(got[2]), f32(want[2]))


@pytest.mark.parametrize("pool", ["bfloat16", "float16"])
def test_conversion_rounds_to_nearest_even(pool: str) -> None:
    """Ties, subnormals, overflow, infinity and NaN, as JAX converts them."""
    bits = np.random.default_rng(0).integers(0, 2**32, 3 * 64 * 20, dtype=np.uint32)
    bits[: len(bits) // 2] &= np.uint32(0xFFFFF000 if pool == "float16" else 0xFFFF8000)  # ties
    special = [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2**-24, 2**-25, 1e-40]
    values = bits.view(np.float32)
    values[: len(special)] = special
    near_one = np.random.default_rng(1).uniform(-1e-4, 1e-4, 64 * 20).astype(np.float32)
    values[-64 * 20 :] = near_one  # float16's subnormals
    args = list(_case(1, 20, 64, 4, [0, 1, 2], pool=pool))
    args[2] = jnp.asarray(values.reshape(3, 20, 64))
    _, _, v_pages = rope_write(*args)
    want = np.asarray(jax.lax.convert_element_type(args[2], pool), np.float32)
    got = np.asarray(v_pages, np.float32)[jnp.arange(3), :, np.asarray(args[6]) % 3]
    if pool == "bfloat16":  # XLA:CPU flushes subnormals
        small = np.abs(values.reshape(want.shape)) < 1.2e-38
        want = np.where(small, 0, want)
        got = np.where(small, 0, got)
    np.testing.assert_array_equal(got, want)


def test_bfloat16_activations() -> None:
    args = _case(4, 2, 16, 8, [0, 3, 1], dtype="bfloat16", pool="bfloat16")
    for x, y in zip(rope_write(*args), rope._rope_write_xla(*args), strict=True):
        assert x.dtype == jnp.bfloat16
        f32 = lambda x: np.asarray(x, np.float32)
        np.testing.assert_allclose(f32(x), f32(y), **tolerance("bfloat16", 1))


def test_a_token_without_a_page_touches_no_memory() -> None:
    """Case X01: neither -1 nor one past the end may reach another sequence's last page."""
    args = _case(2, 1, 16, 8, [-1, 5, 6, -(2**31), 2**31 - 1])
    q, k_pages, v_pages = rope_write(*args)
    assert np.isnan(k_pages).all() and np.isnan(v_pages).all()
    np.testing.assert_allclose(q, rope.apply_rope(args[0], *args[3:5]), **tolerance("float32", 2))


def test_a_negative_position_counts_from_the_end_of_a_page() -> None:
    args = list(_case(2, 1, 16, 8, [0, 1]))
    args[6] = jnp.asarray([-1, -5], jnp.int32)
    for x, y in zip(rope_write(*args), rope._rope_write_xla(*args), strict=True):
        np.testing.assert_allclose(x, y, **tolerance("float32", 2))


def test_writes_in_place_what_is_given_up_and_nothing_else() -> None:
    args = _case(2, 1, 16, 8, [0, 1])
    kept = rope_write(*args)  # not donated: the pools live on
    assert np.isnan(args[7]).all() and np.isnan(args[8]).all()
    before = args[7].unsafe_buffer_pointer()
    donated = jax.jit(rope_write, donate_argnums=(7, 8))(*args)
    assert donated[1].unsafe_buffer_pointer() == before and args[7].is_deleted()
    for x, y in zip(kept, donated, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_tokens_bits_do_not_depend_on_the_chunk() -> None:
    args = _case(3, 1, 40, 20, [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3)
    whole = rope_write(*args)
    pools, turned = args[7:], []
    for i in range(15):
        q, *pools = rope_write(*(x[i : i + 1] for x in args[:7]), *pools)
        turned.append(q)
    np.testing.assert_array_equal(jnp.concatenate(turned), whole[0])
    for x, y in zip(pools, whole[1:], strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_tokens() -> None:
    args = _case(2, 1, 16, 8, [])
    q, k_pages, _ = rope_write(*args)
    assert q.shape == (0, 2, 16) and np.isnan(k_pages).all()


def _raw(q, k, v, cos, sin, pages, positions, k_pages, v_pages):
    """The operation without the annotations of its Python side."""
    native.library()
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("infer_rope_write", (like(q), like(k_pages), like(v_pages)))
    return call(q, k, v, cos, sin, pages, positions, k_pages, v_pages)


BAD = [
    (1, lambda k: k[:2], "do not fit"),
    (1, lambda k: k[..., :8], "do not fit"),
    (2, lambda v: v[:, :0], "do not fit"),
    (0, lambda q: q[None], "do not fit"),
    (0, lambda q: q.astype(jnp.bfloat16), "must be float32"),
    (3, lambda cos: jnp.tile(cos, 2), r"2R at most H.*\[3, 16\]"),
    (4, lambda sin: sin[:1], "2R at most H"),
    (5, lambda pages: pages[:2], "pages and positions"),
    (6, lambda positions: positions.astype(jnp.float32), "pages and positions"),
    (7, lambda pool: pool[..., :8], r"the pool of keys must be \[P, K, U, H\]"),
    (8, lambda pool: pool[:4], "the pools differ"),
    (8, lambda pool: pool.astype(jnp.float16), "the pools differ"),
]


@pytest.mark.parametrize(("index", "change", "message"), BAD)
def test_bad_operands_are_refused(index, change, message) -> None:
    args = list(_case(2, 1, 16, 8, [0, 1, 2]))
    args[index] = change(args[index])
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(_raw(*args))


def test_under_vmap() -> None:
    args = _case(2, 1, 16, 8, [0, 1])
    twice = [jnp.stack([x, x]) for x in args]
    for x, y in zip(jax.vmap(rope_write)(*twice), rope_write(*args), strict=True):
        np.testing.assert_array_equal(x, jnp.stack([y, y]))


def test_lowers_once_for_any_positions() -> None:
    traces = []
    traced = jax.jit(functools.wraps(rope_write)(lambda *a: traces.append(1) or rope_write(*a)))
    args = list(_case(2, 1, 16, 8, [0, 1]))
    traced(*args)
    args[6] = args[6] + 1
    traced(*args)
    assert len(traces) == 1
