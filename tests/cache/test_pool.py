"""Pools of quantised keys and values: written, copied, shared and read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.cache import paged
from infer.cache.pool import (
    KV_DTYPES,
    QuantizedPool,
    create_pool,
    dtype_of,
    kv_dtype_name,
    read_pages,
)
from infer.errors import ConfigError
from infer.quant.kv import KV_FORMATS
from tests.cases.kv import definition, heads, numbers
from tests.models.tiny import llama_config

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_an_empty_pool_reads_as_zeros(dtype: str) -> None:
    pool = create_pool((3, 2, 4, 6), dtype)
    assert pool.shape == (3, 2, 4, 6) and dtype_of(pool) == dtype
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
