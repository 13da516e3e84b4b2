"""From what users type to the arrays of a run: prompts, sampling parameters, buckets; checked with
clear errors.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.backend import default_platform
from infer.cache import paged
from infer.cache.pool import kv_dtype_name, writes_pages
from infer.config import ModelConfig
from infer.errors import RequestError
from infer.generation import speculation
from infer.generation.state import Lanes, Requests, State, initial_state
from infer.models.params import Params
from infer.ops.choice import check_implementation
from infer.spec.drafters import Drafter
from infer.spec.policy import stated_seconds

# One tile of a prefill pass: long enough for full dots, short enough that a short prompt wastes
# little.
TILE = 64
# Tokens of a prefill pass on a CPU: measured 5% slower per token than 256, and 64 20% slower.
_CPU_PASS = 128
LOGPROB_COUNTS = (0, 1, 5, 20)
# Tokens whose arithmetic takes as long as reading the weights: what a round costs where nothing was
# measured.  Packed SmolLM2 on two cores takes 5 ms a pass and 2.9 ms a token; the GPU's is a guess.
_WEIGHTS_IN_TOKENS = {"cpu": 2, "gpu": 128}
# Slots when none are asked for: XLA:CPU's products gain little per row past about eight rows.
_DEFAULT_SLOTS = {"cpu": 8, "gpu": 64}


@runtime_checkable
class TextCodec(Protocol):
    """What generate needs of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def pad_id(self) -> int | None: ...  # noqa: D102
    def encode(  # noqa: D102
        self, text: str, *, add_bos: bool | None = ..., parse_special: bool = ...
    ) -> list[int]: ...
    def stream(  # noqa: D102
        self, *, skip_special_tokens: bool = ..., continuation: bool = ...
    ) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Room:
    """Sizes that a call has room for whatever is in it, so that calls of one series share a
    program, and with it every bit of a request's arithmetic.

    Attributes:
        requests: rows.
        prompt: tokens of a prompt.
        new_tokens: of a row.
        features: the sizes of `rows.caps_of`, for the requests of the whole series.
    """

    requests: int = 1
    prompt: int = 1
    new_tokens: int = 1
    features: dict[str, Any] = field(default_factory=dict)


# Past these, arrays of a run would not fit anywhere, or int32 would not count them.
_MOST = {"num_slots": 2**16, "page_size": 2**16, "num_pages": 2**28, "prefill_chunk": 2**20}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a call is run; none of it changes what is generated, or, with `draft`, the distribution
    of that.  See `generate` for the meanings.
    """

    num_slots: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int = 256
    logprobs_mode: str = "raw"
    share_prefixes: bool = True
    implementation: str | None = None
    command_buffers: bool = True
    kv_dtype: DTypeLike | None = None  # kept as its name
    draft: Drafter | None = None
    room: Room = Room()

    def __post_init__(self) -> None:
        check_implementation(self.implementation)
        object.__setattr__(self, "kv_dtype", kv_dtype_name(self.kv_dtype))
        if self.logprobs_mode not in ("raw", "processed"):
            raise RequestError(
                f"logprobs_mode is {self.logprobs_mode!r}, must be 'raw' (the model's own) or "
                "'processed' (after masks, penalties, temperature and filters)"
            )
        if self.draft is not None and not isinstance(self.draft, Drafter):
            raise RequestError(
                f"draft is {self.draft!r:.80}; pass a drafter, such as infer.spec.NGram(k=4), or "
                "None"
            )
        for name in ("num_slots", "page_size", "num_pages", "prefill_chunk"):
            value = getattr(self, name)
            most = _MOST[name]
            if value is not None and (not is_int(value) or not 1 <= value <= most):
                raise RequestError(f"{name} is {value!r}, must be an integer from 1 to {most}")

    @property
    def whole_page(self) -> int:
        """Tokens that are written together: a page, where the cache is written by pages, else 1."""
        return self.page_size if writes_pages(self.kv_dtype) else 1

    def slots(self, num_requests: int) -> int:
        """Return the number of slots for so many requests."""
        most = _DEFAULT_SLOTS.get(default_platform(), _DEFAULT_SLOTS["gpu"])
        return self.num_slots or min(num_requests, most)


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The static sizes of a program; the only things that can make it compile again."""

    requests: int
    prompt: int
    new_tokens: int
    slots: int
    pages: int
    pages_per_row: int
    page_size: int
    stop_ids: int
    bias: int
    allowed: int
    bad_words: tuple[int, int]
    logprobs: int
    prompt_logprobs: int | None
    processed_logprobs: bool
    lanes: Lanes
    implementation: str | None = None
    command_buffers: bool = False
    kv_dtype: str | None = None
    draft: str | None = None  # the drafter's options in words

    @property
    def whole_page(self) -> int:
        """As of `RunOptions`."""
        return self.page_size if writes_pages(self.kv_dtype) else 1

    def cache_dtype(self, params: Params) -> str:
        """Return the name of the dtype of cached keys and values."""
        return self.kv_dtype or params.dtype.name


def bucket(value: int, smallest: int) -> int:
    """Return the smallest power of two that is at least `value` and at least `smallest`."""
    return max(smallest, 1 << max(0, value - 1).bit_length())


def lanes_for(prefill_chunk: int, prompt_cap: int, slots: int, page: int = 1) -> Lanes:
    """Return tiles and passes whose tokens in one turn are at most `prefill_chunk`, or one page.

    `page` is that of a cache that is written by whole pages, and divides a tile.

    A pass costs the same however few of its tiles are used, so on a CPU it is as small as full dots
    allow and as often as is needed; what a GPU does at a time is the whole chunk.
    """
    tile = min(TILE, prefill_chunk, prompt_cap)
    tile = max(page, tile // page * page)
    most_useful = slots * -(-prompt_cap // tile)
    tiles = max(1, min(prefill_chunk // tile, most_useful))
    in_a_pass = tiles
    if default_platform() == "cpu":
        in_a_pass = min(tiles, max(1, min(_CPU_PASS, max(prompt_cap, TILE)) // tile))
    return Lanes(tile=tile, num_tiles=in_a_pass, passes=max(1, tiles // in_a_pass))


def token_rows(
    prompts: object, tokenizer: TextCodec | None, prompt_lens: object | None
) -> list[list[int]]:
    """Return one list of ids per prompt, from strings, lists of ids, or an array [R, T] with
    lengths.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, (np.ndarray, jax.Array)):
        return _array_rows(np.asarray(prompts), prompt_lens)
    if prompt_lens is not None:
        raise RequestError(
            "prompt_lens goes with an array [R, T] of ids; a list of prompts has its own lengths"
        )
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; pass a list of strings, a list of lists of "
            "ids, or an array [R, T]"
        )
    items: list[Any] = list(prompts)
    if items and all(is_int(p) for p in items):
        raise RequestError(
            "prompts is a flat list of ids; one prompt is [[1, 2, 3]], a list in a list"
        )
    rows = []
    for index, prompt in enumerate(items):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError(
                    f"prompt {index} is a string and no tokenizer was given; "
                    "pass tokenizer=model.tokenizer, call model.generate(...), or pass token ids"
                )
            # Special tokens written out in a prompt are those tokens, as in vLLM and transformers.
            rows.append(list(tokenizer.encode(prompt, parse_special=True)))
        elif isinstance(prompt, (np.ndarray, jax.Array)):
            rows += _array_rows(np.asarray(prompt)[None], None)
        elif (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, (bytes, bytearray, memoryview))
            and all(is_int(t) for t in prompt)
        ):
            rows.append([int(t) for t in prompt])
        else:
            raise RequestError(
                f"prompt {index} is a {type(prompt).__name__}"
                f"{_of_what(prompt)}; pass a string or a list of integer ids"
            )
    return rows


def _of_what(prompt: object) -> str:
    if not isinstance(prompt, (list, tuple)):
        return ""
    kinds = sorted({type(item).__name__ for item in prompt if not is_int(item)})
    return f" with {', '.join(kinds)} in it"


def is_int(value: object) -> bool:
    """Return whether `value` is an integer, Python's or numpy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _array_rows(array: np.ndarray, prompt_lens: object | None) -> list[list[int]]:
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise RequestError(
            f"prompts is an array {list(array.shape)} of {array.dtype}; pass integer ids [R, T]"
        )
    lens = (
        np.full(array.shape[0], array.shape[1]) if prompt_lens is None else np.asarray(prompt_lens)
    )
    if lens.shape != array.shape[:1] or not np.issubdtype(lens.dtype, np.integer):
        raise RequestError(
            f"prompt_lens is {list(lens.shape)} of {lens.dtype}; pass one integer per row, "
            f"[{array.shape[0]}]"
        )
    if lens.size and (lens.min() < 0 or lens.max() > array.shape[1]):
        raise RequestError(
            f"prompt_lens spans {lens.min()}..{lens.max()}; the array has room for "
            f"0..{array.shape[1]} tokens"
        )
    return [row[:n].tolist() for row, n in zip(array, lens, strict=True)]


def check_prompts(rows: list[list[int]], config: ModelConfig) -> None:
    """Raise RequestError naming the first prompt that is empty, too long, or has ids the model does
    not know.
    """
    if not rows:
        raise RequestError("prompts is empty; pass at least one prompt")
    for index, ids in enumerate(rows):
        if not ids:
            raise RequestError(
                f"prompt {index} is empty; a prompt has at least one token (a model with a BOS "
                "token can start from it)"
            )
        if len(ids) >= config.max_context:
            raise RequestError(
                f"prompt {index} has {len(ids)} tokens, the model's context is "
                f"{config.max_context} with at least one "
                "left to generate; shorten the prompt"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= config.num_tokens:
            bad = low if low < 0 else high
            raise RequestError(
                f"prompt {index} has id {bad}; ids of this model are 0..{config.num_tokens - 1}"
            )


def check_draft(drafter: Drafter, config: ModelConfig, options: RunOptions) -> None:
    """Raise RequestError unless the drafter can draft for this model, and k drafts for a request of
    some size in the pool that was asked for.

    A pool that is as large as the requests needs no check: drafts past `max_tokens` are not asked
    for.
    """
    k, num_pages, page_size = drafter.k, options.num_pages, options.page_size
    if k + 2 > config.max_context:
        raise RequestError(
            f"draft.k is {k}, and the model's context is {config.max_context}: a round is k + 1 "
            f"tokens after at least one of a prompt; lower k to {config.max_context - 2} or less"
        )
    if num_pages is not None and k + 2 > num_pages * page_size:
        raise RequestError(
            f"draft.k is {k}, and the pool has {num_pages} pages of {page_size} tokens: a round is "
            "k + 1 tokens after at least one of a prompt; lower k or raise num_pages"
        )
    if writes_pages(options.kv_dtype) and k > page_size:
        raise RequestError(
            f"draft.k is {k}, and {options.kv_dtype} keeps pages of {page_size} tokens, the most"
            " that can be taken back; lower k or raise page_size"
        )
    drafter.check(config)


def turn_seconds(drafter: Drafter, num_slots: int) -> list[float]:
    """Return what a turn in each tier costs, and one that drafts in vain: the drafter's own figures
    where it has some, else a guess in plain decode turns.
    """
    if drafter.costs is not None:
        return [*drafter.costs, drafter.costs[0]]
    weights = _WEIGHTS_IN_TOKENS.get(default_platform(), _WEIGHTS_IN_TOKENS["gpu"])
    return stated_seconds(drafter.widths, num_slots, weights)


def fresh_state(
    params: Params,
    requests: Requests,
    caps: Caps,
    pad_id: int,
    drafter: Drafter | None = None,
) -> State:
    """Return the state before the first turn, its cache empty."""
    cache = paged.create(
        params.config,
        num_rows=2 * caps.slots,
        num_writers=caps.slots,
        num_pages=caps.pages,
        page_size=caps.page_size,
        pages_per_row=caps.pages_per_row,
        dtype=caps.cache_dtype(params),
        more=() if drafter is None else drafter.cached(params.config),
    )
    state = initial_state(
        cache,
        requests,
        hidden_size=params.config.hidden_size,
        dtype=params.dtype,
        max_new=caps.new_tokens,
        num_logprobs=caps.logprobs,
        num_prompt_logprobs=caps.prompt_logprobs,
        vocab_size=params.config.vocab_size,
        pad_id=pad_id,
    )
    if drafter is None:
        return state
    seconds = jnp.asarray(turn_seconds(drafter, caps.slots), jnp.float32)
    begun = speculation.initial(drafter, params, caps.slots, caps.requests, seconds)
    return dataclasses.replace(state, speculation=begun)


def typed_key(key: object) -> jax.Array:
    """Return `key`, or raise RequestError if it is not one typed key."""
    if not (
        isinstance(key, jax.Array)
        and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        and key.shape == ()
    ):
        raise RequestError(f"key is {key!r:.80}; pass one typed key, jax.random.key(seed)")
    return key
