"""Speculation's arithmetic: the table and the worked example, and what a drafter costs."""

import math

import pytest

from infer.hardware import get_chip
from infer.plan import speculation
from infer.plan.shape import AttentionShape, ModelShape, uniform

GQA8 = AttentionShape(num_kv_heads=8, k_head_dim=128, v_head_dim=128)
TARGET = ModelShape(num_params=8_000_000_000, weight_bytes=16_000_000_000, layers=uniform(32, GQA8))
DRAFT = ModelShape(
    num_params=500_000_000,
    weight_bytes=1_000_000_000,
    layers=uniform(24, AttentionShape(num_kv_heads=2, k_head_dim=64, v_head_dim=64)),
)
H100 = get_chip("h100-80gb")


@pytest.mark.parametrize(
    ("alpha", "c", "k", "speedup"),
    [
        (0.6, 0.05, 4, 1.92),
        (0.6, 0.1, 3, 1.67),
        (0.6, 0.2, 2, 1.40),
        (0.7, 0.05, 6, 2.35),
        (0.7, 0.1, 4, 1.98),
        (0.7, 0.2, 3, 1.58),
        (0.8, 0.05, 8, 3.09),
        (0.8, 0.1, 6, 2.47),
        (0.8, 0.2, 4, 1.87),
        (0.9, 0.05, 13, 4.67),
        (0.9, 0.1, 10, 3.43),
        (0.9, 0.2, 7, 2.37),
    ],
)
def test_best_k_and_its_speedup(alpha: float, c: float, k: int, speedup: float) -> None:
    best, gain = speculation.best_k(alpha, c)
    assert best == k
    assert gain == pytest.approx(speedup, abs=0.005)


def test_worked_example() -> None:
    assert speculation.expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert speculation.speedup(0.8, 4, 0.05) == pytest.approx(3.3616 / 1.2)


def test_ends_of_the_range() -> None:
    assert speculation.expected_tokens(1.0, 5) == 6
    assert speculation.expected_tokens(0.0, 5) == 1
    assert speculation.expected_tokens(0.9, 0) == 1
    assert speculation.expected_tokens(1 - 2**-53, 999) == pytest.approx(1000, rel=1e-12)
    assert speculation.expected_tokens(5e-324, 3) == 1
    # Not a sum over a trillion drafts.
    assert speculation.expected_tokens(0.5, 10**12) == 2
    assert speculation.best_k(0.1, 0.2) == (0, 1.0)
    assert speculation.best_k(0.5, 0.0, most=7)[0] == 7
    assert speculation.expected_tokens_by_position([0.8] * 4) == pytest.approx(3.3616)
    assert speculation.expected_tokens_by_position([0.5, 0.0, 1.0]) == 1.5
    # Four rounds of three drafts: 3, 1, 0 and 2 stand; three of them ended by a rejection.
    assert speculation.acceptance_rate(6, 3) == pytest.approx(2 / 3)
    assert math.isnan(speculation.acceptance_rate(0, 0))


def test_k_is_chosen_from_measured_seconds_with_hysteresis() -> None:
    alphas = [0.8] * 7
    # Tokens a round: 1, 1.8, 2.952, 3.689, 4.161.
    alone = {0: 1.0, 1: 1.05, 3: 1.15, 5: 1.25, 7: 1.45}
    assert speculation.choose_k(alphas, alone, current=0) == 5
    # 2.869 tokens a second against 2.951: 2.9% is within 5%, not within 2%.
    assert speculation.choose_k(alphas, alone, current=7) == 7
    assert speculation.choose_k(alphas, alone, current=7, margin=0.02) == 5
    loaded = {0: 1.0, 1: 1.9, 3: 3.7, 5: 5.5, 7: 7.3}
    assert speculation.choose_k(alphas, loaded, current=5) == 0
    falling = [0.9, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert speculation.choose_k(falling, alone, current=5) == 1


def test_a_bandwidth_bound_round_is_the_formula_with_the_ratio_of_weights() -> None:
    plan = speculation.plan_round(TARGET, DRAFT, H100, alpha=0.8, k=4)
    assert plan.verify_s == plan.plain_s
    assert plan.speedup == pytest.approx(speculation.speedup(0.8, 4, 1 / 16), rel=1e-4)
    assert plan.rejected_tokens == pytest.approx(5 - 3.3616)
    assert plan.rejected_share == pytest.approx((5 - 3.3616) / 5)


def test_a_drafter_costs_its_weights_its_cache_and_the_slots_of_drafts() -> None:
    plan = speculation.plan_round(TARGET, DRAFT, H100, alpha=0.8, k=4, batch=3, context=30)
    assert plan.draft_weight_bytes == 1e9
    # 34 tokens are 3 pages of 16; a token of the drafter is 24 x 2 x 2 x 64 x 2 = 12,288 bytes.
    assert plan.draft_kv_bytes == 3 * 3 * 16 * 12_288
    # The target's 31 tokens are 2 pages, with 4 drafts more 3; its token is 131,072 bytes.
    assert plan.slot_bytes == 3 * 1 * 16 * 131_072
    assert plan.extra_bytes == 1e9 + 3 * 3 * 16 * 12_288 + 3 * 16 * 131_072
    free = speculation.plan_round(TARGET, None, H100, alpha=0.8, k=4, batch=3, context=30)
    assert (free.draft_s, free.draft_weight_bytes, free.draft_kv_bytes) == (0, 0, 0)
    assert free.slot_bytes == plan.slot_bytes


def test_a_large_batch_pays_for_rejected_tokens_until_speculation_is_off() -> None:
    best = [
        speculation.best_round(TARGET, DRAFT, H100, alpha=0.6, batch=batch, context=32)
        for batch in (1, 64, 512)
    ]
    assert best[0].k >= best[1].k >= best[2].k
    assert best[0].speedup > 1.5
    assert (best[2].k, best[2].speedup) == (0, 1.0)
    forced = speculation.plan_round(TARGET, DRAFT, H100, alpha=0.6, k=4, batch=512, context=32)
    assert forced.speedup < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: speculation.expected_tokens(1.1, 3), r"alpha is 1\.1; .*0 to 1"),
        (lambda: speculation.expected_tokens(math.nan, 3), "alpha is nan"),
        (lambda: speculation.expected_tokens(0.5, -1), "k is -1; .*at least 0"),
        (lambda: speculation.best_k(0.5, 0.1, most=0), "k is 0; .*at least 1"),
        (lambda: speculation.speedup(0.5, 1, -0.1), r"c is -0\.1"),
        (lambda: speculation.speedup(0.5, 1, 0.1, 0.0), r"v is 0\.0"),
        (lambda: speculation.acceptance_rate(-1, 0), "accepted is -1"),
        (lambda: speculation.choose_k([0.5], {0: 1.0, 2: 1.0}, current=0), "1 acceptances"),
        (lambda: speculation.choose_k([0.5], {0: 1.0}, current=1), "current is 1"),
        (lambda: speculation.choose_k([0.5], {0: 0.0}, current=0), "above 0"),
        (lambda: speculation.choose_k([0.5], {0: 1.0}, current=0, margin=-1.0), r"margin is -1\.0"),
        (
            lambda: speculation.plan_round(TARGET, None, H100, alpha=0.5, k=1, batch=0),
            "batch is 0",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
