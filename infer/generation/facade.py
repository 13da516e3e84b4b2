"""`generate(params, prompts)`: one function, two forms.

Called on the host it checks everything, rounds sizes up to buckets so that a second call compiles nothing, runs the
one-program loop and returns numpy arrays, words and text.  Called inside a trace (a user's jit, scan, shard_map) it is pure:
arrays in, arrays out.
"""

import functools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.cache import paged
from infer.compiling import num_traces, record_trace
from infer.errors import RequestError
from infer.generation import prepare
from infer.generation.prepare import Caps, TextCodec
from infer.generation.program import Finish, Lanes, Requests, State, initial_state, run
from infer.generation.result import FINISH_WORDS, Generation, GenerationResult
from infer.models.params import Params
from infer.sampling import GREEDY_BELOW, SamplingParams, SamplingState

_PROGRAM = "generate"
_FOREVER = np.int32(2**31 - 1)
# Slots when none are asked for: XLA:CPU's products stop growing in speed per row at about eight rows.
_DEFAULT_SLOTS = {"cpu": 8, "gpu": 64}
# Turns between two looks at the tokens when text is streamed.
_STREAM_TURNS = 4


def generate(
    params: Params,
    prompts: Any,
    *,
    prompt_lens: Any = None,
    tokenizer: TextCodec | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | SamplingState | None = None,
    key: Array | None = None,
    max_tokens: int | None = None,
    num_slots: int | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    prefill_chunk: int = 256,
    implementation: str | None = None,
) -> Any:
    """Generate from every prompt: prefill, decode, sampling and refill of slots in one compiled program.

    Args:
      params: weights; a pytree whose static `config` says what the model is.
      prompts: a list of strings (needs `tokenizer`), a list of lists of ids, or an integer array [R, T].
      prompt_lens: with an array, the tokens of each row that count, [R]; None means all T.
      tokenizer: encodes string prompts, decodes the result, and adds its end-of-sequence ids.
      sampling: one SamplingParams for all, or one per prompt; None is greedy with max_tokens=128.  Inside a trace also a
        SamplingState, whose every field may be traced.
      key: a typed key; requests without a seed draw from it.  On the host None draws a seed, reported in
        `stats["seed"]`; inside a trace sampling without a key is an error.
      max_tokens: the static room for new tokens; needed only with a SamplingState.
      num_slots: requests that run at a time; the others wait inside the program.
      page_size: tokens in a page of the cache.
      num_pages: pages in the pool; None makes room for all slots at their longest.
      prefill_chunk: most prompt tokens in one prefill pass.
      implementation: None chooses; "xla" is what there is.

    Returns:
      GenerationResult on the host, Generation (a pytree of arrays) inside a trace.

    Raises:
      RequestError: a prompt or parameter that cannot be served, with its index or name.
      CapacityError: the pool cannot hold one of the requests.
    """
    if implementation not in (None, "xla"):
        raise RequestError(f"implementation is {implementation!r}; this version has 'xla' (None chooses it)")
    options = dict(num_slots=num_slots, page_size=page_size, num_pages=num_pages, prefill_chunk=prefill_chunk)
    _check_sizes(options)
    if _is_traced(params, prompts, prompt_lens, sampling, key):
        if tokenizer is not None:
            raise RequestError("tokenizer is host work; inside a trace pass token ids and decode the result outside")
        return _generate_pure(params, prompts, prompt_lens, sampling, key, max_tokens, **options)
    if isinstance(sampling, SamplingState):
        raise RequestError("a SamplingState is for use inside a trace; outside pass SamplingParams")
    if max_tokens is not None:
        raise RequestError("max_tokens goes into SamplingParams; the argument is the room for a SamplingState")
    job = _Job.prepare(params, prompts, prompt_lens, tokenizer, sampling, key, **options)
    job.run_all()
    return job.result()


def stream(
    params: Params, prompt: Any, *, tokenizer: TextCodec, sampling: SamplingParams | None = None, **options: Any
) -> Iterator[str]:
    """Yield the text of one prompt's continuation as it grows; the joined pieces equal `generate`'s text.

    Takes `generate`'s options.  The same compiled program runs a few turns at a time.
    """
    prompts = [prompt] if isinstance(prompt, str) or prepare.is_int(prompt[0]) else prompt
    job = _Job.prepare(params, prompts, None, tokenizer, sampling, options.pop("key", None), **_with_defaults(options))
    decoder = tokenizer.stream()  # type: ignore[attr-defined]
    seen = 0
    for ids in job.bursts():
        fresh, seen = ids[seen:], len(ids)
        piece = "".join(decoder.put(token) for token in fresh)
        if piece:
            yield piece
    tail = decoder.flush()
    if tail:
        yield tail


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    known = dict(num_slots=None, page_size=16, num_pages=None, prefill_chunk=256)
    if unknown := set(options) - set(known):
        raise TypeError(f"stream() got unexpected options {sorted(unknown)}; it takes key and {sorted(known)}")
    merged = known | options
    _check_sizes(merged)
    return merged


def _check_sizes(options: dict[str, int | None]) -> None:
    for name, value in options.items():
        if value is not None and (not prepare.is_int(value) or value < 1):
            raise RequestError(f"{name} is {value!r}, must be an integer of at least 1")


def _is_traced(*values: Any) -> bool:
    """Return whether we are inside a trace: a leaf is a tracer, or fresh arrays are."""
    leaves = jax.tree.leaves(values)
    return any(isinstance(x, jax.core.Tracer) for x in (*leaves, jnp.zeros(())))


# ---- the compiled program --------------------------------------------------------------------------------------------


def _traced_run(
    params: Params, requests: Requests, state: State, max_turns: Array, until_first: Array, *, caps: Caps
) -> State:
    record_trace(_PROGRAM, vars(caps))
    return run(params, requests, state, max_turns, until_first, lanes=caps.lanes)


_run = jax.jit(_traced_run, static_argnames="caps", donate_argnames="state")


@functools.partial(jax.jit, static_argnames=("caps", "pad_id"))
def _start(params: Params, requests: Requests, *, caps: Caps, pad_id: int) -> State:
    return _fresh_state(params, requests, caps, pad_id)


def _fresh_state(params: Params, requests: Requests, caps: Caps, pad_id: int) -> State:
    cache = paged.create(
        params.config,
        num_slots=caps.slots,
        num_pages=caps.pages,
        page_size=caps.page_size,
        pages_per_row=caps.pages_per_row,
        dtype=params.dtype,
    )
    return initial_state(
        cache,
        requests,
        max_new=caps.new_tokens,
        num_logprobs=caps.logprobs,
        vocab_size=params.config.vocab_size,
        pad_id=pad_id,
    )


def _slots(num_requests: int, num_slots: int | None) -> int:
    return num_slots or min(num_requests, _DEFAULT_SLOTS.get(jax.default_backend(), 64))


# ---- the host form ---------------------------------------------------------------------------------------------------


class _Job:
    """One call of the host form: its arrays, its program, its clock."""

    def __init__(
        self,
        params: Params,
        rows: list[list[int]],
        each: list[SamplingParams],
        max_tokens: list[int],
        requests: Requests,
        caps: Caps,
        tokenizer: TextCodec | None,
        seed: int | None,
    ) -> None:
        self.params, self.rows, self.each, self.max_tokens = params, rows, each, max_tokens
        self.requests, self.caps, self.tokenizer, self.seed = requests, caps, tokenizer, seed
        pad_id = tokenizer.pad_id if tokenizer else None
        self.state = _start(params, requests, caps=caps, pad_id=0 if pad_id is None else pad_id)
        self.compile_s = self.ttft_s = self.decode_s = 0.0
        self.compiles = 0
        self.first_tokens = 0

    @classmethod
    def prepare(
        cls,
        params: Params,
        prompts: Any,
        prompt_lens: Any,
        tokenizer: TextCodec | None,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        key: Array | None,
        *,
        num_slots: int | None,
        page_size: int,
        num_pages: int | None,
        prefill_chunk: int,
    ) -> "_Job":
        config = params.config
        rows = prepare.token_rows(prompts, tokenizer, prompt_lens)
        prepare.check_prompts(rows, config)
        each = prepare.expand_sampling(sampling, len(rows))
        # The context bounds the answer: it ends with finish_reason "length" there, as in every engine.
        max_tokens = [min(s.max_tokens, config.max_context - len(ids)) for s, ids in zip(each, rows, strict=True)]
        stops = [prepare.stop_ids_of(s, config, tokenizer) for s in each]
        key, seed = _base_key(each, key)
        requests_cap = prepare.bucket(len(rows), 1)
        prompt_cap = prepare.bucket(max(map(len, rows)), 16)
        new_cap = prepare.bucket(max(max_tokens), 16)
        slots = _slots(requests_cap, num_slots)
        pages_per_row = int(prepare.pages_for(prompt_cap + new_cap, page_size))
        pages = num_pages or slots * pages_per_row
        prepare.check_pool(rows, max_tokens, page_size, pages)
        asked = max((s.logprobs or 0) for s in each)
        caps = Caps(
            requests=requests_cap,
            prompt=prompt_cap,
            new_tokens=new_cap,
            slots=slots,
            pages=pages,
            pages_per_row=pages_per_row,
            page_size=page_size,
            stop_ids=prepare.bucket(max(map(len, stops)), 4),
            logprobs=next(c for c in prepare.LOGPROB_COUNTS if c >= asked),
            lanes=prepare.lanes_for(prefill_chunk, prompt_cap, slots),
        )
        state = prepare.sampling_state(
            each,
            max_tokens,
            stops,
            key,
            rows=caps.requests,
            num_stop_ids=caps.stop_ids,
            vocab_size=config.vocab_size,
        )
        requests = prepare.request_arrays(rows, state, caps)
        return cls(params, rows, each, max_tokens, requests, caps, tokenizer, seed)

    def _run(self, max_turns: int | np.int32, until_first: bool) -> float:
        """Advance the state and return the seconds it took."""
        start = time.perf_counter()
        self.state = _run(
            self.params,
            self.requests,
            self.state,
            jnp.asarray(max_turns, jnp.int32),
            jnp.asarray(until_first),
            caps=self.caps,
        )
        jax.block_until_ready(self.state.turns)
        return time.perf_counter() - start

    def compile(self) -> None:
        """Compile the program by a call of no turns, so that compiling and running are timed apart."""
        before = num_traces(_PROGRAM)
        seconds = self._run(0, False)
        self.compiles += num_traces(_PROGRAM) - before
        self.compile_s += seconds if self.compiles else 0.0

    def run_to_first_tokens(self) -> None:
        """Run until every admitted request has its first token."""
        self.compile()
        self.ttft_s = self._run(_FOREVER, True)
        self.first_tokens = int(np.sum(np.asarray(self.state.output.lengths)))

    def run_all(self) -> None:
        """Run to the end."""
        self.run_to_first_tokens()
        self.decode_s = self._run(_FOREVER, False)

    def bursts(self) -> Iterator[list[int]]:
        """Run a few turns at a time; yield the first request's ids so far, its stop id left out."""
        self.run_to_first_tokens()
        while True:
            ids = self._visible_ids(0)
            yield ids
            if int(self.state.output.finish[0]) != Finish.RUNNING or bool(self.state.cache.overflow):
                return
            self.decode_s += self._run(int(self.state.turns) + _STREAM_TURNS, False)

    def _visible_ids(self, row: int) -> list[int]:
        length = int(self.state.output.lengths[row])
        ids = np.asarray(self.state.output.tokens[row, :length]).tolist()
        return ids[:-1] if int(self.state.output.finish[row]) == Finish.STOP else ids

    def result(self) -> GenerationResult:
        """Return the finished job's arrays, words, text and figures."""
        paged.raise_if_overflow(self.state.cache, way_out="raise num_pages or lower max_tokens")
        out = jax.device_get(self.state.output)
        count, vocab = len(self.rows), self.params.config.vocab_size
        width = max(self.max_tokens)
        asked = max((s.logprobs or 0) for s in self.each)
        text = None
        if self.tokenizer is not None:
            text = [self.tokenizer.decode(self._visible_ids(row)) for row in range(count)]
        return GenerationResult(
            tokens=np.asarray(out.tokens[:count, :width]),
            lengths=np.asarray(out.lengths[:count]),
            logprobs=np.asarray(out.logprobs[:count, :width]),
            top_tokens=np.asarray(out.top_tokens[:count, :width, :asked]),
            top_logprobs=np.asarray(out.top_logprobs[:count, :width, :asked]),
            finish_reason=[FINISH_WORDS[f] for f in out.finish[:count]],
            stop_reason=[int(i) if i < vocab else None for i in out.stop_reason[:count]],
            prompt_tokens=self.rows,
            text=text,
            stats=self._stats(out),
        )

    def _stats(self, out: Any) -> dict[str, Any]:
        generated = int(np.sum(out.lengths))
        # Prompts of the first wave only: later ones are prefilled among the decode passes.
        first_wave = sum(map(len, self.rows[: self.caps.slots]))
        stats = {
            "backend": jax.default_backend(),
            "implementation": "xla",
            "compile_s": self.compile_s,
            "ttft_s": self.ttft_s,
            "prefill_tokens_per_s": first_wave / self.ttft_s if self.ttft_s else None,
            "decode_tokens_per_s": _rate(generated - self.first_tokens, self.decode_s),
            "compiles": self.compiles,
            "num_prompt_tokens": [len(r) for r in self.rows],
            "num_output_tokens": out.lengths[: len(self.rows)].tolist(),
            "prefill_passes": int(self.state.prefill_passes),
            "decode_passes": int(self.state.decode_passes),
        }
        return stats | ({"seed": self.seed} if self.seed is not None else {})


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _base_key(each: list[SamplingParams], key: Array | None) -> tuple[Array, int | None]:
    """Return the call's key, and the seed that was drawn for it where none was given and one is needed."""
    if key is not None:
        return _typed(key), None
    if all(s.temperature < GREEDY_BELOW or s.seed is not None for s in each):
        return jax.random.key(0), None
    seed = secrets.randbits(31)
    return jax.random.key(seed), seed


def _typed(key: Array) -> Array:
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        raise RequestError(f"key is {key!r:.80}; pass one typed key, jax.random.key(seed)")
    return key


# ---- the pure form ---------------------------------------------------------------------------------------------------


def _generate_pure(
    params: Params,
    prompts: Any,
    prompt_lens: Any,
    sampling: Any,
    key: Array | None,
    max_tokens: int | None,
    *,
    num_slots: int | None,
    page_size: int,
    num_pages: int | None,
    prefill_chunk: int,
) -> Generation:
    """Arrays in, arrays out.  Ids and lengths cannot be checked here: they must be in range."""
    config = params.config
    prompts = jnp.asarray(prompts)
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise RequestError(f"prompts is {prompts.dtype}{list(prompts.shape)}; inside a trace pass integer ids [R, T]")
    num_requests, length = prompts.shape
    if num_requests < 1 or length < 1 or length >= config.max_context:
        raise RequestError(
            f"prompts is [{num_requests}, {length}]; at least one row of 1..{config.max_context - 1} tokens is needed"
        )
    lens = jnp.full(num_requests, length, jnp.int32) if prompt_lens is None else jnp.asarray(prompt_lens, jnp.int32)
    state, new, logprobs = _pure_sampling(config, sampling, key, num_requests, length, max_tokens)
    pages_per_row = int(prepare.pages_for(length + new, page_size))
    slots = _slots(num_requests, num_slots)
    caps = Caps(
        requests=num_requests,
        prompt=length,
        new_tokens=new,
        slots=slots,
        pages=num_pages or slots * pages_per_row,
        pages_per_row=pages_per_row,
        page_size=page_size,
        stop_ids=state.stop_ids.shape[1],
        logprobs=logprobs,
        lanes=prepare.lanes_for(prefill_chunk, length, slots),
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
        _fresh_state(params, requests, caps, pad_id=0),
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
    config: Any, sampling: Any, key: Array | None, num_requests: int, length: int, max_tokens: int | None
) -> tuple[SamplingState, int, int]:
    """Return the sampling arrays, the room for new tokens and the number of top log-probabilities."""
    if isinstance(sampling, SamplingState):
        if max_tokens is None:
            raise RequestError("a SamplingState may be traced: pass max_tokens=, the static room for new tokens")
        room = min(max_tokens, config.max_context - length)
        bounded = jnp.minimum(sampling.max_tokens, room)
        return SamplingState(**(vars(sampling) | {"max_tokens": bounded})), room, 0
    each = prepare.expand_sampling(sampling, num_requests)
    if key is None:
        if any(s.temperature >= GREEDY_BELOW and s.seed is None for s in each):
            raise RequestError("sampling inside a trace needs key= or a seed in every SamplingParams")
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
