"""Planar weights in panels: the products of the weight that `dequantize` defines."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from infer.native.embed import embed
from infer.native.linear import gated_mlp, linear
from infer.native.repack import repack
from infer.ops import linear as ops
from infer.ops.quantized import quantized_product
from infer.quant.gptq import gptq
from infer.quant.methods import FP8, GPTQ, MX, NF4, NVFP4, RTN, LLMInt8, Method, SmoothQuant
from infer.quant.qarray import QArray, dequantize
from tests.native.weights import random_rows, rms, rms_norm, rounded

INTEGERS = [
    RTN(bits=bits, group_size=group, symmetric=symmetric, scale_dtype=dtype)
    for bits in (2, 3, 4, 5, 6, 8)
    for group, symmetric, dtype in (
        (16, True, "float16"),
        (16, False, "float32"),
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
    with pytest.raises(NotImplementedError, match=r"groups of 16 or a multiple of 32 .*, not 8"):
        repack(weight((16, 64), RTN(bits=8, group_size=8)))
    with pytest.raises(NotImplementedError, match="rounds activations to outliers for integers"):
        repack(weight((16, 64), LLMInt8()))


# ---- Orders and roundings of a weight's own ------------------------------------------------------


def ordered(shape: tuple[int, int], activations: str | None = None) -> QArray:
    method = GPTQ(bits=4, group_size=32, act_order=True, activations=activations)
    energy = np.random.default_rng(2).uniform(0.5, 2, shape[1]).astype(np.float32)
    q, ok = gptq(
        jnp.asarray(0.05 * random_rows(*shape, seed=1)),
        jnp.diag(jnp.asarray(energy)),
        jnp.float32(0.01),
        format=method.format_for(shape),
        act_order=True,
    )
    assert bool(ok) and not np.array_equal(np.asarray(q.perm), np.arange(shape[1]))
    return q


def test_columns_in_an_order_of_their_own():
    q = ordered((40, 96))
    packed, w = repack(q), np.asarray(dequantize(q), np.float64)
    assert packed.nbytes == packed.data.nbytes + 4 * 96
    x, gain = random_rows(5, 96), np.random.default_rng(3).uniform(0.5, 2, 96).astype(np.float32)
    perm = np.asarray(q.perm)
    normed = rms_norm(x, gain, 1e-5)
    residual = random_rows(5, 40, seed=9)
    norm = (jnp.asarray(gain), 1e-5)
    (y,) = ops.linears(jnp.asarray(x), (packed,), (None,), norm=norm, residual=jnp.asarray(residual))
    seen = np.empty_like(normed)
    seen[:, perm] = rounded(normed[:, perm])  # groups are of the codes' order
    want = seen @ w.T + residual
    assert rms(np.asarray(y) - want) < 1e-3 * rms(want)
    rows = ops.embed(packed, jnp.asarray([3, 39], jnp.int32), jnp.float32)
    np.testing.assert_allclose(np.asarray(rows), w[[3, 39]], rtol=2e-7)


OWN = {
    "a token": RTN(bits=8, group_size="channel", activations="int8"),
    "a token, groups, zero points": RTN(
        bits=4, group_size=16, symmetric=False, activations="int8"
    ),
    "stored": SmoothQuant(static=True),
    "e4m3": FP8(activations="token"),
    "e4m3 of blocks": FP8(granularity="block", activations="block"),
}


def own(name: str, shape: tuple[int, int]) -> QArray:
    method = OWN[name]
    if isinstance(method, SmoothQuant):
        q = weight(shape, method.weights)
        return dataclasses.replace(
            q, act_scale=jnp.float32(0.03), format=method.format_for(shape)
        )
    return weight(shape, method)


@pytest.mark.parametrize("name", OWN)
def test_activations_are_rounded_as_the_format_says(name: str) -> None:
    q = own(name, (40, 288))
    x = random_rows(19, 288)
    x[4] = 0
    want = np.asarray(quantized_product(jnp.asarray(x), q))
    got = np.asarray(ops.linear(jnp.asarray(x), repack(q)))
    assert rms(got - want) < 2e-6 * rms(want)
    assert (got[4] == 0).all()
    by_groups = rounded(x) @ np.asarray(dequantize(q), np.float64).T
    assert rms(by_groups - want) > 1e-3 * rms(want)  # not what was done
    alone = np.asarray(ops.linear(jnp.asarray(x[3:4]), repack(q)))
    np.testing.assert_array_equal(alone[0], got[3])


def test_the_norm_before_and_the_gate_between() -> None:
    q = own("a token", (64, 96))
    x, gain = random_rows(3, 96), np.random.default_rng(3).uniform(0.5, 2, 96).astype(np.float32)
    norm = (jnp.asarray(gain), 1e-5)
    packed = repack(q)
    got = ops.linears(jnp.asarray(x), (packed, packed), (None, None), norm=norm)
    normed = jnp.asarray(rms_norm(x, gain, 1e-5), jnp.float32)
    for y in got:
        # A code may differ where the norms differ in the last bit.
        assert rms(np.asarray(y) - quantized_product(normed, q)) < 2e-3 * rms(np.asarray(y))
    down = own("stored", (96, 64))
    gate = up = packed
    y = ops.gated_mlp(jnp.asarray(x), (gate, up, repack(down)), (None,) * 3, "silu", norm=norm)
    h = np.asarray(quantized_product(normed, q), np.float64)
    inner = jnp.asarray(h / (1 + np.exp(-h)) * h, jnp.float32)
    want = np.asarray(quantized_product(inner, down))
    assert rms(np.asarray(y) - want) < 5e-3 * rms(want)


def test_a_rounding_that_does_not_go_with_its_arguments() -> None:
    packed = repack(weight((16, 64), RTN(bits=8, group_size=32)))
    x = jnp.ones((2, 64))
    with pytest.raises(ValueError, match="rounding is 2; act_scale goes with 2"):
        linear(x, (packed,), rounding=2)
    floats = repack(weight((16, 64), FP8()))
    with pytest.raises(Exception, match="rounding 1 goes with weights of integers"):
        linear(x, (floats,), rounding=1)[0].block_until_ready()


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
