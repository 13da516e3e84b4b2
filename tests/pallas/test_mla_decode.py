"""Latent attention over pages in Triton, interpreted: the plain form, heads unabsorbed, bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.mla_decode import MlaDecodeBlocks, mla_decode, mla_decode_reference
from tests.pallas.paged_cases import f32, paged_case
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

BLOCKS = MlaDecodeBlocks(block_rows=16, block_keys=16, split_keys=32)
LAST = [-1, 0, 32, 89]


def _case(heads: int, width: int, queries: int, dtype: str) -> tuple[jax.Array, ...]:
    case = paged_case(LAST, heads=heads, kv=1, width=width, queries=queries, dtype=dtype)
    return case.q, case.k_pages[:, 0], case.page_table, case.positions


def _kernel(**options: Any) -> Any:
    options = {"scale": 0.2, "blocks": BLOCKS, "return_lse": True, "interpret": True, **options}
    return jax.jit(functools.partial(mla_decode, **options))


@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "queries", "dtype"),
    [(16, 64, 16, 1, "float32"), (5, 40, 8, 5, "float32"), (24, 128, 16, 1, "bfloat16")],
)
def test_equals_the_plain_form(
    heads: int, rank: int, rotated: int, queries: int, dtype: str
) -> None:
    case = _case(heads, rank + rotated, queries, dtype)
    kernel = _kernel(rank=rank)
    o, lse = kernel(*case)
    reference = functools.partial(mla_decode_reference, rank=rank, scale=0.2)
    want, want_lse = jax.jit(reference)(*case)
    near = tolerance(dtype, 90)
    np.testing.assert_allclose(f32(o), f32(want), **near)
    np.testing.assert_allclose(f32(lse), f32(want_lse), **near)
    np.testing.assert_array_equal(f32(o)[0], 0)
    np.testing.assert_array_equal(f32(kernel(*case)[0]), f32(o))
    if queries == 1 and dtype == "float32":
        q, pool, table, positions = case
        alone = kernel(q[3:], pool, table[3:], positions[3:])
        np.testing.assert_array_equal(f32(alone[0][0]), f32(o[3]))
        np.testing.assert_array_equal(f32(alone[1][0]), f32(lse[3]))


def test_is_attention_of_heads_with_keys_and_values_of_their_own() -> None:
    # Unabsorbed: k_n = [W_uk,n c, r], v_n = W_uv,n c; one row, one query at the last of 20 tokens.
    rng = np.random.default_rng(1)
    heads, rank, rotated, nope = 4, 16, 16, 8
    w_uk, w_uv = rng.standard_normal((2, heads, nope, rank))
    cache = rng.standard_normal((20, rank + rotated))
    q = rng.standard_normal((heads, nope + rotated))
    c, r = cache[:, :rank], cache[:, rank:]
    want = np.empty((heads, nope))
    for n in range(heads):
        k = np.concatenate([c @ w_uk[n].T, r], axis=1)
        p = np.exp(0.2 * (k @ q[n]))
        want[n] = (p / p.sum()) @ (c @ w_uv[n].T)
    absorbed = np.concatenate([np.einsum("nd,ndr->nr", q[:, :nope], w_uk), q[:, nope:]], axis=1)
    o, _ = _kernel(rank=rank)(
        jnp.asarray(absorbed, jnp.float32)[None, None],
        jnp.asarray(cache, jnp.float32).reshape(5, 4, -1),
        jnp.arange(5, dtype=jnp.int32)[None, :],
        jnp.asarray([[19]], jnp.int32),
    )
    got = np.einsum("nr,ndr->nd", f32(o)[0, 0], w_uv)
    np.testing.assert_allclose(got, want, **tolerance("float32", 90))


def test_refuses_what_it_cannot() -> None:
    q, pool, table, positions = _case(4, 32, 1, "float32")
    with pytest.raises(ValueError, match="rank 32"):
        mla_decode(q, pool, table, positions, rank=32, scale=1.0, interpret=True)
    with pytest.raises(NotImplementedError, match="no latents of float8_e4m3fn"):
        mla_decode(
            q, pool.astype(jnp.float8_e4m3fn), table, positions, rank=16, scale=1.0, interpret=True
        )
    with pytest.raises(ValueError, match="multiple of block_keys"):
        MlaDecodeBlocks(split_keys=100)
    tuned = MlaDecodeBlocks.for_shape(1, 4096, num_heads=128, split="tuned")
    assert tuned.split_keys < MlaDecodeBlocks.for_shape(1, 4096, num_heads=128).split_keys
