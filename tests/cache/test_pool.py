"""Pools of quantised keys and values: written, copied, shared and read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.cache import paged
from infer.cache.layout import pool_bytes
from infer.cache.pool import (
    KV_DTYPES,
    GroupedPool,
    QuantizedPool,
    create_pool,
    create_pools,
    dtype_of,
    kv_dtype_name,
    read_pages,
    write_whole_pages,
)
from infer.errors import ConfigError
from infer.quant.hadamard import transform
from infer.quant.kv import KV_FORMATS, dequantize_kv, quantize_kv
from tests.cases.kv import definition, heads, numbers
from tests.models.tiny import llama_config

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_an_empty_pool_reads_as_zeros(dtype: str) -> None:
    for pool in create_pools((3, 2, 4, 8), dtype):
        assert pool.shape == (3, 2, 4, 8) and dtype_of(pool) == dtype
        np.testing.assert_array_equal(read_pages(pool, jnp.asarray([[2, 9]], jnp.int32)), 0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_tokens_and_pages_hold_what_numpy_defines(kv_format: str) -> None:
    x = heads(8).reshape(10, 4, 8)
    positions = jnp.asarray([0, 1, 2, 3, 4, 5, 6, 7, 3, 2], jnp.int32)
    ids = jnp.asarray([0, 0, 0, 0, 2, 2, 2, 2, 5, 1], jnp.int32)  # 5 is no page
    empty = create_pool((5, 4, 4, 8), kv_format)
    pool = paged.write_tokens(empty, jnp.asarray(x), ids, positions)
    want = numbers(*definition(x, kv_format))
    read = np.asarray(read_pages(pool, jnp.arange(5, dtype=jnp.int32)))
    for i in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        np.testing.assert_array_equal(read[ids[i], :, positions[i] % 4], want[i])
    assert not read[[3, 4]].any() and not read[1, :, [0, 1, 3]].any()
    whole = paged.write_pages(
        empty, jnp.asarray(x[:8].reshape(2, 4, 4, 8)), jnp.asarray([0, 2], jnp.int32)
    )
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pool), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_copy_on_write_copies_data_and_scales(kv_format: str) -> None:
    cache = paged.create(
        llama_config(), num_rows=2, num_pages=6, page_size=4, pages_per_row=2, dtype=kv_format
    )
    cache, _ = paged.allocate(cache, jnp.asarray([1, 0], jnp.int32))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 8)), jnp.float32)
    page, slots = jnp.zeros(3, jnp.int32), jnp.arange(3, dtype=jnp.int32)
    write = lambda pools: tuple(paged.write_tokens(p, x, page, slots) for p in pools)
    cache = dataclasses.replace(
        cache,
        k_pages=write(cache.k_pages),
        v_pages=write(cache.v_pages),
        lengths=jnp.asarray([3, 0], jnp.int32),
    )
    cache = paged.reorder(cache, jnp.asarray([0, 0], jnp.int32))
    cache, copied = jax.jit(paged.own_next_page)(cache, jnp.ones(2, bool))
    assert int(copied) == 1
    paged.check_invariants(cache)
    first, second = cache.page_table[:, 0]
    assert first != second
    for leaf in jax.tree.leaves((cache.k_pages, cache.v_pages)):
        np.testing.assert_array_equal(np.asarray(leaf[first]), np.asarray(leaf[second]))
        assert np.asarray(leaf[first], np.float32).any()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, None),
        ("fp8", "float8_e4m3"),
        ("fp8_e4m3", "float8_e4m3"),
        (jnp.float8_e4m3fn, "float8_e4m3"),
        (jnp.int8, "int8"),
        (np.dtype("int8"), "int8"),
        (jnp.int4, "int4"),
        (jnp.bfloat16, "bfloat16"),
    ],
)
def test_names(given: Any, name: str | None) -> None:
    assert kv_dtype_name(given) == name


@pytest.mark.parametrize(
    "given",
    ["int3", "fp8_e5m2", "uint8", "", jnp.uint8, jnp.float8_e5m2, jnp.float8_e4m3, 8, float],
)
def test_other_names_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype is .*; there are 'float32', .*'float8_e4m3'"):
        kv_dtype_name(given)


def test_heads_of_an_odd_width_have_no_int4() -> None:
    with pytest.raises(ConfigError, match="even head width, not 7; use int8"):
        create_pool((3, 2, 4, 7), "int4")
    assert isinstance(create_pool((3, 2, 4, 7), "int8"), QuantizedPool)


def test_turned_heads_are_int4_and_say_so() -> None:
    pool = create_pool((3, 2, 4, 20), "int4_hadamard")
    assert isinstance(pool, QuantizedPool) and pool.turned and pool.data.shape == (3, 2, 4, 10)
    assert dtype_of(pool) == pool.kv_dtype == "int4_hadamard" and pool.shape == (3, 2, 4, 20)
    assert dtype_of(jax.tree.map(lambda x: x, pool)) == "int4_hadamard"
    with pytest.raises(ConfigError, match="no Hadamard matrix of 18 rows is known here"):
        create_pool((3, 2, 4, 18), "int4_hadamard")


def test_a_wide_channel_costs_less_where_heads_are_turned() -> None:
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    x[:, 5] *= 30
    read = lambda x: dequantize_kv(*quantize_kv(x, "int4"))
    error = lambda y: float(np.abs(np.asarray(y) - x).mean())
    back = transform(read(transform(jnp.asarray(x), 64)), 64, back=True)
    assert error(back) < 0.5 * error(read(jnp.asarray(x)))


def test_pages_that_are_quantised_as_a_whole() -> None:
    keys, values = create_pools((3, 2, 16, 64), "kivi2")
    assert isinstance(keys, GroupedPool) and isinstance(values, GroupedPool)
    assert keys.data.shape == values.data.shape == (3, 2, 16, 16)
    assert (keys.scale.shape, values.scale.shape) == ((3, 2, 1, 64), (3, 2, 16, 2))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 16, 64)), jnp.float32)
    written = write_whole_pages(keys, x, jnp.asarray([2, 3], jnp.int32))  # 3 is no page
    read = np.asarray(read_pages(written, jnp.arange(3, dtype=jnp.int32)))
    assert not read[:2].any() and np.abs(read[2] - np.asarray(x[0])).max() < 1
    with pytest.raises(ConfigError, match="heads of 12 numbers fill no whole bytes"):
        create_pools((3, 2, 4, 12), "kivi4")


@pytest.mark.parametrize("kv_dtype", ["kivi2", "kivi4"])
def test_bytes_of_whole_pages_are_those_of_the_plan(kv_dtype: str) -> None:
    config = llama_config(head_dim=64)
    for size in (16, 32):
        pools = create_pools((5, config.num_kv_heads, size, 64), kv_dtype)
        have = config.num_layers * sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
        assert pool_bytes(config, 5, size, kv_dtype) == have
