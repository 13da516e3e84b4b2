"""A place to start an experiment: two questions about sampling, checked with chex.

    python examples/research.py --model smollm2-135m

1. Is the log-probability that `generate` reports for each token that of `score`, the plain forward
   over the whole sequence?  With and without jit.
2. How do the entropy of the next token and the log-probability of what is drawn change with the
   temperature?  All temperatures run as one `vmap`, each row with its own key.

Everything is a pure function of (params, ids, key), so it composes with jit, vmap and grad.  Needs
chex.
"""

import argparse
import functools
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import infer
from infer.models import decoder

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
PROMPTS = ("The capital of France is", "Water boils at a temperature of")
# Cached decoding and the whole forward sum in other orders; float32 logits reach about 20.
TOLERANCE = 2e-3


def rollout(
    params: infer.Params, prompts: Array, key: Array, *, max_tokens: int
) -> infer.Generation:
    """Return continuations of equally long prompts [R, T] at temperature 1."""
    sampling = infer.SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    return infer.generate(params, prompts, sampling=sampling, key=key)


def logprob_gap(params: infer.Params, prompts: Array, key: Array, *, max_tokens: int) -> Array:
    """Return the largest difference between generate's log-probabilities and score's."""
    out = rollout(params, prompts, key, max_tokens=max_tokens)
    chex.assert_shape(out.tokens, (prompts.shape[0], max_tokens))
    whole = jnp.concatenate([prompts, out.tokens], axis=1)
    scored = infer.score(params, whole)[:, prompts.shape[1] - 1 :]
    chex.assert_equal_shape([scored, out.logprobs])
    return jnp.max(jnp.abs(scored - out.logprobs))


def entropy(logits: Array) -> Array:
    """Return the entropy in nats: -sum p log p over the last axis."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(logprobs) * jnp.maximum(logprobs, -1e9), axis=-1)


def by_temperature(
    params: infer.Params, tokens: Array, temperatures: Array, key: Array
) -> tuple[Array, Array]:
    """Return, per temperature, the mean entropy of the next token after `tokens` [R, T], and the
    mean log-probability, under the model itself, of a token drawn there.
    """
    raw = decoder.forward(params, tokens)[:, -1]

    def at(temperature: Array, key: Array) -> tuple[Array, Array]:
        tempered = raw / temperature
        drawn = jax.random.categorical(key, tempered, shape=(256, raw.shape[0]))
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(raw)[None], drawn[..., None], axis=-1)
        return jnp.mean(entropy(tempered)), jnp.mean(logprobs)

    return jax.vmap(at)(temperatures, jax.random.split(key, temperatures.shape[0]))


def check_gap(params: infer.Params, prompts: Array, key: Array, max_tokens: int) -> float:
    """Compare generate with score, with jit and without; raise AssertionError if they differ."""
    chex.clear_trace_counter()  # chex counts by a function's source: start anew

    @jax.jit
    @chex.assert_max_traces(n=1)  # a second trace would mean that the program depends on values
    def compiled(params: infer.Params, prompts: Array, key: Array) -> Array:
        return logprob_gap(params, prompts, key, max_tokens=max_tokens)

    found = compiled(params, prompts, key)
    chex.assert_trees_all_close(found, compiled(params, prompts, key), rtol=0)
    # `generate` outside a jit is the host form; its result is numpy and has words and figures too.
    sampling = infer.SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    host = infer.generate(params, np.asarray(prompts), sampling=sampling, key=key)
    pure = jax.jit(functools.partial(rollout, max_tokens=max_tokens))(params, prompts, key)
    chex.assert_trees_all_equal(host.tokens, np.asarray(pure.tokens))
    chex.assert_trees_all_close(host.logprobs, np.asarray(pure.logprobs), atol=TOLERANCE)
    chex.assert_scalar_non_negative(TOLERANCE - float(found))
    return float(found)


def check_temperatures(params: infer.Params, prompts: Array, key: Array) -> tuple[Array, Array]:
    """Return entropy and log-probability by temperature; hotter is more uncertain, or it raises."""
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params: infer.Params, prompts: Array, temperatures: Array, key: Array):
        return by_temperature(params, prompts, temperatures, key)

    entropies, logprobs = run(params, prompts, jnp.asarray(TEMPERATURES), key)
    chex.assert_tree_all_finite((entropies, logprobs))
    chex.assert_trees_all_close(
        (entropies, logprobs),
        by_temperature(params, prompts, jnp.asarray(TEMPERATURES), key),
        atol=TOLERANCE,
    )
    if not bool(jnp.all(jnp.diff(entropies) > 0)):
        raise AssertionError(f"entropy must grow with the temperature: {entropies}")
    return entropies, logprobs


def main() -> None:
    """Run both on a real model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    start = time.perf_counter()
    model = infer.load(args.model)
    rows = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    shortest = min(map(len, rows))
    prompts = jnp.asarray([row[:shortest] for row in rows])
    gap = check_gap(model.params, prompts, jax.random.key(0), args.max_tokens)
    print(f"generate and score differ by at most {gap:.1e} nats over {args.max_tokens} tokens")
    entropies, logprobs = check_temperatures(model.params, prompts, jax.random.key(1))
    for temperature, nats, logprob in zip(TEMPERATURES, entropies, logprobs, strict=True):
        print(f"temperature {temperature}: entropy {nats:.2f} nats, mean log p {logprob:.2f}")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
