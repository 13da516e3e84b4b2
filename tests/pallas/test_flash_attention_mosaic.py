"""Hopper prefill attention, interpreted, against the formula."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from infer.ops.attention import dense_attention
from infer.pallas import flash_attention_mosaic as module
from infer.pallas.flash_attention_mosaic import (
    flash_attention_mosaic,
    flash_attention_mosaic_reference,
)
from infer.pallas.hopper_attention import HopperBlocks, check_attention
from tests.pallas.mosaic import RACE, detecting_races, needs_interpreter
from tests.tolerances import tolerance

pytestmark = [pytest.mark.kernels, needs_interpreter]

SMALL = HopperBlocks(block_k=64)


def _draw(
    tokens: int,
    *,
    keys: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    width: int = 64,
    value_width: int | None = None,
    dtype: str = "bfloat16",
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(tokens)
    keys = tokens if keys is None else keys
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return (
        normal(batch, tokens, heads, width),
        normal(batch, keys, kv_heads, width),
        normal(batch, keys, kv_heads, value_width or width),
    )


def _check(args: tuple[Array, Array, Array], blocks: HopperBlocks = SMALL, **static: Any) -> None:
    q = args[0]
    static = {"scale": 0.2, **static}
    o, lse = flash_attention_mosaic(*args, blocks=blocks, interpret=True, **static)
    want_o, want_lse = flash_attention_mosaic_reference(*args, **static)
    assert o.dtype == q.dtype
    # Weights are rounded to the dtype before the product: an error of a unit a term, averaged.
    np.testing.assert_allclose(
        np.asarray(o, np.float32), want_o, **tolerance(q.dtype.name, 1), err_msg=str(static)
    )
    np.testing.assert_allclose(lse, want_lse, **tolerance("float32", q.shape[-1]))


@pytest.mark.parametrize(
    ("shape", "static"),
    [
        # Whole blocks, the first and last of them at an edge; two heads a key head.
        ({"tokens": 256}, {}),
        # Lengths of a row, of no whole tile, and past one block of queries.
        ({"tokens": 1}, {}),
        ({"tokens": 203, "dtype": "float16"}, {}),
        # A window that begins inside blocks; all options at once.
        ({"tokens": 200, "heads": 4, "kv_heads": 2}, {"window": 70, "softcap": 3.0}),
        # Every block is clear of the window in part only.
        ({"tokens": 136}, {"window": 1}),
        # More queries than keys, some past every key they may see.
        ({"tokens": 128, "keys": 40}, {"window": 16}),
        # Fewer queries than keys.
        ({"tokens": 24, "keys": 72}, {}),
    ],
)
def test_equals_the_formula(shape: dict[str, Any], static: dict[str, Any]) -> None:
    _check(_draw(**shape), **static)


@pytest.mark.parametrize(("width", "value_width"), [(80, 80), (128, 128), (192, 128)])
def test_head_widths(width: int, value_width: int) -> None:
    blocks = HopperBlocks.for_shape(width)
    _check(_draw(136, width=width, value_width=value_width), blocks)


def test_a_sink_joins_the_denominator_once() -> None:
    sinks = jnp.asarray([2.0, -1.0], jnp.float32)
    _check(_draw(72, heads=2), window=9, sinks=sinks)


def test_one_key_is_its_value() -> None:
    q, k, v = _draw(1)
    o, lse = flash_attention_mosaic(q, k, v, scale=0.5, interpret=True)
    assert jnp.array_equal(o, v)
    score = float(jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32))) * 0.5
    np.testing.assert_allclose(float(lse[0, 0, 0]), score, rtol=1e-5)


def test_equals_the_xla_form() -> None:
    args = _draw(80, heads=2)
    static = {"scale": 0.2, "window": 40, "softcap": 5.0}
    o, _ = flash_attention_mosaic(*args, interpret=True, **static)
    want = dense_attention(*args, **static)
    np.testing.assert_allclose(
        np.asarray(o, np.float32), np.asarray(want, np.float32), **tolerance("bfloat16", 1)
    )


def test_a_row_alone_and_a_second_run_give_the_same_bits() -> None:
    q, k, v = _draw(72, batch=2)
    run = functools.partial(flash_attention_mosaic, scale=0.2, blocks=SMALL, interpret=True)
    both, again, alone = run(q, k, v), run(q, k, v), run(q[1:], k[1:], v[1:])
    for x, y, z in zip(both, again, alone, strict=True):
        assert jnp.array_equal(x, y) and jnp.array_equal(x[1:], z)


@pytest.mark.parametrize("window", [None, 100])
def test_has_no_race(window: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    # Four blocks of keys for two slots: every slot is refilled.
    with detecting_races():
        _check(_draw(256), window=window)
    assert RACE not in capfd.readouterr().out


def test_a_missing_fence_is_caught(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Of the writes of the output before TMA reads them.
    unfenced = types.SimpleNamespace(**{**vars(plgpu), "commit_smem": lambda: None})
    monkeypatch.setattr(module, "plgpu", unfenced)
    q, k, v = _draw(64)
    with detecting_races():
        jax.block_until_ready(
            flash_attention_mosaic(q, k, v, scale=0.2, blocks=SMALL, interpret=True)
        )
    assert RACE in capfd.readouterr().out


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "message"),
    [
        (
            (1, 8, 3, 64),
            (1, 8, 2, 64),
            (1, 8, 2, 64),
            ValueError,
            "3 heads, not a multiple of k's 2",
        ),
        ((1, 8, 2, 64), (1, 8, 2, 32), (1, 8, 2, 32), ValueError, "heads of one width"),
        ((1, 8, 2, 64), (1, 8, 2, 64), (1, 9, 2, 64), ValueError, "in the last axis only"),
        ((1, 8, 2, 72), (1, 8, 2, 72), (1, 8, 2, 72), NotImplementedError, "multiples of 16"),
        ((1, 8, 2, 512), (1, 8, 2, 512), (1, 8, 2, 512), NotImplementedError, "up to 256"),
    ],
)
def test_refuses(q: Any, k: Any, v: Any, error: type[Exception], message: str) -> None:
    zeros = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    with pytest.raises(error, match=message):
        check_attention("flash_attention", zeros(q), zeros(k), zeros(v), k[2], SMALL)


def test_refuses_what_wgmma_and_shared_memory_do_not_take() -> None:
    x = jnp.zeros((1, 8, 2, 64))
    with pytest.raises(NotImplementedError, match=r"Mosaic.*float32.*bfloat16 or float16"):
        flash_attention_mosaic(x, x, x, scale=1.0)
    x = jnp.zeros((1, 8, 2, 256), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="bytes of shared memory; take fewer"):
        flash_attention_mosaic(x, x, x, scale=1.0, blocks=HopperBlocks(num_stages=3))
    with pytest.raises(ValueError, match="block_k 100"):
        HopperBlocks(block_k=100)
    with pytest.raises(ValueError, match="num_stages 1"):
        HopperBlocks(num_stages=1)
