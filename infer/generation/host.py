"""The host form of `generate`: one job with its arrays, its compiled program and its clock."""

import functools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.backend import check_memory
from infer.cache import paged
from infer.cache.layout import pool_bytes
from infer.compiling import num_traces, record_trace
from infer.errors import RequestError
from infer.generation import prepare
from infer.generation.prepare import Caps, RunOptions, TextCodec
from infer.generation.program import Finish, Requests, State, run
from infer.generation.result import FINISH_WORDS, GenerationResult
from infer.models.params import Params
from infer.sampling import GREEDY_BELOW, SamplingParams

PROGRAM = "generate"
_FOREVER = np.int32(2**31 - 1)
# Turns between two looks at the tokens when text is streamed.
_STREAM_TURNS = 4


def traced_run(
    params: Params,
    requests: Requests,
    state: State,
    max_turns: Array,
    until_first: Array,
    *,
    caps: Caps,
) -> State:
    """Run turns, and count each trace: the function that is compiled."""
    record_trace(PROGRAM, vars(caps))
    return run(params, requests, state, max_turns, until_first, lanes=caps.lanes)


_run = jax.jit(traced_run, static_argnames="caps", donate_argnames="state")


@functools.partial(jax.jit, static_argnames=("caps", "pad_id"))
def _start(params: Params, requests: Requests, *, caps: Caps, pad_id: int) -> State:
    return prepare.fresh_state(params, requests, caps, pad_id)


class Job:
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
        options: RunOptions,
    ) -> "Job":
        """Check what was asked and build its arrays; nothing is compiled or run yet but the zeros.

        Raises:
            RequestError: a prompt or parameter that cannot be served.
            CapacityError: one request alone is larger than the pool.
        """
        config = params.config
        rows = prepare.token_rows(prompts, tokenizer, prompt_lens)
        prepare.check_prompts(rows, config)
        each = prepare.expand_sampling(sampling, len(rows))
        # The context bounds the answer: it ends with finish_reason "length" there, as in every
        # engine.
        max_tokens = [
            min(s.max_tokens, config.max_context - len(ids))
            for s, ids in zip(each, rows, strict=True)
        ]
        stops = [prepare.stop_ids_of(s, config, tokenizer) for s in each]
        key, seed = _base_key(each, key)
        requests_cap = prepare.bucket(len(rows), 1)
        prompt_cap = prepare.bucket(max(map(len, rows)), 16)
        new_cap = prepare.bucket(max(max_tokens), 16)
        slots = options.slots(requests_cap)
        pages_per_row = int(paged.pages_for(prompt_cap + new_cap, options.page_size))
        pages = options.num_pages or slots * pages_per_row
        check_memory(
            f"a page pool of {pages} pages of {options.page_size} tokens",
            pool_bytes(config, pages, options.page_size, params.dtype),
            "lower num_slots, num_pages or max_tokens",
        )
        prepare.check_pool(rows, max_tokens, options.page_size, pages)
        asked = max((s.logprobs or 0) for s in each)
        caps = Caps(
            requests=requests_cap,
            prompt=prompt_cap,
            new_tokens=new_cap,
            slots=slots,
            pages=pages,
            pages_per_row=pages_per_row,
            page_size=options.page_size,
            stop_ids=prepare.bucket(max(map(len, stops)), 4),
            logprobs=next(c for c in prepare.LOGPROB_COUNTS if c >= asked),
            lanes=prepare.lanes_for(options.prefill_chunk, prompt_cap, slots),
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
        """Compile the program by a call of no turns, so that compiling and running are timed
        apart.
        """
        before = num_traces(PROGRAM)
        seconds = self._run(0, False)
        self.compiles += num_traces(PROGRAM) - before
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
            if int(self.state.output.finish[0]) != Finish.RUNNING or bool(
                self.state.cache.overflow
            ):
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
            text = [
                self.tokenizer.decode(self._visible_ids(row), continuation=True)
                for row in range(count)
            ]
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
            stats=self.stats(),
        )

    def stats(self) -> dict[str, Any]:
        """Return the figures of the run so far: seconds, tokens, rates, what ran."""
        lengths = np.asarray(self.state.output.lengths)[: len(self.rows)]
        generated = int(np.sum(lengths))
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
            "num_output_tokens": lengths.tolist(),
            "prefill_passes": int(self.state.prefill_passes),
            "decode_passes": int(self.state.decode_passes),
        }
        return stats | ({"seed": self.seed} if self.seed is not None else {})


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _base_key(each: list[SamplingParams], key: Array | None) -> tuple[Array, int | None]:
    """Return the call's key, and the seed that was drawn for it where none was given and one is
    needed.
    """
    if key is not None:
        return _typed(key), None
    if all(s.temperature < GREEDY_BELOW or s.seed is not None for s in each):
        return jax.random.key(0), None
    seed = secrets.randbits(31)
    return jax.random.key(seed), seed


def _typed(key: Array) -> Array:
    if not (
        isinstance(key, jax.Array)
        and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        and key.shape == ()
    ):
        raise RequestError(f"key is {key!r:.80}; pass one typed key, jax.random.key(seed)")
    return key
