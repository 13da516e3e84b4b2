"""Slots and pages: who is admitted, who begins on whose pages, and what a finished request leaves.

Pages are reserved at admission for the whole request.  The queue is first come, first served: a
request that does not fit waits, and so do those behind it.

A request whose prompt begins like an earlier one's (its parent) takes those pages by reference.
It waits in its slot until the parent has computed them, never longer than computing them itself
would have taken.  Equal prompts share all full pages and the last residual stream, so that no token
is computed again; the page that both would write into is copied at the fork.  Other prompts share
whole tiles only: the rest is cut into the same tiles as if the request were alone, and the same
bits come out.

A parent that leaves while children still wait in the queue leaves its prompt to a holder, a row of
the cache that never runs.  Holders are a convenience: when the head of the queue finds no pages,
the one whose next use is farthest gives its own back, and its children compute for themselves.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from infer.cache import paged
from infer.generation.state import Requests, State, at_most_once, row_of


def admit(state: State, requests: Requests) -> State:
    """Give free slots to waiting requests: the i-th free slot to the i-th in the queue, as far as
    the pages reach.

    If no slot is busy, no holder is left and not even the first request fits, the pool can never
    serve it: `overflow` ends the loop.
    """
    num_requests = requests.prompts.shape[0]
    free = jnp.any(state.request == num_requests)
    waiting = free & (state.next_request < requests.count)
    # Holders too are freed here.
    holding = jnp.any(state.held < num_requests)
    return at_most_once(waiting | holding, lambda s: _admit(s, requests), state)


def _admit(state: State, requests: Requests) -> State:
    num_requests, cache = requests.prompts.shape[0], state.cache
    counters = state.counters
    free = state.request == num_requests
    candidate = state.next_request + jnp.cumsum(free, dtype=jnp.int32) - 1
    wanted = free & (candidate < requests.count)
    row = jnp.minimum(candidate, num_requests - 1)
    # Who would be where, were all candidates admitted; a parent comes before its children.
    whose = jnp.concatenate([jnp.where(wanted, candidate, state.request), state.held])
    parent = requests.parent[row]
    match = (whose[None, :] == parent[:, None]) & (wanted & (parent < num_requests))[:, None]
    found, source = jnp.any(match, axis=1), jnp.argmax(match, axis=1).astype(jnp.int32)
    shared = jnp.where(found, requests.shared[row] // cache.page_size, 0)
    # A child of a child that is admitted in this very moment waits a turn: what its parent shares
    # is not in the table yet.
    chained = found & found.at[source].get(mode="fill", fill_value=False)

    # The last token generated is never fed back: it needs no room.
    tokens = requests.prompt_lens[row] + requests.sampling.max_tokens[row] - 1
    total = paged.pages_for(tokens, cache.page_size)
    need = jnp.where(wanted, total - shared, 0)
    _, available = paged.free_page_ids(cache.page_refs)
    fits = (jnp.cumsum(need, dtype=jnp.int32) <= available) & (total <= cache.page_table.shape[1])
    refused = jnp.cumsum(wanted & (chained | ~fits), dtype=jnp.int32)
    admitted = wanted & (refused == 0)
    forks = admitted & found
    num_shared = _rows(jnp.where(forks, shared, 0))
    cache, _ = paged.allocate(cache, _rows(jnp.where(admitted, need, 0)), num_shared)
    cache = paged.fork(cache, _rows(source), num_shared)
    short = jnp.any(wanted & ~chained & (refused == 1) & ~fits)
    count = lambda mask: jnp.sum(mask, dtype=jnp.int32)
    state = dataclasses.replace(
        state,
        cache=cache,
        request=jnp.where(admitted, candidate, state.request),
        source=jnp.where(forks, source, state.source),
        num_generated=jnp.where(admitted, 0, state.num_generated),
        next_request=state.next_request + count(admitted),
        counters=dataclasses.replace(
            counters,
            forks=counters.forks + count(forks),
            shared_tokens=counters.shared_tokens
            + jnp.sum(jnp.where(forks, requests.shared[row], 0), dtype=jnp.int32),
            refills=counters.refills + jnp.where(counters.turns > 0, count(admitted), 0),
            page_waits=counters.page_waits + short.astype(jnp.int32),
        ),
    )
    idle = jnp.all(state.request == num_requests)
    state, evicted = _let_go(state, requests, short, idle)
    stuck = short & idle & ~evicted
    overflow = state.cache.overflow | stuck
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, overflow=overflow))


def _rows(slots: Int[Array, " B"]) -> Int[Array, " B2"]:
    """Return a value a slot as a value a row of the cache, 0 for the holders."""
    return jnp.concatenate([slots, jnp.zeros_like(slots)])


def _let_go(
    state: State, requests: Requests, short: Array, idle: Array
) -> tuple[State, Bool[Array, ""]]:
    """Free the holders that nobody waits for, and, where the queue is short of pages, one more.

    That is the one whose next child is farthest back in the queue; the one of the queue's head
    itself only where nothing else can make room.
    """
    num_requests, num_slots = requests.prompts.shape[0], state.request.shape[0]
    holder = num_slots + jnp.arange(num_slots, dtype=jnp.int32)
    needed_now = jnp.any(state.source[None, :] == holder[:, None], axis=1)
    used = (state.held < num_requests) & ~needed_now
    index = jnp.arange(num_requests, dtype=jnp.int32)[None, :]
    waiting_child = (requests.parent[None, :] == state.held[:, None]) & (
        index >= state.next_request
    )
    next_use = jnp.min(jnp.where(waiting_child, index, num_requests), axis=1)
    done = used & (next_use == num_requests)
    may_go = used & ~done & (idle | (next_use > state.next_request))
    # Pages that are freed for nothing in return come first.
    evict = short & ~jnp.any(done) & jnp.any(may_go)
    farthest = jnp.argmax(jnp.where(may_go, next_use, -1))
    gone = done | (evict & (jnp.arange(num_slots, dtype=jnp.int32) == farthest))
    cache = paged.release(state.cache, jnp.concatenate([jnp.zeros_like(gone), gone]))
    held = jnp.where(gone, num_requests, state.held)
    return dataclasses.replace(state, cache=cache, held=held), jnp.any(gone)


def begin_forks(state: State, requests: Requests) -> State:
    """Start the slots whose parent has computed what they wait for.

    One that has its whole prompt in common is `primed` thereby.
    """
    waiting = jnp.any(state.source < 2 * state.request.shape[0])
    return at_most_once(waiting, lambda s: _begin_forks(s, requests), state)


def _begin_forks(state: State, requests: Requests) -> State:
    num_slots, cache = state.request.shape[0], state.cache
    row = row_of(state, requests)
    shared, prompt = requests.shared[row], requests.prompt_lens[row]
    done = cache.lengths.at[state.source].get(mode="clip")
    ready = (state.source < 2 * num_slots) & (done >= shared)
    whole = ready & (shared == prompt)
    # The first token of this row would go where its parent's has gone, or will.
    copied = whole & (prompt % cache.page_size > 0) & (requests.sampling.max_tokens[row] > 1)
    column = (prompt // cache.page_size)[:, None]
    page = lambda table: jnp.take_along_axis(table, column, axis=1, mode="clip")[:, 0]
    copy = jnp.where(copied, page(cache.page_table[:num_slots]), cache.num_pages)
    original = page(cache.page_table.at[state.source].get(mode="clip"))
    cache = paged.copy_pages(cache, original, copy)
    lengths = jnp.where(ready, shared, cache.lengths[:num_slots])
    hidden = jnp.where(
        whole[:, None], state.hidden.at[state.source].get(mode="clip"), state.hidden[:num_slots]
    )
    pages_copied = state.counters.pages_copied + jnp.sum(copied, dtype=jnp.int32)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, lengths=cache.lengths.at[:num_slots].set(lengths)),
        source=jnp.where(ready, 2 * num_slots, state.source),
        hidden=state.hidden.at[:num_slots].set(hidden),
        counters=dataclasses.replace(state.counters, pages_copied=pages_copied),
    )


def retire(state: State, requests: Requests, finished: Bool[Array, " B"]) -> State:
    """Free the slots that are finished; prompts that waiting requests begin with go to holders."""
    row = row_of(state, requests)
    wanted = finished & (requests.last_child[row] >= state.next_request)
    state = at_most_once(jnp.any(wanted), lambda s: _hold(s, requests, wanted), state)
    return dataclasses.replace(
        state,
        cache=paged.release(state.cache, _rows(finished.astype(jnp.int32)) > 0),
        request=jnp.where(finished, requests.prompts.shape[0], state.request),
        num_generated=jnp.where(finished, 0, state.num_generated),
    )


def _hold(state: State, requests: Requests, wanted: Bool[Array, " B"]) -> State:
    """Let free holders share the prompts of the wanted slots, as far as there are holders."""
    num_requests, num_slots = requests.prompts.shape[0], state.request.shape[0]
    free, _ = paged.free_page_ids((state.held < num_requests).astype(jnp.int32))
    rank = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    target = jnp.where(wanted, free.at[rank].get(mode="clip"), num_slots)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    slot = jnp.full(num_slots, num_slots, jnp.int32).at[target].set(slots, mode="drop")
    new = slot < num_slots
    row = row_of(state, requests)
    prompt = requests.prompt_lens[row].at[slot].get(mode="clip")
    cache = state.cache
    pages = jnp.where(new, paged.pages_for(prompt, cache.page_size), 0)
    zeros = jnp.zeros_like(slot)
    cache = paged.fork(cache, jnp.concatenate([zeros, slot]), jnp.concatenate([zeros, pages]))
    lengths = cache.lengths.at[num_slots:].set(jnp.where(new, prompt, cache.lengths[num_slots:]))
    hidden = jnp.where(
        new[:, None], state.hidden.at[slot].get(mode="clip"), state.hidden[num_slots:]
    )
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, lengths=lengths),
        held=jnp.where(new, row.at[slot].get(mode="clip"), state.held),
        hidden=state.hidden.at[num_slots:].set(hidden),
    )


def finish_rows(
    state: State, requests: Requests, rows: Bool[Array, " R"], reason: Int[Array, ""]
) -> State:
    """End the running requests marked in `rows` from outside, free their pages, admit others.

    For what only the host can see, such as a stop string.  Rows that are not running, or have not
    generated anything yet, are left.
    """
    num_requests = requests.prompts.shape[0]
    state = begin_forks(state, requests)
    occupied = (state.request < num_requests) & (state.num_generated > 0)
    ended = occupied & rows[row_of(state, requests)]
    target = jnp.where(ended, state.request, num_requests)
    finish = state.output.finish.at[target].set(reason.astype(jnp.int8), mode="drop")
    state = dataclasses.replace(state, output=dataclasses.replace(state.output, finish=finish))
    return admit(retire(state, requests, ended), requests)
