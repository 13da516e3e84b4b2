"""The pytrees of the generation loop: what is asked, what has been answered, and the carry."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from infer.cache.paged import PagedCache
from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import SamplingState
from infer.spec.policy import Policy

C = TypeVar("C")


class Finish(enum.IntEnum):
    """Why a request ended."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CAPACITY = 3
    ABORT = 4


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The static shape of a prefill pass, `num_tiles` tiles of `tile` tokens, and the most passes
    of a turn.
    """

    tile: int
    num_tiles: int
    passes: int


@pytree_dataclass
class Requests:
    """What is asked; read only.  Rows from `count` on are padding and never run."""

    prompts: Leaf  # int32 [R, T]
    prompt_lens: Leaf  # int32 [R]
    choice: Leaf  # int32 [R], which of its prompt's parallel samples a row is
    parent: Leaf  # int32 [R], an earlier row whose prompt begins like this one; R = none
    shared: Leaf  # int32 [R], how many tokens of it: all of them, or whole pages and whole tiles
    last_child: Leaf  # int32 [R], the last row whose parent this is; -1 = none
    wants_prompt_logprobs: Leaf  # bool [R]
    sampling: SamplingState  # [R]
    count: Leaf  # int32 []


@pytree_dataclass
class Output:
    """What has been generated; a row per request, written in place."""

    tokens: Leaf  # int32 [R, N]
    logprobs: Leaf  # f32 [R, N]
    top_tokens: Leaf  # int32 [R, N, C]
    top_logprobs: Leaf  # f32 [R, N, C]
    lengths: Leaf  # int32 [R]
    finish: Leaf  # int8 [R]
    stop_reason: Leaf  # int32 [R], the id that stopped it, V where none did
    prompt_logprobs: Leaf  # f32 [R, T or 0], of each prompt token given those before it; first 0
    prompt_top_tokens: Leaf  # int32 [R, T or 0, C']
    prompt_top_logprobs: Leaf  # f32 [R, T or 0, C']


@pytree_dataclass
class Counters:
    """What the loop has done, int32 [] each."""

    turns: Leaf
    prefill_passes: Leaf
    decode_passes: Leaf
    prompt_tokens: Leaf  # that went through the layers
    shared_tokens: Leaf  # of prompts, that did not: another row's pages hold them
    forks: Leaf  # requests that began on another's pages
    pages_copied: Leaf  # at a fork: the page in which both would have written
    refills: Leaf  # requests admitted after the first turn
    page_waits: Leaf  # turns in which a slot was free and its request waited for pages


@pytree_dataclass
class Speculation:
    """What speculation carries from turn to turn; a row a slot in `drafter`."""

    drafter: Any  # the drafter's own carry
    owner: Leaf  # int32 [B], the request that each slot's part of it belongs to
    policy: Policy
    gains: Leaf  # f32 [B], tokens that a round should bring each slot, a running mean
    trust: Leaf  # f32 [B], drafts of each slot that stood over those that should, a running mean
    passes: Leaf  # int32 [n + 1], that generated, by the tier they ran in
    row_passes: Leaf  # int32 [], rows that generated in them
    tokens: Leaf  # int32 [], that came out of them
    drafted: Leaf  # int32 [k], drafts at each position that were judged
    accepted: Leaf  # int32 [k], those that stood


@pytree_dataclass
class State:
    """The loop's carry.  Donate it: every leaf is updated in place.

    The cache has 2B rows: B slots, and B holders.  A holder keeps the pages of a prompt whose own
    request has left its slot while others that begin like it still wait in the queue.
    """

    cache: PagedCache
    request: Leaf  # int32 [B], of each slot; R = free
    held: Leaf  # int32 [B], whose prompt each holder keeps; R = free
    source: Leaf  # int32 [B], row of the cache a slot waits for, to begin on its pages; 2B = none
    hidden: Leaf  # [2B, D], residual stream of the prompt's last token, once it is known
    num_generated: Leaf  # int32 [B]
    last_token: Leaf  # int32 [B]
    next_request: Leaf  # int32 [], head of the queue
    output: Output
    counters: Counters
    speculation: Speculation | None = None


def initial_state(
    cache: PagedCache,
    requests: Requests,
    *,
    hidden_size: int,
    dtype: DTypeLike,
    max_new: int,
    num_logprobs: int,
    num_prompt_logprobs: int | None,
    vocab_size: int,
    pad_id: int,
) -> State:
    """Return the state before the first turn: every slot free, the whole queue waiting.

    Args:
        cache: empty, with two rows a slot.
        requests: what is asked.
        hidden_size: D.
        dtype: of the residual stream.
        max_new: room for new tokens (N).
        num_logprobs: top log-probabilities kept per token (C).
        num_prompt_logprobs: the same for prompts; None keeps no log-probabilities of prompts.
        vocab_size: V.
        pad_id: fills the tokens that are not generated.
    """
    (num_requests, prompt_cap), num_rows = requests.prompts.shape, cache.page_table.shape[0]
    num_slots = num_rows // 2
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    floats = lambda *shape: jnp.zeros(shape, jnp.float32)
    prompt_shape = (num_requests, 0 if num_prompt_logprobs is None else prompt_cap)
    output = Output(
        tokens=jnp.full((num_requests, max_new), pad_id, jnp.int32),
        logprobs=floats(num_requests, max_new),
        top_tokens=zeros(num_requests, max_new, num_logprobs),
        top_logprobs=floats(num_requests, max_new, num_logprobs),
        lengths=zeros(num_requests),
        finish=jnp.zeros(num_requests, jnp.int8),
        stop_reason=jnp.full(num_requests, vocab_size, jnp.int32),
        prompt_logprobs=floats(*prompt_shape),
        prompt_top_tokens=zeros(*prompt_shape, num_prompt_logprobs or 0),
        prompt_top_logprobs=floats(*prompt_shape, num_prompt_logprobs or 0),
    )
    return State(
        cache=cache,
        request=jnp.full(num_slots, num_requests, jnp.int32),
        held=jnp.full(num_slots, num_requests, jnp.int32),
        source=jnp.full(num_slots, num_rows, jnp.int32),
        hidden=jnp.zeros((num_rows, hidden_size), dtype),
        num_generated=zeros(num_slots),
        last_token=zeros(num_slots),
        next_request=zeros(),
        output=output,
        counters=Counters(**{name: zeros() for name in Counters.__dataclass_fields__}),
    )


def at_most_once(condition: Array, step: Callable[[C], C], state: C) -> C:
    """Return step(state) if `condition`, else state: as a loop, whose carry XLA keeps in place.

    `lax.cond` with a branch that writes would copy every page pool.
    """
    again = lambda c: c[0]
    once = lambda c: (jnp.zeros_like(c[0]), step(c[1]))
    return lax.while_loop(again, once, (condition, state))[1]


def row_of(state: State, requests: Requests) -> Int[Array, " B"]:
    """Return each slot's request, some request for a free slot: an index that exists."""
    return jnp.minimum(state.request, requests.prompts.shape[0] - 1)


def unfinished(state: State, requests: Requests) -> Array:
    """Return whether a request runs or waits."""
    num_requests = requests.prompts.shape[0]
    return jnp.any(state.request < num_requests) | (state.next_request < requests.count)


def known_tokens(state: State, requests: Requests) -> Int[Array, " B"]:
    """Return the tokens of each slot's sequence that are known: its prompt and what it has
    generated.
    """
    return requests.prompt_lens[row_of(state, requests)] + state.num_generated


def tokens_to_do(state: State, requests: Requests) -> Int[Array, " B"]:
    """Return the known tokens of each slot that are not in the cache; 0 for a slot that is free or
    waits for another's pages.
    """
    num_slots = state.request.shape[0]
    runs = (state.request < requests.prompts.shape[0]) & (state.source == 2 * num_slots)
    lengths = state.cache.lengths[:num_slots]
    return jnp.where(runs, known_tokens(state, requests) - lengths, 0)


def planned_length(requests: Requests, row: Int[Array, " N"]) -> Int[Array, " N"]:
    """Return the planned length of each request's sequence: its prompt and all it may generate.

    Rotary scalings that depend on a length take this one, from the first token on: the keys in the
    cache and the queries to come turn alike.
    """
    return requests.prompt_lens[row] + requests.sampling.max_tokens[row]


def primed(state: State, requests: Requests) -> Bool[Array, " B"]:
    """Return the slots whose whole prompt is in the cache and whose first token is not drawn: their
    residual stream is in `hidden`.
    """
    row = row_of(state, requests)
    num_slots = state.request.shape[0]
    runs = (state.request < requests.prompts.shape[0]) & (state.source == 2 * num_slots)
    complete = state.cache.lengths[:num_slots] == requests.prompt_lens[row]
    return runs & complete & (state.num_generated == 0)
