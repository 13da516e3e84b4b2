"""Our quantisers beside other packages: the share of equal codes and scales, on files that
scripts/goldens/quant_*.py made (each holds versions and command under `made`).
"""

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops.linear import linear
from infer.quant import codes, rtn
from infer.quant.gptq import gptq
from infer.quant.methods import FP8, MX, NF4, NVFP4, RTN, LLMInt8
from infer.quant.qarray import QArray, dequantize, scales

DATA = Path(__file__).parent.parent / "data" / "quant"


@functools.cache
def golden(package: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{package}.npz") as file:
        return dict(file)


@functools.cache
def inputs() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "goldens" / "quant_inputs.py"
    spec = importlib.util.spec_from_file_location("quant_inputs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes_of(q: QArray) -> np.ndarray:
    return np.asarray(codes.unpack(q.data, q.format.bits, q.shape[1]))


def equal(a: np.ndarray, b: np.ndarray) -> float:
    """The share of entries that are equal."""
    assert np.shape(a) == np.shape(b), (np.shape(a), np.shape(b))
    return float(np.mean(np.asarray(a) == np.asarray(b)))


def test_the_files_say_what_made_them():
    for path in sorted(DATA.glob("*.npz")):
        made = json.loads(str(golden(path.stem)["made"]))
        assert made["command"].startswith(f"python scripts/goldens/quant_{path.stem}.py"), path
        assert "torch" in made["packages"] and len(made["packages"]) > 1


# ---- bitsandbytes -------------------------------------------------------------------------------


def high_first(data: np.ndarray) -> np.ndarray:
    """bitsandbytes puts the first of two codes in the high nibble."""
    return np.stack([data >> 4, data & 15], -1).reshape(data.shape[0], -1)


def used(q: QArray) -> np.ndarray:
    """[8, groups]: whether a group has a number that is not 0."""
    width = q.format.group or 256
    return np.abs(inputs().weights()).reshape(8, -1, width).max(-1) > 0


@pytest.mark.parametrize("levels", ["nf4", "fp4"])
def test_four_bits_are_those_of_bitsandbytes(levels):
    want = golden("bitsandbytes")
    w = inputs().weights()
    q = NF4(levels=levels, double=False).pack(jnp.asarray(w))
    absmax = want[f"{levels}_plain.absmax"].reshape(8, 4)
    assert equal(np.asarray(scales(q))[used(q)], absmax[used(q)]) == 1  # of zeros it is 1, not 0
    ours, theirs = np.asarray(dequantize(q)), want[f"{levels}_plain.values"]
    if levels == "nf4":
        assert equal(codes_of(q), high_first(want["nf4_plain.data"])) == 1
        np.testing.assert_array_equal(ours, theirs)
    else:  # two codes of zero; and bitsandbytes' quotient, a product with 1 / absmax, breaks ties
        rest = np.arange(8) != 3
        np.testing.assert_array_equal(ours[rest], theirs[rest])
        assert equal(ours[3], theirs[3]) > 0.85
        np.testing.assert_allclose(np.abs(ours - w)[3], np.abs(theirs - w)[3], atol=1e-6)


@pytest.mark.parametrize("levels", ["nf4", "fp4"])
def test_double_quantisation_is_that_of_bitsandbytes(levels):
    want = golden("bitsandbytes")
    w = inputs().weights()
    q = NF4(levels=levels).pack(jnp.asarray(w))
    name = f"{levels}_double"
    np.testing.assert_array_equal(codes.DYNAMIC, want[f"{name}.nested_map"])
    np.testing.assert_allclose(q.scale.offset, want[f"{name}.offset"], rtol=1e-6)
    np.testing.assert_allclose(q.scale.absmax, want[f"{name}.nested_absmax"], rtol=1e-6)
    assert equal(q.scale.codes, want[f"{name}.absmax"].reshape(8, 4)) == 1
    # Here the rule differs: bitsandbytes takes the codes under the scale as it was before its own
    # rounding, we under the one that is stored, which can only be nearer.
    ours, theirs = np.asarray(dequantize(q)), want[f"{name}.values"]
    error, other = (np.mean((x.astype(np.float64) - w) ** 2) for x in (ours, theirs))
    assert error <= other
    # Their codes under our scales are their numbers: the rest of the law is the same.
    coded = codes.pack(jnp.asarray(high_first(want[f"{name}.data"])), 4)
    np.testing.assert_allclose(dequantize(dataclasses.replace(q, data=coded)), theirs, rtol=2e-5)


def test_int8_rows_are_those_of_bitsandbytes():
    want = golden("bitsandbytes")
    w = inputs().weights().astype(np.float16).astype(np.float32)
    q = LLMInt8().pack(jnp.asarray(w))
    np.testing.assert_array_equal(scales(q)[:, 0], want["int8.absmax"] / np.float32(127))
    difference = codes_of(q).astype(int) - 128 - want["int8.codes"]
    # bitsandbytes multiplies by 127 / absmax, we divide by absmax / 127: a tie can fall otherwise.
    assert np.abs(difference).max() <= 1 and np.mean(difference == 0) >= 0.999


def test_the_product_of_llm_int8_is_that_of_bitsandbytes():
    want = golden("bitsandbytes")["int8.y"].astype(np.float32)
    w, x = inputs().weights(), inputs().activations()
    q = LLMInt8().pack(jnp.asarray(w.astype(np.float16).astype(np.float32)))
    ours = np.asarray(linear(jnp.asarray(x), q))
    # Column 3 is an outlier of every token: there both take the same entries out.  Column 200 is
    # one of two tokens: bitsandbytes takes it out of the int8 product for all of them.
    exact = x @ np.asarray(dequantize(q)).T
    ours, theirs = (np.sqrt(np.mean((y - exact) ** 2, 0)) for y in (ours, want))
    assert np.all(ours < 0.03 * np.sqrt(np.mean(exact**2, 0)))
    # Errors far below the rounding of float16, in which theirs are given, say nothing.
    np.testing.assert_allclose(ours, theirs, rtol=0.5, atol=1e-5)
    assert np.mean(ours) < 1.05 * np.mean(theirs)


# ---- torchao and ModelOpt -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", rtn.E8M0_RULES)
@pytest.mark.parametrize("code", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_microscaling_is_that_of_torchao(code, rule):
    want = golden("torchao")
    q = MX(code=code, scale_rule=rule).pack(jnp.asarray(inputs().weights()))
    theirs = want[f"{code}_{rule}.data"]
    if code == "e2m1":  # two codes a byte, the first in the low nibble, as ours
        np.testing.assert_array_equal(q.data, theirs)
    assert equal(q.scale, want[f"{code}_{rule}.scale"]) == 1
    if code != "e2m1":
        assert equal(codes_of(q), theirs) == 1


def test_nvfp4_is_that_of_modelopt():
    want = golden("modelopt")
    q = NVFP4().pack(jnp.asarray(inputs().weights()))
    np.testing.assert_array_equal(q.global_scale, want["nvfp4.global"])
    assert equal(q.scale, want["nvfp4.scale"]) == 1
    theirs = np.stack([want["nvfp4.data"] & 15, want["nvfp4.data"] >> 4], -1).reshape(8, 256)
    assert equal(codes_of(q), theirs) == 1


def test_nvfp4_is_nearly_that_of_torchao():
    want = golden("torchao")
    q = NVFP4().pack(jnp.asarray(inputs().weights()))
    # torchao multiplies by reciprocals, and its least scale is 2^-6, that of zeros too.
    same = np.asarray(q.scale) == want["nvfp4.scale"]
    least = np.abs(inputs().weights()).reshape(8, 16, 16).max(-1) < 6 * 2**-6 * q.global_scale
    assert same[~least].all()
    theirs = np.stack([want["nvfp4.data"] & 15, want["nvfp4.data"] >> 4], -1).reshape(8, 256)
    where = np.repeat(same, 16, 1)
    assert equal(codes_of(q)[where], theirs[where]) >= 0.999


# ---- compressed-tensors -------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", ["group", "channel"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_those_of_compressed_tensors(bits, group, symmetric):
    want = golden("compressed_tensors")
    name = f"int{bits}_{group}_{'symmetric' if symmetric else 'asymmetric'}"
    method = RTN(
        bits=bits,
        group_size=64 if group == "group" else "channel",
        symmetric=symmetric,
        scale_dtype="float32",
    )
    q = method.pack(jnp.asarray(inputs().weights()))
    some = used(q)
    # A group of zeros: their scale is eps and their zero point 0 / 0, ours are 1 and 0.
    assert equal(np.asarray(q.scale)[some], want[f"{name}.scale"][some]) == 1
    if not symmetric:
        assert equal(np.asarray(q.zero)[some], want[f"{name}.zero"][some]) == 1
    some = np.repeat(some, 256 // q.scale.shape[1], 1) | symmetric
    assert equal(codes_of(q)[some], want[f"{name}.codes"][some]) == 1


def test_eight_bit_floats_are_those_of_compressed_tensors():
    want = golden("compressed_tensors")
    q = FP8().pack(jnp.asarray(inputs().weights()))
    assert equal(q.scale, want["fp8_channel.scale"]) == 1
    assert equal(q.data, want["fp8_channel.codes"]) == 1


def test_blocks_at_ragged_edges_are_those_of_compressed_tensors():
    want = golden("compressed_tensors")
    q = FP8(granularity="block").pack(jnp.asarray(inputs().ragged()))
    assert q.scale.shape == (2, 2)
    assert equal(q.scale, want["fp8_block.scale"]) == 1
    assert equal(q.data, want["fp8_block.codes"]) == 1


# ---- GPTQ of llm-compressor ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["int4_channel", "int3_channel", "int4_ordered", "int4_ordered_asymmetric"]
)
def test_gptq_is_that_of_llm_compressor(name):
    want = golden("llmcompressor")
    w, h = (jnp.asarray(a) for a in inputs().gptq_case())
    ordered = "ordered" in name
    format = rtn.int_format(
        int(name[3]),
        64 if ordered else 0,
        symmetric=name in ("int4_channel", "int4_ordered"),
        scale_dtype="float32",
    )
    q, ok = gptq(w, h, jnp.float32(0.01), format=format, act_order=ordered, static_groups=ordered)
    assert bool(ok)
    assert equal(q.scale, want[f"{name}.scale"]) == 1
    # Values, not codes, are what their function returns; half a step tells codes apart.
    step = np.repeat(np.asarray(scales(q)), w.shape[1] // q.scale.shape[1], 1)
    same = np.abs(np.asarray(dequantize(q)) - want[f"{name}.values"]) < 0.5 * step
    # Sums in float32 in another order: a weight on the edge of two codes can fall otherwise, and
    # what it pushes to those that follow with it.
    assert same.mean() >= 0.999
