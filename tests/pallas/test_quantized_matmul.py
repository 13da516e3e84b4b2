"""Products with packed weights as one kernel, interpreted, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.norm import rms_norm
from infer.pallas.quantized_matmul import (
    QuantizedMatmulBlocks,
    quantized_matmul,
    quantized_matmul_reference,
)
from infer.quant.methods import RTN, LLMInt8
from tests.cases.kernels.quantized_matmul import NAMES, packed
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels

# 80 rows do not fill tiles of 32, and 512 columns are cut unevenly.
OUT, WIDTH = 80, 512
BLOCKS = QuantizedMatmulBlocks(block_out=32, splits=3)


def _x(rows: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal((rows, WIDTH)), dtype)


def _error(y: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name: str) -> None:
    weight, x = packed(name, OUT, WIDTH, jax.random.key(3)), _x(5)
    y = quantized_matmul(x, weight, blocks=BLOCKS, interpret=True)
    assert y.shape == (5, OUT) and y.dtype == jnp.float32
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    weight, x = packed("int4 g64 zero", OUT, WIDTH, jax.random.key(4)), _x(16, "bfloat16")
    y = quantized_matmul(x, weight, interpret=True)
    for rows in (1, 3):
        alone = quantized_matmul(x[5 : 5 + rows], weight, interpret=True)
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(y[5 : 5 + rows]))


def test_many_rows_take_larger_tiles() -> None:
    weight, x = packed("Q8_0", OUT, WIDTH, jax.random.key(5)), _x(70, "bfloat16")
    y = quantized_matmul(x, weight, interpret=True)
    # bfloat16 products are exact in float32, so only the order of sums differs.
    assert _error(y, quantized_matmul_reference(x, weight)) < 1e-6


def test_rows_that_are_no_whole_number_of_steps() -> None:
    method = RTN(bits=8, group_size="channel")
    w = jax.random.normal(jax.random.key(6), (24, 200), jnp.float32)
    x = _x(2)[:, :200]
    with pytest.raises(NotImplementedError, match="group that is a power of two"):
        # 200 columns are no whole number of steps of 128, and their scale is the row's: refused
        # rather than read past the end.
        quantized_matmul(x, method.pack(w), interpret=True)


@pytest.mark.parametrize(
    "method",
    [RTN(bits=3, group_size=64), RTN(bits=4, group_size=16), LLMInt8()],
    ids=["3 bits", "groups of 16", "rounded activations"],
)
def test_what_it_cannot_do_is_named(method: object) -> None:
    w = jax.random.normal(jax.random.key(6), (16, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"in Triton: .* of shape \(16, 128\) is not"):
        quantized_matmul(_x(1)[:, :128], method.pack(w), interpret=True)  # type: ignore[attr-defined]


def test_refuses_shapes_that_do_not_fit() -> None:
    weight = packed("Q8_0", OUT, WIDTH, jax.random.key(5))
    with pytest.raises(ValueError, match=r"x must be \[T, I\]"):
        quantized_matmul(_x(2)[:, :64], weight, interpret=True)
    with pytest.raises(ValueError, match="block_out is 48; use a power of two"):
        QuantizedMatmulBlocks(block_out=48)


def _around(dtype: str, gated: bool) -> dict[str, object]:
    """Return everything that may stand around a product, small and large numbers in it."""
    rng = np.random.default_rng(11)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    more: dict[str, object] = {"gain": draw(WIDTH), "eps": 0.5, "bias": draw(OUT)}
    more |= {"residual": 30 * draw(5, OUT)}
    if gated:
        up = packed("nvfp4", OUT, WIDTH, jax.random.key(9))
        more |= {"up": up, "up_bias": draw(OUT), "activation": "gelu_tanh"}
    return more


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_gate_bias_and_residual_are_those_of_the_definition(gated: bool, splits: int) -> None:
    # NVFP4 has a scale of the whole weight besides.
    weight, more = packed("nvfp4", OUT, WIDTH, jax.random.key(8)), _around("float32", gated)
    x = _x(5).at[3].mul(100.0)
    blocks = QuantizedMatmulBlocks(block_out=32, splits=splits)
    y = quantized_matmul(x, weight, blocks=blocks, interpret=True, **more)
    want = quantized_matmul_reference(x, weight, **more)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)


def test_a_format_with_minima_sums_what_is_normalised() -> None:
    weight, gain = packed("Q4_K", OUT, WIDTH, jax.random.key(8)), _around("float32", False)["gain"]
    y = quantized_matmul(_x(5), weight, gain=gain, eps=1e-5, interpret=True)
    want = quantized_matmul_reference(_x(5), weight, gain=gain, eps=1e-5)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_a_fused_row_has_the_same_bits_in_any_batch(gated: bool) -> None:
    weight, more = packed("nvfp4", OUT, WIDTH, jax.random.key(8)), _around("bfloat16", gated)
    more["dtype"] = "bfloat16"
    y = quantized_matmul(_x(5, "bfloat16"), weight, interpret=True, **more)
    assert y.dtype == jnp.bfloat16
    more["residual"] = more["residual"][2:3]  # type: ignore[index]
    alone = quantized_matmul(_x(5, "bfloat16")[2:3], weight, interpret=True, **more)
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(y[2]))


def test_the_norm_inside_is_as_accurate_as_the_norm_before() -> None:
    """Rows of a residual stream, some channels of it wide: both forms round to bfloat16 once."""
    weight = packed("int4 g128", OUT, WIDTH, jax.random.key(8))
    x = _x(16, "float32").at[:, ::50].mul(300.0).astype(jnp.bfloat16)
    gain = jax.random.uniform(jax.random.key(2), (WIDTH,), jnp.float32, 0.01, 3.0)
    want = quantized_matmul_reference(x, weight, gain=gain, eps=1e-5)
    inside = quantized_matmul(x, weight, gain=gain, eps=1e-5, interpret=True)
    before = quantized_matmul(rms_norm(x, gain, 1e-5, "xla"), weight, interpret=True)
    assert _error(inside, want) < 1.2 * _error(before, want)
    assert _error(inside, want) < 3e-3


def test_refuses_what_stands_around_and_does_not_fit() -> None:
    x, weight = _x(2), packed("Q8_0", OUT, WIDTH, jax.random.key(5))
    other, gain = packed("Q4_0", OUT, WIDTH, jax.random.key(5)), jnp.ones(WIDTH, jnp.float32)
    call = lambda x=x, **more: quantized_matmul(x, weight, interpret=True, **more)
    with unchecked():
        for name, shape in (("gain", OUT), ("bias", WIDTH), ("residual", (1, OUT))):
            with pytest.raises(ValueError, match=rf"{name} is .*; with x \(2, 512\) it must be"):
                call(**{name: jnp.ones(shape, jnp.float32)})
    for more in ({"up": weight}, {"activation": "silu"}):
        with pytest.raises(ValueError, match="pass both or neither"):
            call(**more)
    with pytest.raises(ValueError, match="up_bias is there without up"):
        call(up_bias=jnp.ones(OUT, jnp.float32))
    with pytest.raises(ValueError, match="gate and up must be alike"):
        call(up=packed("Q8_0", 48, WIDTH, jax.random.key(5)), activation="silu")
    with pytest.raises(NotImplementedError, match="are Q8_0 and Q4_0; give them one format"):
        call(up=other, activation="silu")
    with pytest.raises(NotImplementedError, match=r"\(80, 512\) of Q8_0 with 'gelu'; there are"):
        call(up=weight, activation="gelu")
    with pytest.raises(NotImplementedError, match="norm of x in float16"):
        call(x.astype(jnp.float16), gain=gain)
