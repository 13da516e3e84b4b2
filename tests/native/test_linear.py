"""Products and gated MLP against the weight that `dequantize` defines."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.native.linear import gated_mlp, linear
from infer.native.repack import Packed, repack
from tests.native import bits
from tests.native.weights import (
    FLOATS,
    FORMATS,
    PACKED,
    dense,
    random_rows,
    random_weight,
    rms,
    rms_norm,
    rounded,
)
from tests.tolerances import tolerance


def seen(name: str, x: np.ndarray) -> np.ndarray:
    """Return the activations that a weight of this format is multiplied with."""
    return x.astype(np.float64) if name in FLOATS else rounded(x)


def close(got: jax.Array, want: np.ndarray, reduction: int) -> None:
    """Compare with the tolerance of float32 sums of this length, in units of the largest."""
    atol = tolerance("float32", reduction)["atol"] * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows,out,width", [(1, 16, 256), (7, 100, 512), (70, 33, 256)])
def test_product_is_that_of_the_dequantised_weight(
    name: str, rows: int, out: int, width: int
) -> None:
    weight, x = random_weight(name, (out, width)), random_rows(rows, width)
    (y,) = linear(jnp.asarray(x), (repack(weight),))
    close(y, seen(name, x) @ dense(weight).T, width)


@pytest.mark.parametrize("name", [n for n in FORMATS if not n.endswith("_K")])
def test_widths_that_are_no_multiple_of_64(name: str) -> None:
    weight, x = random_weight(name, (17, 96)), random_rows(3, 96)
    (y,) = linear(jnp.asarray(x), (repack(weight),))
    close(y, seen(name, x) @ dense(weight).T, 96)


@pytest.mark.parametrize("name", PACKED)
def test_rounding_the_activations_costs_about_half_a_percent(name: str) -> None:
    weight = random_weight(name, (256, 512))
    x = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    (y,) = linear(jnp.asarray(x), (repack(weight),))
    exact = x.astype(np.float64) @ dense(weight).T
    # Of 32 normal values the largest is about 2.1: steps of 2.1 / 127 have the error 2.1 / 127 /
    # sqrt(12) = 0.0048.
    assert 0.003 < rms(y - exact) / rms(exact) < 0.0065


def test_by_hand() -> None:
    # d = 2, so that the codes are x / 2 and nothing is rounded.
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 1], x[0, 31] = 254, -4, 6
    blocks = np.zeros((2, 34), np.uint8)  # Q8_0: d, codes
    blocks[:, :2] = np.array([0.5, -2], np.float16)[:, None].view(np.uint8)
    codes = blocks[:, 2:].view(np.int8)
    codes[0, [0, 1, 31]] = 1, 2, -128
    codes[1, [0, 1, 31]] = -3, 5, 127
    from infer.quant.blocks import FORMATS as BLOCKS
    from infer.quant.qarray import QArray

    (y,) = linear(jnp.asarray(x), (repack(QArray.create(blocks, BLOCKS["Q8_0"], (2, 32))),))
    assert y.tolist() == [
        [0.5 * (254 - 8 - 768), -2.0 * (-3 * 254 - 20 + 762)],
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_place(name: str) -> None:
    weight, x = repack(random_weight(name, (40, 256))), jnp.asarray(random_rows(70, 256))
    (every,) = linear(x, (weight,))
    for rows in (1, 2, 3, 7, 8, 33, 64):
        (y,) = linear(x[:rows], (weight,))
        assert np.array_equal(y, every[:rows]), rows
    (y,) = linear(x[::-1], (weight,))
    assert np.array_equal(y[::-1], every)


@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_a_row_has_the_same_bits_in_batches_of_1_to_33(name: str) -> None:
    x = jnp.asarray(random_rows(33, 256))
    gate, up = (repack(random_weight(name, (64, 256), seed=s)) for s in (1, 2))
    down = repack(random_weight("Q8_0", (256, 64), seed=3))
    mlp = jax.jit(lambda x: gated_mlp(x, gate, up, down, "silu", residual=True))
    every = mlp(x)
    for rows in range(1, 33):
        assert np.array_equal(mlp(x[:rows]), every[:rows]), rows


@pytest.mark.parametrize("isa,threads", [("avx2", 1), ("avx2", 3), ("avx512", 1), ("avx512", 7)])
def test_bits_depend_on_neither_instructions_nor_threads(isa: str, threads: int) -> None:
    env = {**os.environ, "INFER_NATIVE_ISA": isa, "INFER_NUM_THREADS": str(threads)}
    run = [sys.executable, "-m", "tests.native.bits"]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=300)
    if "and the best set here is" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == f"{isa} {threads}"
    got = {line.split(" ", 1)[1]: line.split(" ", 1)[0] for line in lines}
    assert got == bits.digests()


def test_norm_bias_and_residual() -> None:
    weight, x = random_weight("Q4_1", (40, 96)), random_rows(5, 96)
    gain, bias, residual = (random_rows(*s, seed=9) for s in [(1, 96), (1, 40), (5, 40)])
    (y,) = linear(
        jnp.asarray(x),
        (repack(weight),),
        norm_gain=jnp.asarray(gain[0]),
        eps=0.1,
        biases=(jnp.asarray(bias[0]),),
        residual=jnp.asarray(residual),
    )
    # Where the norm's last bit decides a rounding, a code differs by one.
    want = rounded(rms_norm(x, gain[0], 0.1)) @ dense(weight).T + bias + residual
    assert rms(y - want) < 1e-4 * rms(want)


def test_norm_of_unrounded_activations() -> None:
    weight, x = random_weight("F32", (40, 96)), random_rows(5, 96)
    gain = random_rows(1, 96, seed=9)[0]
    (y,) = linear(jnp.asarray(x), (repack(weight),), norm_gain=jnp.asarray(gain), eps=0.1)
    close(y, rms_norm(x, gain, 0.1) @ dense(weight).T, 96)


def test_weights_of_several_formats_share_their_activations() -> None:
    x = jnp.asarray(random_rows(9, 256))
    weights = [
        repack(random_weight(n, (o, 256))) for n, o in [("Q4_K", 48), ("Q6_K", 20), ("BF16", 16)]
    ]
    bias = jnp.asarray(random_rows(1, 20, seed=9)[0])
    together = linear(x, weights, biases=(None, bias, None))
    alone = [
        linear(x, (w,), biases=(b,))[0] for w, b in zip(weights, (None, bias, None), strict=True)
    ]
    for y, want in zip(together, alone, strict=True):
        assert np.array_equal(y, want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q8_0"])
def test_gated_mlp(activation: str, name: str) -> None:
    x, gain = random_rows(9, 64), random_rows(1, 64, seed=8)[0]
    gate, up, down = (
        random_weight(name, s, seed=i) for i, s in enumerate([(96, 64), (96, 64), (64, 96)])
    )
    y = gated_mlp(
        jnp.asarray(x),
        repack(gate),
        repack(up),
        repack(down),
        activation,
        norm_gain=jnp.asarray(gain),
        eps=1e-5,
        residual=True,
    )
    n = seen(name, rms_norm(x, gain, 1e-5))
    g, u = n @ dense(gate).T, n @ dense(up).T
    tanh = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
    acted = g / (1 + np.exp(-g)) if activation == "silu" else g / 2 * (1 + tanh)
    want = seen(name, acted * u) @ dense(down).T + x
    if name == "F32":
        close(y, want, 96)
    else:  # a code differs by one where a last bit decides its rounding
        assert rms(y - want) < 1e-3 * rms(want)


def test_gated_mlp_of_large_gates_is_finite() -> None:
    eye = repack(jnp.eye(32, dtype=jnp.float32))
    x = jnp.asarray([[-1e30, -100, -88, 0, 88, 100, 1e18] + [0] * 25], jnp.float32)
    for activation in ("silu", "gelu_tanh"):
        y = gated_mlp(x, eye, eye, eye, activation)
        want = [0, 0, 0, 0, 88**2, 100**2, 1e36]
        np.testing.assert_allclose(y[0, :7], want, rtol=1e-6, atol=1e-30)


def test_nan_and_zero_rows() -> None:
    x = random_rows(10, 64)
    weight = repack(random_weight("Q4_0", (40, 64)))
    (clean,) = linear(jnp.asarray(x), (weight,))
    x[2, 5], x[4, 63], x[6] = np.nan, np.inf, 0
    (y,) = linear(jnp.asarray(x), (weight,))
    assert not np.isfinite(y[2]).any() and not np.isfinite(y[4]).any() and not np.any(y[6])
    others = [0, 1, 3, 5, 7, 8, 9]
    assert np.array_equal(y[jnp.asarray(others)], clean[jnp.asarray(others)])


def test_no_rows() -> None:
    weight = repack(random_weight("Q4_0", (64, 64)))
    x = jnp.zeros((0, 64), jnp.float32)
    assert linear(x, (weight,))[0].shape == (0, 64)
    assert gated_mlp(x, weight, weight, weight, "silu").shape == (0, 64)


def test_inside_jit_and_vmap() -> None:
    weight, x = repack(random_weight("Q4_0", (40, 64))), jnp.asarray(random_rows(6, 64))
    (want,) = linear(x, (weight,))
    assert np.array_equal(jax.jit(lambda x, w: linear(x, (w,))[0])(x, weight), want)
    by_two = jax.vmap(lambda x: linear(x, (weight,))[0])(x.reshape(3, 2, 64))
    assert np.array_equal(by_two.reshape(6, 40), want)


def test_concurrent_calls_do_not_disturb_each_other() -> None:
    weight = repack(random_weight("Q4_1", (2000, 512)))
    xs = [jnp.asarray(random_rows(r, 512, seed=r)) for r in (1, 3, 40)]
    call = jax.jit(lambda x, w: linear(x, (w,))[0])
    want = [np.asarray(call(x, weight)) for x in xs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(30):
            if not np.array_equal(call(xs[i], weight), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not wrong and not any(t.is_alive() for t in threads)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": jnp.zeros((2, 32), jnp.float32)}, r"x is float32 \(2, 32\)"),
        ({"x": jnp.zeros((2, 64), jnp.bfloat16)}, "x is bfloat16"),
        ({"norm_gain": jnp.zeros((32,), jnp.float32)}, "norm_gain"),
        ({"residual": jnp.zeros((1, 40), jnp.float32)}, "residual"),
        ({"biases": (jnp.zeros((64,), jnp.float32),)}, "bias"),
        ({"biases": ()}, "as many biases"),
    ],
)
def test_operands_that_do_not_fit_are_errors(change: dict, message: str) -> None:
    operands = {
        "x": jnp.zeros((2, 64), jnp.float32),
        "weights": (repack(random_weight("Q4_0", (40, 64))),),
    }
    # TypeError: the type checker that tests put on every function may be first.
    with pytest.raises((ValueError, TypeError), match=message):
        linear(**{**operands, **change})


def test_data_of_another_shape_is_an_error_before_memory_is_touched() -> None:
    weight = repack(random_weight("Q4_0", (40, 64)))
    lying = Packed(weight.data[:2], format="Q4_0", shape=(40, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"uint8 \[3, 576\]"):
        jax.block_until_ready(linear(jnp.zeros((2, 64), jnp.float32), (lying,)))
    other = Packed(weight.data, format="Q8_0", shape=(40, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match="weight has packed data"):
        jax.block_until_ready(linear(jnp.zeros((2, 64), jnp.float32), (other,)))
