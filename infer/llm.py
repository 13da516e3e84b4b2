"""`LLM`: a model behind vLLM's offline interface, over `generate`'s one program."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from infer.backend import DeviceLike, find_device, place
from infer.errors import ConfigError, RequestError
from infer.generation import prepare, rows
from infer.generation.facade import prepare_on
from infer.generation.host import Job
from infer.generation.prepare import Room, RunOptions
from infer.generation.result import GenerationResult
from infer.model import Model, load
from infer.outputs import CompletionOutput, Logprob, RequestOutput
from infer.progress import counting_bar
from infer.sampling import SamplingParams

Messages = Sequence[Mapping[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model with `generate`, `chat` and `score`, as vLLM's `LLM`.

    Every call is one run of the same program as `infer.generate`: more prompts than slots wait
    inside it.

    Args:
        model: what `infer.load` takes, or a Model that is loaded already.
        dtype, revision: as in `infer.load`.
        packed: as in `infer.load`; None, which chooses, is the default here.
        device: where everything runs; the weights of a Model are copied there if they lie
            elsewhere.
        seed: of the draws of requests that have no seed of their own; each call has other draws,
            and the calls of a new LLM repeat them.
        options: `infer.generate`'s num_slots, page_size, num_pages, prefill_chunk, logprobs_mode,
            share_prefixes, implementation, command_buffers, kv_dtype, draft.

    Attributes:
        model: the loaded Model.
        stats: figures of the last call, those of `GenerationResult.stats`: seconds, tokens/s, what
            was compiled, which implementation each operation ran ("implementations"); empty before
            the first.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        dtype: DTypeLike | None = None,
        packed: bool | str | None = None,
        revision: str | None = None,
        device: DeviceLike = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        try:
            self.options = RunOptions(**options)
        except TypeError:
            known = (
                "num_slots, page_size, num_pages, prefill_chunk, logprobs_mode, share_prefixes, "
                "implementation, command_buffers, kv_dtype and draft"
            )
            raise ConfigError(
                f"LLM has no option {', '.join(options)}; beside dtype, packed, revision, device "
                f"and seed there are {known}"
            ) from None
        if not isinstance(model, Model):
            if packed is None and self.options.implementation not in (None, "native"):
                packed = False  # no other implementation reads the native operations' weights
            model = load(model, dtype=dtype, packed=packed, revision=revision, device=device)
        elif dtype is not None or packed is not None or revision is not None:
            raise ConfigError(
                "dtype, packed and revision are for loading, and this Model is loaded already; "
                "pass them to infer.load"
            )
        else:
            params, _ = place(model.params, find_device(device))
            model = Model(params, model.tokenizer, model.name, model.path)
        self.model, self.device = model, device
        self._key, self._calls = jax.random.key(seed), itertools.count()
        self._request_ids = itertools.count()
        self.stats: dict[str, Any] = {}

    @property
    def implementation(self) -> str | None:
        """What the last call ran, in a word: "native", "xla", ...; None before the first."""
        return self.stats.get("implementation")

    def __repr__(self) -> str:
        return f"LLM({self.model!r})"

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.model.tokenizer

    def generate(
        self, prompts: Any, sampling_params: Sampling = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: one or a list of: a string, {"prompt": string}, {"prompt_token_ids": ids}; in a
                list also plain lists of ids.
            sampling_params: one for all or one per prompt; None is `SamplingParams()`, vLLM's
                default: 16 tokens at temperature 1.
            use_tqdm: show a bar of finished requests where standard error is a terminal.

        Returns:
            One RequestOutput per prompt, in their order.

        Raises:
            RequestError: a prompt or parameter that cannot be served.
            CapacityError: the pool cannot hold one of the requests.
        """
        given = _prompts(prompts)
        each = rows.expand_sampling(sampling_params or SamplingParams(), len(given))
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self.run(given, texts, each, self.options, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        Args:
            messages: [{"role": ..., "content": ...}, ...], or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: a name or the source of another template than the model's own.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            tools: descriptions of functions, as the template expects them.
            chat_template_kwargs: further variables of the template, such as enable_thinking.

        Returns:
            One RequestOutput per conversation; `prompt` is the rendered text.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(
                f"messages is {messages!r:.80}; pass a list of {{'role': ..., 'content': ...}}, or "
                "a list of such lists"
            )
        many = all(isinstance(m, Sequence) and not isinstance(m, str) for m in messages)
        conversations: Any = messages if many else [messages]
        prompts = [
            self.model.tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def score(self, prompts: Any, *, use_tqdm: bool = True) -> list[list[float | None]]:
        """Return the log-probability of each prompt token given those before it; None for the
        first.

        For gradients, `infer.score`.
        """
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self.generate(prompts, asked, use_tqdm=use_tqdm)
        return [
            [
                None if entry is None else entry[token].logprob
                for entry, token in zip(o.prompt_logprobs or [], o.prompt_token_ids, strict=True)
            ]
            for o in outputs
        ]

    def run(
        self,
        prompts: Sequence[Any],
        texts: Sequence[str | None],
        each: Sequence[SamplingParams],
        options: RunOptions,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts (strings or lists of ids) once; `texts` is what their outputs call them."""
        key = jax.random.fold_in(self._key, next(self._calls))
        model = self.model
        job = prepare_on(
            self.device, model.params, prompts, None, model.tokenizer, list(each), key, options
        )
        with counting_bar("requests", len(job.rows)) if show_progress else nullcontext() as count:
            if count is None:
                job.run_all()
            else:
                for _ in job.bursts():
                    count(_num_finished(job))
        result = job.result()
        self.stats = result.stats
        return self._outputs(result, texts, each)

    def room_for(self, requests: Sequence[tuple[list[int], SamplingParams]], num_rows: int) -> Room:
        """Return the sizes by which calls of at most `num_rows` rows, all of them from `requests`,
        share one program.
        """
        config, tokenizer = self.model.config, self.model.tokenizer
        todo = rows.expand_rows(
            [r[0] for r in requests], [r[1] for r in requests], config, tokenizer
        )
        return Room(
            requests=num_rows,
            prompt=max(len(r.ids) for r in todo),
            new_tokens=max(r.max_tokens for r in todo),
            features=rows.caps_of(todo, config.vocab_size),
        )

    def check(self, ids: list[int], sampling: SamplingParams) -> None:
        """Raise what `generate` would for this one request, without running anything."""
        config = self.model.config
        prepare.check_prompts([ids], config)
        todo = rows.expand_rows([ids], [sampling], config, self.model.tokenizer)
        if self.options.num_pages is not None:
            rows.check_pool(todo, self.options.page_size, self.options.num_pages)

    def _outputs(
        self, result: GenerationResult, texts: Sequence[str | None], each: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        of_prompt: list[list[int]] = [[] for _ in texts]
        for row, index in enumerate(result.prompt_index):
            of_prompt[index].append(row)
        decoded = self._decoder()
        return [
            RequestOutput(
                request_id=str(next(self._request_ids)),
                prompt=text,
                prompt_token_ids=result.prompt_tokens[found[0]],
                prompt_logprobs=_prompt_logprobs(result, found[0], sampling, decoded),
                outputs=[self._completion(result, row, sampling, decoded) for row in found],
            )
            for text, sampling, found in zip(texts, each, of_prompt, strict=True)
        ]

    def _completion(
        self,
        result: GenerationResult,
        row: int,
        sampling: SamplingParams,
        decoded: Callable[[int], str | None],
    ) -> CompletionOutput:
        ids, reason = result.token_ids(row), result.stop_reason[row]
        own_end = isinstance(reason, int) and reason not in sampling.stop_token_ids
        logprobs = result.logprobs[row, : len(ids)]
        asked = sampling.logprobs
        return CompletionOutput(
            index=result.choice[row],
            text=result.text[row] if result.text is not None else "",
            token_ids=ids,
            cumulative_logprob=float(np.sum(logprobs, dtype=np.float64)),
            logprobs=None
            if asked is None
            else [
                _entry(
                    ids[i],
                    logprobs[i],
                    result.top_tokens[row, i, :asked],
                    result.top_logprobs[row, i, :asked],
                    decoded,
                )
                for i in range(len(ids))
            ],
            finish_reason=result.finish_reason[row],
            stop_reason=None if own_end else reason,
        )

    def _decoder(self) -> Callable[[int], str | None]:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return lambda token: None
        return lambda token: tokenizer.token_bytes(token).decode(errors="replace")


def _prompts(prompts: Any) -> list[str | list[int]]:
    """Return the prompts as strings and lists of ids."""
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    if isinstance(prompts, np.ndarray) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; pass a string, a dict, or a list of these"
        )
    return [_prompt(prompt, index) for index, prompt in enumerate(prompts)]


def _prompt(prompt: Any, index: int) -> Any:
    """Return a string, or what shall be a list of ids: `generate` checks that."""
    if prepare.is_int(prompt):
        raise RequestError(
            "prompts is a flat list of ids; one prompt is [[1, 2, 3]], a list in a list"
        )
    if not isinstance(prompt, Mapping):
        return prompt
    given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    others = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if len(given) == 0 or others:
        raise RequestError(
            f"prompt {index} has {', '.join(map(repr, others)) or 'neither'}; a dict has 'prompt' "
            "(text) or 'prompt_token_ids' (ids)"
        )
    # With both, the ids are what the model reads, as in vLLM.
    value = prompt["prompt_token_ids"] if "prompt_token_ids" in given else prompt["prompt"]
    if isinstance(value, str) is ("prompt_token_ids" in given):
        raise RequestError(
            f"prompt {index}: {given[-1]!r} is {value!r:.60}; 'prompt' is text, "
            "'prompt_token_ids' a list of ids"
        )
    return value


def _entry(
    token: int,
    logprob: Any,
    top_tokens: np.ndarray,
    top_logprobs: np.ndarray,
    decoded: Callable[[int], str | None],
) -> dict[int, Logprob]:
    """Return the position's dict: the token itself, then the likeliest ones."""
    ranks = {int(t): rank for rank, t in enumerate(top_tokens, start=1)}
    entry = {int(token): Logprob(float(logprob), ranks.get(int(token)), decoded(int(token)))}
    for other, value in zip(top_tokens, top_logprobs, strict=True):
        entry.setdefault(int(other), Logprob(float(value), ranks[int(other)], decoded(int(other))))
    return entry


def _prompt_logprobs(
    result: GenerationResult,
    row: int,
    sampling: SamplingParams,
    decoded: Callable[[int], str | None],
) -> list[dict[int, Logprob] | None] | None:
    asked, logprobs = sampling.prompt_logprobs, result.prompt_logprobs[row]
    top_tokens, top_logprobs = result.prompt_top_tokens[row], result.prompt_top_logprobs[row]
    if asked is None or logprobs is None or top_tokens is None or top_logprobs is None:
        return None
    ids = result.prompt_tokens[row]
    return [
        None if i == 0 else _entry(ids[i], logprobs[i], top_tokens[i], top_logprobs[i], decoded)
        for i in range(len(ids))
    ]


def _num_finished(job: Job) -> int:
    return int(np.sum(np.asarray(job.state.output.finish)[: len(job.rows)] != 0))
