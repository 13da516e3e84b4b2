"""RoPE and the write into pages in one native operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import native
from infer.cache.pool import QuantizedPool
from infer.native.rope_write import rope_write, rope_write_quantized
from infer.ops import rope
from infer.quant.kv import KV_FORMATS, dequantize_kv, quantize_kv
from tests.cases.kv import definition, heads
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


def _quantized(args, kv_format: str):
    """Return the arguments with quantised pools: data, then scales that are NaN."""
    *tokens, k_pages, v_pages = args
    data = [quantize_kv(jnp.nan_to_num(x), kv_format)[0] for x in (k_pages, v_pages)]
    return (*tokens, *data, *[jnp.full(k_pages.shape[:3], jnp.nan)] * 2)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("num_heads", "kv", "width", "half"), [(6, 2, 16, 8), (3, 3, 80, 10)])
def test_quantised_pools_equal_the_plain_form(kv_format, num_heads, kv, width, half) -> None:
    args = _quantized(_case(num_heads, kv, width, half, [0, 3, 5, 1, 4]), kv_format)
    got = jax.jit(rope_write_quantized)(*args)
    pools = QuantizedPool(args[7], args[9]), QuantizedPool(args[8], args[10])
    q, k, v = rope._rope_write_xla(*args[:7], *pools)
    np.testing.assert_allclose(got[0], q, **tolerance("float32", 2))
    # Values are only rounded: to the last bit.  Of turned keys the last bit may fall either way.
    np.testing.assert_array_equal(np.asarray(got[2]).view(np.uint8), v.data.view(np.uint8))
    np.testing.assert_array_equal(got[4], v.scale)
    np.testing.assert_allclose(got[3], k.scale, rtol=1e-6)
    scales = jnp.nan_to_num(k.scale)
    read = [dequantize_kv(x, scales) for x in (got[1], k.data)]
    np.testing.assert_allclose(*read, atol=0, rtol=2**-3 if kv_format == "float8_e4m3" else 1)
    assert np.mean(np.asarray(read[0] != read[1])) < 0.01


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("width", [64, 18])
def test_quantised_pools_hold_what_numpy_defines(kv_format: str, width: int) -> None:
    """Ties, zeros, subnormals, numbers of all sizes; keys that nothing turns, and values."""
    x = heads(width).reshape(5, 8, width)
    args = list(_quantized(_case(1, 8, width, 0, [0, 1, 2, 3, 4]), kv_format))
    args[1], args[2] = jnp.asarray(x), jnp.asarray(-x)
    _, *data, k_scales, v_scales = rope_write_quantized(*args)
    slots = np.asarray(args[6]) % 3
    for sign, found, scales in ((1, data[0], k_scales), (-1, data[1], v_scales)):
        want, want_scales = definition(sign * x, kv_format)
        at = lambda pool: np.asarray(pool)[np.arange(5), :, slots]
        np.testing.assert_array_equal(at(scales), want_scales)
        np.testing.assert_array_equal(at(found).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_quantised_bits_do_not_depend_on_the_chunk(kv_format: str) -> None:
    args = _quantized(_case(3, 1, 40, 20, [0] * 3 + [1] * 3 + [2] * 3), kv_format)
    _, *whole = rope_write_quantized(*args)
    pools = args[7:]
    for i in range(9):
        _, *pools = rope_write_quantized(*(x[i : i + 1] for x in args[:7]), *pools)
    for x, y in zip(pools, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_quantised_heads_that_are_no_numbers_stay_none() -> None:
    args = list(_quantized(_case(1, 2, 16, 0, [0, 1]), "int8"))
    args[2] = args[2].at[0, 1, 3].set(jnp.nan).at[1, 0, 3].set(-jnp.inf)
    *_, v_scales = rope_write_quantized(*args)
    found = np.asarray(v_scales)[[0, 1], :, np.asarray(args[6]) % 3]
    assert np.isfinite(found).tolist() == [[True, False], [False, True]]


def test_wrong_quantised_operands_are_refused() -> None:
    native.library()
    good = list(_quantized(_case(2, 1, 16, 8, [0, 1, 2]), "int4"))
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    def run(args):
        results = [like(args[i]) for i in (0, 7, 8, 9, 10)]
        call = jax.ffi.ffi_call("infer_rope_write_quantized", results)
        return jax.block_until_ready(call(*args))

    run(good)
    for index, change, message in (
        (7, lambda pool: jnp.tile(pool, 2), r"the pool of keys must be \[P, K, U, H\]"),
        (7, lambda pool: pool.astype(jnp.float32), "quantised pools must be int8"),
        (8, lambda pool: pool.astype(jnp.int8), "the pools differ"),
        (9, lambda scales: scales[:4], r"scales must be float32 \[P, K, U\]"),
        (10, lambda scales: scales.astype(jnp.float16), "scales must be float32"),
    ):
        args = list(good)
        args[index] = change(args[index])
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run(args)


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
