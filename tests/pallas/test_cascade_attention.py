"""Attention with a shared prefix, interpreted: against rows that list all of their pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.cascade_attention import (
    cascade_attention,
    cascade_attention_reference,
    merge_two,
)
from infer.pallas.paged_attention import PagedAttentionBlocks
from tests.pallas.paged_cases import f32, paged_case
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

BLOCKS = PagedAttentionBlocks(block_keys=16, split_keys=32)


def _case(dtype: str) -> tuple[jax.Array, ...]:
    """Two groups of two rows with 40 and 15 shared keys; the last row is padding."""
    case = paged_case([70, 43, 15, -1], heads=4, kv=2, width=32, queries=2, dtype=dtype)
    none = case.k_pages.shape[0]
    table = np.array(case.page_table)
    prefix = np.full((2, 9), none, np.int32)
    prefix[0, :8], prefix[1, :3] = table[0, :8], table[2, :3]
    # A row's own pages of the shared keys are not looked up.
    table[0, :8], table[1, :8], table[2, :3] = -1, none, 10**6
    lengths = jnp.asarray([40, 15], jnp.int32)
    q, k, v, _, positions = case
    return q, k, v, jnp.asarray(prefix), lengths, jnp.asarray(table), positions


def _kernel(**options: Any) -> Any:
    options = {"scale": 0.3, "blocks": BLOCKS, "interpret": True, **options}
    return jax.jit(functools.partial(cascade_attention, **options))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {"sinks": True, "softcap": 5.0}), ("bfloat16", {"window": 30})],
)
def test_equals_the_plain_form(dtype: str, options: dict[str, Any]) -> None:
    if options.get("sinks"):
        options = {**options, "sinks": jnp.linspace(-1.0, 3.0, 4, dtype=jnp.float32)}
    case = _case(dtype)
    kernel = _kernel(**options)
    o = kernel(*case)
    want = jax.jit(functools.partial(cascade_attention_reference, scale=0.3, **options))(*case)
    np.testing.assert_allclose(f32(o), f32(want), **tolerance(dtype, 90))
    np.testing.assert_array_equal(f32(o)[3], 0)
    np.testing.assert_array_equal(f32(kernel(*case)), f32(o))
    if dtype == "float32":  # row 1 alone in its group
        q, k, v, prefix, lengths, table, positions = case
        one = slice(1, 2)
        alone = kernel(q[one], k, v, prefix[:1], lengths[:1], table[one], positions[one])
        np.testing.assert_array_equal(f32(alone[0]), f32(o[1]))


def test_merge_by_hand() -> None:
    cell = lambda x: jnp.asarray([[[x]]], jnp.float32)
    ones = jnp.ones((1, 1, 1, 1), jnp.float32)
    inf = float("inf")
    # Weights 1 and 3: (1 x 2 + 3 x 6) / 4.
    o, lse = merge_two(2 * ones, cell(0.0), 6 * ones, cell(float(np.log(3))))
    assert float(o[0, 0, 0, 0]) == pytest.approx(5.0)
    assert float(lse[0, 0, 0]) == pytest.approx(np.log(4))
    o, lse = merge_two(0 * ones, cell(-inf), 6 * ones, cell(2.0))
    assert float(o[0, 0, 0, 0]) == 6.0 and float(lse[0, 0, 0]) == 2.0
    o, lse = merge_two(0 * ones, cell(-inf), 0 * ones, cell(-inf))
    assert float(o[0, 0, 0, 0]) == 0.0 and float(lse[0, 0, 0]) == -inf


def test_refuses_groups_that_do_not_divide_the_rows() -> None:
    q, k, v, prefix, lengths, table, positions = _case("float32")
    with pytest.raises(ValueError, match="3 rows are not a multiple of 2 groups"):
        cascade_attention(
            q[:3], k, v, prefix, lengths, table[:3], positions[:3], scale=1.0, interpret=True
        )
