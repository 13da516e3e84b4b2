"""Gradients of flash attention against those of its formula."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.flash_attention import (
    FlashAttentionBlocks,
    flash_attention_ragged_reference,
    flash_attention_reference,
)
from infer.pallas.flash_attention_backward import (
    FlashAttentionBackwardBlocks,
    attention,
    attention_ragged,
)
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

SIZES = {
    "blocks": FlashAttentionBlocks(block_queries=32, block_keys=16),
    "backward_blocks": FlashAttentionBackwardBlocks(
        dq=FlashAttentionBlocks(block_queries=32, block_keys=16),
        dkv=FlashAttentionBlocks(block_queries=16, block_keys=32),
    ),
    "interpret": True,
}
SCALE = 0.2


def gradients(
    function: Callable[..., Any], where: dict[str, jax.Array], options: dict[str, Any]
) -> Callable[..., Any]:
    """Return the jitted gradients in q, k, v and sinks of sums of o and lse, weighted."""

    def loss(inputs: tuple[jax.Array, ...], do: jax.Array, dlse: jax.Array) -> jax.Array:
        q, k, v, *sinks = inputs
        o, lse = function(
            q, k, v, scale=SCALE, sinks=sinks[0] if sinks else None, **where, **options
        )
        # lse of padding is a constant, whatever its weight.
        return jnp.sum((o * do).astype(jnp.float32)) + jnp.sum(lse * dlse)

    return jax.jit(jax.grad(loss))


def draw(
    shape: tuple[int, ...], num_keys: int, kv_heads: int, widths: tuple[int, int], sinks: bool
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Draw q, k, v and sinks, do and dlse; shape is (B, T, N) or (T, N)."""
    keys = jax.random.split(jax.random.key(sum(shape)), 5)
    rows, (width, value_width) = shape[:-2], widths
    inputs = (
        jax.random.normal(keys[0], (*shape, width)),
        jax.random.normal(keys[1], (*rows, num_keys, kv_heads, width)),
        jax.random.normal(keys[2], (*rows, num_keys, kv_heads, value_width)),
    )
    do = jax.random.normal(keys[3], (*shape, value_width))
    dlse = jax.random.normal(keys[4], (*rows, shape[-1], shape[-2]))
    return (*inputs, jnp.linspace(-1.0, 3.0, shape[-1])) if sinks else inputs, do, dlse


@pytest.mark.parametrize(
    ("shape", "num_keys", "kv_heads", "widths", "options", "sinks", "lengths"),
    [
        ((2, 75, 4), 75, 2, (32, 32), {}, False, None),
        ((2, 75, 2), 75, 1, (80, 48), {"window": 20}, True, (0, 60)),
        ((2, 75, 2), 75, 2, (72, 40), {"window": 60, "softcap": 2.0}, True, (1, 75)),
        ((1, 75, 2), 40, 1, (32, 32), {"window": 30, "softcap": 1.0}, True, None),
    ],
)
def test_against_the_formula(
    shape: tuple[int, ...],
    num_keys: int,
    kv_heads: int,
    widths: tuple[int, int],
    options: dict[str, Any],
    sinks: bool,
    lengths: tuple[int, ...] | None,
) -> None:
    inputs, do, dlse = draw(shape, num_keys, kv_heads, widths, sinks)
    where = {} if lengths is None else {"lengths": jnp.array(lengths, jnp.int32)}
    got = gradients(attention, where, options | SIZES)(inputs, do, dlse)
    want = gradients(flash_attention_reference, where, options)(inputs, do, dlse)
    # Sums over queries and keys, of terms up to the size of the gradients themselves.
    size = max(float(jnp.max(jnp.abs(x))) for x in want)
    close = tolerance("float32", num_keys)
    chex.assert_trees_all_close(got, want, rtol=close["rtol"], atol=close["atol"] * size)
    assert size > 0.1


def test_ragged_rows_against_the_formula() -> None:
    options = {"window": 34, "softcap": 2.0}
    inputs, do, dlse = draw((100, 4), 100, 2, (32, 32), True)
    where = {"starts": jnp.array([0, 0, 37, 38, 83], jnp.int32)}
    want = gradients(flash_attention_ragged_reference, where, options)(inputs, do, dlse)
    kernel = gradients(attention_ragged, where, options | SIZES)
    # Padding is never read: neither inputs nor what comes back into it.
    stale = lambda x: x.at[83:].set(jnp.nan)
    inputs = (*map(stale, inputs[:3]), inputs[3])
    got = kernel(inputs, stale(do), dlse)
    size = max(float(jnp.max(jnp.abs(x))) for x in want)
    close = tolerance("float32", 100)
    chex.assert_trees_all_close(got, want, rtol=close["rtol"], atol=close["atol"] * size)
    assert not any(np.any(x[83:]) for x in got[:3])
    np.testing.assert_array_equal(kernel(inputs, stale(do), dlse)[1], got[1])


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    inputs, do, dlse = draw((83, 2), 83, 1, (32, 32), False)
    where = {"starts": jnp.array([0, 46, 83], jnp.int32)}
    together = gradients(attention_ragged, where, SIZES)(inputs, do, dlse)
    row = lambda x: x[None, 46:]
    alone = gradients(attention, {}, SIZES)(tuple(map(row, inputs)), row(do), dlse[None, :, 46:])
    for one, all_ in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[0], all_[46:])


def test_half_precision_stays_near() -> None:
    inputs, do, dlse = draw((1, 75, 4), 75, 2, (64, 64), True)
    low = tuple(x.astype(jnp.bfloat16) for x in inputs[:3])
    got = gradients(attention, {}, SIZES)((*low, inputs[3]), do.astype(jnp.bfloat16), dlse)
    want = gradients(flash_attention_reference, {}, {})(
        (*(x.astype(jnp.float32) for x in low), inputs[3]), do, dlse
    )
    for x, y in zip(got, want, strict=True):
        error = jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y)
        assert error < 1e-2  # weights and their gradients rounded to bfloat16 before each product
    assert [x.dtype for x in got] == [jnp.bfloat16] * 3 + [jnp.float32]


def test_errors_are_those_of_the_forward_pass() -> None:
    q = jnp.zeros((1, 20, 4, 32))
    with pytest.raises(ValueError, match="window is 0"):
        attention(q, q, q, scale=SCALE, window=0)
    with pytest.raises(NotImplementedError, match="one dtype of"):
        attention(q.astype(jnp.bfloat16), q, q, scale=SCALE)


def test_blocks_are_chosen_by_chip() -> None:
    choose = functools.partial(FlashAttentionBackwardBlocks.for_shape, 128, 128, "bfloat16")
    assert choose() == choose((8, 9)) == choose((12, 0))
    assert choose((9, 0)).dkv.block_queries > choose((8, 0)).dkv.block_queries
