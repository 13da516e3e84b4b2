"""Planar QArrays: what is refused, what a part decodes to, and what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.quant import QArray, dequantize, permute_rows, rtn, take_rows
from infer.quant.formats import PlanarFormat
from infer.quant.methods import FP8, MX, NF4, NVFP4, RTN, Method
from infer.quant.qarray import NestedScale, dequantize_tile, scales

SHAPE = (20, 128)
METHODS: dict[str, Method] = {
    "int4": RTN(bits=4, group_size=32, symmetric=False),
    "int3": RTN(bits=3, group_size="channel"),
    "int8": RTN(bits=8, group_size="tensor"),
    "nf4": NF4(),
    "fp8-block": FP8(granularity="block"),
    "mxfp6": MX(code="e3m2"),
    "nvfp4": NVFP4(),
}


def packed(name: str, shape: tuple[int, int] = SHAPE) -> QArray:
    w = np.random.default_rng(2).standard_normal(shape)
    return METHODS[name].pack(jnp.asarray(w, jnp.float32))


def permuted(q: QArray) -> QArray:
    order = np.random.default_rng(3).permutation(q.shape[1]).astype(np.int32)
    assert isinstance(q.format, PlanarFormat)
    format = dataclasses.replace(q.format, ordered=True)
    return dataclasses.replace(q, perm=jnp.asarray(order), format=format)


@pytest.mark.parametrize("name", METHODS)
def test_rows_and_tiles_are_those_of_the_whole(name):
    for q in (packed(name), permuted(packed(name))):
        want = np.asarray(dequantize(q))
        ids = np.array([[19, 0, 7], [7, 3, 1]], np.int32)
        np.testing.assert_array_equal(jax.jit(take_rows)(q, ids), want[ids])
        tile = jax.jit(dequantize_tile, static_argnums=(2, 3))
        np.testing.assert_array_equal(tile(q, jnp.int32(3), 8, jnp.float32), want[3:11])


def test_tiles_across_blocks_of_rows():
    q = packed("fp8-block", (300, 136))
    want = np.asarray(dequantize(q))
    np.testing.assert_array_equal(dequantize_tile(q, 120, 140, jnp.float32), want[120:260])
    ids = np.array([299, 127, 128, 0])
    np.testing.assert_array_equal(take_rows(q, ids), want[ids])


def test_a_row_that_is_not_there_is_nan():
    got = np.asarray(take_rows(packed("nvfp4"), np.array([-1, 20, 19])))
    assert np.isnan(got[:2]).all() and np.isfinite(got[2]).all()


def test_an_order_of_columns():
    q = packed("int4")
    order = np.random.default_rng(3).permutation(128)
    got = dequantize(permuted(q))
    np.testing.assert_array_equal(np.asarray(got)[:, order], dequantize(q))


def test_a_cast_is_one_cast():
    q = packed("int4")
    want = dequantize(q).astype(jnp.bfloat16)
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), want)
    np.testing.assert_array_equal(take_rows(q, np.arange(20), jnp.bfloat16), want)


def test_rows_are_not_reordered_apart_from_their_scales():
    with pytest.raises(ValueError, match=r"INT4-G32-ASYM keeps its scales apart \(planar\)"):
        permute_rows(packed("int4"), np.arange(20))


# ---- Refusals -----------------------------------------------------------------------------------


def parts(q: QArray) -> dict[str, object]:
    names = ("data", "scale", "zero", "global_scale", "perm", "act_scale")
    return {n: getattr(q, n) for n in names if getattr(q, n) is not None}


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("int4", {"data": jnp.zeros((20, 63), jnp.uint8)}, r"data is uint8 \[20, 63\]; it must be"),
        ("int4", {"data": jnp.zeros((20, 64), jnp.int8)}, r"data is int8 \[20, 64\]; it must be"),
        ("int4", {"scale": jnp.zeros((20, 4))}, r"scale is float32 \[20, 4\]; it must be float16"),
        ("int4", {"scale": jnp.zeros((20, 3), jnp.float16)}, r"scale is float16 \[20, 3\]"),
        ("int4", {"zero": None}, r"zero is missing; it must be uint8 \[20, 4\]"),
        ("int3", {"zero": jnp.zeros((20, 1), jnp.uint8)}, r"zero has no place in this format"),
        ("int3", {"global_scale": jnp.float32(1)}, r"global_scale has no place"),
        ("int3", {"act_scale": jnp.float32(1)}, r"act_scale has no place"),
        ("int3", {"perm": jnp.zeros(128, jnp.int32)}, r"perm has no place"),
        ("nvfp4", {"global_scale": None}, r"global_scale is missing; it must be float32 \[\]"),
        ("nvfp4", {"scale": jnp.zeros((20, 8))}, r"scale is float32 \[20, 8\]; it must be uint8"),
        ("nf4", {"scale": jnp.zeros((20, 2))}, r"scale is a .*, and must be a NestedScale"),
        ("mxfp6", {"scale": None}, r"scale is missing; it must be uint8 \[20, 4\]"),
    ],
)
def test_a_wrong_part_is_refused_by_name(name, change, message):
    q = packed(name)
    whole = parts(q) | change
    data, scale = whole.pop("data"), whole.pop("scale")
    assert isinstance(q.format, PlanarFormat)
    with pytest.raises(ValueError, match=message):
        QArray.planar(data, scale, q.format, q.shape, **whole)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"codes": jnp.zeros((20, 1), jnp.uint8)}, r"scale.codes is uint8 \[20, 1\]"),
        ({"absmax": jnp.zeros(2)}, r"scale.absmax is float32 \[2\]; it must be float32 \[1\]"),
        ({"offset": jnp.zeros(1)}, r"scale.offset is float32 \[1\]; it must be float32 \[\]"),
    ],
)
def test_a_wrong_part_of_nested_scales_is_refused_by_name(change, message):
    q = packed("nf4")
    assert isinstance(q.scale, NestedScale) and isinstance(q.format, PlanarFormat)
    with pytest.raises(ValueError, match=message):
        QArray.planar(q.data, dataclasses.replace(q.scale, **change), q.format, q.shape)


def test_shapes_and_layouts_are_refused():
    q = packed("int4")
    assert isinstance(q.format, PlanarFormat)
    with pytest.raises(ValueError, match="a QArray is a matrix"):
        QArray.planar(q.data, q.scale, q.format, (0, 128), zero=q.zero)
    with pytest.raises(ValueError, match="fills no whole bytes; use a width that is a multiple"):
        QArray.planar(q.data, q.scale, q.format, (20, 127), zero=q.zero)
    with pytest.raises(ValueError, match=r"build the planar form with QArray\.planar"):
        QArray.create(q.data, q.format, q.shape)


def test_all_that_is_wrong_is_said_at_once():
    q = packed("int4")
    assert isinstance(q.format, PlanarFormat)
    with pytest.raises(ValueError, match=r"data is .*; scale is missing.*|zero is missing.*"):
        QArray.planar(q.data[:, :3], None, q.format, q.shape)


# ---- Bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, bits",
    [
        (rtn.int_format(4, 128), 4.125),
        (rtn.int_format(4, 64, symmetric=False), 4 + 24 / 64),
        (rtn.int_format(3, 64), 3.25),
        (rtn.int_format(8), 8.0),
        (rtn.FORMATS["MXFP4"], 4.25),
        (rtn.FORMATS["MXFP6-E2M3"], 6.25),
        (rtn.FORMATS["MXFP8-E4M3"], 8.25),
        (rtn.FORMATS["NVFP4"], 4.5),
        (rtn.FORMATS["NF4"], 4.5),
        (dataclasses.replace(rtn.FORMATS["NF4"], scale_dtype="nested"), 4.127),
    ],
)
def test_bits_per_weight_by_hand(format, bits):
    np.testing.assert_allclose(format.bits_per_weight, bits, atol=2e-4)


def test_bytes_by_hand():
    # 20 x 128 at 4 bits: 1,280; 80 scales of 2 bytes, 80 zero points of 1.
    assert packed("int4").nbytes == 1280 + 160 + 80
    # 3 bits: 960; 20 scales of 2 bytes.
    assert packed("int3").nbytes == 960 + 40
    # NVFP4: 160 scales of 1 byte, and one float32.
    assert packed("nvfp4").nbytes == 1280 + 160 + 4
    # NF4 doubly quantised: 40 scales of 1 byte, one float32 for 256 of them, and their mean.
    assert packed("nf4").nbytes == 1280 + 40 + 4 + 4
    # Blocks of 128 x 128 in float32.
    assert packed("fp8-block").nbytes == 2560 + 4
    assert permuted(packed("int4")).nbytes == packed("int4").nbytes + 4 * 128


def test_scales_as_numbers():
    q = packed("nvfp4")
    want = np.abs(np.random.default_rng(2).standard_normal(SHAPE)).reshape(20, 8, 16).max(-1) / 6
    np.testing.assert_allclose(scales(q), want, rtol=0.07)
