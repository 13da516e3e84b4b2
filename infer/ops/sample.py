"""From raw logits to tokens: masks and penalties, filters and the draw.

The plain forms are those of infer.sampling; a form draws the same token from the same key.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from infer import sampling
from infer.ops.choice import choose
from infer.sampling import GREEDY_BELOW, History, SamplingState


def process_logits(
    logits: Float[Array, "B V"],
    state: SamplingState,
    history: History,
    implementation: str | None = None,
) -> Float[Array, "B V"]:
    """Return the logits after masks, biases and penalties; see `infer.sampling.process_logits`."""
    kernel = lambda interpret: functools.partial(_process_logits_triton, interpret=interpret)
    return choose(
        "process_logits",
        (logits, state, history),
        xla=sampling.process_logits,
        kernels={"triton": kernel(False), "interpret": kernel(True)},
        preferred=(),
        implementation=implementation,
    )


def _process_logits_triton(
    logits: Array, state: SamplingState, history: History, *, interpret: bool
) -> Array:
    from infer.pallas.process_logits import process_logits as kernel

    vocab = logits.shape[1]
    x = jnp.where(state.allowed, logits, -jnp.inf) if state.allowed.shape[1] else logits
    banned = sampling.banned_ids(state, history, vocab)
    run = functools.partial(kernel, interpret=interpret)

    def penalised(x: Array) -> Array:
        penalties = jnp.stack([state.repetition, state.frequency, state.presence], axis=1)
        counts = sampling.token_counts(history, vocab)
        return run(x, banned, state.bias_ids, state.bias, counts=counts, penalties=penalties)

    uses = (state.repetition != 1) | (state.frequency != 0) | (state.presence != 0)
    plain = lambda x: run(x, banned, state.bias_ids, state.bias)
    return lax.cond(jnp.any(uses), penalised, plain, x)


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    keys: Array,
    implementation: str | None = None,
) -> Int[Array, " B"]:
    """Return one token a row, drawn with that row's parameters (`state` has B rows) and draw key;
    see `infer.sampling.sample`.
    """
    kernel = lambda interpret: functools.partial(_sample_triton, interpret=interpret)
    return choose(
        "sample",
        (logits, state, keys),
        xla=sampling.sample,
        kernels={
            "native": _sample_native,
            "triton": kernel(False),
            "jax_triton": _sample_jax_triton,
            "interpret": kernel(True),
        },
        preferred=("triton",),
        implementation=implementation,
    )


def logsumexp(logits: Float[Array, "B V"], implementation: str | None = None) -> Float[Array, " B"]:
    """Return log(sum(exp(logits))) of each row: logits less this are log-probabilities.  NaN for a
    row with NaN.
    """
    return choose(
        "logsumexp",
        (logits,),
        xla=lambda x: jax.nn.logsumexp(x, axis=-1),
        kernels={"native": _logsumexp_native},
        preferred=(),
        implementation=implementation,
    )


def _logsumexp_native(logits: Array) -> Array:
    from infer.native.sample import logsumexp as kernel

    return kernel(logits)


def _sample_native(logits: Array, state: SamplingState, keys: Array) -> Array:
    from infer.native.sample import sample as kernel

    return kernel(
        logits,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        jax.random.key_data(keys),
        greedy_below=GREEDY_BELOW,
    )


def _sample_jax_triton(logits: Array, state: SamplingState, keys: Array) -> Array:
    from infer.jax_triton.sample import sample as kernel

    return kernel(
        logits,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        jax.random.key_data(keys),
        greedy_below=GREEDY_BELOW,
    )


def _sample_triton(logits: Array, state: SamplingState, keys: Array, *, interpret: bool) -> Array:
    from infer.pallas.sample import sample as kernel

    return kernel(
        logits,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        jax.random.key_data(keys),
        greedy_below=GREEDY_BELOW,
        interpret=interpret,
    )
