"""The statistics of a comparison, in numpy alone.

Tokens of one window are not independent of each other, windows nearly are.  So the unit that is
resampled is the window: a value per window comes in, [W, ...].
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

# Fewer windows than this make an interval that is too narrow: said loudly, not refused.
ENOUGH_WINDOWS = 50
RESAMPLES = 10_000
# Numbers that a resampling step holds at a time.
_HELD = 1 << 22


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> "Interval":
        """Return the interval of an increasing function of the estimate."""
        return Interval(*map(function, (self.value, self.low, self.high)))


def bootstrap_mean(
    groups: Sequence[Float[np.ndarray, " _W"]], *, seed: int, resamples: int = RESAMPLES
) -> Interval:
    """Return the mean over all windows of all groups, with its 95% percentile interval.

    Windows are drawn with replacement within their own group, so that every resample has as many
    of each text as there are.  Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap,
    chapters 8 (the unit) and 13 (percentiles).

    Args:
        groups: a value per window, an array for each text; of a paired comparison the differences.
        seed: of the draws; equal seeds give equal intervals.
        resamples: how many.

    Returns:
        The mean with its interval, which is all numbers where a value is not finite.

    Raises:
        ValueError: there is no window.
    """
    sizes = [len(group) for group in groups]
    if not sizes or not all(sizes):
        raise ValueError(f"the groups have {sizes} windows; each needs at least one")
    values = [np.asarray(group, np.float64) for group in groups]
    if not all(np.isfinite(group).all() for group in values):
        with np.errstate(invalid="ignore"):
            return Interval(float(np.concatenate(values).mean()), -math.inf, math.inf)
    total, count = np.zeros(resamples), sum(sizes)
    # From a first value on: equal windows give exactly their value, not a rounded sum.
    offset = float(values[0][0])
    rng = np.random.default_rng(seed)
    for group in values:
        rest = group - offset
        step = max(1, _HELD // len(rest))
        for first in range(0, resamples, step):
            last = min(first + step, resamples)
            picked = rng.integers(0, len(rest), (last - first, len(rest)))
            total[first:last] += rest[picked].sum(1)
    value = offset + sum(float(np.sum(group - offset)) for group in values) / count
    low, high = np.quantile(offset + total / count, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def perplexity(nll: Sequence[Float[np.ndarray, "_W S"]], *, seed: int) -> Interval:
    """Return exp(mean negative log-likelihood) of all scored tokens, by window."""
    return bootstrap_mean([x.mean(1) for x in nll], seed=seed).map(_exp)


def perplexity_ratio(
    base: Sequence[Float[np.ndarray, "_W S"]],
    other: Sequence[Float[np.ndarray, "_W S"]],
    *,
    seed: int,
) -> Interval:
    """Return PPL(other) / PPL(base) = exp(mean (nll_other - nll_base)), paired by window."""
    pairs = zip(base, other, strict=True)
    deltas = [np.mean(np.asarray(b, np.float64) - a, axis=1) for a, b in pairs]
    return bootstrap_mean(deltas, seed=seed).map(_exp)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Spread:
    """Mean (with its interval), median, 99th percentile and maximum of a value per token."""

    mean: Interval
    median: float
    p99: float
    max: float


def spread(values: Sequence[Float[np.ndarray, "_W S"]], *, seed: int) -> Spread:
    """Return how a value per token is distributed; its mean's interval is by window."""
    flat = np.concatenate([x.ravel() for x in values]).astype(np.float64)
    return Spread(
        mean=bootstrap_mean([x.astype(np.float64).mean(1) for x in values], seed=seed),
        median=float(np.median(flat)),
        p99=float(np.quantile(flat, 0.99)),
        max=float(flat.max()),
    )


def by_position(
    values: Float[np.ndarray, "W S"], first: int, *, buckets: int = 8
) -> list[tuple[int, int, float]]:
    """Return (first position, last position, mean) of up to `buckets` equal stretches of a window.

    Args:
        values: one per scored token; column j is position first + j.
        first: position of the first scored token in its window, BOS counted.
        buckets: how many stretches at most.
    """
    edges = np.linspace(0, values.shape[1], min(buckets, values.shape[1]) + 1).astype(int)
    return [
        (first + int(a), first + int(b) - 1, float(values[:, a:b].mean()))
        for a, b in itertools.pairwise(edges)
    ]


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value that two classifiers err equally often.

    Under that hypothesis each item that just one of them gets right is a fair coin: twice the
    binomial tail, at most 1.  Source: McNemar 1947, Psychometrika 12(2); the exact form, Fagerland
    et al. 2013, BMC Med. Res. Methodol. 13:91.

    Args:
        only_first: items that only the first got right.
        only_second: items that only the second got right.
    """
    n = only_first + only_second
    tail = sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)


def wilson(right: int, count: int) -> Interval:
    """Return a share of right answers with its 95% interval.

    Source: Wilson 1927, JASA 22(158): it stays inside [0, 1], and is right for few items.
    """
    z2 = 1.959963984540054**2
    share = right / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = share * (1 - share) / count + z2 / (4 * count**2)
    half = math.sqrt(z2 * spread) / (1 + z2 / count)
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == count else middle + half
    return Interval(share, low, high)


BETTER, WORSE = "better", "worse"
NO_DIFFERENCE = "no difference that this text can show"
IDENTICAL = "identical: every log-probability is the same"


def verdict(ratio: Interval) -> str:
    """Say what a perplexity ratio's 95% interval says of the second model."""
    if ratio.high < 1:
        return BETTER
    return WORSE if ratio.low > 1 else NO_DIFFERENCE
