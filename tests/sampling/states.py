"""Sampling parameters as arrays, for tests of the draw."""

import jax
import jax.numpy as jnp

from infer.sampling import SamplingState, request_keys, seed_words


def state_of(rows: int, vocab: int, **changes: object) -> SamplingState:
    fields = (
        dict(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            max_tokens=10,
            min_tokens=0,
            presence=0.0,
            frequency=0.0,
            repetition=1.0,
        )
        | changes
    )
    array = lambda name, dtype: jnp.broadcast_to(jnp.asarray(fields[name], dtype), (rows,))
    return SamplingState(
        temperature=array("temperature", jnp.float32),
        top_k=array("top_k", jnp.int32),
        top_p=array("top_p", jnp.float32),
        min_p=array("min_p", jnp.float32),
        presence=array("presence", jnp.float32),
        frequency=array("frequency", jnp.float32),
        repetition=array("repetition", jnp.float32),
        bias_ids=jnp.zeros((rows, 0), jnp.int32),
        bias=jnp.zeros((rows, 0), jnp.float32),
        allowed=jnp.ones((rows, 0), bool),
        bad_words=jnp.zeros((rows, 0, 0), jnp.int32),
        max_tokens=array("max_tokens", jnp.int32),
        min_tokens=array("min_tokens", jnp.int32),
        stop_ids=jnp.full((rows, 2), vocab, jnp.int32),
        key=request_keys(
            jax.random.key(0), *seed_words([None] * rows), jnp.arange(rows, dtype=jnp.int32)
        ),
    )
