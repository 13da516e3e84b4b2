"""The generation loop: R requests flow through B slots inside one `lax.while_loop`.

A turn runs at most one prefill pass, over tiles of the waiting prompts, then at most one decode
pass, one token for every slot that has exactly one token to do; then it samples once for all slots
that are ready.  Each step is a `while_loop` of at most one trip: the page pools stay in place,
which `lax.cond` with two writing branches would not allow.  Each has one shape for the whole run.

A prompt is always cut at multiples of the tile, and a lone last token always goes to the decode
pass, so the arithmetic of a request does not depend on what its neighbours do.

Pages are reserved at admission for the whole request.  The queue is first come, first served: a
request that does not fit waits, and so do those behind it.  Finished slots give their pages back at
the end of the turn and are refilled at once.
"""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.cache import paged
from infer.cache.paged import PagedCache
from infer.config import LayerConfig
from infer.models import decoder
from infer.models.params import Params
from infer.ops.attention import paged_attention
from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import (
    History,
    Role,
    SamplingState,
    draw_keys,
    filtered_logits,
    is_stop,
    log_probabilities,
    process_logits,
    sample,
    take,
    top_log_probabilities,
)

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
    """The static shape of a prefill pass: `num_tiles` tiles of `tile` tokens."""

    tile: int
    num_tiles: int


@pytree_dataclass
class Requests:
    """What is asked; read only.  Rows from `count` on are padding and never run."""

    prompts: Leaf  # int32 [R, T]
    prompt_lens: Leaf  # int32 [R]
    choice: Leaf  # int32 [R], which of its prompt's parallel samples a row is
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
class State:
    """The loop's carry.  Donate it: every leaf is updated in place."""

    cache: PagedCache  # rows are slots
    request: Leaf  # int32 [B], R = free
    num_generated: Leaf  # int32 [B]
    last_token: Leaf  # int32 [B]
    next_request: Leaf  # int32 [], head of the queue
    output: Output
    turns: Leaf  # int32 []
    prefill_passes: Leaf  # int32 []
    decode_passes: Leaf  # int32 []


@pytree_dataclass
class Ready:
    """The slots whose last known token has gone through all layers in this turn."""

    x: Leaf  # [B, D], their residual streams; 0 elsewhere
    rows: Leaf  # bool [B]


def initial_state(
    cache: PagedCache,
    requests: Requests,
    *,
    max_new: int,
    num_logprobs: int,
    num_prompt_logprobs: int | None,
    vocab_size: int,
    pad_id: int,
) -> State:
    """Return the state before the first turn: every slot free, the whole queue waiting.

    Args:
        cache: empty.
        requests: what is asked.
        max_new: room for new tokens (N).
        num_logprobs: top log-probabilities kept per token (C).
        num_prompt_logprobs: the same for prompts; None keeps no log-probabilities of prompts.
        vocab_size: V.
        pad_id: fills the tokens that are not generated.
    """
    (num_requests, prompt_cap), num_slots = requests.prompts.shape, cache.page_table.shape[0]
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
        num_generated=zeros(num_slots),
        last_token=zeros(num_slots),
        next_request=zeros(),
        output=output,
        turns=zeros(),
        prefill_passes=zeros(),
        decode_passes=zeros(),
    )


def run(
    params: Params,
    requests: Requests,
    state: State,
    max_turns: Int[Array, ""],
    until_first: Bool[Array, ""],
    *,
    lanes: Lanes,
    processed_logprobs: bool = False,
) -> State:
    """Run turns until every request is done, `max_turns` have been run in all, or the pool cannot
    serve anyone.

    Args:
        params: weights.
        requests: what is asked.
        state: where to go on; fresh from `initial_state` or returned by an earlier call.
        max_turns: absolute number of turns at which to return.
        until_first: return as soon as no admitted request waits for its first token.
        lanes: shape of a prefill pass.
        processed_logprobs: report log-probabilities of the distribution that is sampled, after
            masks, penalties, temperature and filters, instead of the raw model's.
    """

    def go_on(s: State) -> Array:
        waiting = jnp.any((s.request < requests.prompts.shape[0]) & (s.num_generated == 0))
        wanted = (s.turns < max_turns) & (waiting | ~until_first)
        return _unfinished(s, requests) & wanted & ~s.cache.overflow

    def turn(s: State) -> State:
        num_slots = s.request.shape[0]
        todo = lambda s: _tokens_to_do(s, requests)
        none = Ready(
            x=jnp.zeros((num_slots, params.config.hidden_size), params.dtype),
            rows=jnp.zeros(num_slots, bool),
        )
        c = (s, none)
        c = _at_most_once(
            jnp.any(todo(s) > 1), lambda c: _prefill_pass(params, requests, *c, lanes), c
        )
        c = _at_most_once(jnp.any(todo(c[0]) == 1), lambda c: _decode_pass(params, requests, *c), c)
        s, ready = c
        # Nothing is ready after most turns of a long prompt alone: the head, as dear as several
        # layers, is skipped.
        s = _at_most_once(
            jnp.any(ready.rows), lambda s: _emit(params, requests, s, ready, processed_logprobs), s
        )
        return _admit(dataclasses.replace(s, turns=s.turns + 1), requests)

    return lax.while_loop(go_on, turn, _admit(state, requests))


def _at_most_once(condition: Array, step: Callable[[C], C], state: C) -> C:
    """Return step(state) if `condition`, else state: as a loop, whose carry XLA keeps in place."""
    again = lambda c: c[0]
    once = lambda c: (jnp.zeros_like(c[0]), step(c[1]))
    return lax.while_loop(again, once, (condition, state))[1]


def _unfinished(state: State, requests: Requests) -> Array:
    num_requests = requests.prompts.shape[0]
    return jnp.any(state.request < num_requests) | (state.next_request < requests.count)


def _known(state: State, requests: Requests) -> Array:
    """Return the tokens of each slot's sequence that are known: its prompt and what it has
    generated.
    """
    row = jnp.minimum(state.request, requests.prompts.shape[0] - 1)
    return requests.prompt_lens[row] + state.num_generated


def _tokens_to_do(state: State, requests: Requests) -> Array:
    """Return the known tokens of each slot that are not in the cache; 0 for a free slot."""
    occupied = state.request < requests.prompts.shape[0]
    return jnp.where(occupied, _known(state, requests) - state.cache.lengths, 0)


def _span(requests: Requests, row: Int[Array, " N"]) -> Int[Array, " N"]:
    """Return the planned length of each request's sequence: its prompt and all it may generate.

    Rotary scalings that depend on a length take this one, from the first token on: the keys in the
    cache and the queries to come turn alike.
    """
    return requests.prompt_lens[row] + requests.sampling.max_tokens[row]


# ---- passes --------------------------------------------------------------------------------------


def _prefill_pass(
    params: Params, requests: Requests, state: State, ready: Ready, lanes: Lanes
) -> tuple[State, Ready]:
    """Put up to `num_tiles` tiles of prompts into the cache, oldest request first; note which
    prompts are complete.
    """
    num_slots = state.request.shape[0]
    todo = _tokens_to_do(state, requests)
    order = jnp.argsort(state.request)
    # ceil((todo - 1) / tile): a lone last token is left to the decode pass.
    tiles = jnp.where(todo > 1, (todo + lanes.tile - 2) // lanes.tile, 0)[order]
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    g = jnp.arange(lanes.num_tiles, dtype=jnp.int32)
    nth = jnp.sum((ends[None, :] <= g[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    used = g < ends[-1]
    nth = jnp.minimum(nth, num_slots - 1)
    slot = order[nth].astype(jnp.int32)
    start = state.cache.lengths[slot] + (g - (ends - tiles)[nth]) * lanes.tile
    known = _known(state, requests)[slot]
    count = jnp.where(used, jnp.clip(known - start, 0, lanes.tile), 0)

    offset = jnp.arange(lanes.tile, dtype=jnp.int32)
    inside = offset[None, :] < count[:, None]
    positions = jnp.where(inside, start[:, None] + offset[None, :], -1)
    row = jnp.minimum(state.request[slot], requests.prompts.shape[0] - 1)
    tokens = requests.prompts.at[row[:, None], positions].get(mode="clip")
    slots_flat = jnp.repeat(jnp.where(used, slot, num_slots), lanes.tile)
    table = state.cache.page_table[slot]
    spans = jnp.repeat(_span(requests, row), lanes.tile)
    x, cache = _through_layers(
        params, state.cache, tokens.reshape(-1), positions, slots_flat, table, spans
    )

    output = _score_prompts(params, requests, state.output, x, row, positions)
    target = jnp.where(used, slot, num_slots)
    done = jnp.zeros(num_slots, jnp.int32).at[target].add(count, mode="drop")
    last = jnp.zeros(num_slots, jnp.int32).at[target].max(g * lanes.tile + count - 1, mode="drop")
    cache = dataclasses.replace(cache, lengths=cache.lengths + done)
    state = dataclasses.replace(
        state, cache=cache, output=output, prefill_passes=state.prefill_passes + 1
    )
    complete = (done > 0) & (done == todo)
    return state, _noted(ready, complete, x[last])


def _score_prompts(
    params: Params,
    requests: Requests,
    output: Output,
    x: Float[Array, "N D"],
    row: Int[Array, " G"],
    positions: Int[Array, "G U"],
) -> Output:
    """Record the raw log-probability of each next prompt token that the tiles' positions predict.

    One tile at a time, so that the logits of a tile are the most there ever are.  The prompt's last
    token predicts a generated one: a lone last token in the decode pass is not missed.
    """
    if not output.prompt_logprobs.shape[1]:
        return output
    num_requests = requests.prompts.shape[0]
    num_tiles, tile = positions.shape
    wanted = requests.wants_prompt_logprobs[row][:, None] & (positions >= 0)
    wanted = wanted & (positions + 1 < requests.prompt_lens[row][:, None])
    x = x.reshape(num_tiles, tile, -1)

    def one(g: Array, out: Output) -> Output:
        raw = decoder.logits(params, x[g])
        target = requests.prompts.at[row[g], positions[g] + 1].get(mode="clip")
        at = jnp.where(wanted[g], row[g], num_requests), positions[g] + 1
        count = out.prompt_top_tokens.shape[-1]
        ids, values = top_log_probabilities(raw, max(count, 1))
        return dataclasses.replace(
            out,
            prompt_logprobs=out.prompt_logprobs.at[at].set(
                log_probabilities(raw, target), mode="drop"
            ),
            prompt_top_tokens=out.prompt_top_tokens.at[at].set(ids[:, :count], mode="drop"),
            prompt_top_logprobs=out.prompt_top_logprobs.at[at].set(values[:, :count], mode="drop"),
        )

    # Only the tiles that want it: their number is data.
    order = jnp.argsort(~jnp.any(wanted, axis=1))
    used = jnp.sum(jnp.any(wanted, axis=1), dtype=jnp.int32)
    return lax.fori_loop(0, used, lambda i, out: one(order[i], out), output)


def _decode_pass(
    params: Params, requests: Requests, state: State, ready: Ready
) -> tuple[State, Ready]:
    """Run one token of every slot that has exactly one to do."""
    num_slots = state.request.shape[0]
    active = _tokens_to_do(state, requests) == 1
    positions = jnp.where(active, state.cache.lengths, -1)
    row = jnp.minimum(state.request, requests.prompts.shape[0] - 1)
    from_prompt = requests.prompts.at[row, positions].get(mode="clip")
    tokens = jnp.where(state.num_generated == 0, from_prompt, state.last_token)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    x, cache = _through_layers(
        params,
        state.cache,
        tokens,
        positions[:, None],
        jnp.where(active, slots, num_slots),
        state.cache.page_table,
        _span(requests, row),
    )
    cache = dataclasses.replace(cache, lengths=cache.lengths + active.astype(jnp.int32))
    state = dataclasses.replace(state, cache=cache, decode_passes=state.decode_passes + 1)
    return state, _noted(ready, active, x)


def _noted(ready: Ready, rows: Array, x: Array) -> Ready:
    return Ready(x=jnp.where(rows[:, None], x, ready.x), rows=ready.rows | rows)


def _through_layers(
    params: Params,
    cache: PagedCache,
    tokens: Int[Array, " N"],
    positions: Int[Array, "B T"],
    slots: Int[Array, " N"],
    page_table: Int[Array, "B M"],
    spans: Int[Array, " N"],
) -> tuple[Float[Array, "N D"], PagedCache]:
    """Write keys and values of all tokens into pages, attend, and return the residual stream and
    the cache.

    `positions` -1 and `slots` past the end mark padding, which writes nothing.
    """
    config = params.config
    flat = positions.reshape(-1)
    pages = paged.page_of(cache.page_table, slots, flat, cache.num_pages, cache.page_size)

    def attend(
        layer: LayerConfig,
        q: Array,
        k: Array,
        v: Array,
        sinks: Array | None,
        pools: tuple[Array, Array],
    ):
        # Written first, read after: reading the old pool once the new one exists would copy it.
        k_pages = paged.write_tokens(pools[0], k, pages, flat)
        v_pages = paged.write_tokens(pools[1], v, pages, flat)
        o = paged_attention(
            q.reshape(*positions.shape, *q.shape[1:]),
            k_pages,
            v_pages,
            page_table,
            positions,
            scale=config.softmax_scale,
            window=layer.window,
            softcap=config.attn_softcap,
            sinks=sinks,
        )
        return o.reshape(q.shape), (k_pages, v_pages)

    x, pools = decoder.hidden_states(
        params,
        tokens,
        jnp.maximum(flat, 0),
        attend,
        tuple(zip(cache.k_pages, cache.v_pages, strict=True)),
        spans,
    )
    k_pages, v_pages = zip(*pools, strict=True)
    return x, dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages)


# ---- sampling and slots --------------------------------------------------------------------------


def _emit(
    params: Params, requests: Requests, state: State, ready_rows: Ready, processed: bool
) -> State:
    """Sample a token for each slot that is ready, record it, and free the slots that are
    finished.
    """
    ready = ready_rows.rows
    num_requests = requests.prompts.shape[0]
    vocab = params.config.vocab_size
    sampling = take(requests.sampling, state.request)
    raw = decoder.logits(params, ready_rows.x)
    row = jnp.minimum(state.request, num_requests - 1)
    with jax.named_scope("sample"):
        history = History(
            prompts=requests.prompts[row],
            prompt_lens=requests.prompt_lens[row],
            generated=state.output.tokens[row],
            num_generated=state.num_generated,
        )
        allowed = process_logits(raw, sampling, history)
        keys = draw_keys(sampling.key, requests.choice[row], state.num_generated, Role.DRAW)
        token = sample(allowed, sampling, keys)
        # A row without a number to compare, or with nothing left to draw, has no answer.
        best = jnp.max(allowed, axis=-1)
        sane = ~jnp.any(jnp.isnan(raw), axis=-1) & ~jnp.isneginf(best)
        reported = filtered_logits(allowed, sampling) if processed else raw
    out, column = state.output, state.num_generated
    broken = ready & ~sane
    ready = ready & sane
    target = jnp.where(ready, state.request, num_requests)
    num_generated = column + ready.astype(jnp.int32)
    stopped = ready & is_stop(token, sampling) & (num_generated >= sampling.min_tokens)
    finished = stopped | broken | (ready & (num_generated >= sampling.max_tokens))
    reason = jnp.where(stopped, Finish.STOP, Finish.LENGTH)
    reason = jnp.where(broken, Finish.ABORT, reason).astype(jnp.int8)
    put = lambda leaf, value: leaf.at[target, column].set(value, mode="drop")
    num_logprobs = out.top_tokens.shape[-1]
    top_tokens, top_logprobs = out.top_tokens, out.top_logprobs
    if num_logprobs:
        ids, values = top_log_probabilities(reported, num_logprobs)
        top_tokens, top_logprobs = put(top_tokens, ids), put(top_logprobs, values)
    done = jnp.where(finished, state.request, num_requests)
    output = dataclasses.replace(
        out,
        tokens=put(out.tokens, token),
        logprobs=put(out.logprobs, log_probabilities(reported, token)),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        lengths=out.lengths.at[target].set(num_generated, mode="drop"),
        finish=out.finish.at[done].set(reason, mode="drop"),
        stop_reason=out.stop_reason.at[done].set(jnp.where(stopped, token, vocab), mode="drop"),
    )
    return dataclasses.replace(
        state,
        cache=paged.release(state.cache, finished),
        request=jnp.where(finished, num_requests, state.request),
        num_generated=jnp.where(finished, 0, num_generated),
        last_token=jnp.where(ready, token, state.last_token),
        output=output,
    )


def _admit(state: State, requests: Requests) -> State:
    """Give free slots to waiting requests: the i-th free slot to the i-th in the queue, as far as
    the pages reach.

    If no slot is busy and not even the first request fits, the pool can never serve it: `overflow`
    ends the loop.
    """
    num_requests, cache = requests.prompts.shape[0], state.cache
    free = state.request == num_requests
    candidate = state.next_request + jnp.cumsum(free, dtype=jnp.int32) - 1
    wanted = free & (candidate < requests.count)
    row = jnp.minimum(candidate, num_requests - 1)
    # The last token generated is never fed back: it needs no room.
    tokens = requests.prompt_lens[row] + requests.sampling.max_tokens[row] - 1
    need = jnp.where(wanted, paged.pages_for(tokens, cache.page_size), 0)
    _, available = paged.free_page_ids(cache.page_refs)
    fits = (jnp.cumsum(need, dtype=jnp.int32) <= available) & (need <= cache.page_table.shape[1])
    admitted = wanted & (jnp.cumsum(wanted & ~fits, dtype=jnp.int32) == 0)
    cache, _ = paged.allocate(cache, jnp.where(admitted, need, 0))
    stuck = jnp.any(wanted) & ~jnp.any(admitted) & jnp.all(free)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, overflow=cache.overflow | stuck),
        request=jnp.where(admitted, candidate, state.request),
        num_generated=jnp.where(admitted, 0, state.num_generated),
        next_request=state.next_request + jnp.sum(admitted, dtype=jnp.int32),
    )


def finish_rows(
    state: State, requests: Requests, rows: Bool[Array, " R"], reason: Int[Array, ""]
) -> State:
    """End the running requests marked in `rows` from outside, free their pages, admit others.

    For what only the host can see, such as a stop string.  Rows that are not running are left.
    """
    num_requests = requests.prompts.shape[0]
    occupied = state.request < num_requests
    ended = occupied & rows[jnp.minimum(state.request, num_requests - 1)]
    target = jnp.where(ended, state.request, num_requests)
    finish = state.output.finish.at[target].set(reason.astype(jnp.int8), mode="drop")
    state = dataclasses.replace(
        state,
        cache=paged.release(state.cache, ended),
        request=jnp.where(ended, num_requests, state.request),
        num_generated=jnp.where(ended, 0, state.num_generated),
        output=dataclasses.replace(state.output, finish=finish),
    )
    return _admit(state, requests)
