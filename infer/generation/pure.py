"""The pure form of `generate`, for use inside a trace: arrays in, arrays out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.cache.paged import pages_for
from infer.config import ModelConfig
from infer.errors import RequestError
from infer.generation import prepare
from infer.generation.prepare import Caps, RunOptions
from infer.generation.program import Finish, Requests, run
from infer.generation.result import Generation
from infer.models.params import Params
from infer.sampling import GREEDY_BELOW, SamplingState

_FOREVER = np.int32(2**31 - 1)


def generate_pure(
    params: Params,
    prompts: Any,
    prompt_lens: Any,
    sampling: Any,
    key: Array | None,
    max_tokens: int | None,
    options: RunOptions,
) -> Generation:
    """Arrays in, arrays out.  Ids and lengths cannot be checked here: they must be in range."""
    config = params.config
    prompts = jnp.asarray(prompts)
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise RequestError(
            f"prompts is {prompts.dtype}{list(prompts.shape)}; inside a trace pass integer ids "
            "[R, T]"
        )
    num_requests, length = prompts.shape
    if num_requests < 1 or length < 1 or length >= config.max_context:
        raise RequestError(
            f"prompts is [{num_requests}, {length}]; at least one row of "
            f"1..{config.max_context - 1} tokens is needed"
        )
    lens = (
        jnp.full(num_requests, length, jnp.int32)
        if prompt_lens is None
        else jnp.asarray(prompt_lens, jnp.int32)
    )
    state, new, logprobs = _pure_sampling(config, sampling, key, num_requests, length, max_tokens)
    pages_per_row = int(pages_for(length + new, options.page_size))
    slots = options.slots(num_requests)
    caps = Caps(
        requests=num_requests,
        prompt=length,
        new_tokens=new,
        slots=slots,
        pages=options.num_pages or slots * pages_per_row,
        pages_per_row=pages_per_row,
        page_size=options.page_size,
        stop_ids=state.stop_ids.shape[1],
        logprobs=logprobs,
        lanes=prepare.lanes_for(options.prefill_chunk, length, slots),
    )
    requests = Requests(
        prompts=prompts.astype(jnp.int32),
        prompt_lens=lens,
        choice=jnp.zeros(num_requests, jnp.int32),
        sampling=state,
        count=jnp.asarray(num_requests, jnp.int32),
    )
    final = run(
        params,
        requests,
        prepare.fresh_state(params, requests, caps, pad_id=0),
        jnp.asarray(_FOREVER),
        jnp.zeros((), bool),
        lanes=caps.lanes,
    )
    out = final.output
    ended = jnp.where(out.finish == Finish.RUNNING, jnp.int8(Finish.CAPACITY), out.finish)
    return Generation(
        tokens=out.tokens,
        lengths=out.lengths,
        logprobs=out.logprobs,
        top_tokens=out.top_tokens,
        top_logprobs=out.top_logprobs,
        finish_reason=ended,
        stop_reason=out.stop_reason,
        state=final,
    )


def _pure_sampling(
    config: ModelConfig,
    sampling: Any,
    key: Array | None,
    num_requests: int,
    length: int,
    max_tokens: int | None,
) -> tuple[SamplingState, int, int]:
    """Return the sampling arrays, the room for new tokens and the number of top
    log-probabilities.
    """
    if isinstance(sampling, SamplingState):
        if max_tokens is None:
            raise RequestError(
                "a SamplingState may be traced: pass max_tokens=, the static room for new tokens"
            )
        room = min(max_tokens, config.max_context - length)
        bounded = jnp.minimum(sampling.max_tokens, room)
        return SamplingState(**(vars(sampling) | {"max_tokens": bounded})), room, 0
    each = prepare.expand_sampling(sampling, num_requests)
    if key is None:
        if any(s.temperature >= GREEDY_BELOW and s.seed is None for s in each):
            raise RequestError(
                "sampling inside a trace needs key= or a seed in every SamplingParams"
            )
        key = jax.random.key(0)
    elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise RequestError("key is not a typed key; pass jax.random.key(seed)")
    new = [min(s.max_tokens, config.max_context - length) for s in each]
    stops = [prepare.stop_ids_of(s, config, None) for s in each]
    state = prepare.sampling_state(
        each,
        new,
        stops,
        key,
        rows=num_requests,
        num_stop_ids=max(1, *map(len, stops)),
        vocab_size=config.vocab_size,
    )
    asked = max((s.logprobs or 0) for s in each)
    return state, max(new), next(c for c in prepare.LOGPROB_COUNTS if c >= asked)
