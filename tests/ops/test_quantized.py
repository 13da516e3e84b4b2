"""Products with packed weights: x' @ dequantize(q).T, x' rounded as the format says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.ops import quantized
from infer.ops.quantized import quantized_product, round_activations
from infer.quant import rtn
from infer.quant.qarray import QArray, dequantize

WIDTH = 192


def inputs(rows: int = 5) -> jax.Array:
    x = np.random.default_rng(1).standard_normal((rows, WIDTH)).astype(np.float32)
    x[0, 3], x[1, 70], x[2] = 40, -9, 0
    return jnp.asarray(x)


def weight(activations: str, symmetric: bool = True, group: int = 0, rows: int = 1) -> QArray:
    w = jnp.asarray(0.1 * np.random.default_rng(0).standard_normal((48, WIDTH)), jnp.float32)
    if "e4m3" in activations:
        format = dataclasses.replace(rtn.FORMATS["FP8-E4M3"], activations=activations)
        q = rtn.quantize_float(w, format)
    else:
        format = rtn.int_format(8, group, rows, symmetric, "float32", activations)
        q = rtn.quantize_int(w, format)
    static = jnp.float32(40 / 127) if "static" in activations else None
    return dataclasses.replace(q, act_scale=static)


def rounded_by_hand(x: np.ndarray, q: QArray) -> np.ndarray:
    """x' from the module's docstring, in numpy."""
    how = q.format.activations
    if how == "":
        return x
    if how == "outliers":
        out = np.abs(x) >= 6
        rest = np.where(out, np.float32(0), x)
        s = np.abs(rest).max(1, keepdims=True) / np.float32(127)
        s[s == 0] = 1
        return np.where(out, x, np.clip(np.round(rest / s), -127, 127) * s)
    if how.startswith("int8"):
        s = np.abs(x).max(1, keepdims=True) / np.float32(127)
        s = np.full_like(s, q.act_scale) if how == "int8_static" else s
        s[s == 0] = 1
        return np.clip(np.round(x / s), -127, 127) * s
    parts = [x[:, :128], x[:, 128:]] if how == "e4m3_128" else [x]
    scaled = []
    for part in parts:
        s = np.maximum(np.abs(part).max(1, keepdims=True), np.float32(1e-4)) / np.float32(448)
        s = np.full_like(s, q.act_scale) if how == "e4m3_static" else s
        cast = np.clip(part / s, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float32)
        scaled.append(cast * s)
    return np.concatenate(scaled, 1)


CASES = {
    "none": weight(""),
    "none-group": weight("", group=64),
    "int8": weight("int8"),
    "int8-asymmetric": weight("int8", symmetric=False),
    "int8-tensor": weight("int8", rows=0),
    "int8-group": weight("int8", group=64, symmetric=False),
    "int8-static": weight("int8_static"),
    "outliers": weight("outliers"),
    "e4m3": weight("e4m3"),
    "e4m3-static": weight("e4m3_static"),
    "e4m3-128": weight("e4m3_128"),
}
product = jax.jit(quantized_product)


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_that_of_what_was_rounded(name):
    q, x = CASES[name], inputs()
    rounded = rounded_by_hand(np.asarray(x), q)
    if q.format.activations:
        of = jax.jit(lambda x: round_activations(x, q.format.activations, q.act_scale))
        np.testing.assert_array_equal(of(x), rounded)
    want = rounded.astype(np.float64) @ np.asarray(dequantize(q), np.float64).T
    np.testing.assert_allclose(product(x, q), want, atol=2e-6 * np.abs(want).max())
    np.testing.assert_array_equal(product(x, q)[2], 0)


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_same_rounding_in_any_company(name):
    q, x = CASES[name], inputs()
    if q.format.activations:
        of = lambda x: round_activations(x, q.format.activations, q.act_scale)
        np.testing.assert_array_equal(of(x[1:2]), of(x)[1:2])
    if name in ("int8", "int8-asymmetric", "int8-tensor", "int8-static"):  # sums are exact
        np.testing.assert_array_equal(product(x[1:2], q), product(x, q)[1:2])


def test_integer_sums_are_exact():
    q = CASES["int8"]
    coded = np.asarray(q.data).astype(int) - 128
    x = np.asarray(inputs())
    s = np.abs(x).max(1, keepdims=True) / np.float32(127)
    s[s == 0] = 1
    sums = np.clip(np.round(x / s), -127, 127).astype(int) @ coded.T
    want = sums.astype(np.float32) * s * np.asarray(q.scale).T
    np.testing.assert_array_equal(product(jnp.asarray(x), q), want)


def test_columns_in_another_order():
    q = CASES["none-group"]
    order = np.random.default_rng(3).permutation(WIDTH).astype(np.int32)
    turned = dataclasses.replace(q, perm=jnp.asarray(order))
    x = inputs()
    want = np.asarray(x) @ np.asarray(dequantize(turned)).T
    np.testing.assert_allclose(product(x, turned), want, atol=1e-5)
    assert np.abs(want - np.asarray(product(x, q))).max() > 0.1


def test_tiles_and_a_rest(monkeypatch):
    q, x = CASES["none-group"], inputs()
    whole = product(x, q)
    monkeypatch.setattr(quantized, "_TILE", 32 * WIDTH)  # one tile of 32 rows, and 16 that are left
    tiled = jax.jit(lambda x, q: quantized_product(x, q))(x, q)
    np.testing.assert_allclose(tiled, whole, atol=1e-5)


def test_products_in_bfloat16():
    q, x = CASES["none-group"], inputs().astype(jnp.bfloat16)
    got = product(x, q)
    assert got.dtype == jnp.float32
    w = np.asarray(dequantize(q, jnp.bfloat16)).astype(np.float64)
    np.testing.assert_allclose(got, np.asarray(x).astype(np.float64) @ w.T, atol=1e-4)
