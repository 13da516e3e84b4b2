"""`score`: dense in chunks, paged, its gradient, and decode-time log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.models import decoder
from tests.models import tiny


def _tokens(batch: int, length: int) -> jax.Array:
    rng = np.random.default_rng(4)
    return jnp.asarray(rng.integers(0, tiny.NUM_TOKENS, (batch, length)), jnp.int32)


def _by_hand(params, tokens):
    y = jax.nn.log_softmax(decoder.forward(params, tokens)[:, :-1], axis=-1)
    return jnp.take_along_axis(y, tokens[:, 1:, None], axis=-1, mode="clip")[..., 0]


@pytest.mark.parametrize("model", [tiny.llama, tiny.gemma3], ids=["llama", "gemma3"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 50)], ids=str)
def test_dense_and_paged_equal_the_whole_forward(model, shape: tuple[int, int]) -> None:
    params, tokens = model(), _tokens(*shape)
    want = _by_hand(params, tokens)
    np.testing.assert_allclose(infer.score(params, tokens), want, atol=1e-5)
    np.testing.assert_allclose(infer.score(params, tokens, paged=True), want, atol=1e-5)


def test_the_gradient_is_that_of_the_whole_forward() -> None:
    params, tokens = tiny.gemma3(), _tokens(2, 40)
    weight = jnp.linspace(-1.0, 2.0, 39)
    loss = lambda score: lambda params: jnp.sum(score(params, tokens) * weight[None, :])
    got = jax.jit(jax.grad(loss(infer.score)))(params)
    want = jax.jit(jax.grad(loss(_by_hand)))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.max(jnp.abs(b))) + 1e-6)


def test_no_array_of_all_logits_is_in_the_program() -> None:
    """Forwards and backwards: logits are a chunk of 64 tokens, never [B x S, V]."""
    params, tokens = tiny.llama(), _tokens(3, 101)
    loss = lambda params: infer.score(params, tokens).sum()
    for function in (loss, jax.grad(loss)):
        text = jax.jit(function).lower(params).as_text()
        assert "tensor<64x96xf32>" in text
        for all_logits in ("tensor<300x96xf32>", "tensor<3x100x96xf32>", "tensor<5x64x96xf32>"):
            assert all_logits not in text


@pytest.mark.parametrize("paged", [False, True])
def test_decode_time_logprobs_equal_those_of_score(paged: bool) -> None:
    """Decoding token by token and scoring the whole: the difference is rounding."""
    params, prompts = tiny.gemma3(), [[5, 6, 7], [8, 9, 10]]
    sampling = infer.SamplingParams(temperature=1.0, max_tokens=60, seed=3, ignore_eos=True)
    out = infer.generate(params, prompts, sampling=sampling)
    whole = jnp.asarray([p + out.token_ids(i) for i, p in enumerate(prompts)], jnp.int32)
    scored = infer.score(params, whole, paged=paged)[:, 2:]
    np.testing.assert_allclose(out.logprobs, scored, atol=2e-5)


@pytest.mark.kernels
def test_the_gradient_through_the_kernels_is_that_of_the_plain_forms() -> None:
    """Flash attention backwards, and the fused small operations with the plain form's gradient."""
    params, tokens = tiny.gemma3(), _tokens(2, 11)
    loss = lambda name: lambda params: infer.score(params, tokens, implementation=name).sum()
    got = jax.jit(jax.value_and_grad(loss("interpret")))(params)
    want = jax.jit(jax.value_and_grad(loss("xla")))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.max(jnp.abs(b))) + 1e-6)
