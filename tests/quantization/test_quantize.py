"""The driver on tiny random models: what it refuses, what it leaves alone, and that scaling changes
no function.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.config import Activation, Norm, Residual
from infer.errors import ConfigError
from infer.models import decoder
from infer.models.params import LayerParams, Params, random_params
from infer.quant.formats import GGML_TYPES
from infer.quant.methods import AWQ, FP8, GPTQ, MX, NF4, RTN, LLMInt8, Method, SmoothQuant
from infer.quant.qarray import QArray, dequantize
from infer.quantization import Recipe, driver, quantize
from infer.quantization.observe import observe_all
from infer.quantization.recipe import readers
from infer.quantization.scaling import can_scale, scale_input
from tests.models.tiny import NUM_TOKENS, llama, llama_config
from tests.typecheck import unchecked

MODELS: dict[str, dict[str, object]] = {
    "gqa-tied": {},
    "mha-untied": dict(num_kv_heads=4, tied_embeddings=False),
    "post-norms": dict(pre_norms=False, post_norms=True),
    "parallel": dict(
        residual=Residual.PARALLEL_ONE_NORM, norm=Norm.LAYER, gated_mlp=False, num_kv_heads=4
    ),
    "biases": dict(
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        mlp_bias=True,
        qkv_bias=True,
        o_bias=True,
        num_kv_heads=4,
        activation=Activation.GELU_TANH,
        learned_positions=True,
    ),
    "qkv-bias": dict(qkv_bias=True, num_kv_heads=4, mlp_bias=True),
}


@functools.cache
def model(name: str) -> Params:
    return random_params(llama_config(**MODELS[name]), seed=4)


@functools.cache
def text(rows: int = 6, length: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, NUM_TOKENS, (rows, length))


forward = jax.jit(decoder.forward)


def logits(params: Params) -> np.ndarray:
    return np.asarray(forward(params, jnp.asarray(text(), jnp.int32)))[..., :NUM_TOKENS]


def floats(params: Params) -> Params:
    is_packed = lambda x: isinstance(x, QArray)
    return jax.tree.map(lambda x: dequantize(x) if is_packed(x) else x, params, is_leaf=is_packed)


# ---- Scaling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_moving_a_scale_changes_no_function(name):
    params = model(name)
    config = params.config
    rng = np.random.default_rng(2)
    layers, moved = [], 0
    for layer in params.layers:
        for key, matrices in readers(config).items():
            if can_scale(config, key):
                width = getattr(layer, matrices[0]).shape[1]
                s = jnp.asarray(np.exp(rng.uniform(-1, 1, width)), jnp.float32)
                layer = scale_input(config, layer, key, s)
                moved += 1
        layers.append(layer)
    want = logits(params)
    got = logits(dataclasses.replace(params, layers=tuple(layers)))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert moved or name == "post-norms"


# ---- Methods over models ------------------------------------------------------------------------

COMPOSED: dict[str, Method] = {
    "smooth": SmoothQuant(),
    "smooth-gptq": SmoothQuant(
        weights=GPTQ(bits=8, group_size="channel", scale_dtype="float32"), static=True
    ),
    "gptq": GPTQ(bits=4, group_size=16),
    "awq": AWQ(bits=4, group_size=16),
    "awq-gptq": AWQ(bits=4, group_size=16, rounding="gptq"),
}


@pytest.mark.parametrize(
    "name, method",
    [
        *((m, "awq") for m in MODELS),
        ("gqa-tied", "gptq"),
        ("gqa-tied", "awq-gptq"),
        ("biases", "smooth"),
        ("parallel", "smooth-gptq"),
        ("post-norms", "smooth"),
    ],
)
def test_a_calibrated_model_is_near_the_float_one(name, method):
    params = model(name)
    got = quantize(params, COMPOSED[method], text())
    matrices = [w for x in got.layers for w in (x.q, x.k, x.v, x.o, x.up, x.down)]
    assert all(isinstance(w, QArray) for w in matrices)
    want = logits(params)
    error = np.linalg.norm(logits(got) - want) / np.linalg.norm(want)
    assert error < (0.03 if "smooth" in method else 0.25)


def test_nothing_of_the_input_changes_and_twice_is_the_same():
    params = model("mha-untied")
    before = jax.tree.map(np.array, params)
    a, b = (quantize(params, AWQ(bits=4, group_size=16), text()) for _ in range(2))
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_layers_are_reported_as_they_are_done():
    done = []
    quantize(llama(), RTN(group_size=16), progress=lambda i, n: done.append((i, n)))
    assert done == [(1, 2), (2, 2)]


def test_packed_weights_are_those_of_their_numbers():
    format = GGML_TYPES[8]  # Q8_0
    rng = np.random.default_rng(1)
    params = random_params(llama_config(hidden_size=64, intermediate_size=64, head_dim=16), seed=1)

    def pack(w: jax.Array) -> QArray:
        data = rng.integers(0, 0x3C, (w.shape[0], format.row_bytes(w.shape[1])), np.uint8)
        return QArray.create(data, format, w.shape)

    layers = tuple(
        dataclasses.replace(x, **{m: pack(getattr(x, m)) for m in ("q", "k", "v", "o", "down")})
        for x in params.layers
    )
    packed = dataclasses.replace(params, layers=layers)
    a = quantize(packed, {"layers.*.[qo]": RTN(group_size=32)})
    b = quantize(floats(packed), {"layers.*.[qo]": RTN(group_size=32)})
    np.testing.assert_array_equal(a.layers[1].q.data, b.layers[1].q.data)
    assert a.layers[0].down is packed.layers[0].down  # what no pattern names keeps its bytes


# ---- Recipes ------------------------------------------------------------------------------------


def test_a_recipe_says_what_stays():
    got = quantize(
        model("mha-untied"),
        {"layers.0.*": None, "layers.*.[qkvo]": RTN(group_size=16), "lm_head": LLMInt8()},
    )
    assert not isinstance(got.layers[0].q, QArray) and not isinstance(got.layers[1].up, QArray)
    assert got.layers[1].q.format.name == "INT4-G16" and got.lm_head.format.bits == 8


@pytest.mark.parametrize(
    "recipe, message",
    [
        (
            {"layers.*.dwon": RTN(group_size=16)},
            r"'layers.\*.dwon' matches no matrix of this model; there are embed,"
            r" layers.<0 to 1>.<q\|k\|v\|o\|gate\|up\|down>: correct the pattern",
        ),
        ({"lm_head": RTN(group_size=16)}, "'lm_head' matches no matrix"),  # tied
        ({"embed": GPTQ(group_size=16)}, "embed cannot take GPTQ, which is calibrated"),
        ({"layers.*": RTN(group_size=128)}, "group_size 128 does not divide the width 32"),
        ({"layers.*": None}, "every matrix stays as it is; give at least one a method"),
        (
            {"layers.*": RTN(group_size=16), "layers.*.down": None},
            r"'layers.\*.down' is never reached: 'layers.\*' before it takes all that it matches",
        ),
        (
            {"layers.*.q": AWQ(group_size=16), "layers.*": RTN(group_size=16)},
            "layers.0: q, k, v read one input, which AWQ scales, so they need the same method",
        ),
    ],
)
def test_recipes_that_cannot_be(recipe, message):
    with pytest.raises(ConfigError, match=message):
        quantize(llama(), recipe, text() if "AWQ" in message or "GPTQ" in message else None)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"layers.*": 4}, r"'layers\.\*': 4 is no rule; a recipe maps patterns"),
        ({7: None}, r"7: None is no rule"),
        (4, "a recipe is a int; pass a method"),
    ],
)
def test_what_is_no_recipe(given, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.of(given)


def test_the_first_pattern_that_matches_holds():
    recipe = Recipe.of({"layers.0.*": None, "layers.*": NF4()})
    assert recipe.method_for("layers.0.q") is None and recipe.method_for("layers.1.q") == NF4()
    assert recipe.method_for("embed") is None


def test_a_pattern_is_reached_where_it_takes_one_matrix():
    paths = {f"layers.{i}.{m}": (8, 32) for i in (0, 1) for m in ("q", "up")}
    rules = {"layers.0.*": None, "*.q": RTN(bits=8, group_size=16), "layers.*": RTN(group_size=16)}
    assert set(Recipe.of(rules).methods(paths)) == {"layers.1.q", "layers.1.up"}
    with pytest.raises(ConfigError, match=r"'\*q' is never reached: 'layers.0.\*', '\*.q' before"):
        Recipe.of({"layers.0.*": None, "*.q": RTN(group_size=16), "*q": None}).methods(paths)


@pytest.mark.parametrize("method", [RTN(group_size="channel"), RTN(bits=3, group_size=12)])
def test_rows_that_fill_no_whole_bytes_are_refused_first(method):
    """12 codes of 4 bits are 6 bytes, and yet no format holds such rows."""
    with pytest.raises(ConfigError, match=r"layers.0.q and 1 others: a row of 12 codes .* fills"):
        Recipe.of(method).methods({"layers.0.q": (8, 12), "layers.0.k": (8, 12)})
    with pytest.raises(ValueError, match=r"rows of 12 codes of . bits fill no whole bytes"):
        method.pack(jnp.ones((8, 12)))
    assert Recipe.of(RTN(bits=8, group_size=12)).methods({"layers.0.q": (8, 12)})


# ---- Calibration in batches ---------------------------------------------------------------------


def test_a_number_of_sequences_that_nothing_divides_makes_few_batches(monkeypatch):
    """AWQ's search reads the first batch: of 7 sequences it is not one alone."""
    monkeypatch.setattr(driver, "_BATCH_TOKENS", 3 * 16)
    params, tokens = llama(), text(7)
    xs, length, turns = driver._embedded(params, tokens)
    assert (length, [len(x) for x in xs]) == (16, [48, 32, 32])
    rows = np.concatenate([np.asarray(x).reshape(-1, 16, 32) for x in xs])
    order = [i for nth in range(3) for i in range(nth, 7, 3)]
    np.testing.assert_array_equal(rows, np.asarray(params.embed)[tokens[order]])
    layer, w = params.config.layers[0], params.layers[0]
    assert isinstance(w, LayerParams)
    some = observe_all(params.config, layer, length, w, xs, turns[layer.rope])
    monkeypatch.setattr(driver, "_BATCH_TOKENS", 2048)
    (x,), _, turns = driver._embedded(params, tokens)
    whole = observe_all(params.config, layer, length, w, [x], turns[layer.rope])
    for name, seen in whole.items():  # `down` reads what attention and its rotations gave
        np.testing.assert_allclose(some[name].gram, seen.gram, rtol=1e-4, atol=1e-4)
        assert some[name].count == seen.count == 7 * 16


# ---- Bad input ----------------------------------------------------------------------------------


def test_activations_that_overflow_are_not_searched_over():
    params = llama()
    w = params.layers[1]
    large = dataclasses.replace(w, gate=w.gate * 1e20, up=w.up * 1e20)
    params = dataclasses.replace(params, layers=(params.layers[0], large))
    for method in (AWQ(group_size=16), SmoothQuant(), GPTQ(group_size=16)):
        method = {"layers.1.*": method}
        with pytest.raises(ConfigError, match=r"layers\.1: the activations that down reads"):
            quantize(params, method, text())


def test_no_packed_matrix_becomes_floats_for_anothers_scale():
    params = model("mha-untied")
    once = quantize(params, {"layers.*.v": RTN(group_size=16), "layers.1.up": NF4(group_size=16)})
    for name, writer in (("o", r"0\.v"), ("down", r"1\.up")):
        with pytest.raises(ConfigError, match=rf"\.{name}: AWQ .* rows of layers\.{writer}, and"):
            quantize(once, {f"layers.*.{name}": AWQ(group_size=16)}, text())


def test_inside_a_trace_nothing_can_be_checked():
    for call in (lambda p: quantize(p, RTN(group_size=16)), lambda p: quantize(llama(), RTN())):
        with pytest.raises(ConfigError, match="called inside a function that JAX traces"):
            jax.eval_shape(call, llama())


def test_smoothing_that_moves_nothing_is_said(caplog):
    quantize(model("post-norms"), SmoothQuant(), text())
    assert "SmoothQuant moves nothing: this llama model has no norms before" in caplog.text


@pytest.mark.parametrize(
    "calibration, message",
    [
        (None, "GPTQ needs activations; pass calibration=token ids"),
        (np.zeros((4, 8)), r"calibration is float64\[4, 8\]; pass integer token ids \[N, S\]"),
        (np.zeros(64, int), r"calibration is int64\[64\]; pass integer token ids"),
        (np.full((4, 16), NUM_TOKENS), "has ids from 90 to 90; the model knows 0 to 89"),
        (np.full((4, 16), -1), "has ids from -1 to -1"),
        (np.zeros((1, 129), int), "sequences of 129 tokens, and the model's context is 128"),
        (np.zeros((2, 16), int), "calibration has 32 tokens, and inputs of 48 channels need"),
    ],
)
def test_calibration_that_will_not_do(calibration, message):
    with pytest.raises(ConfigError, match=message):
        quantize(llama(), GPTQ(group_size=16), calibration)


def test_calibration_that_nobody_reads():
    with pytest.raises(ConfigError, match="no method of this recipe looks at activations"):
        quantize(llama(), RTN(group_size=16), text())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers(bad):
    params = llama()
    layer = params.layers[1]
    assert isinstance(layer, LayerParams)
    broken = dataclasses.replace(layer, up=layer.up.at[3, 4].set(bad))
    params = dataclasses.replace(params, layers=(params.layers[0], broken))
    with pytest.raises(ConfigError, match=r"layers\.1\.up has weights that are NaN or infinite"):
        quantize(params, RTN(group_size=16))


def test_scales_that_their_dtype_cannot_hold():
    params = llama()
    large = dataclasses.replace(params.layers[0], up=params.layers[0].up * 1e8)
    params = dataclasses.replace(params, layers=(large, params.layers[1]))
    with pytest.raises(ConfigError, match=r"layers\.0\.up: its scales are beyond float16"):
        quantize(params, RTN(group_size=16))
    quantize(params, RTN(group_size=16, scale_dtype="float32"))


@pytest.mark.parametrize(
    "method",
    [
        RTN(bits=8, group_size=16, symmetric=False, scale_dtype="float32"),
        NF4(group_size=16),
        MX(scale_rule="rceil"),
    ],
)
def test_numbers_that_float32_cannot_hold(method):
    """The width of a range, the sum of the scales, and 6 x 2^126."""
    large = jnp.sign(model("gqa-tied").embed) * 3e38
    params = dataclasses.replace(model("gqa-tied"), embed=large)
    with pytest.raises(ConfigError, match="embed: its weights are so large that numbers of "):
        quantize(params, {"embed": method})
    assert np.isfinite(dequantize(quantize(params, {"embed": FP8()}).embed)).all()


# All inputs of the first layer are equal: its Hessian has rank one, damping makes it whole.
SAME = np.zeros((6, 16), int)


def test_a_hessian_of_rank_one_is_damped():
    method = GPTQ(group_size=16)
    got = quantize(llama(), method, SAME)
    assert np.isfinite(logits(got)).all()
    # Only one input matters, and its error is made up for by all the others.
    w = llama().layers[0].q
    x = np.asarray(llama().embed[0], np.float64) * np.asarray(llama().layers[0].attn_norm)
    off = lambda q: np.linalg.norm(np.asarray(dequantize(q) - w, np.float64) @ x)
    assert off(got.layers[0].q) < 0.2 * off(RTN(group_size=16).pack(w))


@pytest.mark.parametrize("method", [GPTQ, functools.partial(AWQ, rounding="gptq")])
def test_a_hessian_that_stays_singular_is_refused(method):
    with pytest.raises(ConfigError, match=r"layers\.0\.q: the Hessian stays singular with damping"):
        quantize(llama(), method(group_size=16, damping=1e-15), SAME)


def test_damping_that_does_not_suffice_is_raised_and_said(caplog):
    got = quantize(llama(), GPTQ(group_size=16, damping=1e-6), SAME)
    assert np.isfinite(logits(got)).all()
    assert "layers.0.q: the Hessian with damping 1e-06 has no factor" in caplog.text


def test_what_is_quantised_is_not_quantised_again():
    once = quantize(model("gqa-tied"), {"layers.0.*": RTN(bits=8, group_size="channel")})
    with pytest.raises(ConfigError, match=r"layers\.0\.q is INT8 already"):
        quantize(once, RTN(bits=4, group_size="channel"))
    rest = quantize(once, {"layers.1.*": RTN(bits=4, group_size="channel")})
    assert rest.layers[0].q.format.name == "INT8" and rest.layers[1].q.format.name == "INT4"


def test_a_model_is_no_params():
    with unchecked(), pytest.raises(ConfigError, match=r"params is a dict; pass model\.params"):
        quantize({}, RTN())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RTN(bits=4.0), "bits is 4.0; use 8"),  # type: ignore[arg-type]
        (lambda: RTN(bits=np.int64(4)), r"bits is .*4.*; use 8"),
        (lambda: RTN(symmetric="no"), "symmetric is 'no'; use True, False"),  # type: ignore[arg-type]
        (lambda: GPTQ(damping=None), "damping is None; use a number"),  # type: ignore[arg-type]
        (lambda: SmoothQuant(alpha=None), "alpha is None; use a number"),  # type: ignore[arg-type]
        (lambda: AWQ(convention="signed"), "convention is 'signed' and symmetric is False"),
        (lambda: AWQ(rounding="gptqq"), "rounding is 'gptqq'; use 'rtn', 'gptq'"),
        (lambda: AWQ(damping=0.1), "damping is 0.1 and rounding 'rtn', which damps nothing"),
        (lambda: NF4(group_size="tensor"), "group_size is 'tensor'; use a number"),  # type: ignore[arg-type]
        (lambda: RTN(group_size=True), "group_size is True"),
    ],
)
def test_options_of_another_type(make, message):
    with unchecked(), pytest.raises(ConfigError, match=message):
        make()
