"""Flash attention against its formula, and what must not change a bit of it."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.attention import dense_attention
from infer.pallas import attention_rows
from infer.pallas.flash_attention import (
    FlashAttentionBlocks,
    flash_attention,
    flash_attention_ragged,
    flash_attention_ragged_reference,
    flash_attention_reference,
)
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

# Small, unequal, and dividing none of the lengths below.
BLOCKS = FlashAttentionBlocks(block_queries=32, block_keys=16)
SCALE = 0.2


def draw(
    shape: tuple[int, ...],
    num_keys: int,
    kv_heads: int,
    width: int,
    value_width: int,
    dtype: str = "float32",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw q [*shape, N, H], and k and v of `num_keys` tokens; shape is (B, T, N) or (T, N)."""
    keys = jax.random.split(jax.random.key(sum(shape) + width), 3)
    rows = shape[:-2]
    normal = lambda key, *size: jax.random.normal(key, size, jnp.dtype(dtype))
    return (
        normal(keys[0], *shape, width),
        normal(keys[1], *rows, num_keys, kv_heads, width),
        normal(keys[2], *rows, num_keys, kv_heads, value_width),
    )


@functools.cache
def jitted(function: Any, **static: Any) -> Any:
    return jax.jit(
        functools.partial(
            function, **({"scale": SCALE, "blocks": BLOCKS, "interpret": True} | static)
        )
    )


def test_two_keys_by_hand() -> None:
    q = jnp.array([3.0, 2.0])[None, :, None, None] * jnp.ones((1, 1, 1, 16)) / 16
    k = jnp.array([1.0, 5.0])[None, :, None, None] * jnp.ones((1, 1, 1, 16))
    v = jnp.array([10.0, 20.0])[None, :, None, None] * jnp.ones((1, 1, 1, 16))
    o, lse = jitted(flash_attention)(q, k, v)
    # Scores: 3 x 1 x 0.2, then 2 x (1, 5) x 0.2.
    second = (10 * math.exp(0.4) + 20 * math.exp(2.0)) / (math.exp(0.4) + math.exp(2.0))
    np.testing.assert_allclose(o[0, :, 0, 0], [10.0, second], rtol=1e-6)
    lses = [0.6, math.log(math.exp(0.4) + math.exp(2.0))]
    np.testing.assert_allclose(lse[0, 0], lses, rtol=1e-6)
    o, lse = jitted(flash_attention)(q, k, v, sinks=jnp.array([1.0]))
    sums = [math.exp(0.6) + math.e, math.exp(0.4) + math.exp(2.0) + math.e]
    first = 10 * math.exp(0.6) / sums[0]
    second = (10 * math.exp(0.4) + 20 * math.exp(2.0)) / sums[1]
    np.testing.assert_allclose(o[0, :, 0, 0], [first, second], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log(sums), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "num_keys", "kv_heads", "widths", "dtype", "options", "sinks", "lengths"),
    [
        ((2, 75, 4), 75, 2, (32, 32), "float32", {}, False, None),
        ((1, 64, 3), 64, 3, (64, 64), "float32", {"softcap": 1.5}, False, None),
        ((2, 75, 4), 75, 1, (80, 48), "float32", {"window": 20}, True, (0, 60)),
        ((2, 75, 2), 75, 2, (192, 128), "float32", {"window": 60, "softcap": 2.0}, True, (1, 75)),
        ((1, 40, 2), 75, 1, (72, 40), "float32", {"window": 1}, False, None),
        ((1, 75, 2), 40, 1, (32, 32), "float32", {"window": 30}, True, None),
        ((1, 75, 4), 75, 2, (96, 96), "bfloat16", {}, True, None),
        ((1, 75, 8), 75, 1, (64, 64), "float16", {"window": 47}, False, (33,)),
        ((1, 40, 2), 40, 1, (256, 256), "bfloat16", {"softcap": 50.0}, False, None),
    ],
)
def test_against_the_formula(
    shape: tuple[int, ...],
    num_keys: int,
    kv_heads: int,
    widths: tuple[int, int],
    dtype: str,
    options: dict[str, Any],
    sinks: bool,
    lengths: tuple[int, ...] | None,
) -> None:
    q, k, v = draw(shape, num_keys, kv_heads, *widths, dtype)
    arrays = {
        "sinks": jnp.linspace(-1.0, 3.0, shape[2]) if sinks else None,
        "lengths": None if lengths is None else jnp.array(lengths, jnp.int32),
    }
    if lengths is not None:  # stale memory behind a row's end
        past = jnp.arange(num_keys)[None, :, None, None] >= arrays["lengths"][:, None, None, None]
        k, v = jnp.where(past, jnp.nan, k), jnp.where(past, jnp.nan, v)
        past = jnp.arange(shape[1])[None, :, None, None] >= arrays["lengths"][:, None, None, None]
        q = jnp.where(past, jnp.nan, q)
    o, lse = jitted(flash_attention, **options)(q, k, v, **arrays)
    o_want, lse_want = jax.jit(
        functools.partial(flash_attention_reference, scale=SCALE, **options)
    )(q, k, v, **arrays)
    chex.assert_trees_all_close(lse, lse_want, **tolerance("float32", num_keys))
    # In half precision the weights are rounded once, before their sum with the values.
    close = tolerance(dtype, num_keys if dtype == "float32" else 1)
    chex.assert_trees_all_close(o.astype(jnp.float32), o_want.astype(jnp.float32), **close)
    assert o.dtype == q.dtype


def test_same_as_the_plain_op() -> None:
    q, k, v = draw((2, 50, 4), 50, 2, 32, 32)
    sinks = jnp.arange(4.0)
    o, _ = jitted(flash_attention, window=9, softcap=3.0)(q, k, v, sinks=sinks)
    want = dense_attention(q, k, v, scale=SCALE, window=9, softcap=3.0, sinks=sinks)
    chex.assert_trees_all_close(o, want, **tolerance("float32", 50))


STARTS = (0, 0, 37, 38, 38, 83)  # rows of 0, 37, 1, 0 and 45 tokens


@pytest.mark.parametrize(
    ("options", "sinks"),
    [({}, False), ({"window": 12, "softcap": 2.0}, True)],
)
def test_ragged_rows_against_the_formula(options: dict[str, Any], sinks: bool) -> None:
    q, k, v = (x.at[83:].set(jnp.nan) for x in draw((100, 4), 100, 2, 32, 48))
    arrays = {"sinks": jnp.linspace(-1.0, 3.0, 4) if sinks else None}
    starts = jnp.array(STARTS, jnp.int32)
    got = jitted(flash_attention_ragged, **options)(q, k, v, starts, **arrays)
    want = jax.jit(functools.partial(flash_attention_ragged_reference, scale=SCALE, **options))(
        q, k, v, starts, **arrays
    )
    chex.assert_trees_all_close(got, want, **tolerance("float32", 100))
    assert not np.any(got[0][83:]) and np.all(got[1][:, 83:] == np.float32(-1e30))


def test_tokens_before_the_first_row_are_padding() -> None:
    q, k, v = (x.at[:5].set(jnp.nan) for x in draw((40, 4), 40, 2, 32, 32))
    starts = jnp.array([5, 21, 40], jnp.int32)
    got = jitted(flash_attention_ragged)(q, k, v, starts)
    want = jax.jit(functools.partial(flash_attention_ragged_reference, scale=SCALE))(
        q, k, v, starts
    )
    chex.assert_trees_all_close(got, want, **tolerance("float32", 40))
    assert not np.any(got[0][:5]) and np.all(got[1][:, :5] == np.float32(-1e30))


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """Whatever its batch, its place on the axis, the padding, or the form."""
    options = {"window": 60, "softcap": 5.0}
    q, k, v = draw((100, 4), 100, 2, 32, 32)
    starts = jnp.array(STARTS, jnp.int32)
    sinks = jnp.arange(4.0)
    o, lse = jitted(flash_attention_ragged, **options)(q, k, v, starts, sinks=sinks)
    again, _ = jitted(flash_attention_ragged, **options)(q, k, v, starts, sinks=sinks)
    np.testing.assert_array_equal(o, again)
    for row in (slice(0, 37), slice(37, 38)):
        alone = [x[None, row] for x in (q, k, v)]
        o_alone, lse_alone = jitted(flash_attention, **options)(*alone, sinks=sinks)
        np.testing.assert_array_equal(o_alone[0], o[row])
        np.testing.assert_array_equal(lse_alone[0], lse[:, row])
    # In a batch of two, padded far beyond its end.
    pad = lambda x: jnp.full((2, 90, *x.shape[1:]), jnp.nan).at[1, :45].set(x[38:83])
    lengths = jnp.array([0, 45], jnp.int32)
    padded, _ = jitted(flash_attention, **options)(
        pad(q), pad(k), pad(v), sinks=sinks, lengths=lengths
    )
    np.testing.assert_array_equal(padded[1, :45], o[38:83])
    assert not np.any(padded[0]) and not np.any(padded[1, 45:])


def test_more_keys_do_not_change_what_came_before() -> None:
    q, k, v = draw((1, 70, 2), 70, 1, 32, 32)
    o, _ = jitted(flash_attention)(q, k, v)
    short, _ = jitted(flash_attention)(q[:, :41], k[:, :41], v[:, :41])
    np.testing.assert_array_equal(short, o[:, :41])


def test_large_scores_and_sinks_stay_finite() -> None:
    q, k, v = draw((1, 40, 2), 40, 1, 32, 32)
    sinks = jnp.array([-1e4, 1e4])
    o, lse = jitted(flash_attention)(q * 1000, k * 1000, v, sinks=sinks)
    want = flash_attention_reference(q * 1000, k * 1000, v, scale=SCALE, sinks=sinks)
    chex.assert_trees_all_close((o, lse), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("starts", [(0, 5, 5, 60, 64), (3, 3, 3, 3, 50), (0, 0, 0, 0, 64)])
def test_each_token_is_in_one_block(starts: tuple[int, ...]) -> None:
    rows = attention_rows.ragged_rows(jnp.array(starts, jnp.int32), 64)
    for size in (16, 32):
        table = jax.jit(functools.partial(attention_rows.block_table, size=size, last_first=True))(
            rows.queries, rows.keys
        )
        written = np.zeros(64, int)
        for first, position, stored, _, other, _ in np.asarray(table).T:
            assert first == other
            written[first + position : first + min(position + size, stored)] += 1
        assert np.all(written == 1)


@pytest.mark.parametrize(
    ("width", "want"),
    [(64, ((0, 64),)), (80, ((0, 64), (64, 16))), (192, ((0, 128), (128, 64))), (8, ((0, 16),))],
)
def test_widths_are_cut_into_powers_of_two(width: int, want: tuple[tuple[int, int], ...]) -> None:
    assert attention_rows.tiles_of(width) == want


def test_tanh_is_exact_to_float32() -> None:
    x = jnp.linspace(-100.0, 100.0, 20001)
    np.testing.assert_allclose(attention_rows.tanh(x), np.tanh(np.asarray(x, float)), atol=2e-7)


def test_blocks_are_chosen_by_chip() -> None:
    choose = lambda capability, width: FlashAttentionBlocks.for_shape(
        width, width, "bfloat16", capability
    )
    assert choose(None, 128) == choose((8, 9), 128) == choose((12, 0), 128)
    assert choose((9, 0), 128).block_keys > choose((8, 0), 128).block_keys
    assert choose((8, 0), 256).block_queries < choose((8, 0), 128).block_queries


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"k": (1, 20, 3, 32), "v": (1, 20, 3, 32)},
            ValueError,
            "4 heads, not a multiple of the 3",
        ),
        ({"scale": 0.0}, ValueError, "scale is 0.0"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"q": (1, 0, 4, 32)}, ValueError, "T = 0: an empty axis"),
        ({"q": (1, 20, 4, 320), "k": (1, 20, 2, 320)}, NotImplementedError, "widths up to 256"),
        ({"dtype": "bfloat16"}, NotImplementedError, "one dtype of"),
    ],
)
def test_what_does_not_work_says_why(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    shapes = {"q": (1, 20, 4, 32), "k": (1, 20, 2, 32), "v": (1, 20, 2, 32)}
    change = dict(change)
    dtype = change.pop("dtype", "float32")
    q, k, v = (jnp.zeros(change.pop(name, shape)) for name, shape in shapes.items())
    with pytest.raises(error, match=text):
        flash_attention(q.astype(dtype), k, v, **({"scale": SCALE, "interpret": True} | change))


def test_blocks_are_powers_of_two() -> None:
    with pytest.raises(ValueError, match="block_keys is 48; use a power of two"):
        FlashAttentionBlocks(block_queries=32, block_keys=48)
