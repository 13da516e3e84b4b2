"""The shared forward: Gemma's constants (case M09), layer patterns (M07), padding, scoring."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.config import LayerConfig, ModelConfig, RopeConfig, RopeScaling, RopeScalingKind
from infer.errors import ConfigError
from infer.models import decoder
from infer.models.gemma3 import layer_pattern
from infer.models.params import Params, random_params, validate
from tests.models import tiny


@pytest.mark.parametrize(
    ("hidden", "factor"), [(3072, 55.5), (1152, 34.0), (2560, 50.5), (3840, 62.0), (5376, 73.5)]
)
def test_the_embedding_factor_takes_the_dtype_of_the_activations(hidden, factor) -> None:
    config = ModelConfig(
        family="gemma3",
        vocab_size=4,
        num_tokens=4,
        hidden_size=hidden,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        layers=(),
        max_context=8,
        embedding_scale=hidden**0.5,
    )
    ones = jnp.ones((4, hidden), jnp.bfloat16)
    params = Params(embed=ones, layers=(), final_norm=ones[0], config=config)
    tokens = jnp.asarray([1], jnp.int32)
    attend = lambda layer, q, k, v, turn, sinks, cache: (q, cache)
    x, _ = decoder.hidden_states(params, tokens, tokens, attend, ())
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x.astype(jnp.float32), factor)


def test_every_sixth_layer_is_full() -> None:
    full, sliding = LayerConfig(rope=RopeConfig(theta=1e6)), LayerConfig(window=4)
    layers = layer_pattern(full, sliding, 12, 6)
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [5, 11]


@pytest.mark.parametrize("params", [tiny.llama(), tiny.gemma3()], ids=["llama", "gemma3"])
def test_a_token_never_sees_what_comes_after_it(params: Params) -> None:
    forward = jax.jit(decoder.forward)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    changed = tokens.copy()
    changed[:, 8:] = 77
    before, after = forward(params, jnp.asarray(tokens)), forward(params, jnp.asarray(changed))
    np.testing.assert_allclose(before[:, :8, :90], after[:, :8, :90], atol=1e-6)
    assert np.abs(before[:, 8:, :90] - after[:, 8:, :90]).max() > 1e-2


def test_sinks_and_spans_are_the_same_dense_and_through_the_cache() -> None:
    """A generation that crosses the original context turns all its keys alike, from the first."""
    scaling = RopeScaling(kind=RopeScalingKind.DYNAMIC, factor=4.0, original_context=12)
    rope = RopeConfig(scaling=scaling)
    layers = (LayerConfig(rope=rope, window=7), LayerConfig(rope=rope))
    params = random_params(tiny.llama_config(layers=layers, sinks=True), seed=5)
    prompt, new = [3, 1, 4, 1, 5, 9, 2, 6], 12
    out = infer.generate(
        params,
        [prompt, prompt[:5]],
        sampling=infer.SamplingParams(temperature=0, max_tokens=new),
        prefill_chunk=4,
        page_size=4,
    )
    for row, start in enumerate((8, 5)):
        ids = jnp.asarray([[*prompt[:start], *out.token_ids(row)]], jnp.int32)
        spans = jnp.asarray([start + new], jnp.int32)
        dense = decoder.forward(params, ids, spans)[0, start - 1 : -1]
        np.testing.assert_array_equal(np.argmax(dense, axis=-1), out.token_ids(row))
        # The span that ends with the prompt gives other logits: the test can fail.
        short = decoder.forward(params, ids, jnp.asarray([start], jnp.int32))[0, start - 1 : -1]
        assert np.abs(np.asarray(dense - short)[:, :90]).max() > 1e-2


class ScoreTest(chex.TestCase):
    """`score` with and without jit."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_score_is_the_log_probability_that_generate_reports(self) -> None:
        params = tiny.llama()
        prompt = [3, 1, 4, 1, 5]
        out = infer.generate(
            params, [prompt], sampling=infer.SamplingParams(temperature=0, max_tokens=6)
        )
        tokens = jnp.asarray([prompt + out.token_ids(0)], jnp.int32)
        scores = self.variant(infer.score)(params, tokens)
        assert scores.shape == (1, 10)
        np.testing.assert_allclose(scores[0, 4:], out.logprobs[0], atol=1e-5)


def test_score_is_differentiable_in_the_weights() -> None:
    params, tokens = tiny.gemma3(), jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]], jnp.int32)
    loss = jax.jit(lambda p: infer.score(p, tokens).sum())
    gradient = jax.jit(jax.grad(loss))(params)
    chex.assert_tree_all_finite(gradient)
    direction = jax.tree.map(lambda g: g / 100, gradient)
    step = 1e-2
    shifted = lambda sign: jax.tree.map(lambda p, d: p + sign * step * d, params, direction)
    numeric = (loss(shifted(1)) - loss(shifted(-1))) / (2 * step)
    analytic = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(numeric, analytic, rtol=2e-2)


def test_weights_that_do_not_fit_their_configuration_are_all_listed() -> None:
    params = tiny.llama()
    broken = Params(**(vars(params) | {"final_norm": jnp.ones(7), "lm_head": jnp.ones((96, 32))}))
    with pytest.raises(ConfigError) as error:
        validate(broken)
    assert ".final_norm is [7], must be [32]" in str(error.value)
    assert ".lm_head has no place in this model" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "5 query heads are not a multiple of 2"),
        ({"num_tokens": 97}, "97 ids, the embedding only 96 rows"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"layers": ()}, "num_layers is 0"),
        ({"layers": (LayerConfig(window=0),)}, "layer 0 has a window of 0"),
        ({"layers": (LayerConfig(rope=RopeConfig(dim=10)),)}, "layer 0 turns 10 of 8 dimensions"),
        ({"layers": (LayerConfig(rope=RopeConfig(dim=-2)),)}, "layer 0 turns -2 of 8 dimensions"),
        ({"layers": (LayerConfig(rope=RopeConfig(theta=float("inf"))),)}, "rope theta inf"),
        ({"layers": (LayerConfig(window=2**40),)}, "window of 1099511627776"),
        ({"final_softcap": float("nan")}, "final_softcap is nan"),
        ({"max_context": 1}, "max_context is 1"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny.llama_config(**change)
