"""Paged decode attention in Triton, interpreted: against plain forms, by hand, bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops import attention
from infer.pallas.paged_attention import (
    PagedAttentionBlocks,
    paged_attention,
    paged_attention_reference,
)
from tests.pallas.paged_cases import f32, paged_case, quantized
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

BLOCKS = PagedAttentionBlocks(block_keys=16, split_keys=32)
LAST = [-1, 0, 32, 89]  # of each row: no token, one, one past a split, all of its pages


def _kernel(**options: Any) -> Any:
    options = {"scale": 0.3, "blocks": BLOCKS, "return_lse": True, "interpret": True, **options}
    return jax.jit(functools.partial(paged_attention, **options))


def _reference(**options: Any) -> Any:
    return jax.jit(functools.partial(paged_attention_reference, **{"scale": 0.3, **options}))


@pytest.mark.parametrize(
    ("heads", "kv", "width", "queries", "dtype", "options"),
    [
        (4, 2, 80, 1, "float32", {}),
        (3, 1, 16, 3, "float32", {"window": 7, "softcap": 2.0}),
        (16, 1, 64, 5, "bfloat16", {"sinks": True}),  # 80 rows: two tiles
        (2, 2, 32, 1, "float16", {"window": 40}),
    ],
)
def test_equals_the_plain_forms(
    heads: int, kv: int, width: int, queries: int, dtype: str, options: dict[str, Any]
) -> None:
    case = paged_case(LAST, heads=heads, kv=kv, width=width, queries=queries, dtype=dtype)
    if options.get("sinks"):
        options = {**options, "sinks": jnp.linspace(-1.0, 3.0, heads, dtype=jnp.float32)}
    kernel = _kernel(**options)
    o, lse = kernel(*case)
    want, want_lse = _reference(**options)(*case)
    near = tolerance(dtype, 90)
    np.testing.assert_allclose(f32(o), f32(want), **near)
    np.testing.assert_allclose(f32(lse), f32(want_lse), **near)
    np.testing.assert_array_equal(f32(o)[0], 0)
    np.testing.assert_array_equal(f32(kernel(*case)[0]), f32(o))
    if dtype == "float32" and not options:  # the contract
        xla = jax.jit(functools.partial(attention.paged_attention, scale=0.3, **options))(*case)
        np.testing.assert_allclose(f32(o), f32(xla), **near)


def test_a_row_has_the_same_bits_alone_in_a_wider_table_and_nearly_so_unsplit() -> None:
    case = paged_case(LAST, heads=4, kv=2, width=32, queries=2)
    sinks = jnp.linspace(-1.0, 3.0, 4, dtype=jnp.float32)
    kernel = _kernel(sinks=sinks, window=70)
    o, lse = kernel(*case)
    alone = kernel(*case.row(3))
    np.testing.assert_array_equal(f32(alone[0][0]), f32(o[3]))
    np.testing.assert_array_equal(f32(alone[1][0]), f32(lse[3]))
    # Eight splits rather than three.
    wide = jnp.pad(case.page_table, ((0, 0), (0, 30)), constant_values=case.k_pages.shape[0])
    wider = kernel(*case._replace(page_table=wide))
    np.testing.assert_array_equal(f32(wider[0]), f32(o))
    np.testing.assert_array_equal(f32(wider[1]), f32(lse))
    whole = PagedAttentionBlocks(block_keys=16, split_keys=96)
    unsplit = _kernel(sinks=sinks, window=70, blocks=whole)(*case)
    np.testing.assert_allclose(f32(unsplit[0]), f32(o), **tolerance("float32", 90))
    np.testing.assert_allclose(f32(unsplit[1]), f32(lse), **tolerance("float32", 90))


def _ones(num_keys: int, values: list[float]) -> tuple[Any, ...]:
    """One head of width 1, whose key j is the logit j + 1 and its value values[j]; pages of 2."""
    pages = -(-num_keys // 2)
    k = jnp.arange(1.0, 2 * pages + 1).reshape(pages, 1, 2, 1).astype(jnp.float32)
    v = jnp.asarray(np.resize(np.asarray(values, np.float32), 2 * pages)).reshape(pages, 1, 2, 1)
    table = jnp.arange(pages, dtype=jnp.int32)[None, :]
    return jnp.ones((1, 1, 1, 1), jnp.float32), k, v, table


def test_a_window_counts_its_own_key() -> None:
    # Seven queries, window 3: 1, 2, 3, 3, 3, 3, 3 keys seen.  All logits 0: lse is log(count).
    _, k, v, table = _ones(7, [1.0])
    positions = jnp.arange(7, dtype=jnp.int32)[None, :]
    q = jnp.zeros((1, 7, 1, 1), jnp.float32)
    _, lse = _kernel(window=3)(q, k, v, table, positions)
    counts = np.exp(f32(lse)[0, :, 0])
    np.testing.assert_allclose(counts, [1, 2, 3, 3, 3, 3, 3], rtol=1e-6)


def test_sinks_by_hand() -> None:
    at = lambda i: jnp.asarray([[i]], jnp.int32)
    q, k, v, table = _ones(3, [1.0, 2.0, 4.0])
    kernel = jax.jit(
        lambda *args: paged_attention(
            *args[:5], sinks=args[5], scale=1.0, blocks=BLOCKS, return_lse=True, interpret=True
        )
    )
    sink = lambda x: jnp.asarray([x], jnp.float32)
    # Logits 0, 0 and sink 0: two of three parts.
    o, lse = kernel(jnp.zeros_like(q), k, jnp.ones_like(v), table, at(1), sink(0.0))
    assert float(o[0, 0, 0, 0]) == pytest.approx(2 / 3, abs=1e-6)
    assert float(lse[0, 0, 0]) == pytest.approx(np.log(3), abs=1e-6)
    # Logits 1, 2, 3, sink 2.5, values 1, 2, 4.
    o, _ = kernel(q, k, v, table, at(2), sink(2.5))
    assert float(o[0, 0, 0, 0]) == pytest.approx(2.308854, abs=1e-6)
    # No visible key: 0, and the denominator is the sink's.
    o, lse = kernel(q, k, v, table, at(-1), sink(2.5))
    assert float(o[0, 0, 0, 0]) == 0
    assert float(lse[0, 0, 0]) == pytest.approx(2.5, abs=1e-6)
    # A sink of -inf is none, for a query with keys and for one without.
    o, lse = kernel(jnp.zeros_like(q), k, v, table, at(1), sink(-np.inf))
    assert float(o[0, 0, 0, 0]) == pytest.approx(1.5, abs=1e-6)
    assert float(lse[0, 0, 0]) == pytest.approx(np.log(2), abs=1e-6)
    o, lse = kernel(q, k, v, table, at(-1), sink(-np.inf))
    assert float(o[0, 0, 0, 0]) == 0
    assert float(lse[0, 0, 0]) == -np.inf


def test_a_page_that_is_none_is_never_read() -> None:
    case = paged_case([44, 44, 44], heads=2, kv=2, width=16, pages_a_row=9)
    pages = case.k_pages.shape[0]
    nothing = jnp.asarray([-1, 10**6, pages], jnp.int32)
    case = case._replace(page_table=case.page_table.at[:, 3].set(nothing))
    o, _ = _kernel()(*case)
    want, _ = _reference()(*case)
    assert np.isfinite(f32(want)).all()
    np.testing.assert_allclose(f32(o), f32(want), **tolerance("float32", 45))


def test_a_tree_sees_the_cache_and_its_own_ancestors() -> None:
    # The root's two children, and a child of each: depths 0, 1, 1, 2, 2.
    case = paged_case([36, 9], heads=4, kv=2, width=16, queries=5)
    parents = [None, 0, 0, 1, 2]
    seen = np.eye(5, dtype=bool)
    for t, parent in enumerate(parents):
        if parent is not None:
            seen[t] |= seen[parent]
    depth = jnp.asarray([0, 1, 1, 2, 2], jnp.int32)
    roots = jnp.asarray([32, 5], jnp.int32)
    case = case._replace(positions=roots[:, None] + depth[None, :])
    tree = jnp.asarray(np.stack([seen, seen]))
    o, lse = _kernel(window=4)(*case, tree=tree)
    want, want_lse = _reference(window=4)(*case, tree=tree)
    np.testing.assert_allclose(f32(o), f32(want), **tolerance("float32", 40))
    np.testing.assert_allclose(f32(lse), f32(want_lse), **tolerance("float32", 40))
    # Another way: token 3's branch, 0 1 3, moved into slots of its own, is a causal row.
    page = lambda j: (case.page_table[0, j // 5], slice(None), j % 5)
    move = lambda pool: pool.at[page(34)].set(pool[page(35)])
    chain = attention.paged_attention(
        case.q[:1, 3:4],
        move(case.k_pages),
        move(case.v_pages),
        case.page_table[:1],
        jnp.asarray([[34]], jnp.int32),
        scale=0.3,
        window=4,
    )
    np.testing.assert_allclose(f32(o[0, 3]), f32(chain[0, 0]), **tolerance("float32", 40))


def test_a_chain_of_40_tokens_as_a_tree_is_causal() -> None:
    case = paged_case([60], heads=1, kv=1, width=16, queries=40)
    tree = jnp.asarray(np.tril(np.ones((1, 40, 40), bool)))
    o, lse = _kernel()(*case, tree=tree)
    want, want_lse = _reference()(*case)
    np.testing.assert_allclose(f32(o), f32(want), **tolerance("float32", 60))
    np.testing.assert_allclose(f32(lse), f32(want_lse), **tolerance("float32", 60))


def test_bounds_cut_a_row_in_two() -> None:
    case = paged_case([70, 20], heads=4, kv=2, width=16)
    bounds = jnp.asarray([[0, 37], [15, 90]], jnp.int32)
    o, lse = _kernel()(*case, bounds=bounds)
    want, want_lse = _reference()(*case, bounds=bounds)
    np.testing.assert_allclose(f32(o), f32(want), **tolerance("float32", 70))
    np.testing.assert_allclose(f32(lse), f32(want_lse), **tolerance("float32", 70))


def test_sizes_depend_on_the_batch_only_when_asked() -> None:
    shape = {"num_kv": 8, "width": 128}
    fixed = PagedAttentionBlocks.for_shape(1, 1024, **shape)
    assert fixed == PagedAttentionBlocks.for_shape(256, 65536, **shape)
    tuned = lambda batch: PagedAttentionBlocks.for_shape(batch, 8192, **shape, split="tuned")
    assert tuned(1).split_keys < tuned(256).split_keys
    wide = PagedAttentionBlocks.for_shape(1, 1024, num_kv=8, width=256)
    assert wide.block_keys == 32
    # float32, be it of the queries alone, is multiplied in small tiles.
    full = PagedAttentionBlocks.for_shape(1, 1024, **shape, q_dtype=jnp.float32)
    assert full == PagedAttentionBlocks.for_shape(1, 1024, **shape, pool_dtype=jnp.float32)
    assert full.block_keys < fixed.block_keys and full.num_stages == 1


def test_refuses_what_it_cannot() -> None:
    case = paged_case([9], heads=4, kv=2, width=16)
    with pytest.raises(ValueError, match="multiple of block_keys"):
        PagedAttentionBlocks(split_keys=100)
    with pytest.raises(ValueError, match="power of two"):
        PagedAttentionBlocks(block_rows=24)
    with pytest.raises(ValueError, match="3 heads, not a multiple of the 2"):
        paged_attention(*case._replace(q=case.q[:, :, :3]), scale=1.0, interpret=True)
    with pytest.raises(ValueError, match="counts the query's own key"):
        paged_attention(*case, scale=1.0, window=0, interpret=True)
    bits, scales = quantized(case, "int8")
    with pytest.raises(ValueError, match="need k_scales and v_scales"):
        paged_attention(*bits, scale=1.0, interpret=True)
    with pytest.raises(ValueError, match="need no scales"):
        paged_attention(*case, scale=1.0, interpret=True, **scales)
    with pytest.raises(ValueError, match="one dtype and shape"):
        paged_attention(*case._replace(k_pages=bits.k_pages), scale=1.0, interpret=True)
    int16 = case.k_pages.astype(jnp.int16)
    wrong = case._replace(k_pages=int16, v_pages=int16)
    with pytest.raises(NotImplementedError, match="no pools of int16"):
        paged_attention(*wrong, scale=1.0, interpret=True)
