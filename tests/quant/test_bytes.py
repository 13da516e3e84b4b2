"""What each format takes: by hand, by its own formula, and as arrays that are really there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import quant
from infer.plan.capacity import weight_bytes
from infer.quant.methods import Method

# The matrices of Llama 3 8B: q and o, k and v, gate and up, down.
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]

# Method -> bytes of (out, in), written out by hand.
FORMULAS = {
    quant.RTN(bits=8, group_size="channel"): lambda o, i: o * i + 2 * o,
    quant.RTN(bits=8, group_size="tensor", scale_dtype="float32"): lambda o, i: o * i + 4,
    quant.RTN(bits=6, group_size=64): lambda o, i: o * i * 6 // 8 + 2 * o * i // 64,
    quant.RTN(bits=5, group_size=64): lambda o, i: o * i * 5 // 8 + 2 * o * i // 64,
    quant.RTN(bits=4, group_size=128): lambda o, i: o * i // 2 + 2 * o * i // 128,
    quant.RTN(bits=4, group_size=128, symmetric=False): lambda o, i: o * i // 2 + 3 * o * i // 128,
    quant.GPTQ(bits=3, group_size=128): lambda o, i: o * i * 3 // 8 + 2 * o * i // 128,
    quant.AWQ(bits=4, group_size=128): lambda o, i: o * i // 2 + 3 * o * i // 128,
    quant.RTN(bits=2, group_size=32): lambda o, i: o * i // 4 + 2 * o * i // 32,
    quant.LLMInt8(): lambda o, i: o * i + 4 * o,
    quant.SmoothQuant(): lambda o, i: o * i + 4 * o,
    quant.FP8(): lambda o, i: o * i + 4 * o,
    quant.FP8(granularity="tensor"): lambda o, i: o * i + 4,
    quant.FP8(granularity="block"): lambda o, i: o * i + 4 * (o // 128) * (i // 128),
    quant.NF4(double=False): lambda o, i: o * i // 2 + 4 * o * i // 64,
    quant.NF4(): lambda o, i: o * i // 2 + o * i // 64 + 4 * o * i // 64 // 256 + 4,
    quant.MX(): lambda o, i: o * i // 2 + o * i // 32,
    quant.MX(code="e3m2"): lambda o, i: o * i * 6 // 8 + o * i // 32,
    quant.MX(code="e4m3"): lambda o, i: o * i + o * i // 32,
    quant.NVFP4(): lambda o, i: o * i // 2 + o * i // 16 + 4,
}


@pytest.mark.parametrize("method", FORMULAS, ids=repr)
def test_bytes_of_real_matrices(method: Method) -> None:
    for shape in SHAPES:
        assert method.format_for(shape).num_bytes(shape) == FORMULAS[method](*shape)


@pytest.mark.parametrize("method", [m for m in FORMULAS if not m.calibrated], ids=lambda m: repr(m))
def test_bytes_that_are_really_there(method: Method) -> None:
    w = jnp.asarray(np.random.default_rng(0).standard_normal((256, 512)), jnp.float32)
    packed = jax.jit(method.pack)(w)
    on_device = sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(packed))
    assert on_device == packed.nbytes == FORMULAS[method](256, 512)


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        (quant.RTN(bits=4, group_size=128), 4.125),
        (quant.RTN(bits=8, group_size="channel"), 8),
        (quant.FP8(), 8),
        (quant.RTN(bits=4, group_size=64, symmetric=False), 4.375),
        (quant.NF4(), 4.127),  # QLoRA, section 3
        (quant.NF4(double=False), 4.5),
        (quant.MX(), 4.25),
        (quant.NVFP4(), 4.5),
    ],
    ids=str,
)
def test_bits_a_weight(method: Method, bits: float) -> None:
    assert method.format_for((4096, 4096)).bits_per_weight == pytest.approx(bits, abs=1e-3)


@pytest.mark.parametrize(
    ("num_params", "bf16", "int8", "int4"),
    [(8.03e9, 16, 8, 4.1), (70.6e9, 141, 71, 36)],
)
def test_memory_numbers_to_know(num_params: float, bf16: float, int8: float, int4: float) -> None:
    """In GB, rounded as the figures are usually given."""
    group128 = quant.RTN(bits=4, group_size=128).format_for((4096, 4096))
    fp8 = quant.FP8().format_for((4096, 4096))
    sizes = [weight_bytes(num_params, b) / 1e9 for b in (16, fp8.bits_per_weight)]
    assert [round(x) for x in sizes] == [bf16, int8]
    digits = 1 if int4 < 10 else 0
    assert round(weight_bytes(num_params, group128.bits_per_weight) / 1e9, digits) == int4
