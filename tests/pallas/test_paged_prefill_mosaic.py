"""Hopper prefill over pages, interpreted, against the formula.  Unwritten memory is NaN."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from infer.ops.attention import paged_attention
from infer.pallas.hopper_attention import HopperBlocks
from infer.pallas.paged_prefill_mosaic import (
    paged_prefill_mosaic,
    paged_prefill_mosaic_reference,
)
from tests.pallas.mosaic import RACE, detecting_races, needs_interpreter
from tests.tolerances import tolerance

pytestmark = [pytest.mark.kernels, needs_interpreter]

SMALL = HopperBlocks(block_k=64)


def _draw(
    spans: list[tuple[int, int]],
    *,
    tokens: int,
    heads: int = 1,
    kv_heads: int = 1,
    width: int = 64,
    page_size: int = 16,
    max_pages: int = 12,
    dtype: str = "bfloat16",
) -> tuple[Array, ...]:
    """Return the arguments for rows whose chunk begins at `first` and has `count` queries."""
    rng = np.random.default_rng(tokens)
    rows = len(spans)
    num_pages = rows * max_pages + 3
    pool = (2, num_pages, kv_heads, page_size, width)
    k, v = np.full(pool, np.nan, np.float32)
    table = np.full((rows, max_pages), num_pages, np.int32)
    positions = np.full((rows, tokens), -1, np.int32)
    free = iter(rng.permutation(num_pages))
    for row, (first, count) in enumerate(spans):
        positions[row, :count] = np.arange(first, first + count)
        for i in range(-(-(first + count) // page_size) if count else 0):
            page = table[row, i] = next(free)
            written = min(page_size, first + count - i * page_size)
            k[page, :, :written] = rng.normal(size=(kv_heads, written, width))
            v[page, :, :written] = rng.normal(size=(kv_heads, written, width))
    q = rng.normal(size=(rows, tokens, heads, width))
    return (
        *(jnp.asarray(x, dtype) for x in (q, k, v)),
        jnp.asarray(table),
        jnp.asarray(positions),
    )


def _check(args: tuple[Array, ...], blocks: HopperBlocks = SMALL, **static: Any) -> None:
    static = {"scale": 0.2, **static}
    o = np.asarray(paged_prefill_mosaic(*args, blocks=blocks, interpret=True, **static), np.float32)
    want = np.asarray(paged_prefill_mosaic_reference(*args, **static))
    np.testing.assert_allclose(o, want, **tolerance(args[0].dtype.name, 1), err_msg=str(static))
    assert not o[np.asarray(args[4]) < 0].any()


@pytest.mark.parametrize(
    ("spans", "shape", "static"),
    [
        # From the start, in the middle of a page, a row of padding, one token.
        ([(37, 20), (0, 0), (5, 1)], {"tokens": 24}, {}),
        # Full pages to the last of the table; two tiles of queries.
        ([(32, 160)], {"tokens": 160, "dtype": "float16"}, {}),
        # Wide pages; a window; the second tile is padding but for one row.
        ([(100, 129)], {"tokens": 136, "page_size": 64, "max_pages": 4}, {"window": 33}),
        ([(90, 40)], {"tokens": 40, "heads": 2}, {"softcap": 3.0, "window": 50}),
    ],
)
def test_equals_the_formula(spans: Any, shape: dict[str, Any], static: dict[str, Any]) -> None:
    _check(_draw(spans, **shape), **static)


def test_a_sink_joins_the_denominator_once() -> None:
    sinks = jnp.asarray([2.0, -1.0], jnp.float32)
    _check(_draw([(70, 30)], tokens=32, heads=2), sinks=sinks, window=9)


def test_blocks_of_128_keys_and_wide_heads() -> None:
    _check(_draw([(120, 16)], tokens=16, width=128), HopperBlocks.for_shape(128))


def test_equals_the_xla_form() -> None:
    args = _draw([(50, 30)], tokens=32, heads=2, kv_heads=2)
    static = {"scale": 0.2, "window": 40}
    o = paged_prefill_mosaic(*args, blocks=SMALL, interpret=True, **static)
    want = paged_attention(*args, **static)
    np.testing.assert_allclose(
        np.asarray(o, np.float32), np.asarray(want, np.float32), **tolerance("bfloat16", 1)
    )


def test_a_row_alone_and_a_second_run_give_the_same_bits() -> None:
    q, k, v, table, positions = _draw([(3, 40), (60, 20)], tokens=40)
    run = lambda rows: paged_prefill_mosaic(
        q[rows], k, v, table[rows], positions[rows], scale=0.2, blocks=SMALL, interpret=True
    )
    both = run(slice(0, 2))
    assert jnp.array_equal(both, run(slice(0, 2))) and jnp.array_equal(both[1:], run(slice(1, 2)))


def test_has_no_race(capfd: pytest.CaptureFixture[str]) -> None:
    # Three blocks of keys for two slots, the last one stale in part.
    with detecting_races():
        _check(_draw([(100, 60)], tokens=64))
    assert RACE not in capfd.readouterr().out


def test_refuses_pages_that_do_not_divide_a_block() -> None:
    args = _draw([(0, 4)], tokens=8, page_size=48)
    with pytest.raises(NotImplementedError, match=r"pages of 48 tokens.*divide block_k 128"):
        paged_prefill_mosaic(*args, scale=1.0)
    with pytest.raises(NotImplementedError, match=r"paged_prefill in Mosaic.*float32"):
        paged_prefill_mosaic(*_draw([(0, 4)], tokens=8, dtype="float32"), scale=1.0)
