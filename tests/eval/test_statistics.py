"""The statistics against closed forms, scipy where it is, and simulated coverage."""

import math

import numpy as np
import pytest

from infer.eval import statistics
from infer.eval.statistics import Interval


def test_equal_windows_have_their_value_exactly_and_no_width() -> None:
    third = np.full(7, 1 / 3)
    assert statistics.bootstrap_mean([third], seed=0) == Interval(1 / 3, 1 / 3, 1 / 3)
    zero = [np.zeros(3), np.zeros(50)]
    assert statistics.bootstrap_mean(zero, seed=1) == Interval(0.0, 0.0, 0.0)


def test_the_interval_of_a_mean_is_the_normal_one_where_windows_are_many() -> None:
    x = np.random.default_rng(0).normal(2.0, 3.0, 4000)
    got = statistics.bootstrap_mean([x], seed=5, resamples=4000)
    half = 1.959964 * x.std() / math.sqrt(len(x))
    assert got.value == pytest.approx(x.mean(), abs=1e-12)
    assert got.low == pytest.approx(x.mean() - half, abs=0.05 * half)
    assert got.high == pytest.approx(x.mean() + half, abs=0.05 * half)


def test_equal_seeds_give_equal_intervals() -> None:
    x = np.random.default_rng(1).normal(size=60)
    one, two, other = (statistics.bootstrap_mean([x], seed=s) for s in (3, 3, 4))
    assert one == two != other


def test_each_text_keeps_its_windows_in_every_resample() -> None:
    """Two texts of different level: the interval does not have the difference in it."""
    rng = np.random.default_rng(2)
    low, high = rng.normal(0, 0.1, 50), rng.normal(100, 0.1, 50)
    got = statistics.bootstrap_mean([low, high], seed=0)
    assert got.high - got.low < 0.05
    assert got.value == pytest.approx((low.sum() + high.sum()) / 100, abs=1e-9)


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Fifty skewed windows, 300 times: about 95%, a little less as percentiles do."""
    rng = np.random.default_rng(3)
    inside = 0
    for trial in range(300):
        x = rng.gamma(4.0, 1.0, 50)
        got = statistics.bootstrap_mean([x], seed=trial, resamples=500)
        inside += got.low <= 4.0 <= got.high
    assert 0.90 <= inside / 300 <= 0.98


def test_tokens_of_one_window_do_not_count_as_independent() -> None:
    """A window whose tokens are all alike is one observation, however long it is."""
    level = np.random.default_rng(4).normal(size=(50, 1))
    short, long = ([np.repeat(level, n, axis=1)] for n in (2, 200))
    a, b = statistics.perplexity(short, seed=0), statistics.perplexity(long, seed=0)
    assert a.low == pytest.approx(b.low) and a.high == pytest.approx(b.high)


def test_perplexity_and_ratio_by_hand() -> None:
    base = [np.log(np.array([[2.0, 8.0], [4.0, 4.0]]))]
    other = [base[0] + math.log(1.5)]
    assert statistics.perplexity(base, seed=0).value == pytest.approx(4.0)
    ratio = statistics.perplexity_ratio(base, other, seed=0)
    assert ratio.value == pytest.approx(1.5)
    assert (ratio.low, ratio.high) == pytest.approx((1.5, 1.5))
    assert statistics.verdict(ratio) == "worse"
    same = statistics.perplexity_ratio(base, base, seed=0)
    assert same == Interval(1.0, 1.0, 1.0)
    assert statistics.verdict(same) == "no difference that this text can show"
    assert statistics.verdict(Interval(0.9, 0.8, 0.99)) == "better"


def test_pairing_finds_a_difference_that_texts_hide() -> None:
    """Windows vary by 30%, the models by 0.5%: paired windows tell them apart."""
    rng = np.random.default_rng(5)
    base = rng.normal(3.0, 0.3, (60, 1)) + rng.normal(0, 0.01, (60, 40))
    other = base + 0.005 + rng.normal(0, 0.01, (60, 40))
    assert statistics.verdict(statistics.perplexity_ratio([base], [other], seed=0)) == "worse"
    alone = [statistics.perplexity([x], seed=0) for x in (base, other)]
    assert alone[0].high > alone[1].low


def test_a_perplexity_past_all_numbers_is_infinite() -> None:
    assert statistics.perplexity([np.full((2, 3), np.inf)], seed=0).value == math.inf
    assert statistics.perplexity([np.full((2, 3), 800.0)], seed=0).value == math.inf


def test_spread_by_hand() -> None:
    values = np.arange(101, dtype=np.float32).reshape(1, 101)
    got = statistics.spread([values], seed=0)
    assert (got.mean.value, got.median, got.p99, got.max) == (50.0, 50.0, 99.0, 100.0)


def test_buckets_of_positions() -> None:
    values = np.tile(np.arange(10.0), (3, 1))
    assert statistics.by_position(values, 6, buckets=4) == [
        (6, 7, 0.5),
        (8, 10, 3.0),
        (11, 12, 5.5),
        (13, 15, 8.0),
    ]
    assert statistics.by_position(values[:, :2], 1) == [(1, 1, 0.0), (2, 2, 1.0)]


def test_mcnemar_by_hand_and_scipy() -> None:
    assert statistics.mcnemar(0, 0) == 1.0
    assert statistics.mcnemar(0, 6) == 2 / 64
    assert statistics.mcnemar(5, 5) == 1.0
    scipy_stats = pytest.importorskip("scipy.stats")
    for a, b in ((1, 9), (7, 3), (40, 61), (0, 1), (300, 250)):
        assert statistics.mcnemar(a, b) == pytest.approx(scipy_stats.binomtest(a, a + b).pvalue)


def test_wilson_by_hand_and_scipy() -> None:
    assert statistics.wilson(0, 10).low == 0.0
    assert statistics.wilson(10, 10).high == 1.0
    scipy_stats = pytest.importorskip("scipy.stats")
    for right, count in ((3, 10), (0, 7), (50, 50), (501, 1000)):
        want = scipy_stats.binomtest(right, count).proportion_ci(method="wilson")
        got = statistics.wilson(right, count)
        assert (got.low, got.high) == pytest.approx((want.low, want.high), abs=1e-12)


def test_no_windows_is_an_error() -> None:
    with pytest.raises(ValueError, match="each needs at least one"):
        statistics.bootstrap_mean([np.ones(3), np.ones(0)], seed=0)
