"""Writing down what a turn has drawn: tokens, log-probabilities, and which requests end."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from infer.generation.state import Finish, Requests, State
from infer.ops.sample import logsumexp
from infer.sampling import filtered_logits, log_probabilities, take, top_log_probabilities
from infer.spec.endings import cut
from infer.spec.target import at_positions
from infer.spec.verify import Verified


def record(
    requests: Requests,
    state: State,
    rows: Bool[Array, " B"],
    raw: Float[Array, "B T V"],
    allowed: Float[Array, "B T V"],
    drawn: Verified,
    processed: bool,
    implementation: str | None,
) -> tuple[State, Int[Array, " B"], Bool[Array, " B"]]:
    """Write the tokens that a pass gave, and their log-probabilities, behind the others of each
    row; return also how many there are, and which slots are finished.

    A row ends with its first stop id, with the last token that it may have, or before a position
    that has no answer.

    Args:
        requests: what is asked.
        state: before the tokens; the cache is left as it is.
        rows: slots that take part.
        raw: the model's logits.
        allowed: after masks and penalties.
        drawn: tokens of each slot, one or several.
        processed: as `processed_logprobs` of `run`.
        implementation: of the ops.
    """
    num_requests, (num_slots, width, vocab) = requests.prompts.shape[0], raw.shape
    sampling = take(requests.sampling, state.request)
    flat = lambda leaf: leaf.reshape(num_slots * width, *leaf.shape[2:])
    total = logsumexp(flat(raw), implementation)
    reported, of_reported = flat(raw), total
    if processed:
        reported = filtered_logits(flat(allowed), at_positions(sampling, width))
        of_reported = logsumexp(reported, implementation)
    token = flat(drawn.tokens)
    # A position with a NaN, or with nothing left to draw, has no answer.
    nothing = jnp.isneginf(log_probabilities(flat(allowed), token, jnp.zeros_like(total)))
    insane = (jnp.isnan(total) | nothing).reshape(num_slots, width)
    ending = cut(drawn, sampling, state.num_generated)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    insane = insane & (column < ending.count[:, None])
    broken = jnp.any(insane, axis=1)
    count = jnp.where(broken, jnp.argmax(insane, axis=1).astype(jnp.int32), ending.count)
    count = jnp.where(rows, count, 0)
    stopped = rows & ending.stopped & ~broken
    finished = rows & (ending.finished | broken)
    reason = jnp.where(stopped, Finish.STOP, Finish.LENGTH)
    reason = jnp.where(broken, Finish.ABORT, reason).astype(jnp.int8)

    emitted = column < count[:, None]
    target = jnp.where(emitted, state.request[:, None], num_requests)
    at = target, state.num_generated[:, None] + column
    put = lambda leaf, value: leaf.at[at].set(
        value.reshape(num_slots, width, *value.shape[1:]), mode="drop"
    )
    out = state.output
    top_tokens, top_logprobs = out.top_tokens, out.top_logprobs
    if top_tokens.shape[-1]:
        ids, values = top_log_probabilities(reported, top_tokens.shape[-1], of_reported)
        top_tokens, top_logprobs = put(top_tokens, ids), put(top_logprobs, values)
    row = jnp.where(rows, state.request, num_requests)
    done = jnp.where(finished, state.request, num_requests)
    last = jnp.take_along_axis(drawn.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    num_generated = state.num_generated + count
    output = dataclasses.replace(
        out,
        tokens=put(out.tokens, token),
        logprobs=put(out.logprobs, log_probabilities(reported, token, of_reported)),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        lengths=out.lengths.at[row].set(num_generated, mode="drop"),
        finish=out.finish.at[done].set(reason, mode="drop"),
        stop_reason=out.stop_reason.at[done].set(jnp.where(stopped, last, vocab), mode="drop"),
    )
    state = dataclasses.replace(
        state,
        num_generated=num_generated,
        last_token=jnp.where(count > 0, last, state.last_token),
        output=output,
    )
    return state, count, finished
