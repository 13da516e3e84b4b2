"""The host form of `generate`: one job with its arrays, its compiled program and its clock."""

import contextlib
import dataclasses
import functools
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.backend import check_memory, default_platform
from infer.cache import paged
from infer.cache.layout import pool_bytes
from infer.cache.pool import kv_dtype_name
from infer.compiling import (
    COMMAND_BUFFERS,
    give_back_memory,
    make_room_for_programs,
    num_traces,
    record_trace,
    told_when_slow,
)
from infer.config import ModelConfig
from infer.errors import RequestError
from infer.generation import prepare, rows, speculation
from infer.generation.prefixes import Prefixes, find_prefixes
from infer.generation.prepare import Caps, RunOptions, TextCodec
from infer.generation.program import run
from infer.generation.result import GenerationResult, host_result
from infer.generation.rows import Row
from infer.generation.saved import StreamState, begin_on, check_fits
from infer.generation.slots import finish_rows
from infer.generation.state import Finish, Requests, State
from infer.generation.text import RowText
from infer.models.params import Params
from infer.ops.choice import recording
from infer.sampling import GREEDY_BELOW, SamplingParams
from infer.spec.drafters import Drafter
from infer.spec.policy import NOT_FORCED

PROGRAM = "generate"
_FOREVER = np.int32(2**31 - 1)
# Turns between two looks at the tokens, when text is streamed or stop strings are searched for.
_BURST_TURNS = 4


def traced_run(
    params: Params,
    requests: Requests,
    state: State,
    max_turns: Array,
    until_first: Array,
    drafter: Drafter | None = None,
    *,
    caps: Caps,
) -> State:
    """Run turns, and count each trace: the function that is compiled."""
    record_trace(PROGRAM, vars(caps))
    with recording() as choices:
        state = run(
            params,
            requests,
            state,
            max_turns,
            until_first,
            lanes=caps.lanes,
            drafter=drafter,
            processed_logprobs=caps.processed_logprobs,
            implementation=caps.implementation,
        )
    _choices[_program_key(params, drafter, caps)] = {c.op: c.implementation for c in choices}
    return state


# What the ops of each program run, found while it was traced.
_choices: dict[Any, dict[str, str]] = {}


def _round_bytes(num_slots: int, k: int, vocab_size: int) -> int:
    """Return the bytes of a round's logits in float32, as they come and as they are judged."""
    return 2 * 4 * num_slots * (k + 1) * vocab_size


def _program_key(params: Params, drafter: Drafter | None, caps: Caps) -> Any:
    return jax.tree.structure((params, drafter)), str(params.dtype), caps


def _in_a_word(ran: dict[str, str]) -> str:
    """Return what ran but for plain XLA; "native+xla" where the products were XLA's."""
    name = next((name for name in ran.values() if name != "xla"), "xla")
    return "native+xla" if name == "native" and ran.get("linear") != "native" else name


_jit = functools.partial(jax.jit, static_argnames="caps", donate_argnames="state")
_run_plain = _jit(traced_run)
_run_as_graph = _jit(traced_run, compiler_options=dict(COMMAND_BUFFERS))


def run_program(
    params: Params,
    requests: Requests,
    state: State,
    max_turns: Array,
    until_first: Array,
    drafter: Drafter | None = None,
    *,
    caps: Caps,
) -> State:
    """Call the compiled program of `caps`; `state` is donated."""
    program = _run_as_graph if caps.command_buffers else _run_plain
    return program(params, requests, state, max_turns, until_first, drafter, caps=caps)


# Seconds of a turn in each tier of speculation, and of one that drafts in vain, of each program.
_turn_seconds: dict[Any, list[float]] = {}
# To time turns: so many of each kind in a call, in so many rounds of all kinds.
_TIMED_TURNS, _TIMED_ROUNDS = 2, 3

_finish = jax.jit(finish_rows, donate_argnames="state")


@functools.partial(jax.jit, static_argnames=("caps", "pad_id"))
def start(
    params: Params,
    requests: Requests,
    drafter: Drafter | None = None,
    *,
    caps: Caps,
    pad_id: int,
) -> State:
    """Return the state before the first turn."""
    return prepare.fresh_state(params, requests, caps, pad_id, drafter)


class Job:
    """One call of the host form: its arrays, its program, its clock."""

    def __init__(
        self,
        params: Params,
        rows: list[Row],
        requests: Requests,
        caps: Caps,
        tokenizer: TextCodec | None,
        seed: int | None,
        drafter: Drafter | None = None,
    ) -> None:
        self.params, self.rows, self.drafter = params, rows, drafter
        self.requests, self.caps, self.seed = requests, caps, seed
        pad_id = tokenizer.pad_id if tokenizer else None
        self.pad_id = 0 if pad_id is None else pad_id
        self.state = start(params, requests, drafter, caps=caps, pad_id=self.pad_id)
        self.text = None if tokenizer is None else [RowText(tokenizer, r.sampling) for r in rows]
        self.compile_s = self.ttft_s = self.decode_s = 0.0
        self.compiles = 0
        self.first_tokens = self.first_prompt_tokens = 0
        self.backend = default_platform()
        self.placement: dict[str, Any] = {}  # where the caller put it, for the figures

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
        prompt_ids = prepare.token_rows(prompts, tokenizer, prompt_lens)
        prepare.check_prompts(prompt_ids, config)
        each = rows.expand_sampling(sampling, len(prompt_ids))
        if tokenizer is None and any(s.stop for s in each):
            raise RequestError(
                "stop strings need tokenizer= to see text; pass it, or use stop_token_ids"
            )
        todo = rows.expand_rows(prompt_ids, each, config, tokenizer)
        key, seed = _base_key(each, key)
        room = options.room
        requests_cap = prepare.bucket(max(room.requests, len(todo)), 1)
        prompt_cap = prepare.bucket(max(room.prompt, *map(len, prompt_ids)), 16)
        new_cap = prepare.bucket(max(room.new_tokens, *(r.max_tokens for r in todo)), 16)
        slots = options.slots(requests_cap)
        pages_per_row = int(paged.pages_for(prompt_cap + new_cap, options.page_size))
        pages = options.num_pages or slots * pages_per_row
        drafter, models = options.draft, (config,)
        if drafter is not None:
            prepare.check_draft(drafter, config, options)
            models = (config, *drafter.cached(config))
        need = sum(
            pool_bytes(model, pages, options.page_size, options.kv_dtype or params.dtype)
            for model in models
        )
        what, way_out = f"a page pool of {pages} pages of {options.page_size} tokens", ""
        if drafter is not None:
            need += _round_bytes(slots, drafter.k, config.vocab_size)
            what += f" and the logits of {slots} slots with {drafter.k} drafts"
            way_out = ", or draft fewer tokens"
        check_memory(what, need, f"lower num_slots, num_pages or max_tokens{way_out}")
        rows.check_pool(todo, options.page_size, pages)
        caps = Caps(
            requests=requests_cap,
            prompt=prompt_cap,
            new_tokens=new_cap,
            slots=slots,
            pages=pages,
            pages_per_row=pages_per_row,
            page_size=options.page_size,
            processed_logprobs=options.logprobs_mode == "processed",
            lanes=prepare.lanes_for(options.prefill_chunk, prompt_cap, slots, options.whole_page),
            implementation=options.implementation,
            command_buffers=options.command_buffers and default_platform() == "gpu",
            kv_dtype=kv_dtype_name(options.kv_dtype),
            draft=None if drafter is None else str(drafter),
            **(rows.caps_of(todo, config.vocab_size) | room.features),
        )
        state = rows.sampling_state(todo, key, caps, config.vocab_size)
        prefixes = Prefixes.none(caps.requests)
        if options.share_prefixes:
            prefixes = prefixes_of(todo, config, caps)
        requests = rows.request_arrays(todo, state, prefixes, caps)
        return cls(params, todo, requests, caps, tokenizer, seed, drafter)

    @classmethod
    def resumed(cls, params: Params, saved: StreamState, tokenizer: TextCodec | None) -> "Job":
        """Return the job that a stream's state was taken from, where it was."""
        check_fits(saved, params)
        prompt = saved.ids()[: int(saved.requests.prompt_lens[0])]
        todo = rows.expand_rows([prompt], [saved.params()], params.config, tokenizer)
        graph = saved.caps.command_buffers and default_platform() == "gpu"
        caps = dataclasses.replace(saved.caps, command_buffers=graph)
        job = cls(params, todo, saved.requests, caps, tokenizer, None, saved.drafter)
        job.state = jax.tree.map(jnp.copy, saved.state)
        if job.text is not None:
            job._read()
        return job

    def begin_on(self, saved: StreamState) -> None:
        """Take what `saved` holds of the prompt, so that only the rest is prefilled."""
        self.state = begin_on(
            saved, self.state, self.requests, self.rows[0], self.params, self.drafter
        )

    def saved(self) -> StreamState:
        """Return a copy of a job of one request as it is now."""
        return StreamState.of(self.requests, self.state, self.caps, self.rows[0], self.drafter)

    def _run(self, max_turns: int | np.int32, until_first: bool) -> float:
        """Advance the state and return the seconds it took."""
        start = time.perf_counter()
        self.state = run_program(
            self.params,
            self.requests,
            self.state,
            jnp.asarray(max_turns, jnp.int32),
            jnp.asarray(until_first),
            self.drafter,
            caps=self.caps,
        )
        jax.block_until_ready(self.state.counters.turns)
        return time.perf_counter() - start

    def compile(self) -> None:
        """Compile the program by a call of no turns, so that compiling and running are timed
        apart.
        """
        new = _program_key(self.params, self.drafter, self.caps) not in _choices
        if new:
            make_room_for_programs()
        before = num_traces(PROGRAM)
        with told_when_slow() if new else contextlib.nullcontext():
            seconds = self._run(0, False)
        traces = num_traces(PROGRAM) - before
        if traces:
            give_back_memory()
        self.compiles += traces
        self.compile_s += seconds if self.compiles else 0.0

    def run_to_first_tokens(self) -> None:
        """Run until every admitted request has its first token."""
        self.compile()
        self.ttft_s = self._run(_FOREVER, True)
        self.first_tokens = int(np.sum(np.asarray(self.state.output.lengths)))
        self.first_prompt_tokens = int(self.state.counters.prompt_tokens)

    def learn_costs(self) -> None:
        """Time a few turns with each number of drafts, unless that is known, and let the loop
        choose by these times.

        All turns are of use: the output does not depend on the number of drafts.
        """
        drafter = self.drafter
        if drafter is None or not drafter.adaptive or drafter.costs is not None:
            return
        program = _program_key(self.params, drafter, self.caps)
        if program not in _turn_seconds:
            found = self.time_turns()
            if found is None:
                return  # too short a run: the next one tries
            _turn_seconds[program] = found
        seconds = np.asarray(_turn_seconds[program], np.float32)
        self._change_policy(seconds=seconds)

    def time_turns(self) -> list[float] | None:
        """Return seconds of a turn in each tier, and of one that drafts in vain, of a job that has
        its first tokens; None if it has no such turns left, or does something else beside them.
        """
        assert self.drafter is not None
        num_tiers = len(self.drafter.widths)
        modes = [*((t, t) for t in range(num_tiers)), (num_tiers - 1, 0)]
        best = [math.inf] * len(modes)
        idle = math.inf  # what a call costs
        whole = True
        for _ in range(_TIMED_ROUNDS):
            for i, mode in enumerate(modes):
                before = self._progress()
                idle = min(idle, self._run(before["turns"], False))
                self._change_policy(forced=np.asarray(mode, np.int32))
                seconds = self._run(before["turns"] + _TIMED_TURNS, False)
                self.decode_s += seconds
                best[i] = min(best[i], seconds)
                after = self._progress()
                wanted = {"turns": _TIMED_TURNS, "generating": _TIMED_TURNS, "prompt_tokens": 0}
                whole = all(after[name] - before[name] == n for name, n in wanted.items())
                if not whole:
                    break
            if not whole:
                break
        self._change_policy(forced=np.full(2, NOT_FORCED, np.int32))
        return [max(s - idle, 1e-6) / _TIMED_TURNS for s in best] if whole else None

    def _progress(self) -> dict[str, int]:
        counters, carried = self.state.counters, self.state.speculation
        assert carried is not None
        return {
            "turns": int(counters.turns),
            "prompt_tokens": int(counters.prompt_tokens),
            "generating": int(np.sum(np.asarray(carried.passes))),
        }

    def _change_policy(self, **values: np.ndarray) -> None:
        """Put values into the state, each where its predecessor lies."""
        carried = self.state.speculation
        assert carried is not None
        old = carried.policy
        place = lambda new, leaf: jax.device_put(new, leaf.sharding if leaf.committed else None)
        new = {name: place(value, getattr(old, name)) for name, value in values.items()}
        policy = dataclasses.replace(old, **new)
        self.state = dataclasses.replace(
            self.state, speculation=dataclasses.replace(carried, policy=policy)
        )

    def run_all(self) -> None:
        """Run to the end: in one call, or in bursts where stop strings are searched for."""
        if any(r.sampling.stop for r in self.rows):
            for _ in self.bursts():
                pass
        else:
            self.run_to_first_tokens()
            self.learn_costs()
            self.decode_s += self._run(_FOREVER, False)
        if self.text is not None:
            self._read()

    def bursts(self, turns: int = _BURST_TURNS) -> Iterator[str]:
        """Run a few turns at a time; yield the new text of the first row after each burst."""
        self.run_to_first_tokens()
        if self.text is not None:
            yield self._read()  # before turns are timed
        self.learn_costs()
        while True:
            if self.text is not None:
                yield self._read()
            running = int(self.state.next_request) < len(self.rows) or bool(
                np.any(np.asarray(self.state.request) < self.caps.requests)
            )
            if not running or bool(self.state.cache.overflow):
                return
            self.decode_s += self._run(int(self.state.counters.turns) + turns, False)

    def _read(self) -> str:
        """Turn new tokens into text, end the rows whose stop string has appeared; return row 0's
        new text.
        """
        assert self.text is not None
        out = self.state.output
        tokens, lengths, finish = map(np.asarray, (out.tokens, out.lengths, out.finish))
        stopped = np.zeros(self.caps.requests, bool)
        first = ""
        for i, text in enumerate(self.text):
            ended = finish[i] != Finish.RUNNING
            ids = tokens[i, : lengths[i]].tolist()
            # The id that ended a request is no part of its text.
            piece = text.put(ids[:-1] if finish[i] == Finish.STOP else ids, bool(ended))
            first = piece if i == 0 else first
            stopped[i] = text.stop is not None and not ended
        if stopped.any():
            reason = jnp.asarray(Finish.STOP, jnp.int32)
            self.state = _finish(self.state, self.requests, jnp.asarray(stopped), reason)
        return first

    def result(self) -> GenerationResult:
        """Return the finished job's arrays, words, text and figures."""
        paged.raise_if_overflow(self.state.cache, way_out="raise num_pages or lower max_tokens")
        out = jax.device_get(self.state.output)
        vocab_size = self.params.config.vocab_size
        return host_result(out, self.rows, self.text, vocab_size, self.pad_id, self.stats())

    def stats(self) -> dict[str, Any]:
        """Return the figures of the run so far: seconds, tokens, rates, what ran."""
        lengths = np.asarray(self.state.output.lengths)[: len(self.rows)]
        generated = int(np.sum(lengths))
        reasons = np.asarray(self.state.output.finish)[: len(self.rows)]
        # Prompt tokens of the first wave only: later ones are prefilled among the decode passes.
        first_wave = self.first_prompt_tokens
        ran = _choices.get(_program_key(self.params, self.drafter, self.caps), {})
        stats = {
            "backend": self.backend,
            "implementation": _in_a_word(ran),
            "implementations": ran,
            "compile_s": self.compile_s,
            "ttft_s": self.ttft_s,
            "prefill_tokens_per_s": first_wave / self.ttft_s if self.ttft_s else None,
            "decode_tokens_per_s": _rate(generated - self.first_tokens, self.decode_s),
            "compiles": self.compiles,
            "num_prompt_tokens": [len(r.ids) for r in self.rows],
            "num_output_tokens": lengths.tolist(),
            "aborted": int(np.sum(reasons == Finish.ABORT)),
        } | {name: int(value) for name, value in vars(self.state.counters).items()}
        stats |= self.placement
        if self.drafter is not None and self.state.speculation is not None:
            stats |= speculation.figures(self.drafter, self.state.speculation)
        return stats | ({"seed": self.seed} if self.seed is not None else {})


def prefixes_of(todo: list[Row], config: ModelConfig, caps: Caps) -> Prefixes:
    """Return which rows begin with another's prompt."""
    return find_prefixes(
        [row.ids for row in todo],
        [len(row.ids) + row.max_tokens if config.ropes_by_length else 0 for row in todo],
        [row.scored for row in todo],
        caps.requests,
        # Whole pages, because a page has one writer, and whole tiles, so that what is not shared
        # is cut as it would be alone.
        math.lcm(caps.lanes.tile, caps.page_size),
        caps.whole_page,
    )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _base_key(each: list[SamplingParams], key: Array | None) -> tuple[Array, int | None]:
    """Return the call's key, and the seed that was drawn for it where none was given and one is
    needed.
    """
    if key is not None:
        return prepare.typed_key(key), None
    if all(s.temperature < GREEDY_BELOW or s.seed is not None for s in each):
        return jax.random.key(0), None
    seed = secrets.randbits(31)
    return jax.random.key(seed), seed
