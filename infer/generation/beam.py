"""Beam search on forked pages, as one compiled program.

Beams of one prompt share the prompt's pages and every page of a common past.  After each step the
beams that go on take the tables of those they come from, and only a page that two of them would
write into is copied.

The score of a sequence of n generated tokens, its stop id included, is

    sum_i log p(token i) / n^length_penalty

Candidates, ranking and stopping follow transformers' beam search (`num_beams`, `length_penalty`,
`early_stopping`).  A prompt's result does not depend on the other prompts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.cache import paged
from infer.cache.paged import PagedCache
from infer.models import decoder
from infer.models.paged_forward import through_layers
from infer.models.params import Params
from infer.pytree import Leaf, pytree_dataclass


@pytree_dataclass
class Task:
    """What is searched for: G prompts."""

    prompts: Leaf  # int32 [G, T]
    prompt_lens: Leaf  # int32 [G]
    max_tokens: Leaf  # int32 [G]
    stop_ids: Leaf  # int32 [G, E], V = unused
    length_penalty: Leaf  # f32 []
    stop_when_full: Leaf  # bool [], `early_stopping` is True
    to_the_end: Leaf  # bool [], `early_stopping` is "never"


@pytree_dataclass
class Beams:
    """K sequences a prompt; a score of -inf marks one that is not there."""

    tokens: Leaf  # int32 [G, K, N]
    lengths: Leaf  # int32 [G, K]
    scores: Leaf  # f32 [G, K]


@pytree_dataclass
class Search:
    """The loop's carry; rows of the cache are prompt-major beams."""

    cache: PagedCache  # G x K rows
    hidden: Leaf  # [G x K, D], residual stream of each beam's last token
    running: Beams  # scores are sums of log-probabilities, best first
    finished: Beams  # scores have the length penalty, best first
    open: Leaf  # bool [G], a better sequence may still come
    steps: Leaf  # int32 []
    pages_copied: Leaf  # int32 []
    most_pages: Leaf  # int32 [], in use at a time


def search(
    params: Params, task: Task, cache: PagedCache, *, num_beams: int, tile: int, max_new: int
) -> Search:
    """Run beam search from an empty cache of G x K rows.

    Args:
        params: weights.
        task: what is searched for.
        cache: empty, with room for every beam on its own.
        num_beams: K.
        tile: prompt tokens of each row in one prefill pass.
        max_new: room for new tokens (N).
    """
    num_prompts = task.prompts.shape[0]
    cache, hidden = _prefill(params, task, cache, num_beams, tile)
    beams = lambda scores: Beams(
        tokens=jnp.zeros((num_prompts, num_beams, max_new), jnp.int32),
        lengths=jnp.zeros((num_prompts, num_beams), jnp.int32),
        scores=scores,
    )
    none = jnp.full((num_prompts, num_beams), -jnp.inf, jnp.float32)
    state = Search(
        cache=cache,
        hidden=hidden,
        # All beams are the prompt: one of them is enough to start from.
        running=beams(none.at[:, 0].set(0.0)),
        finished=beams(none),
        open=jnp.ones(num_prompts, bool),
        steps=jnp.zeros((), jnp.int32),
        pages_copied=jnp.zeros((), jnp.int32),
        most_pages=_pages_in_use(cache),
    )
    go_on = lambda s: jnp.any(s.open) & ~s.cache.overflow
    return lax.while_loop(go_on, lambda s: _step(params, task, s), state)


def _pages_in_use(cache: PagedCache) -> Int[Array, ""]:
    return jnp.sum(cache.page_refs > 0, dtype=jnp.int32)


def _prefill(
    params: Params, task: Task, cache: PagedCache, num_beams: int, tile: int
) -> tuple[PagedCache, Float[Array, "GK D"]]:
    """Put each prompt into the pages of its first beam, share them with the others, and return the
    last token's residual stream for every beam.
    """
    num_prompts = task.prompts.shape[0]
    first = jnp.arange(num_prompts, dtype=jnp.int32) * num_beams
    is_first = jnp.arange(num_prompts * num_beams, dtype=jnp.int32) % num_beams == 0
    lens = jnp.repeat(task.prompt_lens, num_beams)
    need = jnp.where(is_first, paged.pages_for(lens, cache.page_size), 0)
    cache, _ = paged.allocate(cache, need)
    offset = jnp.arange(tile, dtype=jnp.int32)
    spans = jnp.repeat(task.prompt_lens + task.max_tokens, tile)

    def one(j: Array, carry: tuple[PagedCache, Array]) -> tuple[PagedCache, Array]:
        cache, last = carry
        at = j * tile + offset[None, :]
        positions = jnp.where(at < task.prompt_lens[:, None], at, -1)
        tokens = jnp.take_along_axis(task.prompts, positions, axis=1, mode="clip")
        table = cache.page_table[first]
        rows = jnp.repeat(first, tile)
        x, cache = through_layers(params, cache, tokens.reshape(-1), positions, rows, table, spans)
        here = jnp.argmax(positions == task.prompt_lens[:, None] - 1, axis=1)
        of_tile = x.reshape(num_prompts, tile, -1)[jnp.arange(num_prompts), here]
        ends = (task.prompt_lens - 1) // tile == j
        return cache, jnp.where(ends[:, None], of_tile, last)

    hidden = jnp.zeros((num_prompts, params.config.hidden_size), params.dtype)
    trips = (jnp.max(task.prompt_lens) - 1) // tile + 1
    cache, hidden = lax.fori_loop(0, trips, one, (cache, hidden))
    cache = dataclasses.replace(cache, lengths=lens)
    cache = paged.reorder(cache, jnp.repeat(first, num_beams))
    return cache, jnp.repeat(hidden, num_beams, axis=0)


def _step(params: Params, task: Task, s: Search) -> Search:
    """Choose the next tokens of all beams, move finished ones aside, and run the others one token
    further.
    """
    num_prompts, num_beams = s.running.scores.shape
    logprobs = jax.nn.log_softmax(decoder.logits(params, s.hidden), axis=-1)
    vocab = logprobs.shape[-1]
    total = s.running.scores[:, :, None] + logprobs.reshape(num_prompts, num_beams, vocab)
    # What is no number is never chosen: it would be sorted first.
    total = jnp.where(jnp.isnan(total), -jnp.inf, total)
    # Enough for K beams to go on if every other candidate ends.
    count = max(2, 1 + task.stop_ids.shape[1]) * num_beams
    scores, index = lax.top_k(total.reshape(num_prompts, -1), min(count, num_beams * vocab))
    beam, token = index // vocab, index % vocab
    tokens = jnp.take_along_axis(s.running.tokens, beam[:, :, None], axis=1)
    tokens = tokens.at[:, :, s.steps].set(token)
    length = s.steps + 1
    candidates = Beams(tokens=tokens, lengths=jnp.broadcast_to(length, scores.shape), scores=scores)
    stops = jnp.any(token[:, :, None] == task.stop_ids[:, None, :], axis=-1)
    stops = stops | (length >= task.max_tokens)[:, None]
    finished = _finish(task, s, candidates, stops)
    running, chosen = _best(_with_scores(candidates, jnp.where(stops, -jnp.inf, scores)), num_beams)
    still_open = s.open & _may_improve(task, running, finished, length)
    still_open = still_open & (length < task.max_tokens)

    source = jnp.take_along_axis(beam, chosen, axis=1)
    first = jnp.arange(num_prompts, dtype=jnp.int32)[:, None] * num_beams
    cache = paged.reorder(s.cache, (first + source).reshape(-1).astype(jnp.int32))
    last = jnp.take_along_axis(token, chosen, axis=1).reshape(-1).astype(jnp.int32)
    active = jnp.repeat(still_open, num_beams)
    cache, copied = paged.own_next_page(cache, active)
    cache, hidden = _decode(params, task, cache, last, active & ~cache.overflow)
    return Search(
        cache=cache,
        hidden=hidden,
        running=running,
        finished=finished,
        open=still_open,
        steps=length,
        pages_copied=s.pages_copied + copied,
        most_pages=jnp.maximum(s.most_pages, _pages_in_use(cache)),
    )


def _with_scores(beams: Beams, scores: Array) -> Beams:
    return dataclasses.replace(beams, scores=scores)


def _best(beams: Beams, count: int) -> tuple[Beams, Int[Array, "G K"]]:
    """Return the beams with the highest scores, best first, and where they were."""
    scores, index = lax.top_k(beams.scores, count)
    chosen = Beams(
        tokens=jnp.take_along_axis(beams.tokens, index[:, :, None], axis=1),
        lengths=jnp.take_along_axis(beams.lengths, index, axis=1),
        scores=scores,
    )
    return chosen, index


def _finish(task: Task, s: Search, candidates: Beams, stops: Bool[Array, "G C"]) -> Beams:
    """Return the best K of the sequences finished so far and now.

    Of the candidates only the first K count: one that ends far down the list was never a beam.
    """
    num_beams = s.running.scores.shape[1]
    counts = jnp.arange(stops.shape[1]) < num_beams
    full = jnp.all(s.finished.lengths > 0, axis=1) & task.stop_when_full
    takes = stops & counts[None, :] & (s.open & ~full)[:, None]
    scores = candidates.scores / _penalty(task, candidates.lengths)
    new = dataclasses.replace(
        _with_scores(candidates, jnp.where(takes, scores, -jnp.inf)),
        lengths=jnp.where(takes, candidates.lengths, 0),
    )
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), s.finished, new)
    return _best(both, num_beams)[0]


def _penalty(task: Task, length: Array) -> Array:
    return length.astype(jnp.float32) ** task.length_penalty


def _may_improve(task: Task, running: Beams, finished: Beams, length: Array) -> Bool[Array, " G"]:
    """Return whether the best running beam could still beat the worst finished one.

    The best is judged at its present length; with `early_stopping="never"` and a penalty that
    favours length, at the longest it may get.
    """
    present = jnp.broadcast_to(length, task.max_tokens.shape)
    reach = jnp.where(task.to_the_end & (task.length_penalty > 0), task.max_tokens, present)
    best = running.scores[:, 0] / _penalty(task, reach)
    # The worst is -inf where fewer than K are finished.
    better = best > finished.scores[:, -1]
    full = jnp.all(finished.lengths > 0, axis=1)
    return better & ~(full & task.stop_when_full)


def _decode(
    params: Params,
    task: Task,
    cache: PagedCache,
    tokens: Int[Array, " GK"],
    active: Bool[Array, " GK"],
) -> tuple[PagedCache, Float[Array, "GK D"]]:
    """Run one token of every active beam."""
    num_rows = cache.page_table.shape[0]
    spans = jnp.repeat(task.prompt_lens + task.max_tokens, num_rows // task.prompts.shape[0])
    positions = jnp.where(active, cache.lengths, -1)
    rows = jnp.where(active, jnp.arange(num_rows, dtype=jnp.int32), num_rows)
    x, cache = through_layers(
        params, cache, tokens, positions[:, None], rows, cache.page_table, spans
    )
    lengths = cache.lengths + active.astype(jnp.int32)
    return dataclasses.replace(cache, lengths=lengths), x
