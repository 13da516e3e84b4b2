"""`generate(params, prompts)`: one function, two forms.

Called on the host it checks everything, rounds sizes up to buckets so that a second call compiles
nothing, runs the one-program loop and returns numpy arrays, words and text.  Called inside a trace
(a user's jit, scan or vmap) it is pure: arrays in, arrays out.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from infer.backend import Device, DeviceLike, device_of, find_device, on_device, place
from infer.errors import ConfigError, RequestError
from infer.generation.host import Job
from infer.generation.prepare import RunOptions, TextCodec
from infer.generation.pure import generate_pure
from infer.generation.saved import StreamState
from infer.models.params import Params
from infer.sampling import SamplingParams, SamplingState
from infer.spec.drafters import Drafter


class TextStream(Iterator[str]):
    """The pieces of one continuation as they grow; `stats` is filled when the last one is taken."""

    def __init__(self, job: Job) -> None:
        self.stats: dict[str, Any] = {}
        self._job = job
        self._pieces = self._decoded(job)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def state(self) -> StreamState:
        """All that is needed to go on after the pieces taken so far: a pytree of copies.

        `stream(..., state=)` takes it, `save_state` writes it.
        """
        return self._job.saved()

    def _decoded(self, job: Job) -> Iterator[str]:
        for piece in job.bursts():
            if piece:
                yield piece
        self.stats = job.stats()


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
    logprobs_mode: str = "raw",
    share_prefixes: bool = True,
    implementation: str | None = None,
    command_buffers: bool = True,
    kv_dtype: DTypeLike | None = None,
    draft: Drafter | None = None,
    device: DeviceLike = None,
) -> Any:
    """Generate from every prompt: prefill, decode, sampling and refill of slots in one compiled
    program.

    Models whose rotary frequencies depend on the length of a sequence (dynamic NTK, LongRoPE) take
    the planned one, a prompt's tokens and its `max_tokens`, from the first token on.

    Args:
        params: weights; a pytree whose static `config` says what the model is.
        prompts: a list of strings (needs `tokenizer`), a list of lists of ids, or an integer array
            [R, T].
        prompt_lens: with an array, the tokens of each row that count, [R]; None means all T.
        tokenizer: encodes string prompts, decodes the result, and adds its end-of-sequence ids.
        sampling: one SamplingParams for all, or one per prompt; None is greedy with max_tokens=128.
            Inside a trace also a SamplingState, whose every field may be traced.
        key: a typed key; requests without a seed draw from it.  On the host None draws a seed,
            reported in `stats["seed"]`; inside a trace sampling without a key is an error.
        max_tokens: the static room for new tokens; needed only with a SamplingState.
        num_slots: requests that run at a time; the others wait inside the program.
        page_size: tokens in a page of the cache.
        num_pages: pages in the pool; None makes room for all slots at their longest.
        prefill_chunk: most prompt tokens in one prefill pass.
        logprobs_mode: "raw" reports log-probabilities of the model itself, "processed" those of the
            distribution that is sampled.
        share_prefixes: prompts that begin alike share pages and prefill.  Inside a trace only the
            samples of one prompt do, always.
        implementation: None chooses for each op, by platform, shape and dtype; "xla", "native",
            "triton", "mosaic" or "jax_triton" forces one where the op has it, and fails where it
            cannot do the model; "interpret" runs the Triton kernels on any device, slowly.  The
            result's `stats["implementations"]` says what ran.
        command_buffers: on an NVIDIA GPU, run the whole loop as one CUDA graph, without a launch
            from the host for each kernel; False turns that off.
        kv_dtype: of cached keys and values: float32, bfloat16 or float16, or "int8", "int4" or
            "float8_e4m3" ("fp8") with a float32 scale for each token and key/value head, as a name
            or a dtype; None is the dtype of the activations.  Fewer bytes are read at each step of
            a long sequence; float16 holds numbers up to 65,504; what the others cost in quality:
            docs/kv-cache.md.
        draft: speculation: a drafter, such as `infer.spec.NGram(k=4)`, proposes several tokens, and
            the model judges them in one pass.  Greedy tokens stay what they are; drawn ones keep
            their distribution, and with rule="coupled" stay what they are too.  None decodes token
            by token.  `stats["acceptance_rate"]` says how many of the drafts stood.
        device: where this call runs: a jax.Device, "cpu", "gpu", or one of several like "cpu:1".
            Weights, a drafter's too, that lie elsewhere are copied there for this call,
            `stats["bytes_moved"]` says how many bytes; before many calls move them once, with
            `jax.device_put`.  None runs where the weights are.  Not inside a trace.

    Returns:
        GenerationResult on the host, Generation (a pytree of arrays) inside a trace.

    Raises:
        RequestError: a prompt or parameter that cannot be served, with its index or name.
        CapacityError: the pool cannot hold one of the requests.
        ConfigError: there is no such device or implementation, or a trace decides where to run.
        NotImplementedError: a forced implementation cannot do the model's shapes, or not here.
    """
    options = RunOptions(
        num_slots=num_slots,
        page_size=page_size,
        num_pages=num_pages,
        prefill_chunk=prefill_chunk,
        logprobs_mode=logprobs_mode,
        share_prefixes=share_prefixes,
        implementation=implementation,
        command_buffers=command_buffers,
        kv_dtype=kv_dtype,
        draft=draft,
    )
    if _is_traced(params, prompts, prompt_lens, sampling, key, draft):
        if device is not None:
            raise ConfigError(
                f"device={str(device)!r} inside a trace; there the caller's jit places the "
                "program: put its arguments on the device with jax.device_put"
            )
        if tokenizer is not None:
            raise RequestError(
                "tokenizer is host work; inside a trace pass token ids, decode the result outside"
            )
        return generate_pure(params, prompts, prompt_lens, sampling, key, max_tokens, options)
    if isinstance(sampling, SamplingState):
        raise RequestError("a SamplingState is for use inside a trace; outside pass SamplingParams")
    if max_tokens is not None:
        raise RequestError(
            "max_tokens goes into SamplingParams; the argument is the room for a SamplingState"
        )
    job = prepare_on(device, params, prompts, prompt_lens, tokenizer, sampling, key, options)
    job.run_all()
    return job.result()


def prepare_on(
    device: DeviceLike,
    params: Params,
    prompts: Any,
    prompt_lens: Any,
    tokenizer: TextCodec | None,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    key: Array | None,
    options: RunOptions,
) -> Job:
    """Return `Job.prepare` of the rest with its weights and arrays on `device`.

    Only this needs the device: what is run afterwards follows its arguments.
    """
    target = find_device(device)
    params, moved = place(params, target)
    key, _ = place(key, target)
    options, moved_too = _with_draft_on(params, target, options)
    with on_device(target or device_of(params)):
        job = Job.prepare(params, prompts, prompt_lens, tokenizer, sampling, key, options)
    if target is not None:
        job.placement = {"device": str(target), "bytes_moved": moved + moved_too}
    return job


def _with_draft_on(
    params: Params, target: Device | None, options: RunOptions
) -> tuple[RunOptions, int]:
    """Return the options with the drafter's weights, if it has some, where the model's are, and how
    many bytes had to be copied there.
    """
    if options.draft is None:
        return options, 0
    options.draft.check(params.config)  # before anything is moved
    draft, moved = place(options.draft, target)
    ours = device_of(params)
    arrays = [x for x in jax.tree.leaves(draft) if isinstance(x, jax.Array)]
    elsewhere = sorted({str(d) for x in arrays for d in x.devices() if d != ours})
    if elsewhere and ours is not None:
        raise ConfigError(
            f"the drafter's weights are on {', '.join(elsewhere)} and the model's on {ours}; move"
            " them with jax.device_put, or pass device=, which moves both for this call"
        )
    return dataclasses.replace(options, draft=draft), moved


def stream(
    params: Params,
    prompt: str | Sequence[int] | None = None,
    *,
    tokenizer: TextCodec,
    sampling: SamplingParams | None = None,
    key: Array | None = None,
    state: StreamState | None = None,
    device: DeviceLike = None,
    **options: Any,
) -> TextStream:
    """Yield the text of one prompt's continuation as it grows; joined, it is `generate`'s text.

    The same compiled program runs a few turns at a time.

    Args:
        params: weights.
        prompt: a string, or a list of ids; None goes on with `state`, with the same bits as if it
            had not been interrupted.
        tokenizer: encodes the prompt and decodes the continuation.
        sampling: None is greedy with max_tokens=128.
        key: as in `generate`.
        state: `TextStream.state` of an earlier stream.  What it holds of the prompt, such as the
            conversation so far, is not computed again.
        device: as in `generate`.
        **options: `generate`'s num_slots, page_size, num_pages, prefill_chunk, logprobs_mode and
            draft.
    """
    run_options = RunOptions(**options)
    if sampling is not None and sampling.n > 1:
        raise RequestError(f"n is {sampling.n}; a stream has one text, use generate for more")
    if prompt is None:
        if state is None:
            raise RequestError("neither prompt nor state was given; pass one of them")
        if sampling is not None or key is not None or options or device is not None:
            raise RequestError(
                "without a prompt a stream goes on as its state says; leave sampling, key, device "
                "and options out"
            )
        with on_device(device_of(params)):
            return TextStream(Job.resumed(params, state, tokenizer))
    job = prepare_on(device, params, [prompt], None, tokenizer, sampling, key, run_options)
    if state is not None:
        with on_device(device_of(job.params)):
            job.begin_on(state)
    return TextStream(job)


def _is_traced(*values: Any) -> bool:
    """Return whether we are inside a trace: a leaf is a tracer, or fresh arrays are."""
    return any(isinstance(x, Tracer) for x in (*jax.tree.leaves(values), jnp.zeros(())))
