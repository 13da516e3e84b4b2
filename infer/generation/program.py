"""The generation loop: R requests flow through B slots inside one `lax.while_loop`.

A turn runs prefill passes over tiles of the waiting prompts, as far as its token budget goes, then
at most one decode pass, one token for every slot that has exactly one token to do; then it samples
once for all slots that are ready.  With a drafter, the slots that have generated already run a
round of drafts instead (`speculation.py`) in turns where there are drafts.

Each step is a `while_loop` of few or no trips: the page pools stay in place, which `lax.cond` with
two writing branches would not allow.  Each has one shape for the whole run.

A prompt is always cut at multiples of the tile, and a lone last token always goes to the decode
pass, so the arithmetic of a request does not depend on what its neighbours do.

Pages are reserved at admission for the whole request.  The queue is first come, first served: a
request that does not fit waits, and so do those behind it.  Finished slots give their pages back at
the end of the turn and are refilled at once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.generation import speculation
from infer.generation.record import record
from infer.generation.slots import admit, begin_forks, retire
from infer.generation.state import (
    Lanes,
    Output,
    Requests,
    State,
    at_most_once,
    known_tokens,
    planned_length,
    primed,
    row_of,
    tokens_to_do,
    unfinished,
)
from infer.models import decoder
from infer.models.paged_forward import through_layers
from infer.models.params import Params
from infer.ops.sample import logsumexp, process_logits, sample
from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import (
    History,
    Role,
    SamplingState,
    draw_keys,
    log_probabilities,
    take,
    top_log_probabilities,
)
from infer.spec.drafters import Drafter, Tile
from infer.spec.target import is_greedy
from infer.spec.verify import Verified


@pytree_dataclass
class Ready:
    """The slots whose last known token has gone through all layers in this turn."""

    x: Leaf  # [B, D], their residual streams; 0 elsewhere
    rows: Leaf  # bool [B]


def run(
    params: Params,
    requests: Requests,
    state: State,
    max_turns: Int[Array, ""],
    until_first: Bool[Array, ""],
    *,
    lanes: Lanes,
    drafter: Drafter | None = None,
    processed_logprobs: bool = False,
    implementation: str | None = None,
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
        drafter: proposes tokens, which the model judges several at a time; `state` carries what it
            remembers.  None decodes token by token.
        processed_logprobs: report log-probabilities of the distribution that is sampled, after
            masks, penalties, temperature and filters, instead of the raw model's.
        implementation: of the ops; None chooses.
    """

    def go_on(s: State) -> Array:
        waiting = jnp.any((s.request < requests.prompts.shape[0]) & (s.num_generated == 0))
        wanted = (s.counters.turns < max_turns) & (waiting | ~until_first)
        return unfinished(s, requests) & wanted & ~s.cache.overflow

    def turn(s: State) -> State:
        return one_turn(
            params,
            requests,
            s,
            lanes=lanes,
            drafter=drafter,
            processed_logprobs=processed_logprobs,
            implementation=implementation,
        )

    return lax.while_loop(go_on, turn, admit(state, requests))


def one_turn(
    params: Params,
    requests: Requests,
    state: State,
    *,
    lanes: Lanes,
    drafter: Drafter | None = None,
    processed_logprobs: bool = False,
    implementation: str | None = None,
) -> State:
    """Run one turn and admit who has room after it; arguments as those of `run`."""
    num_slots = state.request.shape[0]
    todo = lambda s: tokens_to_do(s, requests)
    none = Ready(
        x=jnp.zeros((num_slots, params.config.hidden_size), params.dtype),
        rows=jnp.zeros(num_slots, bool),
    )
    if drafter is not None:
        state = speculation.begin_turn(drafter, state)
    c = (state, none)
    prefill = lambda state, ready: _prefill_pass(
        params, requests, state, ready, lanes, drafter, implementation
    )
    _, c = lax.while_loop(
        lambda c: (c[0] < lanes.passes) & jnp.any(todo(c[1][0]) > 1),
        lambda c: (c[0] + 1, prefill(*c[1])),
        (jnp.zeros((), jnp.int32), c),
    )
    planned, drafts = None, jnp.zeros(num_slots, bool)
    if drafter is not None:
        s, planned = speculation.plan(params, drafter, requests, c[0], implementation)
        c, drafts = (s, c[1]), planned.rows & (planned.width > 0)
    decode = lambda c: _decode_pass(
        params, requests, c[0], c[1], (todo(c[0]) == 1) & ~drafts, drafter, implementation
    )
    c = at_most_once(jnp.any((todo(c[0]) == 1) & ~drafts), decode, c)
    s, ready = _with_forks(requests, *c)
    # Nothing is ready after most turns of a long prompt alone: the head, as dear as several
    # layers, is skipped.
    emit = lambda s: _emit(params, requests, s, ready, processed_logprobs, implementation)
    s = at_most_once(jnp.any(ready.rows), emit, s)
    if drafter is not None and planned is not None:
        s = speculation.finish_turn(
            params, drafter, requests, s, planned, processed_logprobs, implementation
        )
    return admit(_counted(s, turns=1), requests)


def _counted(state: State, **more: Array | int) -> State:
    """Return the state with the named counters raised."""
    old = state.counters
    new = {name: getattr(old, name) + value for name, value in more.items()}
    return dataclasses.replace(state, counters=dataclasses.replace(old, **new))


def _with_forks(requests: Requests, state: State, ready: Ready) -> tuple[State, Ready]:
    """Keep the residual streams of prompts that are complete, and start the forks that wait for
    them; those with the whole prompt in common are ready too.
    """
    num_slots = state.request.shape[0]
    first = ready.rows & (state.num_generated == 0)
    kept = jnp.where(first[:, None], ready.x, state.hidden[:num_slots])
    state = dataclasses.replace(state, hidden=state.hidden.at[:num_slots].set(kept))
    state = begin_forks(state, requests)
    forked = primed(state, requests) & ~ready.rows
    return state, _noted(ready, forked, state.hidden[:num_slots])


# ---- passes --------------------------------------------------------------------------------------


def _prefill_pass(
    params: Params,
    requests: Requests,
    state: State,
    ready: Ready,
    lanes: Lanes,
    drafter: Drafter | None,
    implementation: str | None,
) -> tuple[State, Ready]:
    """Put up to `num_tiles` tiles of prompts into the cache, oldest request first; note which
    prompts are complete.
    """
    num_slots = state.request.shape[0]
    todo = tokens_to_do(state, requests)
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
    known = known_tokens(state, requests)[slot]
    count = jnp.where(used, jnp.clip(known - start, 0, lanes.tile), 0)

    offset = jnp.arange(lanes.tile, dtype=jnp.int32)
    inside = offset[None, :] < count[:, None]
    positions = jnp.where(inside, start[:, None] + offset[None, :], -1)
    row = jnp.minimum(state.request[slot], requests.prompts.shape[0] - 1)
    tokens = requests.prompts.at[row[:, None], positions].get(mode="clip")
    none = state.cache.page_table.shape[0]
    slots_flat = jnp.repeat(jnp.where(used, slot, none), lanes.tile)
    table = state.cache.page_table[slot]
    spans = jnp.repeat(planned_length(requests, row), lanes.tile)
    tile = Tile(
        tokens=tokens.reshape(-1),
        positions=positions,
        slots=slots_flat,
        page_table=table,
        spans=spans,
    )
    x, state = _through(params, state, tile, implementation)
    if drafter is not None:
        state = speculation.prefilled(params, drafter, state, tile, implementation)

    output = _score_prompts(params, requests, state.output, x, row, positions, implementation)
    target = jnp.where(used, slot, num_slots)
    done = jnp.zeros(num_slots, jnp.int32).at[target].add(count, mode="drop")
    last = jnp.zeros(num_slots, jnp.int32).at[target].max(g * lanes.tile + count - 1, mode="drop")
    cache = state.cache
    cache = dataclasses.replace(cache, lengths=cache.lengths.at[:num_slots].add(done))
    state = dataclasses.replace(state, cache=cache, output=output)
    state = _counted(state, prefill_passes=1, prompt_tokens=jnp.sum(done, dtype=jnp.int32))
    complete = (done > 0) & (done == todo)
    return state, _noted(ready, complete, x[last])


def _score_prompts(
    params: Params,
    requests: Requests,
    output: Output,
    x: Float[Array, "N D"],
    row: Int[Array, " G"],
    positions: Int[Array, "G U"],
    implementation: str | None,
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
        raw = decoder.logits(params, x[g], implementation)
        target = requests.prompts.at[row[g], positions[g] + 1].get(mode="clip")
        at = jnp.where(wanted[g], row[g], num_requests), positions[g] + 1
        count = out.prompt_top_tokens.shape[-1]
        total = logsumexp(raw, implementation)
        ids, values = top_log_probabilities(raw, max(count, 1), total)
        return dataclasses.replace(
            out,
            prompt_logprobs=out.prompt_logprobs.at[at].set(
                log_probabilities(raw, target, total), mode="drop"
            ),
            prompt_top_tokens=out.prompt_top_tokens.at[at].set(ids[:, :count], mode="drop"),
            prompt_top_logprobs=out.prompt_top_logprobs.at[at].set(values[:, :count], mode="drop"),
        )

    # Only the tiles that want it: their number is data.
    order = jnp.argsort(~jnp.any(wanted, axis=1))
    used = jnp.sum(jnp.any(wanted, axis=1), dtype=jnp.int32)
    return lax.fori_loop(0, used, lambda i, out: one(order[i], out), output)


def _decode_pass(
    params: Params,
    requests: Requests,
    state: State,
    ready: Ready,
    active: Bool[Array, " B"],
    drafter: Drafter | None,
    implementation: str | None,
) -> tuple[State, Ready]:
    """Run one token of every slot in `active`: they have exactly one to do."""
    num_slots = state.request.shape[0]
    positions = jnp.where(active, state.cache.lengths[:num_slots], -1)
    row = row_of(state, requests)
    from_prompt = requests.prompts.at[row, positions].get(mode="clip")
    first = state.num_generated == 0
    tokens = jnp.where(first, from_prompt, state.last_token)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    tile = Tile(
        tokens=tokens,
        positions=positions[:, None],
        slots=jnp.where(active, slots, state.cache.page_table.shape[0]),
        page_table=state.cache.page_table[:num_slots],
        spans=planned_length(requests, row),
    )
    x, state = _through(params, state, tile, implementation)
    if drafter is not None:
        last = dataclasses.replace(
            tile,
            positions=jnp.where(first[:, None], tile.positions, -1),
            slots=jnp.where(first, tile.slots, state.cache.page_table.shape[0]),
        )
        read = lambda s: speculation.prefilled(params, drafter, s, last, implementation)
        # Few turns have such a token, and a drafter's pass over padding is as dear as any.
        state = at_most_once(jnp.any(active & first), read, state)
        generating = active & ~first
        state = speculation.decoded(params, drafter, state, generating, x, tokens, implementation)
    cache = state.cache
    lengths = cache.lengths.at[:num_slots].add(active.astype(jnp.int32))
    state = dataclasses.replace(state, cache=dataclasses.replace(cache, lengths=lengths))
    prompts = jnp.sum(active & first, dtype=jnp.int32)
    state = _counted(state, decode_passes=1, prompt_tokens=prompts)
    return state, _noted(ready, active, x)


def _through(
    params: Params, state: State, tile: Tile, implementation: str | None
) -> tuple[Float[Array, "N D"], State]:
    """Run a pass's tokens through the layers."""
    x, cache = through_layers(
        params,
        state.cache,
        tile.tokens,
        tile.positions,
        tile.slots,
        tile.page_table,
        tile.spans,
        implementation,
    )
    return x, dataclasses.replace(state, cache=cache)


def _noted(ready: Ready, rows: Array, x: Array) -> Ready:
    return Ready(x=jnp.where(rows[:, None], x, ready.x), rows=ready.rows | rows)


# ---- sampling and slots --------------------------------------------------------------------------


def _emit(
    params: Params,
    requests: Requests,
    state: State,
    ready_rows: Ready,
    processed: bool,
    implementation: str | None,
) -> State:
    """Sample a token for each slot that is ready, record it, and free the slots that are
    finished.
    """
    sampling = take(requests.sampling, state.request)
    raw = decoder.logits(params, ready_rows.x, implementation)
    row = row_of(state, requests)
    with jax.named_scope("sample"):
        history = History(
            prompts=requests.prompts[row],
            prompt_lens=requests.prompt_lens[row],
            generated=state.output.tokens[row],
            num_generated=state.num_generated,
        )
        allowed = process_logits(raw, sampling, history, implementation)
        keys = _keys_of_draws(sampling, requests.choice[row], state.num_generated)
        token = sample(allowed, sampling, keys, implementation)
    none = jnp.zeros_like(token)
    drawn = Verified(num_accepted=none, tokens=token[:, None], count=none + 1)
    state, _, finished = record(
        requests,
        state,
        ready_rows.rows,
        raw[:, None],
        allowed[:, None],
        drawn,
        processed,
        implementation,
    )
    return retire(state, requests, finished)


def _keys_of_draws(
    sampling: SamplingState, choice: Int[Array, " B"], position: Int[Array, " B"]
) -> Array:
    """Return the key of each row's draw; where no row draws, a CPU is spared the hash, there three
    loops of many small operations, and the keys are zero.
    """
    make = lambda: jax.random.key_data(draw_keys(sampling.key, choice, position, Role.DRAW))
    zeros = lambda: jnp.zeros((*choice.shape, 2), jnp.uint32)
    if_any = lambda: lax.cond(jnp.all(is_greedy(sampling)), zeros, make)
    data = lax.platform_dependent(cpu=if_any, default=make)
    return jax.random.wrap_key_data(data, impl="threefry2x32")
