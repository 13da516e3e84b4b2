"""The pure form of `generate`, for use inside a trace: arrays in, arrays out."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.cache.paged import pages_for
from infer.cache.pool import kv_dtype_name
from infer.config import ModelConfig
from infer.errors import RequestError
from infer.generation import prepare, rows
from infer.generation.prepare import Caps, RunOptions
from infer.generation.program import run
from infer.generation.result import Generation
from infer.generation.state import Finish, Requests
from infer.models.params import Params
from infer.sampling import GREEDY_BELOW, SamplingParams, SamplingState

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
    """Arrays in, arrays out.  Ids cannot be checked here and must be in range; a row whose length
    is not 1 to T comes back aborted, with no tokens.
    """
    config = params.config
    if isinstance(prompts, (str, list, tuple)):
        prompts = np.asarray(prompts)
        if not np.issubdtype(prompts.dtype, np.integer):
            raise RequestError("inside a trace prompts are integer ids [R, T], not text")
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
    lens = jnp.full(num_requests, length, jnp.int32)
    if prompt_lens is not None:
        lens = jnp.asarray(prompt_lens)
        if lens.shape != (num_requests,) or not jnp.issubdtype(lens.dtype, jnp.integer):
            raise RequestError(
                f"prompt_lens is {lens.dtype}{list(lens.shape)}; pass one integer per row, "
                f"[{num_requests}]"
            )
        lens = lens.astype(jnp.int32)
    # What a trace cannot refuse must not hang it: such rows run with a length that exists, and
    # come back aborted and empty.
    valid = (lens >= 1) & (lens <= length)
    lens = jnp.clip(lens, 1, length)
    given, state, caps = _sampling(config, sampling, key, num_requests, length, max_tokens, options)
    drafter = options.draft
    if drafter is not None:
        prepare.check_draft(drafter, config, options)
    whole = lens[given.prompt] % caps.whole_page == 0
    requests = Requests(
        prompts=prompts.astype(jnp.int32)[given.prompt],
        prompt_lens=lens[given.prompt],
        choice=jnp.asarray(given.choice),
        # Prompts are traced and cannot be compared; samples of one prompt share all of it.
        parent=jnp.where(whole, jnp.asarray(given.parent), caps.requests),
        shared=jnp.where((given.choice > 0) & whole, lens[given.prompt], 0),
        last_child=jnp.asarray(given.last_child),
        wants_prompt_logprobs=jnp.asarray(given.scored),
        sampling=state,
        count=jnp.asarray(caps.requests, jnp.int32),
    )
    final = run(
        params,
        requests,
        prepare.fresh_state(params, requests, caps, 0, drafter),
        jnp.asarray(_FOREVER),
        jnp.zeros((), bool),
        lanes=caps.lanes,
        drafter=drafter,
        processed_logprobs=caps.processed_logprobs,
        implementation=caps.implementation,
    )
    out = final.output
    valid = valid[given.prompt]
    ended = jnp.where(out.finish == Finish.RUNNING, jnp.int8(Finish.CAPACITY), out.finish)
    return Generation(
        tokens=out.tokens,
        lengths=jnp.where(valid, out.lengths, 0),
        logprobs=out.logprobs,
        top_tokens=out.top_tokens,
        top_logprobs=out.top_logprobs,
        finish_reason=jnp.where(valid, ended, jnp.int8(Finish.ABORT)),
        stop_reason=out.stop_reason,
        prompt_logprobs=out.prompt_logprobs[given.first],
        prompt_top_tokens=out.prompt_top_tokens[given.first],
        prompt_top_logprobs=out.prompt_top_logprobs[given.first],
        state=final,
    )


def sampling_state(
    params: Params,
    sampling: SamplingParams | Sequence[SamplingParams],
    num_prompts: int,
    *,
    key: Array,
) -> SamplingState:
    """Return sampling parameters as arrays, for `generate` inside a trace: replace any field by a
    traced one, and nothing compiles again.

    Args:
        params: weights, for the model's ids.
        sampling: one for all, or one per prompt; n is 1, and stop strings are host work.
        num_prompts: R.
        key: what requests without a seed draw from; may be traced.

    Raises:
        RequestError: a parameter that this form cannot serve.
    """
    each = rows.expand_sampling(sampling, num_prompts)
    if any(s.n > 1 for s in each):
        raise RequestError("a SamplingState has one row per prompt: repeat the prompt, keep n at 1")
    config = params.config
    return _sampling(config, each, key, num_prompts, 1, None, RunOptions())[1]


@dataclass(frozen=True)
class _Rows:
    """Which prompt and sample each row is, and whether its prompt is scored; static."""

    prompt: np.ndarray  # int32 [R]
    choice: np.ndarray  # int32 [R], 0, 1, ... within a prompt
    scored: np.ndarray  # bool [R]

    @property
    def first(self) -> np.ndarray:
        """The first sample of each row's prompt, int32 [R]."""
        return np.arange(len(self.choice), dtype=np.int32) - self.choice

    @property
    def parent(self) -> np.ndarray:
        """The row whose pages each row begins on, int32 [R]; R = none."""
        return np.where(self.choice > 0, self.first, np.int32(len(self.choice)))

    @property
    def last_child(self) -> np.ndarray:
        """The last sample of each first row's prompt, int32 [R]; -1 where there is none."""
        last = np.full(len(self.choice), -1, np.int32)
        for row in np.flatnonzero(self.choice):
            last[self.first[row]] = row
        return last


def _sampling(
    config: ModelConfig,
    sampling: Any,
    key: Array | None,
    num_prompts: int,
    length: int,
    max_tokens: int | None,
    options: RunOptions,
) -> tuple[_Rows, SamplingState, Caps]:
    """Return the rows, their sampling arrays and the static sizes."""
    room = config.max_context - length
    if isinstance(sampling, SamplingState):
        if max_tokens is None:
            raise RequestError(
                "a SamplingState may be traced: pass max_tokens=, the static room for new tokens"
            )
        if not prepare.is_int(max_tokens) or max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens!r}, must be an integer of at least 1")
        if sampling.num_requests != num_prompts:
            raise RequestError(
                f"the SamplingState has {sampling.num_requests} rows for {num_prompts} prompts; "
                "give it one row per prompt"
            )
        new = min(max_tokens, room)
        state = dataclasses.replace(sampling, max_tokens=jnp.minimum(sampling.max_tokens, new))
        index = np.arange(num_prompts, dtype=np.int32)
        given = _Rows(index, np.zeros_like(index), np.zeros(num_prompts, bool))
        sizes = dict(
            stop_ids=state.stop_ids.shape[1],
            bias=state.bias_ids.shape[1],
            allowed=state.allowed.shape[1],
            bad_words=state.bad_words.shape[1:],
            logprobs=0,
            prompt_logprobs=None,
        )
        return given, state, _caps(num_prompts, length, new, sizes, options)
    each = rows.expand_sampling(sampling, num_prompts)
    if any(s.stop for s in each):
        raise RequestError("stop strings are host work; inside a trace use stop_token_ids")
    if key is None:
        if any(s.temperature >= GREEDY_BELOW and s.seed is None for s in each):
            raise RequestError(
                "sampling inside a trace needs key= or a seed in every SamplingParams"
            )
        key = jax.random.key(0)
    else:
        key = prepare.typed_key(key)
    todo = rows.expand_rows([[0] * length] * num_prompts, each, config, None, room)
    caps = _caps(
        len(todo),
        length,
        max(r.max_tokens for r in todo),
        rows.caps_of(todo, config.vocab_size),
        options,
    )
    given = _Rows(
        np.asarray([r.prompt for r in todo], np.int32),
        np.asarray([r.choice for r in todo], np.int32),
        np.asarray([r.scored for r in todo]),
    )
    return given, rows.sampling_state(todo, key, caps, config.vocab_size), caps


def _caps(count: int, length: int, new: int, sizes: dict[str, Any], options: RunOptions) -> Caps:
    slots = options.slots(count)
    pages_per_row = int(pages_for(length + new, options.page_size))
    return Caps(
        requests=count,
        prompt=length,
        new_tokens=new,
        slots=slots,
        pages=options.num_pages or slots * pages_per_row,
        pages_per_row=pages_per_row,
        page_size=options.page_size,
        processed_logprobs=options.logprobs_mode == "processed",
        lanes=prepare.lanes_for(options.prefill_chunk, length, slots, options.whole_page),
        implementation=options.implementation,
        kv_dtype=kv_dtype_name(options.kv_dtype),
        **sizes,
    )
