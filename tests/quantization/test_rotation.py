"""Rotations: the turned model is the same model, and what cannot be turned is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.config import Norm, QkNorm, Residual
from infer.errors import ConfigError
from infer.models import decoder
from infer.models.params import Params, random_params, validate
from infer.quant.methods import FP8, GPTQ, RTN
from infer.quant.paley import hadamard
from infer.quant.qarray import dequantize
from infer.quantization import (
    Recipe,
    Rotations,
    hadamard_rotations,
    quantize,
    rotate,
    turning_down,
)
from infer.quantization.spinquant import learn
from tests.models.tiny import NUM_TOKENS, llama_config

# Biases, one norm for both blocks, factors, norms of queries and keys, several groups of heads.
MODELS: dict[str, dict[str, object]] = {
    "gqa-tied": {},
    "biases": dict(qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=False),
    "one-norm": dict(residual=Residual.PARALLEL_ONE_NORM, num_kv_heads=4, gated_mlp=False),
    "scaled": dict(embedding_scale=2.0, residual_scale=0.5, logit_scale=0.3, qk_norm=QkNorm.FULL),
    "positions": dict(learned_positions=True, qk_norm=QkNorm.HEAD),
}


@functools.cache
def model(name: str) -> Params:
    return random_params(llama_config(**MODELS[name]), seed=4)


def text(rows: int = 4, length: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, NUM_TOKENS, (rows, length))


forward = jax.jit(decoder.forward)


def assert_same(have: Params, want: Params) -> None:
    a, b = (forward(params, text())[..., :NUM_TOKENS] for params in (have, want))
    np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("name", MODELS)
def test_the_turned_model_computes_the_same(name: str) -> None:
    params = model(name)
    turned = validate(rotate(params, hadamard_rotations(params.config, seed=1)))
    assert_same(turned, params)
    assert float(jnp.abs(turned.layers[0].v - params.layers[0].v).max()) > 0.1
    assert turned.lm_head is not None and not turned.config.tied_embeddings


def test_values_alone_leave_the_stream_and_the_tied_head() -> None:
    params = random_params(llama_config(pre_norms=False, post_norms=True), seed=4)
    turned = rotate(params, hadamard_rotations(params.config, residual=False))
    assert_same(turned, params)
    assert turned.lm_head is None
    np.testing.assert_array_equal(turned.layers[0].q, params.layers[0].q)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(norm=Norm.LAYER), "layer norm subtracts the mean over channels"),
        (dict(post_norms=True), "norms after its blocks have a gain for each channel"),
    ],
)
def test_what_does_not_commute_is_refused_with_what_is_left(change: dict, words: str) -> None:
    params = random_params(llama_config(**change), seed=4)
    with pytest.raises(ConfigError, match=words + ".*turn values"):
        rotate(params, hadamard_rotations(params.config))


def test_matrices_that_are_no_rotations_are_refused() -> None:
    params = model("gqa-tied")
    size = params.config.hidden_size
    with pytest.raises(ConfigError, match=re.escape("is [3, 3], and this llama model takes")):
        rotate(params, Rotations(np.eye(3)))
    with pytest.raises(ConfigError, match="is 3 from orthonormal, which would change the model"):
        rotate(params, Rotations(2 * np.eye(size)))
    with pytest.raises(ConfigError, match="nan from orthonormal"):
        rotate(params, Rotations(np.full((size, size), np.nan)))
    packed = quantize(params, RTN(bits=8, group_size="channel"))
    with pytest.raises(ConfigError, match="INT8 already, and turning it would round it again"):
        rotate(packed, hadamard_rotations(params.config))


def test_quantize_with_rotations_is_quantize_of_the_turned_model() -> None:
    params = model("gqa-tied")
    rotations = hadamard_rotations(params.config)
    recipe = Recipe.of({"layers.*.q": None, "layers.*": GPTQ(bits=4, group_size=16)})
    have = quantize(params, recipe, text(16), rotations=rotations)
    want = quantize(rotate(params, rotations), recipe, text(16))
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert have.config == want.config


def test_turning_down_turns_only_down() -> None:
    rtn = RTN(bits=4, group_size=16)
    wide = dataclasses.replace(rtn, hadamard="full")
    config = model("gqa-tied").config  # two layers
    rules = lambda method: turning_down(config, method).rules
    assert rules(rtn) == (("layers.*.down", wide), ("layers.*", rtn))
    mixed = {"layers.0.*": None, "layers.1.down": rtn, "layers.1*": rtn}
    assert rules(mixed) == (("layers.1.down", wide), ("layers.0.*", None), ("layers.1*", rtn))
    assert rules({"layers.*.down": wide, "*.q": rtn}) == (("layers.*.down", wide), ("*.q", rtn))
    with pytest.raises(ConfigError, match=r"FP8 cannot turn the inputs of down \(R4\); use RTN"):
        turning_down(config, FP8())
    packed = quantize(model("gqa-tied"), turning_down(config, RTN(group_size=16)))
    want = model("gqa-tied").layers[0].down
    size = want.shape[1]
    assert packed.layers[0].down.format.rotated == size
    back = dequantize(packed.layers[0].down)
    assert float(jnp.abs(back - want).max()) < 0.3
    turned = np.asarray(back) @ hadamard(size).T
    assert len(np.unique(turned[0, :16].round(5))) <= 16  # levels of one group


def test_learning_lowers_the_loss_and_keeps_the_model() -> None:
    params = random_params(llama_config(tied_embeddings=False), seed=4)
    # Two wide channels, as trained models have them.
    params = dataclasses.replace(params, embed=params.embed.at[:, :2].multiply(10))
    method = RTN(bits=4, group_size="channel", activations="int4")
    tokens = np.tile(np.arange(8), (4, 4))
    recipe = turning_down(params.config, method)
    found = learn(params, recipe, tokens, steps=20, learning_rate=3e-3)
    assert len(found.losses) == 20 and np.mean(found.losses[10:]) < found.losses[0] - 0.1
    r = found.rotations
    np.testing.assert_allclose(r.residual @ r.residual.T, np.eye(len(r.residual)), atol=1e-10)
    assert_same(rotate(params, r), params)


def test_learning_refuses_what_it_cannot_do() -> None:
    params = model("gqa-tied")
    with pytest.raises(ConfigError, match="has the method FP8, and rotations are learned for RTN"):
        learn(params, FP8(), text())
    with pytest.raises(ConfigError, match="steps is 0; use a count"):
        learn(params, RTN(group_size=16), text(), steps=0)
    with pytest.raises(ConfigError, match="pass token ids"):
        learn(params, RTN(group_size=16), text()[:, :1])
