"""Cached against uncached greedy decoding: what the cache is worth, and that it changes nothing."""

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.bench import ours
from infer.bench.peers import wait_for_quiet
from infer.models.decoder import forward
from infer.models.params import Params


@functools.partial(jax.jit, donate_argnames="tokens")
def _next_token(params: Params, tokens: Array, length: Array) -> tuple[Array, Array]:
    """Run the whole sequence again; append the likeliest token.  Later places hold padding, which
    no earlier position sees.
    """
    token = jnp.argmax(forward(params, tokens)[0, length - 1], axis=-1).astype(tokens.dtype)
    return tokens.at[0, length].set(token), length + 1


def run_uncached(params: Params, prompt: Sequence[int], new_tokens: int) -> ours.Timing:
    """Generate greedily by `infer.models.decoder.forward` alone, padded to the final length."""
    padded = np.zeros((1, len(prompt) + new_tokens), np.int32)
    padded[0, : len(prompt)] = prompt
    start = time.perf_counter()
    tokens, length = jnp.asarray(padded), jnp.asarray(len(prompt), jnp.int32)
    first = start
    for step in range(new_tokens):
        tokens, length = _next_token(params, tokens, length)
        jax.block_until_ready(tokens)
        first = time.perf_counter() if step == 0 else first
    end = time.perf_counter()
    generated = np.asarray(tokens)[0, len(prompt) :].tolist()
    return ours.Timing(ttft_s=first - start, decode_s=end - first, tokens=[generated])


def compare(
    params: Params,
    ids: Sequence[int],
    context: int,
    new_tokens: int,
    rounds: int,
    patience: float = 0.0,
) -> dict[str, Any]:
    """Return tokens/s of both ways at a final length of `context`, alternating, and their ratio."""
    prompt = [ids[i % len(ids)] for i in range(context - new_tokens)]
    cached = ours.run(params, [prompt], new_tokens)
    uncached = run_uncached(params, prompt, new_tokens)
    equal = cached.tokens == uncached.tokens
    with_cache, without, ratios, busy = [], [], [], []
    for _ in range(rounds):
        busy.append(wait_for_quiet(patience))
        with_cache.append(ours.run(params, [prompt], new_tokens).decode_rate())
        without.append(run_uncached(params, prompt, new_tokens).decode_rate())
        ratios.append(with_cache[-1] / without[-1])
    return {
        "context": context,
        "new_tokens": new_tokens,
        "cached_tokens_per_s": statistics.median(with_cache),
        "uncached_tokens_per_s": statistics.median(without),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "tokens_equal": equal,
        "busy_cores": max(busy),
    }
