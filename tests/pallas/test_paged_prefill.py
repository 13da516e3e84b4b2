"""Prefill attention over pages in Triton, interpreted: plain forms, and bits in any chunk."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops import attention
from infer.pallas.paged_attention import PagedAttentionBlocks, paged_attention
from infer.pallas.paged_prefill import (
    PagedPrefillBlocks,
    paged_prefill,
    paged_prefill_reference,
)
from tests.pallas.paged_cases import PagedCase, f32, paged_case, quantized
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

BLOCKS = PagedPrefillBlocks(block_rows=16, block_keys=16)
LAST = [-1, 3, 89]  # of each row: nothing, a chunk with padding in front, all of its pages


def _kernel(**options: Any) -> Any:
    options = {"scale": 0.3, "blocks": BLOCKS, "return_lse": True, "interpret": True, **options}
    return jax.jit(functools.partial(paged_prefill, **options))


@pytest.mark.parametrize(
    ("heads", "kv", "width", "dtype", "options"),
    [
        (4, 2, 80, "float32", {}),
        (3, 1, 16, "float32", {"window": 7, "softcap": 2.0, "sinks": True}),
        (2, 2, 32, "bfloat16", {"window": 40}),
    ],
)
def test_equals_the_plain_forms(
    heads: int, kv: int, width: int, dtype: str, options: dict[str, Any]
) -> None:
    case = paged_case(LAST, heads=heads, kv=kv, width=width, queries=21, dtype=dtype)
    if options.get("sinks"):
        options = {**options, "sinks": jnp.linspace(-1.0, 3.0, heads, dtype=jnp.float32)}
    kernel = _kernel(**options)
    o, lse = kernel(*case)
    reference = functools.partial(paged_prefill_reference, scale=0.3, **options)
    want, want_lse = jax.jit(reference)(*case)
    near = tolerance(dtype, 90)
    np.testing.assert_allclose(f32(o), f32(want), **near)
    np.testing.assert_allclose(f32(lse), f32(want_lse), **near)
    np.testing.assert_array_equal(f32(o)[0], 0)
    np.testing.assert_array_equal(f32(kernel(*case)[0]), f32(o))
    if dtype == "float32" and not options:  # the contract
        xla = jax.jit(functools.partial(attention.paged_attention, scale=0.3))(*case)
        np.testing.assert_allclose(f32(o), f32(xla), **near)
        alone = kernel(*case.row(2))
        np.testing.assert_array_equal(f32(alone[0][0]), f32(o[2]))
        np.testing.assert_array_equal(f32(alone[1][0]), f32(lse[2]))


def test_reads_4_bits() -> None:
    bits, scales = quantized(paged_case(LAST, heads=4, kv=2, width=32, queries=9), "int4")
    o, _ = _kernel()(*bits, **scales)
    want, _ = jax.jit(functools.partial(paged_prefill_reference, scale=0.3))(*bits, **scales)
    np.testing.assert_allclose(f32(o), f32(want), **tolerance("float32", 90))


def _cut(case: PagedCase, start: int, size: int) -> PagedCase:
    cut = slice(start, start + size)
    return case._replace(q=case.q[:, cut], positions=case.positions[:, cut])


@pytest.mark.parametrize(
    ("blocks", "dtype"),
    [
        (PagedAttentionBlocks(block_keys=16, split_keys=32, block_rows=16), "float32"),
        (BLOCKS, "bfloat16"),
    ],
)
def test_a_token_has_the_same_bits_in_a_chunk_of_1_7_or_64(
    blocks: PagedAttentionBlocks | PagedPrefillBlocks, dtype: str
) -> None:
    case = paged_case([69], heads=6, kv=2, width=32, queries=64, dtype=dtype)
    kernel = _kernel(blocks=blocks, window=50)
    whole, whole_lse = (f32(x) for x in kernel(*case))
    for size, starts in ((1, (0, 31, 63)), (7, (0, 28, 57))):
        for start in starts:
            o, lse = kernel(*_cut(case, start, size))
            np.testing.assert_array_equal(f32(o), whole[:, start : start + size])
            np.testing.assert_array_equal(f32(lse), whole_lse[:, start : start + size])
    if isinstance(blocks, PagedAttentionBlocks) and dtype == "float32":
        decode = functools.partial(
            paged_attention, scale=0.3, window=50, blocks=blocks, interpret=True
        )
        o = jax.jit(decode)(*_cut(case, 40, 1))
        np.testing.assert_array_equal(f32(o), whole[:, 40:41])


def test_refuses_what_it_cannot() -> None:
    case = paged_case([9], heads=4, kv=2, width=16)
    with pytest.raises(ValueError, match="power of two"):
        PagedPrefillBlocks(block_rows=24)
    with pytest.raises(ValueError, match="paged_prefill: q has 3 heads"):
        paged_prefill(*case._replace(q=case.q[:, :, :3]), scale=1.0, interpret=True)
    with pytest.raises(ValueError, match="paged_prefill: window is 0"):
        paged_prefill(*case, scale=1.0, window=0, interpret=True)
    assert PagedPrefillBlocks.for_shape(width=256).block_rows == 64
