"""Hadamard matrices and their transform."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.errors import ConfigError
from infer.ops.quantized import quantized_product, round_activations
from infer.quant import hadamard, paley
from infer.quant.format_json import fits, from_json, to_json
from infer.quant.gptq import hessian
from infer.quant.methods import AWQ, GPTQ, NVFP4, RTN, SmoothQuant
from infer.quant.qarray import dequantize, stored, take_rows
from infer.quantization import driver
from infer.quantization.observe import Seen

# Widths of real models: SmolLM2 576 and 1536, Gemma 640 and 2048, Qwen 896 and 4864, Llama-2 11008
# (over a field of 7^3), Llama-3 14336.
_FACTORS = {64: 1, 576: 36, 640: 20, 1536: 12, 896: 28, 4864: 76, 11008: 344, 14336: 28, 52: 52}


@pytest.mark.parametrize(("size", "rows"), _FACTORS.items())
def test_the_factor_of_paley_is_the_smallest(size: int, rows: int) -> None:
    assert paley.factor(size) == rows


@pytest.mark.parametrize("rows", [12, 20, 28, 36, 52, 76, 100, 344])
def test_paley_matrices_have_orthogonal_rows_of_signs(rows: int) -> None:
    h = paley.paley(rows).astype(np.int64)
    assert set(np.unique(h)) == {-1, 1}
    np.testing.assert_array_equal(h @ h.T, rows * np.eye(rows))


def test_four_by_hand() -> None:
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(hadamard.transform(x, 4), [5, -1, -2, 0])


@pytest.mark.parametrize(("width", "size"), [(48, 48), (72, 36), (64, 16), (40, 40)])
def test_transform_is_the_product_with_the_matrix_and_back_undoes_it(width: int, size: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, width)).astype(np.float32)
    want = (x.reshape(3, 2, -1, size) @ paley.hadamard(size).T).reshape(x.shape)
    y = jax.jit(hadamard.transform, static_argnums=1)(x, size)
    np.testing.assert_allclose(y, want, atol=2e-6)
    np.testing.assert_allclose(hadamard.transform(y, size, back=True), x, atol=2e-6)


@pytest.mark.parametrize("size", [6, 7, 172])
def test_a_width_without_a_matrix_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of {size} rows is known here; turn"):
        paley.factor(size)


# ---- Weights for turned inputs -------------------------------------------------------------------

_WIDTH, _OUT = 72, 40
_METHODS = [
    RTN(bits=4, group_size=24, hadamard=36),
    RTN(bits=4, group_size="channel", activations="int4", hadamard="full"),
    RTN(bits=8, group_size="channel", activations="int8", hadamard="full"),
    RTN(bits=4, group_size=8, symmetric=False, hadamard=8),
]


def _weight(width: int = _WIDTH) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((_OUT, width)).astype(np.float32)


@pytest.mark.parametrize("method", _METHODS)
def test_a_weight_for_turned_inputs_is_rounded_turned_and_decodes_turned_back(method: RTN) -> None:
    w = _weight()
    q = method.pack(jnp.asarray(w))
    size = q.format.rotated
    turned = hadamard.transform(jnp.asarray(w), size)
    plain = dataclasses.replace(method, hadamard=None).pack(turned)
    np.testing.assert_array_equal(q.data, plain.data)
    want = hadamard.transform(dequantize(plain), size, back=True)
    np.testing.assert_allclose(dequantize(q), want, atol=1e-6)
    np.testing.assert_allclose(take_rows(q, np.array([3, 0])), want[np.array([3, 0])], atol=1e-6)


@pytest.mark.parametrize("method", _METHODS)
def test_the_product_turns_its_input_and_rounds_what_is_turned(method: RTN) -> None:
    w, x = _weight(), np.random.default_rng(2).standard_normal((5, _WIDTH)).astype(np.float32)
    q = method.pack(jnp.asarray(w))
    y = jax.jit(quantized_product)(x, q)
    turned = hadamard.transform(jnp.asarray(x), q.format.rotated)
    if method.activations:
        turned = round_activations(turned, method.activations)
    want = np.asarray(turned, np.float64) @ np.asarray(dequantize(stored(q)), np.float64).T
    np.testing.assert_allclose(y, want, atol=2e-5)


def test_four_bit_activations_by_hand() -> None:
    # The scale is 0.9 * 7 / 7: 7 is clipped, 0.46 is nearer to 1 than to 0.
    x = jnp.array([[7.0, -7.0, 0.46, 0.44]])
    np.testing.assert_allclose(round_activations(x, "int4"), [[6.3, -7.2, 0.9, 0.0]], rtol=1e-6)


def test_gptq_for_turned_inputs_is_gptq_of_the_turned_weight() -> None:
    w = jnp.asarray(_weight(64))
    x = np.random.default_rng(3).standard_normal((200, 64)).astype(np.float32)
    x[:, 5] *= 20
    plain = GPTQ(bits=3, group_size=32)

    def seen(x: Any) -> Seen:
        size = jnp.abs(jnp.asarray(x))
        return Seen(hessian(jnp.asarray(x)), size.sum(0), size.max(0), jnp.float32(len(x)))

    q = driver._gptq(dataclasses.replace(plain, hadamard="full"), "layers.0.q", w, seen(x))
    turn = lambda y: hadamard.transform(jnp.asarray(y), 64)
    want = driver._gptq(plain, "layers.0.q", turn(w), seen(turn(x)))
    assert (q.data != want.data).mean() < 0.01
    error = lambda q: np.linalg.norm(x @ np.asarray(dequantize(q) - w).T)
    assert error(q) < error(driver._gptq(plain, "layers.0.q", w, seen(x)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RTN(hadamard=True), "hadamard is True; use None, 'full', or the number"),
        (lambda: RTN(hadamard=172), "no Hadamard matrix of 172 rows is known here"),
        (lambda: AWQ(hadamard="full"), "hadamard is 'full', and AWQ scales inputs"),
        (lambda: SmoothQuant(weights=GPTQ(bits=8, group_size="channel", hadamard=8)), "SmoothQ"),
        (lambda: NVFP4(hadamard=64).format_for((8, 96)), "64 does not divide the width 96"),
        (
            lambda: RTN(group_size="channel", hadamard="full").format_for((8, 184)),
            "no Hadamard matrix of 184 rows is known here; turn blocks of 8 instead",
        ),
    ],
)
def test_what_cannot_be_turned_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


def test_a_format_in_a_file_says_what_is_turned() -> None:
    format = RTN(bits=4, group_size=24, hadamard=36).format_for((8, 72))
    values = to_json(format)
    assert values["rotated"] == 36 and from_json(values) == format
    plain = RTN(bits=4, group_size=24).format_for((8, 72))
    assert "rotated" not in to_json(plain) and from_json(to_json(plain)) == plain
    assert fits(format, (8, 48)) == [f"{format.name} turns blocks of 36, and rows of 48"]
    with pytest.raises(ValueError, match="no Hadamard matrix of 172"):
        from_json(values | {"rotated": 172})
