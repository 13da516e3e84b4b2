"""The state of a stream: to go on later, elsewhere, or with the next message.

A `StreamState` is a pytree.  It goes on with exactly the bits of a stream that was never
interrupted; and the next prompt of a conversation that begins with what it holds is prefilled from
there on.
"""

import dataclasses
import functools
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from infer.cache import paged
from infer.cache.pool import dtype_of, kv_dtype_name
from infer.errors import RequestError, WeightFormatError
from infer.generation import prepare, rows
from infer.generation.prefixes import Prefixes
from infer.generation.prepare import Caps
from infer.generation.rows import Row
from infer.generation.slots import admit
from infer.generation.state import Lanes, Requests, Speculation, State
from infer.models.params import Params
from infer.ops.choice import check_implementation
from infer.pytree import pytree_dataclass, static
from infer.sampling import SamplingParams
from infer.spec import policy
from infer.spec.by_name import as_json, from_json
from infer.spec.drafters import Drafter
from infer.weights.safetensors import SafetensorsFile
from infer.weights.safetensors_writer import write_file

_FORMAT = "infer.stream/1"


@pytree_dataclass
class StreamState:
    """One request and how far it has come."""

    requests: Requests
    state: State
    caps: Caps = static()
    sampling: str = static()  # SamplingParams as JSON
    drafter: Any = None  # a Drafter with its weights, which are not copied

    @classmethod
    def of(
        cls, requests: Requests, state: State, caps: Caps, row: Row, drafter: Drafter | None
    ) -> "StreamState":
        """Return a copy of a running stream: the next turn takes the original's memory."""
        requests, state = jax.tree.map(jnp.copy, (requests, state))
        return cls(requests, state, caps, json.dumps(dataclasses.asdict(row.sampling)), drafter)

    def params(self) -> SamplingParams:
        """Return the request's parameters."""
        fields = json.loads(self.sampling)
        fields["logit_bias"] = {int(i): bias for i, bias in fields["logit_bias"].items()}
        return SamplingParams(**fields)

    def ids(self) -> list[int]:
        """Return the prompt and what has been generated."""
        requests, output = self.requests, self.state.output
        prompt = np.asarray(requests.prompts)[0, : int(requests.prompt_lens[0])]
        return [*prompt.tolist(), *np.asarray(output.tokens)[0, : int(output.lengths[0])].tolist()]

    def num_cached(self) -> int:
        """Return how many of `ids` have their keys and values in the pages 0, 1, ...: a request
        alone in its pool gets those, in order, and they keep their contents when it has ended.
        """
        if int(self.state.output.finish[0]) == 0:
            return int(self.state.cache.lengths[0])
        return len(self.ids()) - 1


def check_fits(saved: StreamState, params: Params) -> None:
    """Raise RequestError if `saved` comes from another model than `params`."""
    fresh = jax.eval_shape(
        lambda: prepare.fresh_state(params, saved.requests, saved.caps, 0, saved.drafter)
    )
    for have, need in zip(saved.state.cache.k_pages, fresh.cache.k_pages, strict=False):
        if (have.shape, dtype_of(have)) != (need.shape, dtype_of(need)):
            raise RequestError(
                f"the state has pages {dtype_of(have)}{list(have.shape)}, this model has "
                f"{dtype_of(need)}{list(need.shape)}; go on with the model it comes from"
            )
    if len(saved.state.cache.k_pages) != len(fresh.cache.k_pages):
        raise RequestError(
            f"the state has {len(saved.state.cache.k_pages)} layers, this model "
            f"{len(fresh.cache.k_pages)}; go on with the model it comes from"
        )


def begin_on(
    saved: StreamState,
    state: State,
    requests: Requests,
    row: Row,
    params: Params,
    drafter: Drafter | None,
) -> State:
    """Return the state before the first turn with all that `saved` holds of the prompt in place."""
    check_fits(saved, params)
    pools = lambda cache: [(leaf.shape[1], leaf.shape[3]) for leaf in cache.k_pages]
    if pools(saved.state.cache) != pools(state.cache):
        raise RequestError(
            f"the drafter is {drafter} and the state's {saved.drafter}; keys and "
            "values of a drafter that is a model lie beside the target's: go on with a drafter of "
            "the same model, or without the state"
        )
    have, need = (dtype_of(c.k_pages[0]) for c in (saved.state.cache, state.cache))
    if have != need:
        raise RequestError(f"kv_dtype is {need}, the state's {have}; go on with the same")
    if saved.caps.page_size != state.cache.page_size:
        raise RequestError(
            f"page_size is {state.cache.page_size}, the state's {saved.caps.page_size}; "
            "go on with the same"
        )
    config, old = params.config, saved.ids()
    # The last token of a prompt always goes through the layers: it is what the next one comes from.
    most = min(saved.num_cached(), len(row.ids) - 1)
    same = next((i for i in range(most) if old[i] != row.ids[i]), most)
    same -= same % saved.caps.whole_page
    span = int(saved.requests.prompt_lens[0]) + int(saved.requests.sampling.max_tokens[0])
    turned_otherwise = config.ropes_by_length and span != len(row.ids) + row.max_tokens
    if row.scored or turned_otherwise or same == 0:
        return state
    pages = saved.state.cache.k_pages, saved.state.cache.v_pages
    return _with_pages(state, requests, pages, jnp.asarray(same, jnp.int32))


@functools.partial(jax.jit, donate_argnames="state")
def _with_pages(
    state: State, requests: Requests, pages: tuple[Any, Any], num_tokens: Int[Array, ""]
) -> State:
    """Admit the first request, and let it have the tokens that the given pages hold."""
    state = admit(state, requests)
    cache = state.cache
    count = min(cache.num_pages, pages[0][0].shape[0])
    put = lambda new, old: new.at[:count].set(old[:count])
    k_pages, v_pages = jax.tree.map(put, (cache.k_pages, cache.v_pages), pages)
    lengths = cache.lengths.at[0].set(num_tokens)
    cache = dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages, lengths=lengths)
    counters = dataclasses.replace(state.counters, shared_tokens=num_tokens)
    return dataclasses.replace(state, cache=cache, counters=counters)


# ---- files ---------------------------------------------------------------------------------------


def save_state(path: str | os.PathLike[str], state: StreamState) -> None:
    """Write the state of a stream as one safetensors file; it is there whole or not at all.

    Raises:
        RequestError: the stream's drafter has weights, which are no part of such a file.
    """
    draft = {} if state.drafter is None else {"draft": as_json(state.drafter)}
    named = {}
    for place, leaf in jax.tree_util.tree_leaves_with_path((state.requests, state.state)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        named[jax.tree_util.keystr(place)] = np.asarray(leaf)
    caps = dataclasses.asdict(state.caps)
    metadata = {"format": _FORMAT, "caps": json.dumps(caps), "sampling": state.sampling} | draft
    write_file(path, named, metadata)


def load_state(path: str | os.PathLike[str], params: Params) -> StreamState:
    """Read what `save_state` wrote.

    Args:
        path: of the file.
        params: the model it goes on with.

    Raises:
        WeightFormatError: the file is broken, or no state of a stream.
        RequestError: the state comes from another model.
    """
    with SafetensorsFile.open(path) as file:
        if file.metadata.get("format") != _FORMAT:
            raise WeightFormatError(
                f"{path} is no saved stream: its format is "
                f"{file.metadata.get('format', 'not given')!r}, not {_FORMAT!r}; pass a file that "
                "infer.save_state wrote"
            )
        try:
            caps = _caps(json.loads(file.metadata["caps"]))
            _check_sizes(file, caps)
            draft = file.metadata.get("draft")
            drafter = None if draft is None else from_json(draft)
            if caps.draft != (None if drafter is None else str(drafter)):
                raise ValueError(f"the drafter is {drafter}, its sizes are of {caps.draft!r:.60}")
            template = jax.eval_shape(lambda: _template(params, caps, drafter))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise WeightFormatError(f"{path}: its sizes are broken ({error!r:.100})") from error
        places, structure = jax.tree_util.tree_flatten_with_path(template)
        leaves = [_leaf(file, path, jax.tree_util.keystr(at), leaf) for at, leaf in places]
        requests, state = jax.tree.unflatten(structure, leaves)
        saved = StreamState(requests, state, caps, file.metadata.get("sampling", ""), drafter)
    try:
        _check_values(saved, params)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise WeightFormatError(
            f"{path}: its values contradict each other ({error!r:.100}); save the stream again"
        ) from error
    return saved


def _caps(fields: dict[str, Any]) -> Caps:
    lanes, words = Lanes(**fields.pop("lanes")), tuple(fields.pop("bad_words"))
    caps = Caps(**fields, lanes=lanes, bad_words=words)
    check_implementation(caps.implementation)
    kv_dtype_name(caps.kv_dtype)
    optional = {"processed_logprobs", "prompt_logprobs", "implementation", "command_buffers"}
    optional |= {"kv_dtype", "draft"}
    sizes = [v for k, v in fields.items() if k not in optional]
    sizes += [*words, lanes.tile, lanes.num_tiles, lanes.passes]
    if caps.prompt_logprobs is not None:
        sizes.append(caps.prompt_logprobs)
    if not all(prepare.is_int(size) and 0 <= size < 2**31 for size in sizes):
        raise ValueError("a size is no number from 0 to 2**31 - 1")
    switches = caps.processed_logprobs, caps.command_buffers
    if not all(isinstance(x, bool) for x in switches) or caps.requests != 1 or len(words) != 2:
        raise ValueError("these are not the sizes of one stream")
    if min(caps.slots, caps.pages, caps.page_size, lanes.tile, lanes.num_tiles, lanes.passes) < 1:
        raise ValueError("a size is 0")
    return caps


def _check_sizes(file: SafetensorsFile, caps: Caps) -> None:
    """Compare the sizes with those of tensors that lie in the file, before any is allocated."""
    for name, shape in {
        "[0].prompts": (1, caps.prompt),
        "[0].sampling.stop_ids": (1, caps.stop_ids),
        "[0].sampling.bias": (1, caps.bias),
        "[0].sampling.allowed": (1, caps.allowed),
        "[0].sampling.bad_words": (1, *caps.bad_words),
        "[1].output.tokens": (1, caps.new_tokens),
        "[1].request": (caps.slots,),
    }.items():
        if tuple(file.tensors[name].shape) != shape:
            raise ValueError(f"{name} is {list(file.tensors[name].shape)}, not {list(shape)}")


def _check_values(saved: StreamState, params: Params) -> None:
    """Raise unless the numbers are those of a stream: nothing that could hang the loop, or read
    where it should not.
    """
    requests, state = saved.requests, jax.device_get(saved.state)
    caps, cache, output = saved.caps, state.cache, state.output
    vocab = params.config.vocab_size
    most = int(saved.requests.sampling.max_tokens[0])
    prompt, made = int(requests.prompt_lens[0]), int(output.lengths[0])
    sampling = saved.params()
    running, waits = bool(state.request[0] == 0), bool(state.next_request == 0)
    known = prompt + made
    checks = {
        "n": sampling.n == 1,
        "prompt": 1 <= prompt <= caps.prompt,
        "max_tokens": 1 <= most <= caps.new_tokens,
        "length": 0 <= made <= most,
        "ids": _within(requests.prompts, vocab) and _within(output.tokens, vocab),
        "last_token": _within(state.last_token, vocab),
        "request": running or (state.request == 1).all(),
        "others": (state.request[1:] == 1).all() and (state.held == 1).all(),
        "source": (state.source == 2 * caps.slots).all(),
        "generated": not running or state.num_generated[0] == made < most,
        "finish": 0 <= output.finish[0] <= 4 and (output.finish[0] == 0) == (running or waits),
        "queue": requests.count == 1 and state.next_request in (0, 1) and not (waits and made),
        "cached": not running or 0 <= cache.lengths[0] < known,
        "counters": all(0 <= count < 2**30 for count in vars(state.counters).values()),
        "sharing": requests.parent[0] == 1 and requests.last_child[0] == -1,
        "stop_ids": _within(saved.requests.sampling.stop_ids, vocab + 1),
        "speculation": state.speculation is None or _is_speculation(state.speculation),
    }
    wrong = [name for name, right in checks.items() if not right]
    if wrong:
        raise ValueError(f"not possible: {', '.join(wrong)}")
    paged.check_invariants(cache)
    if running and (paged.held_pages(cache)[0] * caps.page_size < prompt + most - 1):
        raise ValueError("not possible: pages")


def _is_speculation(s: Speculation) -> bool:
    """Return whether the numbers that choose a round's size, and those that count, can be such."""
    known = s.policy
    sizes = known.seconds, known.tokens, s.gains
    return bool(
        all(np.all(np.isfinite(x) & (x > 0)) for x in sizes)
        and np.all((s.trust >= 0) & (s.trust <= policy.MOST_TRUST))
        and np.all((known.share >= 0) & (known.share <= 1))
        and np.all((known.stood >= 0) & (known.stood <= known.judged) & np.isfinite(known.judged))
        and known.limit in (0, known.seconds.shape[0] - 2)
        and np.all(known.forced == policy.NOT_FORCED)
        and known.idle >= 0
        and known.wait >= 0
        and np.all((s.owner >= 0) & (s.owner <= 1))
        and all(np.all(x >= 0) for x in (s.passes, s.row_passes, s.tokens, s.drafted, s.accepted))
    )


def _within(ids: Any, most: int) -> bool:
    return bool(np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < most)))


def _template(params: Params, caps: Caps, drafter: Drafter | None) -> tuple[Requests, State]:
    """Return a request and a state of these sizes."""
    row = Row(
        ids=[0],
        prompt=0,
        choice=0,
        sampling=SamplingParams(),
        max_tokens=1,
        stop_ids=[],
        bad_words=[],
    )
    sampling = rows.sampling_state([row], jax.random.key(0), caps, params.config.vocab_size)
    requests = rows.request_arrays([row], sampling, Prefixes.none(caps.requests), caps)
    return requests, prepare.fresh_state(params, requests, caps, 0, drafter)


def _leaf(file: SafetensorsFile, path: Any, name: str, like: Any) -> Array:
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    if is_key:
        like = jax.eval_shape(jax.random.key_data, like)
    info = file.tensors.get(name)
    if info is None or tuple(info.shape) != like.shape:
        found = "is missing" if info is None else f"is {list(info.shape)}"
        raise RequestError(
            f"{path}: {name} {found}, this model needs {list(like.shape)}; go on with the model it "
            "comes from"
        )
    array = jnp.asarray(np.array(file.array(name)))
    if array.dtype != like.dtype:
        raise RequestError(
            f"{path}: {name} is {array.dtype}, this model needs {like.dtype}; load it with that "
            "dtype"
        )
    return jax.random.wrap_key_data(array, impl="threefry2x32") if is_key else array
