"""Products with packed weights and what stands around them: one kernel, interpreted, against an op
for each part.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.config import LayerConfig
from infer.models.params import LayerParams, random_params
from infer.ops import choice
from infer.ops.linear import gated_mlp, linears, observing
from infer.pallas.triton_call import interpreted
from infer.quant import rtn
from infer.quant.qarray import QArray
from infer.sampling import SamplingParams
from tests.models import tiny

pytestmark = pytest.mark.kernels

WIDTH, OUT = 64, 96
GROUPS, CHANNEL = rtn.int_format(4, 32), rtn.int_format(8, 32)
GPU = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
)


def draw(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def weight(seed: int, out: int = OUT, width: int = WIDTH, format: Any = GROUPS) -> QArray:
    return rtn.quantize_int(0.1 * draw(seed, out, width), format)


X, NORM = draw(1, 3, WIDTH), (draw(2, WIDTH), 1e-3)


def ordered(q: QArray) -> QArray:
    perm = jnp.asarray(np.random.default_rng(5).permutation(WIDTH), jnp.int32)
    format = dataclasses.replace(q.format, ordered=True)  # type: ignore[call-arg]
    return dataclasses.replace(q, perm=perm, format=format)


def test_products_are_those_of_an_op_for_each_part() -> None:
    weights = (weight(3), ordered(weight(4)), weight(5, format=CHANNEL))
    biases = (draw(6, OUT), None, draw(7, OUT))
    run = lambda name: linears(X, weights, biases, norm=NORM, implementation=name)
    with choice.recording() as choices:
        got = run("interpret")
    assert choices == [choice.Choice("linear", "interpret")]
    for y, want in zip(got, run("xla"), strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    residual = draw(8, 3, OUT)
    for more in ({"residual": residual}, {"residual": residual, "norm": NORM}):
        (y,) = linears(X, weights[:1], (None,), implementation="interpret", **more)
        (want,) = linears(X, weights[:1], (None,), implementation="xla", **more)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_mlp_is_that_of_an_op_for_each_part(activation: str) -> None:
    weights = (weight(3), weight(4), weight(5, WIDTH, OUT))
    run = lambda name: gated_mlp(
        X, weights, (None,) * 3, activation, norm=NORM, residual=True, implementation=name
    )
    with choice.recording() as choices:
        y = run("interpret")
    assert {c.op: c.implementation for c in choices}["gated_mlp"] == "interpret"
    assert "gated_activation" not in {c.op for c in choices}
    np.testing.assert_allclose(y, run("xla"), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the Triton form, with its kernel interpreted."""
    pair, gain = (weight(3), weight(4)), NORM[0]

    def loss(name: str | None, x: jax.Array, gain: jax.Array) -> jax.Array:
        y = linears(x, pair, (None, draw(6, OUT)), norm=(gain, 1e-3), implementation=name)
        return jnp.sum(y[0] * jnp.cos(y[1]))

    want = jax.grad(lambda *a: loss("xla", *a), argnums=(0, 1))(X, gain)
    monkeypatch.setattr(choice, "_check_gpu", lambda op, name: None)
    with interpreted():
        got = jax.grad(lambda *a: loss("triton", *a), argnums=(0, 1))(X, gain)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def _chosen(fn: Any, *args: Any) -> dict[str, str]:
    with jax.sharding.use_abstract_mesh(GPU), choice.recording() as choices:
        jax.eval_shape(fn, *args)
    return {c.op: c.implementation for c in choices}


def test_what_a_gpu_chooses() -> None:
    pair, down = (weight(3), weight(4)), weight(5, WIDTH, OUT)
    mlp = lambda x, activation="silu", pair=pair: gated_mlp(
        x, (*pair, down), (None,) * 3, activation, norm=NORM
    )
    few = jnp.ones((4, WIDTH), jnp.bfloat16)
    assert _chosen(mlp, few)["gated_mlp"] == "triton"
    # In parts: many rows, float32, another activation, two formats, an order, float16 with a norm.
    assert "gated_mlp" not in _chosen(mlp, jnp.ones((65, WIDTH), jnp.bfloat16))
    assert "gated_mlp" not in _chosen(mlp, jnp.ones((4, WIDTH), jnp.float32))
    for parts in (
        _chosen(lambda x: mlp(x, "gelu"), few),
        _chosen(lambda x: mlp(x, pair=(weight(3), weight(4, format=CHANNEL))), few),
        _chosen(lambda x: mlp(x, pair=(weight(3), ordered(weight(4)))), few),
        _chosen(mlp, few.astype(jnp.float16)),
    ):
        assert "gated_mlp" not in parts
        assert parts["linear"] == "triton" and parts["gated_activation"] == "xla"
    qkv = lambda x: linears(x, pair, (None, None), norm=NORM)
    assert _chosen(qkv, few) == {"linear": "triton"}
    rounded = rtn.quantize_int(0.1 * draw(3, OUT, WIDTH), rtn.int_format(8, 0, activations="int8"))
    parts = _chosen(lambda x: linears(x, (rounded,), (None,), norm=NORM), few)
    assert parts == {"rms_norm": "xla", "linear": "triton"}


def test_observed_products_are_done_part_by_part() -> None:
    with observing() as seen:
        linears(X, (weight(3),), (None,), norm=NORM, implementation="interpret")
    ((_, h),) = seen
    assert float(jnp.abs(h - X).max()) > 0.1  # what the product reads: normalised


def test_generate_gives_the_same_tokens_with_the_fused_products() -> None:
    config = tiny.llama_config(hidden_size=64, intermediate_size=64, layers=(LayerConfig(),))
    params = random_params(config, seed=1)
    pack = lambda w: rtn.quantize_int(w, GROUPS)  # the head too: what ran last is what is said
    names = ("q", "k", "v", "o", "gate", "up", "down")
    layer = params.layers[0]
    assert isinstance(layer, LayerParams)
    packed = dataclasses.replace(layer, **{name: pack(getattr(layer, name)) for name in names})
    params = dataclasses.replace(params, layers=(packed,), embed=pack(params.embed))
    run = lambda name: infer.generate(
        params,
        [[1, 2, 3], [9]],
        sampling=SamplingParams(max_tokens=4, temperature=0),
        page_size=4,
        implementation=name,
    )
    plain, fused = run("xla"), run("interpret")
    np.testing.assert_array_equal(plain.tokens, fused.tokens)
    np.testing.assert_allclose(plain.logprobs, fused.logprobs, atol=1e-4)
    ran = fused.stats["implementations"]
    assert ran["gated_mlp"] == ran["linear"] == "interpret"
    assert "gated_activation" not in ran
