"""Adapters of each row as kernels, interpreted, against a row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.lora import LoraBlocks, lora, lora_reference
from tests.cases.kernels.lora import arguments
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels

# 200 columns and 72 outputs fill no tile; two adapters of three are in use.
WIDTH, OUT = 200, 72
IDS = jnp.asarray([1, -1, 0, 1, 1], jnp.int32)
BLOCKS = LoraBlocks(block_in=32, block_out=32, splits=3)


def _case(rank: int, dtype: str = "float32") -> tuple[jax.Array, ...]:
    return (*arguments(jax.random.key(rank), 5, 3, rank, WIDTH, OUT, dtype)[:5], IDS)


@pytest.mark.parametrize("rank", [8, 20, 64])
def test_equals_a_row_at_a_time(rank: int) -> None:
    args = _case(rank)
    y = lora(*args, blocks=BLOCKS, interpret=True)
    np.testing.assert_allclose(y, lora_reference(*args), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, lora(*args, interpret=True), rtol=1e-5, atol=1e-5)


def test_a_product_by_hand() -> None:
    f32 = lambda *v: jnp.asarray(v, jnp.float32)
    a, b = f32([[1, 2], [0, 1]], [[9, 9], [9, 9]]), f32([[1, 0], [3, 1]], [[9, 9], [9, 9]])
    y, x = f32([100, 200], [100, 200]), f32([1, 1], [1, 1])
    got = lora(y, x, a, b, f32(0.5, 1), jnp.asarray([0, -1]), interpret=True)
    # a x = (3, 1), b (3, 1) = (3, 10)
    np.testing.assert_array_equal(got, [[101.5, 205], [100, 200]])


def test_a_row_has_the_same_bits_in_any_batch_and_one_without_an_adapter_its_own() -> None:
    y, x, *adapters, ids = _case(16, "bfloat16")
    got = lora(y, x, *adapters, ids, interpret=True)
    assert got.dtype == jnp.bfloat16
    alone = lora(y[3:4], x[3:4], *adapters, ids[3:4], interpret=True)
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(got[3]))
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(y[1]))


def test_adapters_of_other_rows_are_not_read() -> None:
    y, x, a, b, scale, ids = _case(8)
    want = lora(y, x, a, b, scale, ids, interpret=True)
    poison = lambda stack: stack.at[2].set(jnp.nan)
    got = lora(y, x, poison(a), poison(b), poison(scale), ids, interpret=True)
    np.testing.assert_array_equal(got, want)
    lone = jnp.full_like(ids, -1)
    np.testing.assert_array_equal(lora(y, x, a * jnp.nan, b, scale, lone, interpret=True), y)


def test_an_id_that_is_no_adapter_is_seen() -> None:
    y, x, a, b, scale, ids = _case(8)
    got = lora(y, x, a, b, scale, ids.at[0].set(3).at[2].set(-2), interpret=True)
    assert np.isnan(got).any(axis=1).tolist() == [True, False, True, False, False]


def test_what_it_cannot_do_is_named() -> None:
    y, x, a, b, scale, ids = _case(8)
    with pytest.raises(NotImplementedError, match=r"rank 80, x of shape \(5, 200\), dtypes float"):
        wide = jnp.zeros((3, 80, WIDTH), jnp.float32), jnp.zeros((3, OUT, 80), jnp.float32)
        lora(y, x, *wide, scale, ids, interpret=True)
    with unchecked(), pytest.raises(ValueError, match=r"a \(3, 8, 200\), b \(2, 72, 8\)"):
        lora(y, x, a, b[:2], scale, ids, interpret=True)
    for sizes, message in (
        ({"block_in": 48}, "block_in is 48; use a power of two, 16 or more"),
        ({"splits": 0}, "splits is 0"),
        ({"num_warps": 3}, "num_warps is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            LoraBlocks(**sizes)
