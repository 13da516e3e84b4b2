import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.errors import ConfigError
from infer.quant import Format, QArray, dequantize, permute_rows, take_rows
from infer.quant.blocks import FORMATS, dequantize_numpy
from infer.quant.methods import FP8, NF4, NVFP4, RTN, Method
from infer.quant.qarray import expert_of


def packed_weight(name: str, num_rows: int, num_blocks: int = 2) -> QArray:
    """Random codes under finite scales: no byte of a float16 above 0x3b, so all are below 1."""
    format = FORMATS[name]
    rng = np.random.default_rng(5)
    data = rng.integers(0, 0x3C, (num_rows, num_blocks * format.block_bytes), np.uint8)
    return QArray.create(data, format, (num_rows, num_blocks * format.group))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_dequantize_is_gguf_pys(name):
    q = packed_weight(name, 3)
    want = gguf.quants.dequantize(q.data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(q), want)
    np.testing.assert_array_equal(jax.jit(dequantize)(q), want)


def test_dequantize_casts_once():
    q = packed_weight("Q4_1", 3)
    got = dequantize(q, jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, dequantize(q).astype(jnp.bfloat16))


def test_format_and_shape_are_part_of_the_program():
    q = packed_weight("Q8_0", 3)
    leaves, structure = jax.tree.flatten(q)
    assert len(leaves) == 1 and leaves[0] is q.data
    assert structure == jax.tree.structure(packed_weight("Q8_0", 3))
    assert structure != jax.tree.structure(packed_weight("Q8_0", 4))
    assert q.nbytes == 3 * 68
    jax.tree.map(lambda x: None, q)  # unflattening checks nothing


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F32"])
def test_take_rows_is_a_lookup_in_the_decoded_table(name):
    q = packed_weight(name, 7)
    ids = np.array([[6, 0, 3], [3, 3, 5]], np.int32)
    want = dequantize_numpy(q.data, q.format, q.shape)[ids]
    np.testing.assert_array_equal(jax.jit(take_rows)(q, ids), want)


def test_take_rows_decodes_only_the_rows_it_takes():
    q = packed_weight("Q8_0", 1000)
    ids = np.array([1, 2], np.int32)
    lowered = jax.jit(take_rows).lower(q, ids).as_text()
    assert "2x64xf32" in lowered and "1000x64xf32" not in lowered


def test_a_row_that_does_not_exist_is_nan():
    q = packed_weight("Q8_0", 7)
    rows = np.asarray(take_rows(q, np.array([-1, 7, 6], np.int32)))  # and without jit
    assert np.isnan(rows[:2]).all()
    np.testing.assert_array_equal(rows[2], dequantize_numpy(q.data, q.format, q.shape)[6])


def test_permute_rows_moves_scales_with_their_rows():
    q = packed_weight("Q4_0", 4)
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(dequantize(permute_rows(q, order)), dequantize(q)[order])
    on_device = jax.tree.map(jnp.asarray, q)
    np.testing.assert_array_equal(permute_rows(on_device, order).data, q.data[order])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_permute_rows_refuses_what_is_no_permutation(order):
    with pytest.raises(ValueError, match="not the rows 0 to 3 once each; use take_rows"):
        permute_rows(packed_weight("Q4_0", 4), np.array(order))


def test_rows_of_a_planar_format_are_not_permuted_here():
    q = packed_weight("Q4_0", 4)
    planar = dataclasses.replace(q, format=dataclasses.replace(q.format, layout="planar"))
    with pytest.raises(ValueError, match=r"keeps its scales apart \(planar\)"):
        permute_rows(planar, np.arange(4))
    with pytest.raises(ValueError, match=r"Q4_0 \(planar\) has no block decoder"):
        dequantize(planar)


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        (np.zeros((2, 34), np.uint8), (64,), "a matrix .* not of shape \\(64,\\)"),
        (np.zeros((2, 34), np.uint8), (1, 1, 2, 32), "a stack of layers as a tuple of QArrays"),
        (np.zeros((2, 34), np.uint8), (1, 2, 32), "is uint8 \\(1, 2, 34\\)"),
        (np.zeros((0, 34), np.uint8), (0, 32), "at least one weight"),
        (np.zeros((2, 34), np.uint8), (2, 33), "row of 33 weights is no whole number"),
        (np.zeros((2, 34), np.uint8), (3, 32), "is uint8 \\(3, 34\\)"),
        (np.zeros((2, 34), np.int8), (2, 32), "data is int8"),
    ],
)
def test_create_refuses_what_does_not_belong_together(data, shape, message):
    with pytest.raises(ValueError, match=message):
        QArray.create(data, FORMATS["Q8_0"], shape)


def test_create_takes_only_blocks():
    planar = Format(name="int4", bits=4, group=64, block_bytes=32, layout="planar")
    with pytest.raises(ValueError, match="int4 has the layout 'planar'"):
        QArray.create(np.zeros((2, 32), np.uint8), planar, (2, 64))


# ---- Experts' weights ----------------------------------------------------------------------------

_EXPERTS = {
    "int4": RTN(bits=4, group_size=16, symmetric=False),
    "int8": RTN(bits=8, group_size="tensor"),
    "fp8": FP8(),
    "nvfp4": NVFP4(),
}


@pytest.mark.parametrize("name", _EXPERTS)
def test_planar_experts_are_each_packed_and_decoded_alone(name: str) -> None:
    method = _EXPERTS[name]
    w = jnp.asarray(np.random.default_rng(0).standard_normal((3, 24, 32)), jnp.float32)
    w = w * jnp.asarray([1.0, 10.0, 0.1])[:, None, None]
    q = method.pack_experts(w)
    assert q.shape == (3, 24, 32) and q.data.shape[0] == 3
    all_at_once = jax.jit(dequantize)(q)
    for e in range(3):
        alone = method.pack(w[e])
        np.testing.assert_array_equal(all_at_once[e], dequantize(alone))
        taken = jax.jit(expert_of)(q, jnp.int32(e))
        for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (NF4(group_size=16), "NF4 for experts: .*experts have no nested scales"),
        (RTN(bits=4, group_size=16, hadamard=16), "no turned inputs"),
        (FP8(activations="token"), "no rounded activations"),
    ],
)
def test_what_experts_do_not_have(method: Method, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method.pack_experts(jnp.ones((2, 16, 32)))
