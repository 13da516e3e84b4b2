"""Planar weights in panels: the products of the weight that `dequantize` defines."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from infer.native.embed import embed
from infer.native.linear import gated_mlp, linear
from infer.native.repack import repack
from infer.quant.methods import FP8, GPTQ, MX, NF4, NVFP4, RTN, Method
from infer.quant.qarray import dequantize
from tests.native.weights import random_rows, rms, rounded

INTEGERS = [
    RTN(bits=bits, group_size=group, symmetric=symmetric, scale_dtype=dtype)
    for bits in (2, 3, 4, 5, 6, 8)
    for group, symmetric, dtype in (
        (32, True, "float16"),
        (64, False, "float16"),
        ("channel", True, "float32"),
        ("tensor", False, "float32"),
    )
]
NUMBERS = [
    FP8(),
    FP8(code="e5m2", granularity="tensor"),
    FP8(granularity="block"),
    NF4(),
    NF4(levels="fp4", double=False),
    *(MX(code=code) for code in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")),
    NVFP4(),
]


def weight(shape: tuple[int, int], method: Method):
    return method.pack(jnp.asarray(0.05 * random_rows(*shape, seed=1)))


@pytest.mark.parametrize("method", [*INTEGERS, *NUMBERS], ids=repr)
@pytest.mark.parametrize("out,width", [(40, 576), (33, 256)])
def test_products_and_rows_are_those_of_the_dequantised_weight(
    method: Method, out: int, width: int
) -> None:
    q = weight((out, width), method)
    packed, w = repack(q), np.asarray(dequantize(q), np.float64)
    x = random_rows(19, width)
    (y,) = linear(jnp.asarray(x), (packed,))
    seen = rounded(x) if method in INTEGERS else x.astype(np.float64)
    assert rms(np.asarray(y) - seen @ w.T) < 1e-5 * rms(seen @ w.T)
    (alone,) = linear(jnp.asarray(x[3:4]), (packed,))
    np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(y)[3])
    rows = embed(packed, jnp.asarray([0, out - 1, 5], jnp.int32))
    np.testing.assert_allclose(np.asarray(rows), w[[0, out - 1, 5]], rtol=2e-7)


def test_mixed_with_blocks_in_a_gated_mlp() -> None:
    gate, up = (weight((96, 64), RTN(bits=b, group_size=32)) for b in (4, 3))
    down = weight((64, 96), NF4(group_size=32))
    x = random_rows(5, 64)
    y = gated_mlp(jnp.asarray(x), repack(gate), repack(up), repack(down), "silu")
    g, u, d = (np.asarray(dequantize(q), np.float64) for q in (gate, up, down))
    a = rounded(x) @ g.T
    want = (a / (1 + np.exp(-a)) * (rounded(x) @ u.T)) @ d.T
    assert rms(np.asarray(y) - want) < 1e-5 * rms(want)


def test_bytes_are_those_of_codes_and_scales() -> None:
    q = weight((64, 1024), RTN(bits=4, group_size=128))
    per_panel = 128  # of which 16 rows have one
    assert repack(q).nbytes == q.nbytes + 4 * per_panel


def test_what_has_no_kernel_is_refused_by_name() -> None:
    odd = weight((16, 40), RTN(bits=8, group_size="channel"))
    with pytest.raises(NotImplementedError, match="multiple of 32, not 40"):
        repack(odd)
    with pytest.raises(NotImplementedError, match=r"groups that are a multiple of 32, not 16"):
        repack(weight((16, 64), RTN(bits=8, group_size=16)))
    from infer.quant.gptq import gptq

    method = GPTQ(bits=4, group_size=32, act_order=True)
    q, _ = gptq(
        jnp.asarray(random_rows(16, 64)),
        jnp.eye(64),
        jnp.float32(0.01),
        format=method.format_for((16, 64)),
        act_order=True,
    )
    with pytest.raises(NotImplementedError, match="order of their own"):
        repack(q)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (10**6, 64)},
        {"data": np.zeros((1, 32), np.uint8)},
        {"scale": np.ones((1, 2), np.float16)},
        {"data": np.zeros(64 * 32, np.uint8)},
        {"zero": np.zeros((16, 2), np.uint8)},
    ],
)
def test_parts_that_do_not_belong_together_never_reach_the_library(change: dict) -> None:
    q = dataclasses.replace(weight((16, 64), RTN(bits=4, group_size=32)), **change)
    with pytest.raises(ValueError, match="INT4-G32 of shape"):
        repack(q)
