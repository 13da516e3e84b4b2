"""Many tokens with packed weights on Hopper, interpreted, against the definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops import choice
from infer.ops.linear import linear
from infer.pallas.hopper_matmul import HopperMatmulBlocks
from infer.pallas.quantized_matmul_mosaic import (
    LIMITS,
    quantized_matmul_mosaic,
    quantized_matmul_mosaic_reference,
)
from infer.quant.methods import MX, NF4, RTN
from tests.cases.kernels.quantized_matmul_mosaic import METHODS, arrays
from tests.pallas.mosaic import RACE, detecting_races, needs_interpreter

pytestmark = pytest.mark.kernels

# Fewer slots than steps, so that each is filled again; outputs and tokens that fill no tile.
OUT, WIDTH, TOKENS = 96, 384, 21
WIDE = HopperMatmulBlocks(block_out=128, block_tokens=16, num_stages=2)
NARROW = HopperMatmulBlocks(block_out=64, block_tokens=32, num_stages=2)


def _args(name: str, dtype: str = "bfloat16", tokens: int = TOKENS) -> tuple[Any, ...]:
    return arrays(name, tokens, OUT, WIDTH, dtype, jax.random.key(3))


def _check(args: tuple[Any, ...], blocks: HopperMatmulBlocks) -> None:
    y = quantized_matmul_mosaic(*args, blocks=blocks, interpret=True)
    assert y.shape == (args[0].shape[0], OUT) and y.dtype == jnp.float32
    # Codes and activations are exact in 16 bits: what differs is the order of float32 sums.
    want = quantized_matmul_mosaic_reference(*args)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "dtype", "blocks"),
    [
        ("int4 g128", "bfloat16", WIDE),
        ("int4 g128", "float16", NARROW),
        ("int4 channel", "bfloat16", NARROW),
        ("int8 channel", "bfloat16", WIDE),
        ("int8 channel", "float16", NARROW),
        ("int8 g128", "bfloat16", NARROW),
    ],
)
def test_equals_the_definition(name: str, dtype: str, blocks: HopperMatmulBlocks) -> None:
    _check(_args(name, dtype), blocks)


@needs_interpreter
@pytest.mark.parametrize(("bits", "name"), [(4, "int4 channel"), (8, "int8 channel")])
def test_every_code_is_its_number(bits: int, name: str) -> None:
    # Input i of output o has code o + i; a token of the unit matrix reads one column.
    _, weight = arrays(name, 1, 32, 128, "bfloat16", jax.random.key(1))
    at = np.arange(32)[:, None] * 8 + np.arange(128)[None, :]
    codes = (at % (1 << bits)).astype(np.uint8)
    packed = codes if bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)
    weight = weight.__class__.planar(
        jnp.asarray(packed), jnp.ones_like(weight.scale), weight.format, (32, 128)
    )
    y = quantized_matmul_mosaic(
        jnp.eye(128, dtype=jnp.bfloat16), weight, blocks=WIDE, interpret=True
    )
    want = codes.astype(np.float32).T - (1 << (bits - 1))
    np.testing.assert_array_equal(np.asarray(y), want)


@needs_interpreter
def test_a_row_alone_and_a_second_run_give_the_same_bits() -> None:
    x, weight = _args("int4 g128")
    run = lambda x: np.asarray(quantized_matmul_mosaic(x, weight, blocks=WIDE, interpret=True))
    all_rows = run(x)
    np.testing.assert_array_equal(all_rows, run(x))
    np.testing.assert_array_equal(all_rows[18:19], run(x[18:19]))


@needs_interpreter
@pytest.mark.parametrize("name", ["int4 g128", "int8 channel"])
def test_has_no_race(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with detecting_races():
        _check(_args(name, tokens=16), WIDE)
    assert RACE not in capfd.readouterr().out


def test_no_rows_give_none() -> None:
    x, weight = _args("int4 g128")
    y = quantized_matmul_mosaic(x[:0], weight)
    assert y.shape == (0, OUT) and y.dtype == jnp.float32


def test_the_sizes_keep_to_registers_and_shared_memory() -> None:
    for bits, stages in ((4, 5), (8, 4)):
        limits = LIMITS[bits]
        sizes = HopperMatmulBlocks.for_shape(4096, 14336, limits)
        assert sizes == HopperMatmulBlocks(block_tokens=128, num_stages=stages)
        for rows in (1, 64, 512):
            HopperMatmulBlocks.for_shape(rows, 4096, limits).check("here", limits)
    x, weight = _args("int8 g128")
    with pytest.raises(NotImplementedError, match="256 tokens a consumer of 128; take fewer"):
        quantized_matmul_mosaic(x, weight, blocks=HopperMatmulBlocks(block_tokens=256))


@pytest.mark.parametrize(
    "method",
    [RTN(group_size=64), RTN(symmetric=False), RTN(bits=5), NF4(), MX(), RTN(activations="int8")],
    ids=["groups of 64", "zero points", "5 bits", "nf4", "mxfp4", "rounded activations"],
)
def test_what_it_cannot_do_is_named(method: Any) -> None:
    weight = method.pack(jnp.ones((32, 128), jnp.float32))
    with pytest.raises(NotImplementedError, match=r"in Mosaic: .* of shape \(32, 128\) has no"):
        quantized_matmul_mosaic(jnp.ones((2, 128), jnp.bfloat16), weight)


def test_dtypes_and_sizes_that_it_cannot_do_are_named() -> None:
    x, weight = _args("int4 g128", "float32")
    with pytest.raises(NotImplementedError, match="x of float32; it takes bfloat16 and float16"):
        quantized_matmul_mosaic(x, weight)
    with pytest.raises(ValueError, match=r"x must be \[T, I\], the weight \(O, I\)"):
        quantized_matmul_mosaic(x[:, :256].astype(jnp.bfloat16), weight)
    for out, width in ((40, 128), (32, 200)):
        x, weight = arrays("int8 channel", 2, out, width, "bfloat16", jax.random.key(3))
        with pytest.raises(NotImplementedError, match="multiple of 32 outputs and of 128 inputs"):
            quantized_matmul_mosaic(x, weight)


def test_the_op_has_the_form_for_planar_integers_only() -> None:
    x = jnp.ones((300, WIDTH), jnp.bfloat16)
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def chosen(weight: Any, name: str | None) -> str:
        run = lambda x, weight: linear(x, weight, implementation=name)
        with jax.sharding.use_abstract_mesh(mesh), choice.recording() as choices:
            y = jax.eval_shape(run, x, weight)
        assert y.shape == (300, OUT) and y.dtype == x.dtype
        return choices[0].implementation

    packed = lambda method: method.pack(jnp.ones((OUT, WIDTH)))
    for method in METHODS.values():
        assert chosen(packed(method), "mosaic") == "mosaic"
        # Not measured yet: only by name.
        assert chosen(packed(method), None) == "xla"
    assert chosen(packed(NF4()), "mosaic") == "xla"
    with pytest.raises(NotImplementedError, match=r"in Mosaic: .* has no such.* on NVIDIA H200"):
        chosen(packed(RTN(group_size=64)), "mosaic")
