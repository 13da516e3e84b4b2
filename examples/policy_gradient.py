"""Reinforcement learning in one process and one program: sample, reward, update.

    python examples/policy_gradient.py

REINFORCE (Williams 1992) on a tiny random model.  A step draws continuations with `infer.generate`,
scores them with a reward that is a plain function of ids, and climbs

    E[(r - b) * grad log p(continuation | prompt)]

with the log-probabilities of `infer.score` and an optimiser of optax.  Rollout and update are one
`jax.jit`: the weights that sample are the weights that were just updated, without a copy, a second
engine or a server between them.  Needs optax.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import infer
from infer.config import LayerConfig
from infer.models.params import random_params

PROMPTS, PROMPT_LEN, NEW_TOKENS, NUM_TOKENS = 64, 3, 8, 32


class Learner(NamedTuple):
    """What a step changes."""

    params: infer.Params
    optimiser: Any


def model_config() -> infer.ModelConfig:
    """Return a model small enough to learn in seconds on a CPU."""
    return infer.ModelConfig(
        family="llama",
        vocab_size=NUM_TOKENS,
        num_tokens=NUM_TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        layers=(LayerConfig(),) * 2,
        max_context=64,
    ).validate()


def reward(tokens: Array) -> Array:
    """Return the share of even ids in each row [R, T] -> [R]."""
    return jnp.mean(tokens % 2 == 0, axis=1, dtype=jnp.float32)


@functools.partial(jax.jit, static_argnames="optimiser", donate_argnames="learner")
def step(
    learner: Learner, key: Array, *, optimiser: optax.GradientTransformation
) -> tuple[Learner, Array]:
    """Draw, reward, update; return the learner and the mean reward before the update."""
    prompt_key, draw_key = jax.random.split(key)
    prompts = jax.random.randint(prompt_key, (PROMPTS, PROMPT_LEN), 0, NUM_TOKENS)
    # ignore_eos: all continuations have the same length, so that no row of the score is padding.
    sampling = infer.SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    new = infer.generate(learner.params, prompts, sampling=sampling, key=draw_key).tokens
    rewards = reward(new)
    advantage = rewards - jnp.mean(rewards)
    whole = jnp.concatenate([prompts, new], axis=1)

    def loss(params: infer.Params) -> Array:
        logprobs = infer.score(params, whole)[:, PROMPT_LEN - 1 :]
        return -jnp.mean(advantage * jnp.sum(logprobs, axis=1))

    gradient = jax.grad(loss)(learner.params)
    updates, state = optimiser.update(gradient, learner.optimiser, learner.params)
    return Learner(optax.apply_updates(learner.params, updates), state), jnp.mean(rewards)


def train(num_steps: int = 60, seed: int = 0) -> list[float]:
    """Return the mean reward of each step."""
    optimiser = optax.adam(3e-3)
    params = random_params(model_config(), seed=seed)
    learner = Learner(params, optimiser.init(params))
    rewards = []
    for key in jax.random.split(jax.random.key(seed), num_steps):
        learner, mean = step(learner, key, optimiser=optimiser)
        rewards.append(float(mean))
    return rewards


def main() -> None:
    """Train and print how the reward grows."""
    rewards = train()
    for first in range(0, len(rewards), 10):
        part = rewards[first : first + 10]
        print(f"steps {first:2} to {first + len(part) - 1:2}: reward {sum(part) / len(part):.3f}")


if __name__ == "__main__":
    main()
