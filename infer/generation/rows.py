"""Requests as rows: prompts times parallel samples, with their parameters as padded arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.cache.paged import pages_for
from infer.config import ModelConfig
from infer.errors import CapacityError, RequestError
from infer.generation.prefixes import Prefixes
from infer.generation.prepare import LOGPROB_COUNTS, Caps, TextCodec, bucket
from infer.generation.state import Requests
from infer.sampling import SamplingParams, SamplingState, request_keys, seed_words

# Entries of logit_bias: none, a few, or OpenAI's 300.
_BIAS_COUNTS = (0, 16, 304)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence to generate."""

    ids: list[int]
    prompt: int  # which prompt it continues
    choice: int  # which of that prompt's samples it is
    sampling: SamplingParams
    max_tokens: int
    stop_ids: list[int]
    bad_words: list[tuple[int, ...]]

    @property
    def scored(self) -> bool:
        """Whether this row computes its prompt's log-probabilities: the first of its prompt."""
        return self.choice == 0 and self.sampling.prompt_logprobs is not None


def expand_rows(
    prompts: list[list[int]],
    each: list[SamplingParams],
    config: ModelConfig,
    tokenizer: TextCodec | None,
    room: int | None = None,
) -> list[Row]:
    """Return the rows of all prompts, prompt-major: n rows for a prompt with n samples.

    Args:
        prompts: ids.
        each: parameters of each prompt.
        config: bounds ids and lengths.
        tokenizer: turns bad words into ids, and has end-of-sequence ids of its own.
        room: tokens left in the context; None counts each prompt's own.
    """
    rows = []
    for index, (ids, s) in enumerate(zip(prompts, each, strict=True)):
        # The context bounds the answer: it ends with finish_reason "length" there, as in every
        # engine.
        left = config.max_context - len(ids) if room is None else room
        stops = stop_ids_of(s, config, tokenizer)
        words = bad_words_of(s, config, tokenizer)
        _check_allowed(s, config, stops, words)
        rows += [
            Row(
                ids=ids,
                prompt=index,
                choice=choice,
                sampling=s,
                max_tokens=min(s.max_tokens, left),
                stop_ids=stops,
                bad_words=words,
            )
            for choice in range(s.n)
        ]
    return rows


def expand_sampling(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Return one SamplingParams per prompt; None is greedy with 128 tokens."""
    if sampling is None:
        sampling = SamplingParams(temperature=0.0, max_tokens=128)
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if not isinstance(sampling, Sequence) or not all(
        isinstance(s, SamplingParams) for s in sampling
    ):
        raise RequestError(
            f"sampling is a {type(sampling).__name__}; pass a SamplingParams, or a list with one "
            "per prompt"
        )
    if len(sampling) != num_prompts:
        raise RequestError(
            f"{len(sampling)} SamplingParams for {num_prompts} prompts; pass one, or one per prompt"
        )
    return list(sampling)


def stop_ids_of(
    sampling: SamplingParams, config: ModelConfig, tokenizer: TextCodec | None
) -> list[int]:
    """Return the ids that end a request: the model's and tokenizer's own unless ignored, and the
    user's.
    """
    own = (
        () if sampling.ignore_eos else (*config.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))
    )
    ids = sorted({*own, *sampling.stop_token_ids})
    bad = [i for i in ids if not 0 <= i < config.num_tokens]
    if bad:
        raise RequestError(
            f"stop_token_ids has {bad[0]}; ids of this model are 0..{config.num_tokens - 1}"
        )
    return ids


def bad_words_of(
    sampling: SamplingParams, config: ModelConfig, tokenizer: TextCodec | None
) -> list[tuple[int, ...]]:
    """Return the sequences of ids that may not be generated: each word with and without a space
    before it, as in vLLM.
    """
    found: list[tuple[int, ...]] = []
    for word in sampling.bad_words:
        if isinstance(word, str):
            if tokenizer is None:
                raise RequestError(
                    f"bad_words has the string {word!r} and no tokenizer was given; pass "
                    "tokenizer=, or the word as a sequence of ids"
                )
            plain = word.lstrip() or word
            for text in (plain, " " + plain):
                found.append(tuple(tokenizer.encode(text, add_bos=False)))
        else:
            _check_ids("bad_words", word, config)
            found.append(tuple(word))
    return sorted({ids for ids in found if ids})


def _check_ids(name: str, ids: Sequence[int], config: ModelConfig) -> None:
    bad = [i for i in ids if not 0 <= i < config.num_tokens]
    if bad:
        raise RequestError(f"{name} has {bad[0]}; ids of this model are 0..{config.num_tokens - 1}")


def _check_allowed(
    s: SamplingParams, config: ModelConfig, stops: list[int], words: list[tuple[int, ...]]
) -> None:
    """Refuse masks that leave nothing to draw."""
    _check_ids("logit_bias", list(s.logit_bias), config)
    _check_ids("allowed_token_ids", s.allowed_token_ids or (), config)
    if s.allowed_token_ids is None and not words and len(stops) < config.num_tokens:
        return
    left = set(range(config.num_tokens) if s.allowed_token_ids is None else s.allowed_token_ids)
    left -= {w[0] for w in words if len(w) == 1}
    if s.min_tokens:
        left -= set(stops)
    if not left:
        raise RequestError(
            "allowed_token_ids, bad_words and min_tokens leave no id to draw; allow at least one "
            "that is neither a bad word nor, before min_tokens, a stop id"
        )


def caps_of(rows: list[Row], vocab_size: int) -> dict[str, Any]:
    """Return the static sizes that the rows' parameters ask for, by the names of `Caps`."""
    most = lambda values: max(values, default=0)
    above = lambda value, counts: next(c for c in counts if c >= value)
    words = most(len(r.bad_words) for r in rows)
    letters = most(len(w) for r in rows for w in r.bad_words)
    prompts = [r.sampling.prompt_logprobs for r in rows if r.sampling.prompt_logprobs is not None]
    return dict(
        stop_ids=bucket(most(len(r.stop_ids) for r in rows), 4),
        bias=above(most(len(r.sampling.logit_bias) for r in rows), _BIAS_COUNTS),
        allowed=vocab_size if any(r.sampling.allowed_token_ids is not None for r in rows) else 0,
        bad_words=(bucket(words, 4), bucket(letters, 4)) if words else (0, 0),
        logprobs=above(most(r.sampling.logprobs or 0 for r in rows), LOGPROB_COUNTS),
        prompt_logprobs=above(max(prompts), LOGPROB_COUNTS) if prompts else None,
    )


def sampling_state(rows: list[Row], key: jax.Array, caps: Caps, vocab_size: int) -> SamplingState:
    """Return the parameters of `rows` as arrays, padded to the caps with harmless values."""
    count = caps.requests
    pad = count - len(rows)
    each = [r.sampling for r in rows]

    def column(values: Sequence[float], fill: float, dtype: type) -> jax.Array:
        return jnp.asarray(np.asarray([*values, *[fill] * pad], dtype))

    stops = np.full((count, caps.stop_ids), vocab_size, np.int32)
    bias_ids = np.full((count, caps.bias), vocab_size, np.int32)
    bias = np.zeros((count, caps.bias), np.float32)
    allowed = np.ones((count, caps.allowed), bool)
    words = np.full((count, *caps.bad_words), vocab_size, np.int32)
    for i, row in enumerate(rows):
        s = row.sampling
        stops[i, : len(row.stop_ids)] = row.stop_ids
        if s.logit_bias:
            bias_ids[i, : len(s.logit_bias)] = list(s.logit_bias)
            bias[i, : len(s.logit_bias)] = list(s.logit_bias.values())
        if s.allowed_token_ids is not None:
            allowed[i] = False
            allowed[i, list(s.allowed_token_ids)] = True
        for w, ids in enumerate(row.bad_words):
            words[i, w, -len(ids) :] = ids
    seeds, seeded = seed_words([s.seed for s in each] + [None] * pad)
    return SamplingState(
        temperature=column([s.temperature for s in each], 0.0, np.float32),
        top_k=column([min(s.top_k, vocab_size) for s in each], 0, np.int32),
        top_p=column([s.top_p for s in each], 1.0, np.float32),
        min_p=column([s.min_p for s in each], 0.0, np.float32),
        presence=column([s.presence_penalty for s in each], 0.0, np.float32),
        frequency=column([s.frequency_penalty for s in each], 0.0, np.float32),
        repetition=column([s.repetition_penalty for s in each], 1.0, np.float32),
        max_tokens=column([r.max_tokens for r in rows], 1, np.int32),
        min_tokens=column([min(r.sampling.min_tokens, r.max_tokens) for r in rows], 0, np.int32),
        stop_ids=jnp.asarray(stops),
        bias_ids=jnp.asarray(bias_ids),
        bias=jnp.asarray(bias),
        allowed=jnp.asarray(allowed),
        bad_words=jnp.asarray(words),
        key=request_keys(key, seeds, seeded, column([r.prompt for r in rows], 0, np.int32)),
    )


def request_arrays(
    rows: list[Row], sampling: SamplingState, prefixes: Prefixes, caps: Caps
) -> Requests:
    """Return the padded device arrays of all requests."""
    prompts = np.zeros((caps.requests, caps.prompt), np.int32)
    lens, choice = (np.zeros(caps.requests, np.int32) for _ in range(2))
    scored = np.zeros(caps.requests, bool)
    for i, row in enumerate(rows):
        prompts[i, : len(row.ids)] = row.ids
        lens[i], choice[i] = len(row.ids), row.choice
        scored[i] = row.scored
    return Requests(
        prompts=jnp.asarray(prompts),
        prompt_lens=jnp.asarray(lens),
        choice=jnp.asarray(choice),
        parent=jnp.asarray(prefixes.parent),
        shared=jnp.asarray(prefixes.shared),
        last_child=jnp.asarray(prefixes.last_child),
        wants_prompt_logprobs=jnp.asarray(scored),
        sampling=sampling,
        count=jnp.asarray(len(rows), jnp.int32),
    )


def check_pool(rows: list[Row], page_size: int, num_pages: int) -> None:
    """Raise CapacityError before anything runs if one request could never get its pages."""
    for row in rows:
        need = pages_for(len(row.ids) + row.max_tokens - 1, page_size)
        if need > num_pages:
            raise CapacityError(
                f"prompt {row.prompt} with {len(row.ids)} tokens and max_tokens {row.max_tokens} "
                f"needs {need} pages of {page_size} tokens, the pool has {num_pages}; "
                "raise num_pages or lower max_tokens"
            )
