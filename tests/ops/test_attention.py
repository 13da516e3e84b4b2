"""Dense and paged attention: against numpy, against each other, and with poisoned memory."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.attention import dense_attention, paged_attention, ragged_attention
from infer.ops.attention_xla import visible
from tests.tolerances import tolerance
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels


def _reference(q, k, v, scale, window, softcap):
    """Attention of one sequence in float64, from the definition."""
    (t, n, h), (_, num_kv, _) = q.shape, k.shape
    out = np.zeros((t, n, h))
    for i, head in itertools.product(range(t), range(n)):
        keys = range(max(0, i - window + 1) if window else 0, i + 1)
        s = np.array([scale * float(q[i, head] @ k[j, head * num_kv // n]) for j in keys])
        if softcap:
            s = softcap * np.tanh(s / softcap)
        w = np.exp(s - s.max())
        out[i, head] = sum(
            wj * v[j, head * num_kv // n] for wj, j in zip(w / w.sum(), keys, strict=True)
        )
    return out


def _qkv(length: int, heads: int, kv: int, width: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((length, n, width)) for n in (heads, kv, kv))


def test_a_window_counts_the_query_itself() -> None:
    i = jnp.arange(7, dtype=jnp.int32)
    mask = np.asarray(visible(i, i, 3))
    assert mask.sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3]
    assert np.flatnonzero(mask[6]).tolist() == [4, 5, 6]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (5, 2.0), (None, 1.5)])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (3, 1)])
def test_dense_attention_is_the_definition(heads, kv, window, softcap) -> None:
    q, k, v = _qkv(9, heads, kv, 8)
    y = dense_attention(
        *(jnp.asarray(x[None], jnp.float32) for x in (q, k, v)),
        scale=0.3,
        window=window,
        softcap=softcap,
    )
    np.testing.assert_allclose(
        y[0], _reference(q, k, v, 0.3, window, softcap), **tolerance("float32", 64)
    )


def _paged(k: np.ndarray, v: np.ndarray, page_size: int, poison: float):
    """Pages in a scattered order, everything that belongs to nobody filled with `poison`."""
    length, kv, width = k.shape
    used = -(-length // page_size)
    num_pages = used + 3
    order = np.random.default_rng(1).permutation(num_pages - 1)[
        :used
    ]  # the last page is never used
    pools = np.full((2, num_pages, kv, page_size, width), poison, np.float32)
    for j in range(length):
        pools[:, order[j // page_size], :, j % page_size] = np.stack([k[j], v[j]])
    table = np.full(used + 2, num_pages, np.int32)
    table[:used] = order
    return jnp.asarray(pools[0]), jnp.asarray(pools[1]), jnp.asarray(table)


@pytest.mark.parametrize("poison", [0.0, np.nan], ids=["clean", "nan"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 2.0)])
def test_paged_attention_equals_dense_whatever_lies_in_unused_memory(
    page_size, window, softcap, poison
) -> None:
    length = 150 if page_size == 16 else 23
    q, k, v = _qkv(length, 4, 2, 8)
    k_pages, v_pages, table = _paged(k, v, page_size, poison)
    want = _reference(q, k, v, 0.3, window, softcap)
    # One decode token, a chunk at the end, and the whole prompt at once; a padding row beside each.
    for first in (length - 1, length - 5, 0):
        positions = np.arange(first, length)
        padded = np.stack([positions, np.full_like(positions, -1)]).astype(np.int32)
        tables = jnp.stack([table, jnp.full_like(table, k_pages.shape[0])])
        queries = np.stack([q[first:], q[first:]]).astype(np.float32)
        y = jax.jit(paged_attention, static_argnames=("scale", "window", "softcap"))(
            jnp.asarray(queries),
            k_pages,
            v_pages,
            tables,
            jnp.asarray(padded),
            scale=0.3,
            window=window,
            softcap=softcap,
        )
        chex.assert_tree_all_finite(y)
        np.testing.assert_allclose(y[0], want[first:], **tolerance("float32", 256))
        np.testing.assert_array_equal(y[1], 0)


# Case M11: (scores, sink, values) -> output, by hand.
SINKS = [
    ([0.0, 0.0], 0.0, [1.0, 1.0], 0.66666667),
    ([1.0, 2.0, 3.0], 2.5, [1.0, 2.0, 4.0], 2.308854),
]


@pytest.mark.parametrize(("scores", "sink", "values", "want"), SINKS)
def test_a_sink_joins_the_denominator_only_unscaled(scores, sink, values, want) -> None:
    # q·k is twice the score and the scale a half: a sink that was scaled too would count less.
    column = lambda x: jnp.asarray(x, jnp.float32)[None, :, None, None]
    q = jnp.full((1, len(scores), 1, 1), 2.0)
    k, v, sinks = column(scores), column(values), jnp.asarray([sink], jnp.float32)
    dense = dense_attention(q, k, v, scale=0.5, sinks=sinks)
    np.testing.assert_allclose(dense[0, -1, 0, 0], want, rtol=1e-6)
    # Pages of one token and of two: the keys of a sequence lie in several, the sink counts once.
    for page_size in (1, 2):
        k_pages, v_pages, table = _paged(
            np.asarray(k[0]), np.asarray(v[0]), page_size, poison=np.nan
        )
        # A row that sees no key beside it.
        positions = jnp.asarray([[len(scores) - 1], [-1]], jnp.int32)
        tables = jnp.stack([table, jnp.full_like(table, k_pages.shape[0])])
        paged = paged_attention(
            q[:, :1].repeat(2, axis=0),
            k_pages,
            v_pages,
            tables,
            positions,
            scale=0.5,
            sinks=sinks,
        )
        np.testing.assert_allclose(paged[:, 0, 0, 0], [want, 0], rtol=1e-6)


def test_sinks_of_grouped_heads_over_many_trips() -> None:
    q, k, v = _qkv(150, 4, 2, 8)
    sinks = np.asarray([-1.0, 0.5, 2.0, 3.0], np.float32)
    want = np.zeros((150, 4, 8))
    for i, head in itertools.product(range(150), range(4)):
        e = np.exp([0.3 * float(q[i, head] @ k[j, head // 2]) for j in range(i + 1)])
        want[i, head] = e @ v[: i + 1, head // 2] / (e.sum() + np.exp(sinks[head]))
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    dense = dense_attention(*(f32(x[None]) for x in (q, k, v)), scale=0.3, sinks=f32(sinks))
    np.testing.assert_allclose(dense[0], want, **tolerance("float32", 256))
    k_pages, v_pages, table = _paged(k, v, 16, np.nan)
    paged = paged_attention(
        f32(q[None]),
        k_pages,
        v_pages,
        table[None],
        jnp.arange(150, dtype=jnp.int32)[None],
        scale=0.3,
        sinks=f32(sinks),
    )
    np.testing.assert_allclose(paged[0], want, **tolerance("float32", 256))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_ragged_rows_are_each_row_alone(implementation: str) -> None:
    """Rows of 5, 0, 1 and 9 tokens on one axis; two tokens of padding give 0."""
    starts = np.asarray([0, 5, 5, 6, 15], np.int32)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in _qkv(17, 4, 2, 16))
    sinks = jnp.linspace(-1, 1, 4, dtype=jnp.float32)
    options = dict(scale=0.3, window=4, softcap=3.0, sinks=sinks)
    o = ragged_attention(q, k, v, jnp.asarray(starts), implementation=implementation, **options)
    for first, end in itertools.pairwise(starts):
        if end > first:
            row = dense_attention(
                *(x[None, first:end] for x in (q, k, v)), implementation="xla", **options
            )
            np.testing.assert_allclose(o[first:end], row[0], **tolerance("float32", 17))
    np.testing.assert_array_equal(o[15:], 0)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0; it must be a finite number above 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"sinks": jnp.zeros(3)}, r"sinks is \(3,\); give one a head of q, \(4,\)"),
        ({"k": (2, 3, 3, 16)}, "q's heads must be a multiple of k's"),
    ],
    ids=["window", "softcap", "scale", "sinks", "heads"],
)
def test_what_no_form_can_do_is_one_clear_error(options, message, implementation: str) -> None:
    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
    options = {"scale": 0.25} | options
    k = zeros(*options.pop("k", (2, 3, 2, 16)))
    with unchecked(), pytest.raises(ValueError, match=message):
        dense_attention(zeros(2, 3, 4, 16), k, k, implementation=implementation, **options)
    table, positions = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    pool = zeros(1, k.shape[2], 4, 16)
    with unchecked(), pytest.raises(ValueError, match=message):
        paged_attention(
            zeros(2, 3, 4, 16),
            pool,
            pool,
            table,
            positions,
            implementation=implementation,
            **options,
        )


def test_paged_arrays_that_do_not_fit_are_refused() -> None:
    q, pool = jnp.zeros((2, 3, 4, 16)), jnp.zeros((5, 2, 4, 16))
    table, positions = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    for wrong in ({"page_table": table[:1]}, {"positions": positions[:, :1]}):
        args = {"page_table": table, "positions": positions} | wrong
        with (
            unchecked(),
            pytest.raises(ValueError, match="the table have 2 rows, and the pools be alike"),
        ):
            paged_attention(q, pool, pool, scale=1.0, **args)
