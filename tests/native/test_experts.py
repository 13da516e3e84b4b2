"""The experts' operation: bit for bit what the gated MLP gives, expert by expert."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.native.experts import expert_mlp
from infer.native.linear import gated_mlp, linear
from infer.native.repack import Packed, repack
from infer.quant.blocks import FORMATS as BLOCKS
from infer.quant.qarray import QArray
from tests.native.weights import (
    FLOATS,
    FORMATS,
    dense,
    one_expert,
    random_experts,
    random_rows,
    rms,
    rounded,
)


def some(
    name: str, experts: int = 5, width: int = 256, hidden: int = 256
) -> tuple[list[Any], list[Packed]]:
    """Return gate, up and down, as they are and packed."""
    shapes = [(experts, hidden, width), (experts, hidden, width), (experts, width, hidden)]
    weights = [random_experts(name, shape, seed=i) for i, shape in enumerate(shapes)]
    return weights, [repack(w) for w in weights]


def choices(tokens: int, experts: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, distinct in a row, that leave expert 1 empty, and weights."""
    rng = np.random.default_rng(seed)
    there = np.array([e for e in range(experts) if e != 1])
    ids = np.stack([rng.permutation(there)[:k] for _ in range(tokens)]).astype(np.int32)
    return ids, rng.random((tokens, k), np.float32)


def by_gated_mlp(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, raw: list[Any], activation: str
) -> np.ndarray:
    """Return the sum from all of x through each expert's own gated MLP, added in float32."""
    experts = raw[0].shape[0]
    each = np.stack(
        [
            gated_mlp(jnp.asarray(x), *(repack(one_expert(w, e)) for w in raw), activation)
            for e in range(experts)
        ]
    )
    y = np.zeros_like(x)
    for j in range(ids.shape[1]):
        y += weights[:, j, None] * each[ids[:, j], np.arange(len(x))]
    return y


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_each_experts_gated_mlp(name: str) -> None:
    raw, packed = some(name)
    x, (ids, weights) = random_rows(9, 256), choices(9, 5, 2)
    y = expert_mlp(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), *packed, "silu")
    assert np.array_equal(y, by_gated_mlp(x, ids, weights, raw, "silu"))


@pytest.mark.parametrize("name", FORMATS)
def test_against_float64(name: str) -> None:
    raw, packed = some(name)
    x, residual, (ids, weights) = random_rows(9, 256), random_rows(9, 256, 7), choices(9, 5, 3)
    y = expert_mlp(
        *map(jnp.asarray, (x, ids, weights)), *packed, "gelu_tanh", jnp.asarray(residual)
    )
    seen = (lambda a: a.astype(np.float64)) if name in FLOATS else rounded
    gate, up, down = map(dense, raw)
    want = residual.astype(np.float64)
    for t in range(len(x)):
        for e, weight in zip(ids[t], weights[t], strict=True):
            g, u = seen(x[t : t + 1]) @ gate[e].T, seen(x[t : t + 1]) @ up[e].T
            acted = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
            want[t] += float(weight) * (seen(acted * u) @ down[e].T)[0]
    # A code differs by one where a last bit decides its rounding.
    assert rms(y - want) < (1e-6 if name in FLOATS else 1e-3) * rms(want)


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_any_batch_and_place(name: str) -> None:
    _, packed = some(name)
    x, (ids, weights) = random_rows(70, 256), choices(70, 5, 2)
    call = jax.jit(lambda x, ids, weights: expert_mlp(x, ids, weights, *packed, "silu"))
    run = lambda rows: np.asarray(call(x[rows], ids[rows], weights[rows]))
    every = run(np.arange(70))
    for tokens in (1, 2, 7, 33, 64):
        assert np.array_equal(run(np.arange(tokens)), every[:tokens]), tokens
    order = np.random.default_rng(1).permutation(70)
    assert np.array_equal(run(order), every[order])
    assert np.array_equal(run(np.array([69])), every[69:])


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_one_expert_takes_all(name: str, tokens: int) -> None:
    raw, packed = some(name, experts=3)
    x, ids = random_rows(tokens, 256), np.full((tokens, 1), 2, np.int32)
    weights = np.ones((tokens, 1), np.float32)
    y = expert_mlp(*map(jnp.asarray, (x, ids, weights)), *packed, "silu")
    want = gated_mlp(jnp.asarray(x), *(repack(one_expert(w, 2)) for w in raw), "silu")
    assert np.array_equal(y, want)


def test_many_small_experts_and_formats_that_differ() -> None:
    names, experts = ("Q8_0", "F32", "Q5_1"), 40
    shapes = [(experts, 96, 64), (experts, 96, 64), (experts, 64, 96)]
    raw = [random_experts(n, s, seed=i) for i, (n, s) in enumerate(zip(names, shapes, strict=True))]
    x, (ids, weights) = random_rows(101, 64), choices(101, experts, 6)
    y = expert_mlp(*map(jnp.asarray, (x, ids, weights)), *map(repack, raw), "silu")
    assert np.array_equal(y, by_gated_mlp(x, ids, weights, raw, "silu"))


def test_the_id_e_adds_nothing_and_any_other_is_nan() -> None:
    _, packed = some("Q4_0", width=64, hidden=64)
    x, (ids, weights) = random_rows(8, 64), choices(8, 5, 2)
    run = lambda ids, weights: np.asarray(
        expert_mlp(*map(jnp.asarray, (x, ids, weights)), *packed, "silu", jnp.asarray(x))
    )
    clean = run(ids, weights)
    odd, odd_weights = ids.copy(), weights.copy()
    odd[1], odd_weights[1] = 5, np.nan
    odd[2, 0], odd[3, 1], odd[4, 0], odd[5, 1] = -1, 6, -(2**31), 2**31 - 1
    odd[6, 0] = 5
    y = run(odd, odd_weights)
    assert np.array_equal(y[1], x[1])
    assert np.isnan(y[2:6]).all()
    zero = weights.copy()
    zero[6, 0] = 0
    assert np.array_equal(y[6], run(ids, zero)[6])
    assert np.array_equal(y[[0, 7]], clean[[0, 7]])


def test_all_tokens_are_padding() -> None:
    _, packed = some("Q4_0", width=64, hidden=64)
    ids, weights = jnp.full((70, 2), 5, jnp.int32), jnp.ones((70, 2), jnp.float32)
    y = expert_mlp(jnp.ones((70, 64), jnp.float32), ids, weights, *packed, "silu")
    assert not np.any(y)


def test_a_nan_stays_in_its_token() -> None:
    _, packed = some("Q4_0", width=64, hidden=64)
    x = random_rows(10, 64)
    ids, weights = map(jnp.asarray, choices(10, 5, 2))
    call = jax.jit(lambda x: expert_mlp(x, ids, weights, *packed, "silu"))
    clean = np.asarray(call(jnp.asarray(x)))
    x[3, 7] = np.nan
    y = np.asarray(call(jnp.asarray(x)))
    others = np.delete(np.arange(10), 3)
    assert np.isnan(y[3]).all() and np.array_equal(y[others], clean[others])


def test_no_tokens() -> None:
    _, packed = some("Q4_0", width=64, hidden=64)
    ids, weights = jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2), jnp.float32)
    y = expert_mlp(jnp.zeros((0, 64), jnp.float32), ids, weights, *packed, "silu")
    assert y.shape == (0, 64)


def test_inside_vmap() -> None:
    _, packed = some("Q4_0", width=64, hidden=64)
    x, (ids, weights) = random_rows(6, 64), choices(6, 5, 2)
    call = lambda x, ids, weights: expert_mlp(x, ids, weights, *packed, "silu")
    args = [jnp.asarray(a) for a in (x, ids, weights)]
    by_two = jax.vmap(call)(*(a.reshape(3, 2, -1) for a in args))
    assert np.array_equal(by_two.reshape(6, 64), call(*args))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": jnp.zeros((2, 32), jnp.float32)}, r"must be \[E, F, 32\]"),
        ({"x": jnp.zeros((2, 64), jnp.bfloat16)}, "x is bfloat16"),
        ({"expert_ids": jnp.zeros((3, 2), jnp.int32)}, "expert_ids|expert_weights"),
        ({"expert_weights": jnp.zeros((2, 1), jnp.float32)}, "expert_weights"),
        ({"residual": jnp.zeros((1, 64), jnp.float32)}, "residual"),
    ],
)
def test_operands_that_do_not_fit_are_errors(change: dict[str, Any], message: str) -> None:
    _, (gate, up, down) = some("Q4_0", width=64, hidden=96)
    operands = dict(
        x=jnp.zeros((2, 64), jnp.float32),
        expert_ids=jnp.zeros((2, 2), jnp.int32),
        expert_weights=jnp.zeros((2, 2), jnp.float32),
        gate=gate,
        up=up,
        down=down,
        activation="silu",
    )
    # TypeError: the type checker that tests put on every function may be first.
    with pytest.raises((ValueError, TypeError), match=message):
        expert_mlp(**{**operands, **change})
    with pytest.raises(ValueError, match=r"gate is \(5, 96, 64\), up \(5, 64, 96\)"):
        expert_mlp(**{**operands, "up": down})
    with pytest.raises(NotImplementedError, match="'gelu'; there are silu, gelu_tanh"):
        expert_mlp(**{**operands, "activation": "gelu"})


def test_data_of_another_shape_is_an_error_before_memory_is_touched() -> None:
    _, (gate, up, down) = some("Q4_0", width=64, hidden=96)
    short = dataclasses.replace(up, data=up.data[:, :-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"up has packed data \[5, 5, 576\]"):
        jax.block_until_ready(
            expert_mlp(
                jnp.zeros((2, 64), jnp.float32),
                jnp.zeros((2, 2), jnp.int32),
                jnp.zeros((2, 2), jnp.float32),
                gate,
                short,
                down,
                "silu",
            )
        )


def test_experts_are_repacked_one_after_the_other() -> None:
    weight = random_experts("Q5_K", (3, 40, 256))
    packed = repack(weight)
    assert packed.shape == (3, 40, 256) and packed.data.shape == (3, 3, 2880)
    for e in range(3):
        assert np.array_equal(packed.data[e], repack(one_expert(weight, e)).data)


def test_a_strided_stack_of_floats_is_repacked() -> None:
    both = jnp.asarray(random_rows(2 * 3 * 32, 64)).reshape(3, 64, 64)
    gate = np.asarray(both)[:, 32:]  # a view, as of gate and up in one array
    assert np.array_equal(repack(gate).data, repack(gate.copy()).data)


def test_experts_do_not_pass_for_a_matrix() -> None:
    weight = repack(random_experts("Q4_0", (2, 64, 64)))
    with pytest.raises(ValueError, match=r"a weight is \(2, 64, 64\)"):
        linear(jnp.zeros((1, 64), jnp.float32), (weight,))
    with pytest.raises(ValueError, match="must be"):
        gated_mlp(jnp.zeros((1, 64), jnp.float32), weight, weight, weight, "silu")
    with pytest.raises(ValueError, match="matrix"):
        repack(np.zeros((1, 2, 16, 32), np.float32))
    lying = QArray(data=np.zeros((2, 64, 35), np.uint8), format=BLOCKS["Q4_0"], shape=(2, 64, 64))
    with pytest.raises(ValueError, match=r"blocks of 32 are uint8 \[2, 64, 36\]"):
        repack(lying)
