"""A round of speculation in the generation loop: draft, one pass over all drafts, keep what stands.

A round takes the place of the decode pass and the draw for the slots that have generated already.
Drafts come first; the round then runs in the smallest compiled tier that holds them, and where
there are none, or too few to pay, the turn is a plain one.  Drafts that would pass `max_tokens` are
not asked for, so a round needs no page that plain decoding would not.  Rolling back is a length:
what lies past the accepted drafts in the cache is overwritten before it is read.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from infer.generation.record import record
from infer.generation.slots import retire
from infer.generation.state import (
    Requests,
    Speculation,
    State,
    at_most_once,
    planned_length,
    row_of,
    tokens_to_do,
)
from infer.models import decoder
from infer.models.paged_forward import through_layers
from infer.models.params import Params
from infer.ops.sample import process_logits, sample
from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import History, take
from infer.spec import policy
from infer.spec.drafters import Asked, Drafter, Proposal, Seen, Tile, clipped
from infer.spec.rounds import Round, plain_keys
from infer.spec.target import at_positions, filtered, is_greedy, processed_logits
from infer.spec.verify import Rule, Verified, verify, verify_equal


@pytree_dataclass
class Plan:
    """What the slots that generate do in this turn."""

    rows: Leaf  # bool [B], that generate
    proposal: Proposal  # [B]
    offered: Leaf  # int32 [B], drafts that there were, of which the proposal has as many as pay
    limit: Leaf  # int32 [], index of the tier that bounded the drafts
    width: Leaf  # int32 [], index of the tier the turn runs in; 0 = a plain one


def initial(
    drafter: Drafter,
    params: Params,
    num_slots: int,
    num_requests: int,
    seconds: Float[Array, " n2"],
) -> Speculation:
    """Return what is carried before the first turn; `seconds` as in `Policy`."""
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    known = policy.fresh(drafter.widths, seconds, drafter.adaptive)
    return Speculation(
        drafter=drafter.create(params, num_slots),
        owner=jnp.full(num_slots, num_requests, jnp.int32),
        policy=known,
        gains=jnp.full(
            num_slots, policy.expected(known, jnp.asarray(drafter.k, jnp.int32)), jnp.float32
        ),
        trust=jnp.ones(num_slots, jnp.float32),
        passes=zeros(len(drafter.widths)),
        row_passes=zeros(),
        tokens=zeros(),
        drafted=zeros(drafter.k),
        accepted=zeros(drafter.k),
    )


def figures(drafter: Drafter, speculation: Speculation) -> dict[str, Any]:
    """Return what a run's speculation has done, for `stats`; on the host."""
    s = jax.device_get(speculation)
    drafted, accepted = s.drafted.tolist(), s.accepted.tolist()
    ratio = lambda part, whole: part / whole if whole else None
    return {
        "draft": str(drafter),
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "acceptance_rate": ratio(sum(accepted), sum(drafted)),
        "acceptance_by_position": [ratio(a, d) for a, d in zip(accepted, drafted, strict=True)],
        # A row's pass gives one token without speculation.
        "tokens_per_pass": ratio(int(s.tokens), int(s.row_passes)),
        "passes_by_k": dict(zip(drafter.widths, s.passes.tolist(), strict=True)),
        "turn_costs_by_k": dict(zip(drafter.widths, s.policy.seconds.tolist(), strict=False)),
    }


def begin_turn(drafter: Drafter, state: State) -> State:
    """Forget what was known of requests that have left their slots."""
    speculation = _of(state)
    new = speculation.owner != state.request

    def forget(old: Speculation) -> Speculation:
        carry = drafter.reset(old.drafter, new) if jax.tree.leaves(old.drafter) else old.drafter
        most = policy.expected(old.policy, jnp.asarray(drafter.k, jnp.int32))
        return dataclasses.replace(
            old,
            drafter=carry,
            owner=state.request,
            gains=jnp.where(new, most, old.gains),
            trust=jnp.where(new, 1, old.trust),
        )

    speculation = at_most_once(jnp.any(new), forget, speculation)
    return dataclasses.replace(state, speculation=speculation)


def prefilled(
    params: Params, drafter: Drafter, state: State, tile: Tile, implementation: str | None
) -> State:
    """Let the drafter take the prompt tokens of a pass."""
    cache, carry = drafter.prefill(params, state.cache, _of(state).drafter, tile, implementation)
    return _with_carry(dataclasses.replace(state, cache=cache), carry)


def decoded(
    params: Params,
    drafter: Drafter,
    state: State,
    rows: Bool[Array, " B"],
    x: Float[Array, "B D"],
    tokens: Int[Array, " B"],
    implementation: str | None,
) -> State:
    """Let the drafter see a decode pass of slots that generate."""
    seen = Seen(
        rows=rows,
        x=x[:, None],
        logits=None,
        tokens=tokens[:, None],
        fed=rows.astype(jnp.int32),
        emitted=None,
        count=rows.astype(jnp.int32),
    )
    return _with_carry(state, drafter.observe(params, _of(state).drafter, seen, implementation))


def plan(
    params: Params,
    drafter: Drafter,
    requests: Requests,
    state: State,
    implementation: str | None,
) -> tuple[State, Plan]:
    """Ask for drafts for the slots that generate, and choose the tier that holds them.

    A turn that asks for none skips all of it: on a CPU, XLA hands a turn's many small operations
    from thread to thread, which costs more than the operations do.
    """
    tiers = drafter.widths
    rows = (tokens_to_do(state, requests) == 1) & (state.num_generated > 0)
    limit = policy.limit_now(_of(state).policy)

    def ask(c: tuple[State, Proposal], asked: Asked) -> tuple[State, Proposal]:
        s = c[0]
        found, cache, carry = drafter.propose(
            params, s.cache, _of(s).drafter, asked, implementation
        )
        s = _with_carry(dataclasses.replace(s, cache=cache), carry)
        return s, clipped(drafter, found, asked.most, params.config.vocab_size)

    def drafted(c: tuple[State, Plan]) -> tuple[State, Plan]:
        state, proposal = c[0], c[1].proposal
        known = _of(state).policy
        asked = _asked(requests, state, rows, jnp.asarray(tiers, jnp.int32)[limit])
        propose = lambda c: ask(c, asked)
        state, proposal = at_most_once(jnp.any(asked.most > 0), propose, (state, proposal))
        offered = jnp.where(rows, proposal.count, 0)
        gains = 1 + _of(state).trust * (policy.expected(known, offered) - 1)
        state = _with_gains(state, rows, gains)
        least = _least_gain(requests, state, rows, gains, drafter.k)
        adaptive = drafter.adaptive
        width, count = policy.width_for(known, tiers, rows, offered, least, adaptive=adaptive)
        proposal = dataclasses.replace(proposal, count=count)
        return state, Plan(rows=rows, proposal=proposal, offered=offered, limit=limit, width=width)

    shapes = jax.eval_shape(
        lambda s: ask((s, Proposal(None, None, None)), _asked(requests, s, rows, limit))[1], state
    )
    nothing = Plan(
        rows=rows,
        proposal=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
        offered=jnp.zeros(rows.shape, jnp.int32),
        limit=limit,
        width=jnp.zeros((), jnp.int32),
    )
    return at_most_once(jnp.any(rows) & (limit > 0), drafted, (state, nothing))


def _with_gains(state: State, rows: Bool[Array, " B"], tokens: Float[Array, " B"]) -> State:
    """Return the state with what the drafts of `rows` should bring in their running means."""
    old = _of(state)
    gains = old.gains + jnp.where(rows, (tokens - old.gains) / policy.GAIN_MEMORY, 0)
    return dataclasses.replace(state, speculation=dataclasses.replace(old, gains=gains))


def _least_gain(
    requests: Requests, state: State, rows: Array, gains: Float[Array, " B"], k: int
) -> Float[Array, ""]:
    """Return the least of what rows get of a round, now or on average, among those that have most
    to do: the others are ahead of them by a round's drafts.  Infinity where a request waits.
    """
    left = take(requests.sampling, state.request).max_tokens - state.num_generated
    last = rows & (left + k > jnp.max(jnp.where(rows, left, 0)))
    waits = state.next_request < requests.count
    least = jnp.min(jnp.where(last, jnp.maximum(gains, _of(state).gains), jnp.inf))
    return jnp.where(waits, jnp.inf, least)


def _asked(requests: Requests, state: State, rows: Array, limit: Int[Array, ""]) -> Asked:
    num_slots = state.request.shape[0]
    row = row_of(state, requests)
    sampling = take(requests.sampling, state.request)
    # The token after the drafts is one more, and the last one that is allowed is never fed back.
    left = sampling.max_tokens - state.num_generated - 1
    return Asked(
        history=_history(requests, state),
        sampling=sampling,
        choice=requests.choice[row],
        last_token=state.last_token,
        cached=state.cache.lengths[:num_slots],
        page_table=state.cache.page_table[:num_slots],
        spans=planned_length(requests, row),
        most=jnp.where(rows, jnp.clip(left, 0, limit), 0),
        limit=limit,
    )


def _history(requests: Requests, state: State) -> History:
    row = row_of(state, requests)
    return History(
        prompts=requests.prompts[row],
        prompt_lens=requests.prompt_lens[row],
        generated=state.output.tokens[row],
        num_generated=state.num_generated,
    )


def finish_turn(
    params: Params,
    drafter: Drafter,
    requests: Requests,
    state: State,
    planned: Plan,
    processed: bool,
    implementation: str | None,
) -> State:
    """Run the round, if the plan has one, and learn from the turn."""
    tiers = drafter.widths
    nothing = jnp.zeros_like(planned.proposal.count)
    c = state, nothing
    for index, k in enumerate(tiers[1:], start=1):
        run = functools.partial(
            verify_round,
            params,
            drafter,
            requests,
            planned=planned,
            k=k,
            processed=processed,
            implementation=implementation,
        )
        c = at_most_once(planned.width == index, lambda c, run=run: run(c[0]), c)
    state, accepted = c
    return _learnt(drafter, state, planned, accepted)


def _learnt(drafter: Drafter, state: State, planned: Plan, accepted: Array) -> State:
    """Learn from a turn in which a slot generated."""
    tiers, last_token = drafter.widths, state.last_token

    def learn(old: Speculation) -> Speculation:
        aside = planned.rows & (planned.width == 0) & (planned.offered > 0)
        matched = planned.proposal.tokens[:, 0] == last_token
        known = policy.learn(
            old.policy,
            tiers,
            limit=planned.limit,
            rows=planned.rows,
            count=planned.proposal.count,
            accepted=accepted,
            aside=aside,
            matched=matched,
            adaptive=drafter.adaptive,
        )
        trust = policy.trusted(
            old.policy,
            old.trust,
            count=jnp.where(planned.rows, planned.proposal.count, 0),
            accepted=accepted,
            aside=aside,
            matched=matched,
        )
        count = lambda mask: jnp.sum(mask, axis=-1, dtype=jnp.int32)
        num_rows = count(planned.rows)
        tier = jnp.arange(len(tiers), dtype=jnp.int32)
        position = jnp.arange(drafter.k, dtype=jnp.int32)[:, None]
        return dataclasses.replace(
            old,
            policy=known,
            trust=trust,
            passes=old.passes + (tier == planned.width).astype(jnp.int32),
            row_passes=old.row_passes + num_rows,
            tokens=old.tokens + jnp.where(planned.width == 0, num_rows, 0),
            drafted=old.drafted + count(position < planned.proposal.count[None, :]),
            accepted=old.accepted + count(position < accepted[None, :]),
        )

    speculation = at_most_once(jnp.any(planned.rows), learn, _of(state))
    return dataclasses.replace(state, speculation=speculation)


def verify_round(
    params: Params,
    drafter: Drafter,
    requests: Requests,
    state: State,
    *,
    planned: Plan,
    k: int,
    processed: bool,
    implementation: str | None,
    masks: Array | None = None,
) -> tuple[State, Int[Array, " B"]]:
    """Judge up to k drafts a slot in one pass over k + 1 positions, record what comes out, and free
    the slots that are finished; return also how many drafts stand in each.

    Args:
        params: weights.
        drafter: of the drafts.
        requests: what is asked.
        state: before the round.
        planned: the slots that take part, and their drafts; none has more than k.
        k: drafts that the pass has room for.
        processed: as `processed_logprobs` of `run`.
        implementation: of the ops.
        masks: tokens that may come out at each position, as in `processed_logits`: for a caller
            that runs a grammar beside the loop and calls rounds itself.
    """
    rows, num_slots = planned.rows, state.request.shape[0]
    drafts, probs = planned.proposal.tokens[:, :k], planned.proposal.probs
    count = jnp.where(rows, jnp.minimum(planned.proposal.count, k), 0)
    # A drafter's mistake must not read past the embedding.
    ids = jnp.clip(drafts, 0, params.config.vocab_size - 1)
    fed = jnp.concatenate([state.last_token[:, None], ids], axis=1)
    x, cache = _pass(params, requests, state, fed, rows, count, implementation)
    with jax.named_scope("verify"):
        raw = decoder.logits(params, x, implementation).reshape(num_slots, k + 1, -1)
        sampling = take(requests.sampling, state.request)
        allowed = processed_logits(
            raw,
            sampling,
            _history(requests, state),
            drafts,
            masks=masks,
            process_logits=functools.partial(process_logits, implementation=implementation),
        )
        result = _judged(
            drafter,
            sampling,
            requests.choice[row_of(state, requests)],
            state,
            Proposal(tokens=drafts, probs=None if probs is None else probs[:, :k], count=count),
            rows,
            allowed,
            implementation,
        )
    state, kept, finished = record(
        requests, state, rows, raw, allowed, result, processed, implementation
    )
    lengths = cache.lengths.at[:num_slots].add(kept)
    state = dataclasses.replace(state, cache=dataclasses.replace(cache, lengths=lengths))
    seen = Seen(
        rows=rows,
        x=x.reshape(num_slots, k + 1, -1),
        logits=raw,
        tokens=fed,
        fed=jnp.where(rows, count + 1, 0),
        emitted=result.tokens,
        count=jnp.where(rows, result.count, 0),
    )
    carry = drafter.observe(params, _of(state).drafter, seen, implementation)
    state = _with_carry(state, carry)
    total = _of(state).tokens + jnp.sum(kept, dtype=jnp.int32)
    state = dataclasses.replace(state, speculation=dataclasses.replace(_of(state), tokens=total))
    accepted = jnp.where(rows, result.num_accepted, 0)
    return retire(state, requests, finished), accepted


def _pass(
    params: Params,
    requests: Requests,
    state: State,
    fed: Int[Array, "B k1"],
    rows: Bool[Array, " B"],
    count: Int[Array, " B"],
    implementation: str | None,
) -> tuple[Float[Array, "N D"], Any]:
    """Run the last token and the drafts of each row through the layers."""
    num_slots, width = fed.shape
    cache = state.cache
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    inside = rows[:, None] & (offset <= count[:, None])
    positions = jnp.where(inside, cache.lengths[:num_slots, None] + offset, -1)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    none = cache.page_table.shape[0]
    return through_layers(
        params,
        cache,
        fed.reshape(-1),
        positions,
        jnp.repeat(jnp.where(rows, slots, none), width),
        cache.page_table[:num_slots],
        jnp.repeat(planned_length(requests, row_of(state, requests)), width),
        implementation,
    )


def _judged(
    drafter: Drafter,
    sampling: Any,
    choice: Int[Array, " B"],
    state: State,
    proposal: Proposal,
    rows: Bool[Array, " B"],
    allowed: Float[Array, "B k1 V"],
    implementation: str | None,
) -> Verified:
    """Return what the round emits: by plain draws where the rule or greedy rows allow that, which
    are those of plain decoding bit for bit, else by the rule.
    """
    num_slots, width, vocab = allowed.shape
    start = Round(key=sampling.key, choice=choice, position=state.num_generated)
    drafts, count = proposal.tokens, proposal.count

    def by_draws() -> Verified:
        offset = jnp.arange(width, dtype=jnp.int32)[None, :]
        keys = plain_keys(start, jnp.broadcast_to(offset, (num_slots, width)))
        states = at_positions(sampling, width)
        flat = allowed.reshape(-1, vocab)
        drawn = sample(flat, states, keys.reshape(-1), implementation)
        return verify_equal(drafts, drawn.reshape(num_slots, width), count, vocab_size=vocab)

    def by_rule() -> Verified:
        return verify(
            filtered(allowed, sampling),
            drafts,
            proposal.probs,
            count,
            greedy=is_greedy(sampling),
            round=start,
            rule=drafter.judged_by,
        )

    if drafter.judged_by is Rule.COUPLED:
        return by_draws()
    return lax.cond(jnp.all(is_greedy(sampling) | ~rows), by_draws, by_rule)


def _of(state: State) -> Speculation:
    assert state.speculation is not None
    return state.speculation


def _with_carry(state: State, carry: Any) -> State:
    return dataclasses.replace(state, speculation=dataclasses.replace(_of(state), drafter=carry))
