"""What the measures return: figures of each text and of all together, as dataclasses and JSON."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from infer.eval.statistics import Interval, Spread


class Result:
    """A result that JSON can say."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain objects; a number that is not finite is None."""
        assert dataclasses.is_dataclass(self) and not isinstance(self, type)
        return _plain(dataclasses.asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class How:
    """What was run."""

    context: int  # tokens of a window, BOS counted
    scored: str  # "second_half" or "all"
    scored_tokens_per_window: int
    seed: int  # of the bootstrap
    elapsed_s: float  # compilation counted


@dataclass(frozen=True)
class TextPerplexity:
    """One model on one text, or on all of them."""

    name: str
    num_windows: int
    num_scored: int
    perplexity: Interval
    top1: float  # share of scored tokens that were the likeliest
    bits_per_byte: float | None  # comparable between tokenizers, unlike the perplexity


@dataclass(frozen=True)
class Perplexity(Result):
    """Of `perplexity`; `overall` is over the windows of all texts."""

    how: How
    texts: list[TextPerplexity]
    overall: TextPerplexity
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bucket:
    """The mean KL of the scored tokens at some positions of a window."""

    first: int
    last: int
    kl: float


@dataclass(frozen=True)
class TextDivergence:
    """How far a model is from its base on one text, or on all of them."""

    name: str
    num_windows: int
    num_scored: int
    base_perplexity: Interval
    perplexity: Interval
    ratio: Interval  # perplexity over the base's, paired by window
    kl: Spread  # KL(base || model), nats a token
    same_top: Interval  # share of tokens at which both have the same likeliest token
    rms_delta_p: float  # root mean square of p_model(token) - p_base(token)
    kl_by_position: list[Bucket]
    verdict: str  # of the model, by the ratio


@dataclass(frozen=True)
class Divergence(Result):
    """Of `divergence`."""

    how: How
    texts: list[TextDivergence]
    overall: TextDivergence
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TextComparison:
    """Two models on one text, or on all of them."""

    name: str
    num_windows: int
    num_scored: int
    perplexity_a: Interval
    perplexity_b: Interval
    ratio: Interval  # b's perplexity over a's, paired by window
    verdict: str  # of b, by the ratio
    # With a base only.
    kl_a: float | None = None  # mean KL(base || a)
    kl_b: float | None = None
    kl_difference: Interval | None = None  # KL(base || b) - KL(base || a), paired by window
    kl_verdict: str | None = None  # of b: "better" is nearer to the base


@dataclass(frozen=True)
class Comparison(Result):
    """Of `compare`."""

    how: How
    texts: list[TextComparison]
    overall: TextComparison
    bytes_a: int
    bytes_b: int
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Control(Result):
    """A model against itself: ratio 1 and KL 0, exactly, or the measure is broken."""

    num_windows: int
    ratio: float
    kl_max: float
    exact: bool
