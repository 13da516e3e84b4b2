"""`beam_search(params, prompts)`: the host form, checked, with words and text."""

import functools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.backend import check_memory
from infer.cache import paged
from infer.cache.layout import pool_bytes
from infer.cache.pool import kv_dtype_name
from infer.compiling import record_trace
from infer.errors import RequestError
from infer.generation import prepare, rows
from infer.generation.beam import Search, Task, search
from infer.generation.prepare import TILE, TextCodec, bucket
from infer.generation.text import RowText
from infer.models.params import Params
from infer.sampling import SamplingParams

PROGRAM = "beam_search"
_MOST_BEAMS = 256


@dataclass(frozen=True)
class BeamResult:
    """The best sequences of each prompt, best first."""

    token_ids: list[list[list[int]]]  # generated ids, a stop id included
    scores: list[list[float]]  # sum of log-probabilities / length ** length_penalty
    text: list[list[str]] | None = None  # with a tokenizer; a stop id is no part of it
    stats: dict[str, Any] = field(default_factory=dict)  # steps, pages_copied, most_pages


def beam_search(
    params: Params,
    prompts: Any,
    *,
    prompt_lens: Any = None,
    tokenizer: TextCodec | None = None,
    num_beams: int = 4,
    max_tokens: int = 128,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: int = 1,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    page_size: int = 16,
    kv_dtype: DTypeLike | None = None,
) -> BeamResult:
    """Return the `num_return_sequences` best continuations that beam search finds for each prompt.

    Deterministic; the scores are those of the raw model.  See `infer.generation.beam`.

    Args:
        params: weights.
        prompts: as in `generate`.
        prompt_lens: as in `generate`.
        tokenizer: encodes string prompts, decodes results, adds its end-of-sequence ids.
        num_beams: sequences kept at each step (K).
        max_tokens: most new tokens.
        length_penalty: exponent of the length, -5 to 5; above 0 favours longer sequences.
        early_stopping: True stops at K finished sequences; False when no running beam, at its
            present length, is better than the worst of them; "never" when none could become so.
        num_return_sequences: 1 to num_beams.
        stop_token_ids: end a sequence, beside the model's end-of-sequence ids.
        ignore_eos: leave the model's end-of-sequence ids out.
        page_size: tokens in a page of the cache.
        kv_dtype: of cached keys and values, as in `generate`.

    Raises:
        RequestError: a prompt or option out of range.
        CapacityError: more memory than there is.
    """
    if not isinstance(params, Params):
        raise RequestError(f"params is a {type(params).__name__}; pass model.params")
    _check(num_beams, num_return_sequences, length_penalty, early_stopping, page_size)
    config, kv_name = params.config, kv_dtype_name(kv_dtype)
    prompt_ids = prepare.token_rows(prompts, tokenizer, prompt_lens)
    prepare.check_prompts(prompt_ids, config)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )
    todo = rows.expand_rows(prompt_ids, [sampling] * len(prompt_ids), config, tokenizer)
    stops = np.asarray([row.stop_ids for row in todo], np.int32)
    prompt_cap = bucket(max(map(len, prompt_ids)), 16)
    padded = np.zeros((len(todo), prompt_cap), np.int32)
    for i, ids in enumerate(prompt_ids):
        padded[i, : len(ids)] = ids
    task = Task(
        prompts=jnp.asarray(padded),
        prompt_lens=jnp.asarray([len(ids) for ids in prompt_ids], jnp.int32),
        max_tokens=jnp.asarray([row.max_tokens for row in todo], jnp.int32),
        stop_ids=jnp.asarray(stops.reshape(len(todo), -1)),
        length_penalty=jnp.asarray(length_penalty, jnp.float32),
        stop_when_full=jnp.asarray(early_stopping is True),
        to_the_end=jnp.asarray(early_stopping == "never"),
    )
    max_new = bucket(max(row.max_tokens for row in todo), 16)
    # Prompts are shared; past them each beam may be on its own, with a copy of the prompt's end.
    each = num_beams * (int(paged.pages_for(max_new, page_size)) + 1)
    pages = len(todo) * (int(paged.pages_for(prompt_cap, page_size)) + each)
    check_memory(
        f"a page pool of {pages} pages of {page_size} tokens",
        pool_bytes(config, pages, page_size, kv_name or params.dtype),
        "lower num_beams or max_tokens, or pass fewer prompts at a time",
    )
    sizes = dict(num_beams=num_beams, max_new=max_new, page_size=page_size, pages=pages)
    found = jax.device_get(_result(_search(params, task, **sizes, kv_dtype=kv_name)))
    return _words(found, todo, tokenizer, num_return_sequences)


@functools.partial(
    jax.jit, static_argnames=("num_beams", "max_new", "page_size", "pages", "kv_dtype")
)
def _search(
    params: Params,
    task: Task,
    *,
    num_beams: int,
    max_new: int,
    page_size: int,
    pages: int,
    kv_dtype: str | None,
) -> Search:
    num_prompts, prompt_cap = task.prompts.shape
    sizes = dict(prompts=num_prompts, prompt=prompt_cap, stop_ids=task.stop_ids.shape[1])
    record_trace(PROGRAM, sizes | dict(num_beams=num_beams, max_new=max_new, pages=pages))
    cache = paged.create(
        params.config,
        num_rows=num_prompts * num_beams,
        num_pages=pages,
        page_size=page_size,
        pages_per_row=int(paged.pages_for(prompt_cap + max_new, page_size)),
        dtype=kv_dtype or params.dtype,
    )
    tile = min(TILE, prompt_cap)
    return search(params, task, cache, num_beams=num_beams, tile=tile, max_new=max_new)


def _result(found: Search) -> tuple[Any, ...]:
    """Return what the host wants to see: not the pools."""
    return found.finished, found.steps, found.pages_copied, found.most_pages, found.cache.overflow


def _words(
    found: tuple[Any, ...], todo: list[rows.Row], tokenizer: TextCodec | None, count: int
) -> BeamResult:
    best, steps, copied, most, overflow = found
    assert not overflow, "the pool holds every beam on its own"
    token_ids, scores, text = [], [], []
    for g, row in enumerate(todo):
        kept = [k for k in range(count) if np.isfinite(best.scores[g, k])]
        if not kept:
            # At the latest `max_tokens` finishes every beam.
            raise RequestError(
                f"prompt {g}: no sequence has a score that is a number; the model's logits are not "
                "numbers there"
            )
        ids = [best.tokens[g, k, : best.lengths[g, k]].tolist() for k in kept]
        token_ids.append(ids)
        scores.append([float(best.scores[g, k]) for k in kept])
        if tokenizer is not None:
            stopped = [i[:-1] if i[-1] in row.stop_ids else i for i in ids]
            text.append([RowText(tokenizer, row.sampling).put(i, True) for i in stopped])
    stats = dict(steps=int(steps), pages_copied=int(copied), most_pages=int(most))
    return BeamResult(token_ids, scores, text if tokenizer is not None else None, stats)


def _check(
    num_beams: int,
    num_return_sequences: int,
    length_penalty: float,
    early_stopping: bool | str,
    page_size: int,
) -> None:
    if not prepare.is_int(num_beams) or not 1 <= num_beams <= _MOST_BEAMS:
        raise RequestError(
            f"num_beams is {num_beams!r}, must be an integer from 1 to {_MOST_BEAMS}"
        )
    if not prepare.is_int(num_return_sequences) or not 1 <= num_return_sequences <= num_beams:
        raise RequestError(
            f"num_return_sequences is {num_return_sequences!r}, must be from 1 to "
            f"num_beams, {num_beams}"
        )
    # Past these, the power of a long length leaves float32.
    if not isinstance(length_penalty, numbers.Real) or not -5 <= length_penalty <= 5:
        raise RequestError(
            f"length_penalty is {length_penalty!r:.40}, must be a number from -5 to 5"
        )
    if not isinstance(early_stopping, bool) and not (
        isinstance(early_stopping, str) and early_stopping == "never"
    ):
        raise RequestError(f"early_stopping is {early_stopping!r}, must be True, False or 'never'")
    if not prepare.is_int(page_size):
        raise RequestError(f"page_size is {page_size!r}, must be an integer")
    prepare.RunOptions(page_size=page_size)
