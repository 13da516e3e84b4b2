"""Attention over pages that are quantised as a whole: what a query reads, by its position alone."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from infer.cache.pool import GroupedPool, create_pools, read_pages
from infer.ops.grouped_attention import grouped_attention

HEADS, KV, WIDTH, SIZE, PAGES = 4, 2, 16, 4, 12


def tokens(count: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    of = lambda heads: rng.standard_normal((count, heads, WIDTH)).astype(np.float32)
    return of(HEADS), of(KV), of(KV)


def empty(rows: int, kv_dtype: str = "kivi2") -> tuple[Any, Any, Any]:
    """Pools, recent tokens and a table in which row r has the pages r, r + rows, ..."""
    pools = create_pools((PAGES, KV, SIZE, WIDTH), kv_dtype)
    recent = tuple(jnp.full((rows, KV, 2 * SIZE, WIDTH), jnp.nan) for _ in range(2))
    table = jnp.asarray(np.arange(PAGES).reshape(-1, rows).T, jnp.int32)
    return pools, recent, table


def run(state: Any, x: tuple[np.ndarray, ...], at: list[range], **options: Any) -> Any:
    """Append the tokens of each row at the positions `at`; return outputs and the state."""
    pools, recent, table = state
    longest = max(map(len, at))
    positions = np.full((len(at), longest), -1, np.int32)
    for row, where in enumerate(at):
        positions[row, : len(where)] = where
    parts = [jnp.asarray(part[np.maximum(positions, 0)]) for part in x]
    slots = jnp.arange(len(at), dtype=jnp.int32)
    o, pools, recent = grouped_attention(
        *parts, pools, recent, table, jnp.asarray(positions), slots, scale=0.25, **options
    )
    rows = [np.asarray(o[row, : len(where)]) for row, where in enumerate(at)]
    return rows, (pools, recent, table)


def expected(
    x: tuple[np.ndarray, ...], state: Any, row: int, window: int | None = None
) -> np.ndarray:
    """The output of every query, from the pages as they are at the end."""
    q, k, v = x
    (k_pool, v_pool), _, table = state
    read = lambda pool: np.asarray(read_pages(pool, table[row])).swapaxes(1, 2).reshape(-1, KV, 16)
    k_read, v_read = read(k_pool), read(v_pool)
    out = np.zeros_like(q)
    for i in range(len(q)):
        begin = i // SIZE * SIZE
        keys = np.concatenate([k_read[:begin], k[begin : i + 1]])
        values = np.concatenate([v_read[:begin], v[begin : i + 1]])
        for n in range(HEADS):
            s = 0.25 * keys[:, n // 2] @ q[i, n]
            if window is not None:
                s[: max(0, i + 1 - window)] = -np.inf
            p = np.exp(s - s.max())
            out[i, n] = (p / p.sum()) @ values[:, n // 2]
    return out


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_dtype", ["kivi2", "kivi4"])
def test_a_query_reads_its_own_page_in_floats_and_others_as_quantised(
    kv_dtype: str, window: int | None
) -> None:
    x = tokens(19)
    state = empty(1, kv_dtype)
    (whole,), after = run(state, x, [range(19)], window=window)
    np.testing.assert_allclose(whole, expected(x, after, 0, window), atol=2e-5)
    if window is None:
        exact = expected(x, after, 0)[:SIZE]  # the first page: nothing is quantised yet
        np.testing.assert_allclose(whole[:SIZE], exact, atol=2e-5)


def test_chunks_of_any_size_and_single_tokens_give_the_same() -> None:
    x = tokens(19)
    (whole,), last = run(empty(1), x, [range(19)])
    for cuts in ([range(3), range(3, 4), range(4, 13), range(13, 19)], [range(8), range(8, 16)]):
        state, parts = empty(1), []
        steps = [*cuts, *([range(16, 17), range(17, 19)] if cuts[-1].stop < 19 else [])]
        for at in steps:
            (o,), state = run(state, x, [at])
            parts.append(o)
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-5)
        assert isinstance(state[0][0], GroupedPool)
        for a, b in zip(state[0], last[0], strict=True):  # the four full pages
            np.testing.assert_array_equal(a.data[:4], b.data[:4])
            np.testing.assert_array_equal(a.scale[:4], b.scale[:4])


def test_drafts_that_fall_leave_nothing_behind() -> None:
    """Up to U + 1 tokens are taken back, over the border of a page that they had completed."""
    count = 11
    x = tokens(count + SIZE + 1)
    (whole,), _ = run(empty(1), x, [range(count)])
    state, parts = empty(1), []
    for start in range(count):
        mixed = tuple(np.concatenate([a[: start + 1], -3 * a[start + 1 :]]) for a in x)
        (o,), state = run(state, mixed, [range(start, start + SIZE + 1)])
        parts.append(o[:1])
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-5)


def test_rows_of_different_lengths_and_padding_stay_apart() -> None:
    x = tokens(9)
    (alone,), _ = run(empty(1), x, [range(9)])
    rows, state = run(empty(3), x, [range(9), range(5), range(0)])
    np.testing.assert_allclose(rows[0], alone, atol=2e-5)
    np.testing.assert_allclose(rows[1], alone[:5], atol=2e-5)
    rows, _ = run(state, x, [range(0), range(5, 9), range(0, 2)])
    np.testing.assert_allclose(rows[1], alone[5:], atol=2e-5)
    np.testing.assert_allclose(rows[2], alone[:2], atol=2e-5)


def test_lanes_of_one_slot_are_one_chunk() -> None:
    """Two tiles of a prompt in one pass, the second behind the first."""
    x = tokens(13)
    (whole,), _ = run(empty(1), x, [range(13)])
    pools, recent, table = empty(1)
    positions = np.stack([np.arange(8), np.arange(8, 16)]).astype(np.int32)
    positions[positions > 12] = -1
    parts = [jnp.asarray(part[np.maximum(positions, 0)]) for part in x]
    table2 = jnp.concatenate([table, table])
    slots = jnp.zeros(2, jnp.int32)
    o, pools, recent = grouped_attention(
        *parts, pools, recent, table2, jnp.asarray(positions), slots, scale=0.25
    )
    np.testing.assert_allclose(np.asarray(o).reshape(16, HEADS, WIDTH)[:13], whole, atol=2e-5)
    more = tuple(np.concatenate([part, part[:1]]) for part in x)
    (want,), _ = run(empty(1), more, [range(14)])
    (have,), _ = run((pools, recent, table), more, [range(13, 14)])
    np.testing.assert_allclose(have, want[13:], atol=2e-5)
