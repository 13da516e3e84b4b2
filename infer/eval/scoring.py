"""What models say of given tokens: through the page cache in prefill chunks, as in `generate`.

A window runs through all layers as a prompt does: tiles of tokens, keys and values written to
pages.  Then a stretch of tokens at a time goes through the head: its log-probabilities [T, V], of
one model or of several beside each other, become a few numbers a token and are dropped.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.backend import default_platform
from infer.cache import paged
from infer.errors import ConfigError, RequestError
from infer.generation.prepare import TILE, bucket
from infer.models import decoder
from infer.models.paged_forward import through_layers
from infer.models.params import Params

_PAGE = 16
# Tokens of a pass through the layers.  A GPU has room for several windows' worth.
_PASS = {"cpu": 512, "gpu": 4096}
# Tokens whose logits are in memory at a time, of each model: 67 MB with a vocabulary of 262,144.
_STRETCH = 64


@dataclass(frozen=True)
class TokenScores:
    """What one model says of the scored tokens of W windows."""

    nll: Float[np.ndarray, "W S"]  # -log p(token), nats
    right: Bool[np.ndarray, "W S"]  # the token was the likeliest one


@dataclass(frozen=True)
class TokenDivergence:
    """How far a model is from a base at the scored tokens of W windows."""

    kl: Float[np.ndarray, "W S"]  # KL(base || model) over the vocabulary, nats
    same_top: Bool[np.ndarray, "W S"]  # both have the same likeliest token
    delta_p: Float[np.ndarray, "W S"]  # p_model(token) - p_base(token)


def score_windows(
    models: Sequence[Params],
    windows: Int[np.ndarray, "W C"],
    first: int,
    kv_dtypes: Sequence[str | None],
    implementation: str | None = None,
) -> Iterator[tuple[int, list[TokenScores], list[TokenDivergence]]]:
    """Score the tokens at positions `first` to C - 1 of every window, some windows at a time.

    Args:
        models: the first one is the base of the divergences.
        windows: ids, every row full.
        first: position of the first scored token, at least 1.
        kv_dtypes: of each model's cache; None is the activations'.
        implementation: of the ops; None chooses.

    Yields:
        How many windows this is for, a TokenScores a model, a TokenDivergence for each but the
        first.
    """
    length = windows.shape[1]
    at_once = _windows_at_once(length)
    for start in range(0, len(windows), at_once):
        part = windows[start : start + at_once]
        # The last ones are few: the program keeps its shape.
        rows = np.concatenate([part, np.repeat(part[-1:], at_once - len(part), axis=0)])
        tokens = jnp.asarray(rows, jnp.int32)
        lengths = jnp.full(at_once, length, jnp.int32)
        states = []
        for params, kv_dtype in zip(models, kv_dtypes, strict=True):
            x = _states(params, tokens, lengths, kv_dtype, implementation)[
                : len(part), first - 1 : -1
            ]
            states.append(x.reshape(-1, x.shape[-1]))
        targets = tokens[: len(part), first:].reshape(-1)
        scores, divergences = _measure(models, states, targets, implementation)
        shape = (len(part), length - first)
        yield (
            len(part),
            [TokenScores(*(y.reshape(shape) for y in each)) for each in scores],
            [TokenDivergence(*(y.reshape(shape) for y in each)) for each in divergences],
        )


def log_likelihoods(
    params: Params, rows: Sequence[Sequence[int]], implementation: str | None = None
) -> list[Float[np.ndarray, " _T1"]]:
    """Return log p(token t+1 | tokens 0..t) of each row, for rows of different lengths.

    Rows of about one length run together, padded to a power of two.
    """
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
    by_width: dict[int, list[int]] = {}
    for index, ids in enumerate(rows):
        by_width.setdefault(bucket(len(ids), TILE), []).append(index)
    for width, indices in by_width.items():
        at_once = _windows_at_once(width)
        for start in range(0, len(indices), at_once):
            part = indices[start : start + at_once]
            tokens = np.zeros((at_once, width), np.int32)
            lengths = np.ones(at_once, np.int32)
            for row, index in enumerate(part):
                lengths[row] = len(rows[index])
                tokens[row, : lengths[row]] = rows[index]
            x = _states(params, jnp.asarray(tokens), jnp.asarray(lengths), None, implementation)
            flat = jnp.concatenate([x[row, : lengths[row] - 1] for row in range(len(part))])
            targets = np.concatenate([tokens[row, 1 : lengths[row]] for row in range(len(part))])
            (scores,), _ = _measure([params], [flat], jnp.asarray(targets), implementation)
            ends = np.cumsum(lengths[: len(part)] - 1)[:-1]
            for index, nll in zip(part, np.split(scores[0], ends), strict=True):
                found[index] = -nll
    return found


def _windows_at_once(length: int) -> int:
    return max(1, _PASS.get(default_platform(), _PASS["gpu"]) // length)


def check_tokens(params: Params, ids: Int[np.ndarray, "..."], length: int) -> None:
    """Raise unless a window of `length` fits the model and it knows all ids."""
    config = params.config
    if length > config.max_context:
        raise ConfigError(
            f"a window has {length} tokens and the model's context is {config.max_context}; give a "
            "context of at most that"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= config.num_tokens):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise RequestError(
            f"the tokens have the id {bad}; ids of this model are 0..{config.num_tokens - 1}, so "
            "they are of another tokenizer"
        )


@functools.partial(jax.jit, static_argnames=("kv_dtype", "implementation"))
def _states(
    params: Params,
    tokens: Int[Array, "B C"],
    lengths: Int[Array, " B"],
    kv_dtype: str | None,
    implementation: str | None,
) -> Float[Array, "B C D"]:
    """Return the residual streams after all layers; rows past `lengths` are anything."""
    batch, length = tokens.shape
    tile = min(TILE, length)
    tiles = -(-length // tile)
    # Tiles of each window in a pass.
    most = max(1, _PASS.get(default_platform(), _PASS["gpu"]) // (batch * tile))
    passes = -(-tiles // most)
    width = -(-tiles // passes)
    padded = jnp.pad(tokens, ((0, 0), (0, passes * width * tile - length)))
    pages = -(-length // _PAGE)
    cache = paged.create(
        params.config,
        num_rows=batch,
        num_pages=batch * pages,
        page_size=_PAGE,
        pages_per_row=pages,
        dtype=kv_dtype or params.dtype,
    )
    cache, _ = paged.allocate(cache, jnp.full(batch, pages, jnp.int32))
    spans = jnp.repeat(lengths, width * tile)
    slots = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), width * tile)
    table = jnp.repeat(cache.page_table, width, axis=0)

    def one(cache: paged.PagedCache, step: Array) -> tuple[paged.PagedCache, Array]:
        start = step * (width * tile)
        position = start + jnp.arange(width * tile, dtype=jnp.int32)
        inside = position[None, :] < lengths[:, None]
        positions = jnp.where(inside, position[None, :], -1)
        x, cache = through_layers(
            params,
            cache,
            lax.dynamic_slice_in_dim(padded, start, width * tile, 1).reshape(-1),
            positions.reshape(batch * width, tile),
            jnp.where(inside.reshape(-1), slots, batch),
            table,
            spans,
            implementation,
        )
        return cache, x.reshape(batch, width * tile, -1)

    _, x = lax.scan(one, cache, jnp.arange(passes, dtype=jnp.int32))
    return x.swapaxes(0, 1).reshape(batch, passes * width * tile, -1)[:, :length]


def _measure(
    models: Sequence[Params],
    states: Sequence[Array],
    targets: Int[Array, " T"],
    implementation: str | None,
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Return the columns of TokenScores of each model and those of TokenDivergence, flat."""
    count = targets.shape[0]
    num_tokens = models[0].config.num_tokens
    pad = -count % _STRETCH
    states = [jnp.pad(x, ((0, pad), (0, 0))) for x in states]
    targets = jnp.pad(targets, (0, pad))
    scores = [[] for _ in models]
    divergences = [[] for _ in models[1:]]
    for start in range(0, count + pad, _STRETCH):
        target = targets[start : start + _STRETCH]
        base = None
        for nth, (params, x) in enumerate(zip(models, states, strict=True)):
            logp = _log_probabilities(
                params, x[start : start + _STRETCH], num_tokens, implementation
            )
            scores[nth].append(_score(logp, target))
            if base is None:
                base = logp
            else:
                divergences[nth - 1].append(_diverge(base, logp, target))
    joined = lambda parts: [np.concatenate(x)[:count] for x in zip(*parts, strict=True)]
    scores, divergences = jax.device_get((scores, divergences))
    return [joined(x) for x in scores], [joined(x) for x in divergences]


# Programs of their own, shared by all models of one shape: a model against itself then has the
# same bits twice, and a divergence of exactly 0.


@functools.partial(jax.jit, static_argnames=("num_tokens", "implementation"))
def _log_probabilities(
    params: Params, x: Float[Array, "T D"], num_tokens: int, implementation: str | None
) -> Float[Array, "T V"]:
    logits = decoder.logits(params, x, implementation)[:, :num_tokens]
    return jax.nn.log_softmax(logits, axis=-1)


@jax.jit
def _score(logp: Float[Array, "T V"], target: Int[Array, " T"]) -> tuple[Array, Array]:
    chosen = jnp.take_along_axis(logp, target[:, None], axis=-1, mode="clip")[:, 0]
    return -chosen, jnp.argmax(logp, axis=-1) == target


@jax.jit
def _diverge(
    base: Float[Array, "T V"], other: Float[Array, "T V"], target: Int[Array, " T"]
) -> tuple[Array, Array, Array]:
    """KL = sum_v q - p - p (log q - log p): terms that are at least 0, and sum q = sum p."""
    p, q = jnp.exp(base), jnp.exp(other)
    # Where p is 0, so is p log p, whatever log q is.
    terms = q - p - jnp.where(p > 0, p * (other - base), 0.0)
    chosen = lambda y: jnp.take_along_axis(y, target[:, None], axis=-1, mode="clip")[:, 0]
    same = jnp.argmax(base, axis=-1) == jnp.argmax(other, axis=-1)
    return jnp.sum(terms, axis=-1), same, chosen(q) - chosen(p)
