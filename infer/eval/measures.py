"""`perplexity`, `divergence` and `compare`: models on texts, with intervals."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer.cache.pool import kv_dtype_name
from infer.errors import ConfigError, RequestError
from infer.eval import memory, overlap, statistics
from infer.eval.results import (
    Bucket,
    Comparison,
    Control,
    Divergence,
    How,
    Perplexity,
    TextComparison,
    TextDivergence,
    TextPerplexity,
)
from infer.eval.scoring import TokenDivergence, TokenScores, check_tokens, score_windows
from infer.eval.windows import (
    CONTEXT,
    Scored,
    Windows,
    all_windows,
    check_scored,
    check_seed,
    too_few,
)
from infer.model import Model
from infer.models.params import Params
from infer.ops.choice import check_implementation

Progress = Callable[[int, int], None]
KvDtype = str | None | tuple[str | None, ...]

# Windows of each text that a control runs.
_CONTROL_WINDOWS = 4


def perplexity(
    model: Model | Params,
    texts: Any,
    *,
    context: int = CONTEXT,
    windows: int | None = None,
    scored: str = Scored.second_half,
    seed: int = 0,
    allow_overlap: bool = False,
    implementation: str | None = None,
    kv_dtype: KvDtype = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Return exp(mean -log p) of texts under a model, with 95% intervals.

    Logits come through the page cache in prefill chunks, as a prompt's of `generate` do.

    Args:
        model: what `load` returns, or its params where `texts` are ids.
        texts: a text, token ids ([tokens] or [windows, tokens]), or a mapping of names to either.
        context: tokens of a window; ids that are windows already have their own.
        windows: of each text at most; None takes all.
        scored: "second_half", as llama.cpp's perplexity does, or "all" tokens of a window but the
            first.
        seed: of the bootstrap.
        allow_overlap: evaluate on text that the model was calibrated with.
        implementation: as in `generate`.
        kv_dtype: of the cache, as in `generate`; of several models one for all, or a tuple with one
            for each, in the order of the arguments.
        progress: called with (windows done, windows in all).

    Raises:
        ConfigError: the context does not fit the model, or there is no such `scored`.
        RequestError: a text is too short, has ids of another tokenizer, or was calibrated on.
    """
    dtypes = _kv_dtypes(kv_dtype, 1)
    common = (texts, context, windows, scored, seed, allow_overlap, implementation)
    run = _Run([model], dtypes, *common)
    run.measure(progress)
    all_texts = list(zip(run.texts, run.scores, strict=True))

    def of(name: str, some: Sequence[tuple[Windows, list[TokenScores]]]) -> TextPerplexity:
        nll = [scores[0].nll for _, scores in some]
        return TextPerplexity(
            name=name,
            num_windows=sum(map(len, nll)),
            num_scored=sum(x.size for x in nll),
            perplexity=statistics.perplexity(nll, seed=seed),
            top1=_mean([scores[0].right for _, scores in some]),
            bits_per_byte=_bits_per_byte([(text, scores[0]) for text, scores in some]),
        )

    return Perplexity(
        how=run.how(),
        texts=[of(text.name, [(text, scores)]) for text, scores in all_texts],
        overall=of("all", all_texts),
        warnings=run.warnings,
    )


def divergence(
    base: Model | Params,
    other: Model | Params,
    texts: Any,
    *,
    context: int = CONTEXT,
    windows: int | None = None,
    scored: str = Scored.second_half,
    seed: int = 0,
    allow_overlap: bool = False,
    implementation: str | None = None,
    kv_dtype: KvDtype = None,
    progress: Progress | None = None,
) -> Divergence:
    """Return how far `other` is from `base`: KL(base || other) over the whole vocabulary, agreement
    of the likeliest tokens, perplexity ratio.

    Both models are in memory, and the logits of 64 tokens of each at a time.

    Args:
        base: the model that the other one is meant to be, most often before quantisation.
        other: of the same tokenizer.
        texts, context, windows, scored, seed, allow_overlap, implementation, kv_dtype, progress: as
            in
            `perplexity`.

    Raises:
        ConfigError, RequestError: as in `perplexity`; the tokenizers differ.
    """
    dtypes = _kv_dtypes(kv_dtype, 2)
    common = (texts, context, windows, scored, seed, allow_overlap, implementation)
    run = _Run([base, other], dtypes, *common)
    run.measure(progress)

    def of(name: str, some: Sequence[int]) -> TextDivergence:
        nll = [[run.scores[i][m].nll for i in some] for m in (0, 1)]
        found = [run.divergences[i][0] for i in some]
        ratio = statistics.perplexity_ratio(*nll, seed=seed)
        kl = [x.kl for x in found]
        agree = [x.same_top.mean(1) for x in found]
        by_position = statistics.by_position(np.concatenate(kl), run.first)
        squares = [np.square(x.delta_p, dtype=np.float64) for x in found]
        same = all(np.array_equal(a, b) for a, b in zip(*nll, strict=True))
        identical = same and not any(x.any() for x in kl)
        return TextDivergence(
            name=name,
            num_windows=sum(map(len, kl)),
            num_scored=sum(x.size for x in kl),
            base_perplexity=statistics.perplexity(nll[0], seed=seed),
            perplexity=statistics.perplexity(nll[1], seed=seed),
            ratio=ratio,
            kl=statistics.spread(kl, seed=seed),
            same_top=statistics.bootstrap_mean(agree, seed=seed),
            rms_delta_p=float(np.sqrt(_mean(squares))),
            kl_by_position=[Bucket(*each) for each in by_position],
            verdict=statistics.IDENTICAL if identical else statistics.verdict(ratio),
        )

    return Divergence(
        how=run.how(),
        texts=[of(text.name, [i]) for i, text in enumerate(run.texts)],
        overall=of("all", range(len(run.texts))),
        warnings=run.warnings,
    )


def compare(
    a: Model | Params,
    b: Model | Params,
    texts: Any,
    *,
    base: Model | Params | None = None,
    context: int = CONTEXT,
    windows: int | None = None,
    scored: str = Scored.second_half,
    seed: int = 0,
    allow_overlap: bool = False,
    implementation: str | None = None,
    kv_dtype: KvDtype = None,
    progress: Progress | None = None,
) -> Comparison:
    """Say whether `b` is better than `a` on these texts: the ratio of their perplexities, paired by
    window, with its 95% interval and a verdict in words.

    Args:
        a, b: models of the same tokenizer.
        base: what both are meant to be, before quantisation; then their divergences from it are
            compared too, which tells smaller differences apart.
        texts, context, windows, scored, seed, allow_overlap, implementation, kv_dtype, progress: as
            in
            `perplexity`.

    Raises:
        ConfigError, RequestError: as in `divergence`.
    """
    models = [a, b] if base is None else [base, a, b]
    dtypes = _kv_dtypes(kv_dtype, len(models))
    if base is not None:
        dtypes = [dtypes[2], dtypes[0], dtypes[1]]
    common = (texts, context, windows, scored, seed, allow_overlap, implementation)
    run = _Run(models, dtypes, *common)
    run.measure(progress)

    def of(name: str, some: Sequence[int]) -> TextComparison:
        nll = [[run.scores[i][m].nll for i in some] for m in (-2, -1)]
        ratio = statistics.perplexity_ratio(*nll, seed=seed)
        same = all(np.array_equal(x, y) for x, y in zip(*nll, strict=True))
        found = TextComparison(
            name=name,
            num_windows=sum(map(len, nll[0])),
            num_scored=sum(x.size for x in nll[0]),
            perplexity_a=statistics.perplexity(nll[0], seed=seed),
            perplexity_b=statistics.perplexity(nll[1], seed=seed),
            ratio=ratio,
            verdict=statistics.IDENTICAL if same else statistics.verdict(ratio),
        )
        return found if base is None else _against_base(found, run, some, seed)

    sizes = [memory.footprint(_params(model)) for model in (a, b)]
    hint = memory.equal_memory(*sizes)
    return Comparison(
        how=run.how(),
        texts=[of(text.name, [i]) for i, text in enumerate(run.texts)],
        overall=of("all", range(len(run.texts))),
        bytes_a=sizes[0].num_bytes,
        bytes_b=sizes[1].num_bytes,
        warnings=run.warnings + ([] if hint is None else [hint]),
    )


def control(model: Model | Params, texts: Any, **options: Any) -> Control:
    """Return the identity control: the model against itself, on a few windows of each text.

    Args:
        model, texts, options: as in `divergence`; four windows of each text are run at most.
    """
    windows = min(options.pop("windows", None) or _CONTROL_WINDOWS, _CONTROL_WINDOWS)
    found = divergence(model, model, texts, windows=windows, **options).overall
    ratio, most = found.ratio, found.kl.max
    exact = (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0) and most == 0.0
    return Control(found.num_windows, ratio.value, most, exact)


def _against_base(
    found: TextComparison, run: "_Run", some: Sequence[int], seed: int
) -> TextComparison:
    kl = [[run.divergences[i][m].kl.astype(np.float64) for i in some] for m in (0, 1)]
    deltas = [np.mean(y - x, axis=1) for x, y in zip(*kl, strict=True)]
    difference = statistics.bootstrap_mean(deltas, seed=seed)
    return dataclasses.replace(
        found,
        kl_a=_mean(kl[0]),
        kl_b=_mean(kl[1]),
        kl_difference=difference,
        kl_verdict=statistics.verdict(difference.map(lambda x: 1 + x)),
    )


@dataclass
class _Run:
    """Models on texts: what was asked for, checked; then the figures of every scored token."""

    models: Sequence[Model | Params]
    kv_dtypes: Sequence[str | None]
    given: Any
    context: int
    limit: int | None
    scored: str
    seed: int
    allow_overlap: bool
    implementation: str | None
    texts: list[Windows] = field(init=False)
    first: int = field(init=False)
    scores: list[list[TokenScores]] = field(default_factory=list)  # [text][model]
    divergences: list[list[TokenDivergence]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_scored(self.scored)
        check_seed(self.seed)
        check_implementation(self.implementation)
        self.texts = _same_windows(self.models, self.given, self.context, self.limit)
        self.first = Scored(self.scored).first(self.texts[0].ids.shape[1])
        for model in self.models:
            for text in self.texts:
                check_tokens(_params(model), text.ids, text.ids.shape[1])
            if not self.allow_overlap and isinstance(model, Model):
                known = overlap.calibration_of(model.path)
                overlap.refuse_overlap(model.name, self.texts, known)

    @property
    def warnings(self) -> list[str]:
        return too_few(self.texts)

    def measure(self, progress: Progress | None) -> None:
        start = time.perf_counter()
        params = [_params(model) for model in self.models]
        total, done = sum(len(text.ids) for text in self.texts), 0
        for text in self.texts:
            parts = []
            for count, *part in score_windows(
                params, text.ids, self.first, self.kv_dtypes, self.implementation
            ):
                parts.append(part)
                done += count
                if progress is not None:
                    progress(done, total)
            scores = [_joined(TokenScores, x) for x in zip(*(p[0] for p in parts), strict=True)]
            self.scores.append(scores)
            self.divergences.append(
                [_joined(TokenDivergence, x) for x in zip(*(p[1] for p in parts), strict=True)]
            )
            for model, each in zip(self.models, scores, strict=True):
                _check_numbers(model, text, each)
        self.seconds = time.perf_counter() - start

    def how(self) -> How:
        length = self.texts[0].ids.shape[1]
        return How(length, str(self.scored), length - self.first, self.seed, self.seconds)


def _joined(kind: type, parts: Sequence[Any]) -> Any:
    columns = [list(vars(part).values()) for part in parts]
    return kind(*map(np.concatenate, zip(*columns, strict=True)))


def _same_windows(
    models: Sequence[Model | Params], given: Any, context: int, limit: int | None
) -> list[Windows]:
    """Return the windows of the first model, after checking that the others have the same ones."""
    cuts = []
    for model in models:
        tokenizer = model.tokenizer if isinstance(model, Model) else None
        cuts.append(all_windows(given, tokenizer, context=context, limit=limit))
    counts = [_params(model).config.num_tokens for model in models]
    if len(set(counts)) > 1:
        raise RequestError(
            f"the models have vocabularies of {' and '.join(map(str, counts))} tokens; only bits "
            "per byte, which `perplexity` gives of each, are comparable"
        )
    for others in cuts[1:]:
        for x, y in zip(cuts[0], others, strict=True):
            if not np.array_equal(x.ids, y.ids):
                raise RequestError(
                    f"the models' tokenizers cut {x.name} into other ids; only bits per byte, which"
                    " `perplexity` gives of each, are comparable"
                )
    return cuts[0]


def _check_numbers(model: Model | Params, text: Windows, scores: TokenScores) -> None:
    if np.isnan(scores.nll).any():
        window = int(np.isnan(scores.nll).any(1).argmax())
        name = model.name if isinstance(model, Model) else "the model"
        raise RequestError(
            f"{name} gives NaN in window {window} of {text.name}; its weights hold NaN, or "
            f"overflow {_params(model).dtype}: load it in float32"
        )


def _params(model: Any) -> Params:
    if isinstance(model, Model):
        return model.params
    if isinstance(model, Params):
        return model
    raise RequestError(
        f"a model is a {type(model).__name__}; pass what infer.load returns, or its params"
    )


def _kv_dtypes(given: KvDtype, count: int) -> list[str | None]:
    """Return the cache's dtype for each of `count` models."""
    found = list(given) if isinstance(given, tuple) else [given] * count
    if len(found) != count:
        raise ConfigError(
            f"kv_dtype has {len(found)} entries for {count} models; give one for each, or one name"
        )
    return [kv_dtype_name(name) for name in found]


def _mean(parts: Sequence[np.ndarray]) -> float:
    return float(sum(x.sum(dtype=np.float64) for x in parts) / sum(x.size for x in parts))


def _bits_per_byte(parts: Sequence[tuple[Windows, TokenScores]]) -> float | None:
    """Return bits over bytes: -log2 p of the scored tokens, over the bytes that so many tokens of
    each text have on average.
    """
    num_bytes = 0.0
    for text, scores in parts:
        if text.bytes_per_token is None:
            return None
        num_bytes += scores.nll.size * text.bytes_per_token
    return sum(float(s.nll.sum(dtype=np.float64)) for _, s in parts) / np.log(2) / num_bytes
