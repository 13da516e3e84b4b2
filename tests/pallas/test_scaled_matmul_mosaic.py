"""8-bit products on Hopper, interpreted, against the definition."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from infer.ops import choice
from infer.ops.linear import linear
from infer.ops.quantized import int8_activations
from infer.pallas import hopper_matmul
from infer.pallas.hopper_matmul import HopperMatmulBlocks
from infer.pallas.scaled_matmul import scaled_matmul
from infer.pallas.scaled_matmul_mosaic import (
    LIMITS,
    scaled_matmul_mosaic,
    scaled_matmul_mosaic_reference,
)
from infer.quant.methods import FP8, RTN, LLMInt8
from tests.cases.kernels.scaled_matmul import METHODS, arrays
from tests.pallas.mosaic import RACE, detecting_races, needs_interpreter

pytestmark = pytest.mark.kernels

# Fewer slots than steps, so that each is filled again; outputs and tokens that fill no tile.
OUT, WIDTH, TOKENS = 96, 384, 21
WIDE = HopperMatmulBlocks(block_out=128, block_tokens=16, num_stages=2)
NARROW = HopperMatmulBlocks(block_out=64, block_tokens=32, num_stages=2)


def _args(name: str, tokens: int = TOKENS) -> tuple[Array, Array, Any]:
    return arrays(name, tokens, OUT, WIDTH, jax.random.key(3))


@needs_interpreter
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("blocks", [WIDE, NARROW], ids=["wide", "narrow"])
def test_equals_the_definition(name: str, blocks: HopperMatmulBlocks) -> None:
    args = _args(name)
    y = scaled_matmul_mosaic(*args, blocks=blocks, interpret=True)
    assert y.shape == (TOKENS, OUT) and y.dtype == jnp.float32
    want = scaled_matmul_mosaic_reference(*args)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)


@needs_interpreter
def test_integers_have_the_bits_of_the_reference_and_of_the_triton_form() -> None:
    x, scale, weight = _args("int8")
    y = np.asarray(scaled_matmul_mosaic(x, scale, weight, blocks=WIDE, interpret=True))
    w = np.asarray(weight.data).astype(np.int64) - 128
    sums = np.asarray(x).astype(np.int64) @ w.T
    by_hand = sums.astype(np.float32) * (np.asarray(weight.scale).T * np.asarray(scale))
    np.testing.assert_array_equal(y, by_hand)
    np.testing.assert_array_equal(y, scaled_matmul_mosaic_reference(x, scale, weight))
    np.testing.assert_array_equal(y, scaled_matmul(x, scale, weight, interpret=True))


@needs_interpreter
def test_the_largest_codes_do_not_overflow() -> None:
    # The least sum of 384 products of int8: far past 16 bits, and past the 24 of float32.
    _, _, weight = _args("int8")
    low = dataclasses.replace(weight, data=jnp.zeros_like(weight.data))
    x, scale = jnp.full((1, WIDTH), 127, jnp.int8), jnp.ones((1, 1))
    y = scaled_matmul_mosaic(x, scale, low, blocks=WIDE, interpret=True)
    want = np.float32(-128 * 127 * WIDTH) * np.asarray(weight.scale).T
    np.testing.assert_array_equal(np.asarray(y), want)


@needs_interpreter
@pytest.mark.parametrize("name", ["fp8 channel", "fp8 128x128"])
def test_a_row_alone_and_a_second_run_give_the_same_bits(name: str) -> None:
    x, scale, weight = _args(name)
    run = lambda x, scale: np.asarray(
        scaled_matmul_mosaic(x, scale, weight, blocks=WIDE, interpret=True)
    )
    all_rows = run(x, scale)
    np.testing.assert_array_equal(all_rows, run(x, scale))
    np.testing.assert_array_equal(all_rows[18:19], run(x[18:19], scale[18:19]))


@needs_interpreter
def test_two_groups_of_tiles_and_two_stores_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_matmul, "_GROUP", 2)
    monkeypatch.setattr(hopper_matmul, "_STORED", 8)
    x, scale, weight = arrays("int8", 40, 32, 128, jax.random.key(5))
    y = scaled_matmul_mosaic(x, scale, weight, blocks=WIDE, interpret=True)
    np.testing.assert_array_equal(y, scaled_matmul_mosaic_reference(x, scale, weight))


@needs_interpreter
@pytest.mark.parametrize("name", ["int8", "fp8 128x128"])
def test_has_no_race(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    args = _args(name)
    with detecting_races():
        y = scaled_matmul_mosaic(*args, blocks=WIDE, interpret=True)
        np.testing.assert_allclose(y, scaled_matmul_mosaic_reference(*args), rtol=2e-5, atol=2e-5)
    assert RACE not in capfd.readouterr().out


@needs_interpreter
def test_a_missing_fence_is_caught(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Of the writes of the output before TMA reads them.
    unfenced = types.SimpleNamespace(**{**vars(plgpu), "commit_smem": lambda: None})
    monkeypatch.setattr(hopper_matmul, "plgpu", unfenced)
    with detecting_races():
        jax.block_until_ready(
            scaled_matmul_mosaic(*_args("fp8 channel", 8), blocks=WIDE, interpret=True)
        )
    assert RACE in capfd.readouterr().out


@pytest.mark.parametrize("name", ["int8", "fp8 128x128"])
def test_no_rows_give_none(name: str) -> None:
    x, scale, weight = _args(name)
    y = scaled_matmul_mosaic(x[:0], scale[:0], weight)
    assert y.shape == (0, OUT) and y.dtype == jnp.float32


def test_the_sizes_keep_to_registers_and_shared_memory() -> None:
    sizes = lambda rows, out, code: HopperMatmulBlocks.for_shape(rows, out, LIMITS[code])
    # Few tokens: rows of the weight in halves, so that more multiprocessors read it.
    assert sizes(64, 4096, "int") == HopperMatmulBlocks(block_out=64, block_tokens=64, num_stages=8)
    assert sizes(5, 128256, "int").block_out == 128
    assert sizes(512, 4096, "int").block_tokens == 128
    assert sizes(4096, 4096, "int") == HopperMatmulBlocks(block_tokens=256, num_stages=4)
    assert sizes(4096, 4096, "e4m3") == HopperMatmulBlocks(block_tokens=128, num_stages=6)
    for code, limits in LIMITS.items():
        for rows in (1, 64, 512, 4096):
            sizes(rows, 4096, code).check("here", limits)


@pytest.mark.parametrize(
    "method",
    [RTN(bits=8, group_size=64), RTN(bits=8, symmetric=False), FP8(code="e5m2")],
    ids=["groups", "zero points", "e5m2"],
)
def test_what_it_cannot_do_is_named(method: Any) -> None:
    weight = method.pack(jnp.ones((32, 128), jnp.float32))
    x, scale = int8_activations(jnp.ones((2, 128), jnp.float32))
    with pytest.raises(NotImplementedError, match=r"in Mosaic: .* of shape \(32, 128\) has no"):
        scaled_matmul_mosaic(x, scale, weight)


@pytest.mark.parametrize("shape", [(40, 128), (32, 200)])
def test_sizes_that_tma_cannot_tile_are_named(shape: tuple[int, int]) -> None:
    x, scale, weight = arrays("int8", 2, *shape, jax.random.key(3))
    with pytest.raises(NotImplementedError, match="multiple of 32 outputs and of 128 inputs"):
        scaled_matmul_mosaic(x, scale, weight)


def test_refuses_arrays_that_do_not_belong_together() -> None:
    x, scale, weight = _args("int8", 2)
    with pytest.raises(ValueError, match=r"pass int8 \[T, 384\] and \[T, 1\]"):
        scaled_matmul_mosaic(x.astype(jnp.float8_e4m3fn), scale, weight)
    with pytest.raises(ValueError, match="block_out is 32; use 64 or 128"):
        HopperMatmulBlocks(block_out=32)
    with pytest.raises(ValueError, match="block_tokens is 24; use 16"):
        HopperMatmulBlocks(block_tokens=24)
    with pytest.raises(ValueError, match="num_stages is 1; use 2 or more"):
        HopperMatmulBlocks(num_stages=1)
    x, scale, weight = _args("fp8 channel", 2)
    with pytest.raises(NotImplementedError, match="256 tokens a consumer of 128; take fewer"):
        scaled_matmul_mosaic(x, scale, weight, blocks=HopperMatmulBlocks(block_tokens=256))


def test_the_op_has_the_form_for_rounded_activations_only() -> None:
    x = jnp.ones((2, WIDTH), jnp.bfloat16)
    _, _, weight = _args("int8", 2)
    with pytest.raises(NotImplementedError, match="linear in mosaic needs an NVIDIA GPU"):
        linear(x, weight, implementation="mosaic")
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    run = lambda x, weight: linear(x, weight, implementation="mosaic")

    def chosen(weight: Any) -> str:
        with jax.sharding.use_abstract_mesh(mesh), choice.recording() as choices:
            y = jax.eval_shape(run, x, weight)
        assert y.shape == (2, OUT) and y.dtype == x.dtype
        return choices[0].implementation

    assert chosen(weight) == "mosaic"
    assert chosen(LLMInt8().pack(jnp.ones((OUT, WIDTH)))) != "mosaic"
    wrong = RTN(bits=8, group_size=64, activations="int8").pack(jnp.ones((OUT, WIDTH)))
    with pytest.raises(NotImplementedError, match=r"in Mosaic: .* has no such.* on NVIDIA H200"):
        chosen(wrong)
