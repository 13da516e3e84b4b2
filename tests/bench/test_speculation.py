"""`infer bench spec`: its prediction by hand and by the planner, and a run on a tiny pair."""

import math

import pytest

from infer.bench.speculation import Brought, Costs, measure, predicted_speedup, text_of
from infer.plan.speculation import speedup
from infer.spec import SelfDraft
from tests.models import tiny
from tests.spec.model_pairs import late_layers_idle

# Of 150 drafts that were judged 75 stood; a draft step is 0.1 steps, a pass over three tokens 1.3.
ALWAYS = Brought(
    tokens=175, row_passes=100, passes=100, with_drafts=100, drafted=(100, 100), accepted=(50, 25)
)
COSTS = Costs(plain=2.0, in_vain=2.4, judged=3.0)


def test_where_every_turn_drafts_the_prediction_is_the_planners() -> None:
    assert ALWAYS.alpha == 0.5
    assert ALWAYS.expected_tokens() == pytest.approx(1.75)
    expected = speedup(0.5, 2, c=0.1, v=1.3)
    assert predicted_speedup(ALWAYS, COSTS, batch=1) == pytest.approx(expected)


def test_turns_without_drafts_and_rows_that_have_ended_count() -> None:
    half = Brought(
        tokens=138, row_passes=100, passes=40, with_drafts=20, drafted=(50, 50), accepted=(25, 12)
    )
    # judged 50 + 25, stood 37; 2.5 of 4 rows run.
    alpha = 37 / 75
    expected = (1 + 0.5 * alpha + 0.5 * alpha**2) * (2.5 / 4) * 2.0 / (0.5 * 2.4 + 0.5 * 3.0)
    assert predicted_speedup(half, COSTS, batch=4) == pytest.approx(expected)


def test_a_drafter_that_found_nothing_is_a_slower_plain_run() -> None:
    nothing = Brought(
        tokens=9, row_passes=9, passes=9, with_drafts=0, drafted=(0, 0), accepted=(0, 0)
    )
    assert math.isnan(nothing.alpha)
    assert predicted_speedup(nothing, COSTS, batch=1) == pytest.approx(2.0 / 2.4)


def test_tokens_past_the_context_are_refused_before_anything_runs() -> None:
    pair = tiny.llama(), [[1, 2], [3]], SelfDraft(layers=1)
    with pytest.raises(ValueError, match=r"127 tokens .* context of 128; give at most 126"):
        measure(*pair, batch=1, new_tokens=127, rounds=1, say=print)


def test_a_pair_is_measured() -> None:
    params = late_layers_idle(tiny.llama(), 1)
    lines: list[str] = []
    found = measure(
        params,
        [[3, 1, 4, 1, 5], [9, 2, 6]],
        SelfDraft(layers=1, k=2),
        batch=2,
        new_tokens=48,
        rounds=1,
        say=lines.append,
    )
    assert found["alpha"] == 1.0 and found["acceptance_by_position"] == [1.0, 1.0]
    assert found["equal_tokens"] and found["turns_with_drafts"] == 1.0
    assert 2.8 < found["tokens_per_pass"] <= 3.0
    assert found["predicted_speedup"] > 0 and found["measured_speedup"] > 0
    assert lines
    run = {"model": "tiny", "draft": "self:1:2", "cpu": "a CPU", "threads": 2, "rounds": 1}
    text = text_of(run | {"busy_cores": 0.1, "results": [found]})
    assert text.startswith("tiny with self:1:2 on a CPU, 2 threads, 1 round\n")
    assert "alpha 1.000" in text and "DIFFER" not in text and "rely" not in text
    assert "took 1.5 cores: do not rely" in text_of(run | {"busy_cores": 1.5, "results": [found]})
