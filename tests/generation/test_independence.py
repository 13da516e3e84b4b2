"""A request's tokens and log-probabilities are its own: whatever its neighbours, its slot, its
place in the queue, and who shares its prompt.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.generation import host, program
from infer.generation.host import Job
from infer.generation.prepare import RunOptions
from infer.sampling import SamplingParams
from infer.sampling.keys import draw_keys
from tests.generation.schedules import assert_row_equal, job_of, run_in
from tests.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@functools.cache
def _job() -> Job:
    """Return 64 requests of every kind, some behind common prompts, for a pool that is tight."""
    rng = np.random.default_rng(1)
    ids = lambda n: rng.integers(0, tiny.NUM_TOKENS, n).tolist()
    head = ids(19)
    prompts = [(head if i % 3 == 0 else []) + ids(int(rng.integers(1, 40))) for i in range(64)]
    each = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_k=int(rng.choice([0, 5, 40])),
            top_p=float(rng.choice([0.8, 1.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            logit_bias={3: 2.0} if i % 5 == 0 else {},
            max_tokens=int(rng.integers(1, 64)),
            seed=i,
        )
        for i in range(64)
    ]
    options = RunOptions(num_slots=8, page_size=4, num_pages=130, prefill_chunk=16)
    return job_of(tiny.gemma3(), prompts, each, options)


def _schedule(rng: np.random.Generator) -> list[int]:
    """Return a random load: any of the requests, any number of times, in any order."""
    return rng.integers(0, 64, int(rng.integers(1, 65))).tolist()


def test_a_hundred_thousand_tokens_in_random_company_are_bit_equal_to_solo_runs() -> None:
    job, rng = _job(), np.random.default_rng(2)
    solo = [run_in(job, [i], alone=True)[0] for i in range(64)]
    compared = schedules = 0
    while compared < 100_000:
        indices = _schedule(rng)
        together, _ = run_in(job, indices)
        for place, i in enumerate(indices):
            compared += assert_row_equal(together, place, solo[i], 0, f"row {i} at {place}")
        schedules += 1
    print(f"{compared} tokens in {schedules} schedules, 0 differ")


def test_a_key_that_depends_on_the_slot_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparison above can fail."""

    def by_slot(keys, choice, position, role):
        slots = jnp.arange(choice.shape[0], dtype=choice.dtype)
        return draw_keys(keys, choice + slots, position, role)

    monkeypatch.setattr(program, "draw_keys", by_slot)
    wrong = jax.jit(
        lambda *a, caps: host.traced_run(*a, caps=caps),
        static_argnames="caps",
        donate_argnums=2,
    )
    job, rng = _job(), np.random.default_rng(2)
    mismatches = 0
    for _ in range(3):
        indices = _schedule(rng)
        together, _ = run_in(job, indices, program=wrong)
        for place, i in enumerate(indices):
            alone, _ = run_in(job, [i], alone=True, program=wrong)
            n = int(alone.lengths[0])
            mismatches += not np.array_equal(together.tokens[place, :n], alone.tokens[0, :n])
    assert mismatches > 0


@pytest.mark.parametrize(
    "options",
    [
        dict(num_slots=3, page_size=8, prefill_chunk=8),
        dict(num_slots=1, page_size=16, prefill_chunk=64),
        dict(num_slots=16, page_size=1, prefill_chunk=1),
    ],
    ids=str,
)
def test_other_shapes_differ_by_rounding_only(options: dict[str, int]) -> None:
    """Across slots, pages and chunks: equal tokens wherever the two best are further apart than the
    rounding.
    """
    job = _job()
    prompts = [row.ids for row in job.rows][:24]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    run = functools.partial(infer.generate, tiny.gemma3(), prompts, sampling=sampling)
    base = run(num_slots=8, page_size=4, prefill_chunk=16)
    other = run(**options)
    bound, worst, ties = 2e-5, 0.0, 0
    for row in range(24):
        for step in range(40):
            if base.tokens[row, step] != other.tokens[row, step]:
                top = base.top_logprobs[row, step]
                assert top[0] - top[1] < 2 * bound, (row, step)
                ties += 1
                break
            worst = max(worst, abs(base.logprobs[row, step] - other.logprobs[row, step]))
    assert worst < bound
    print(f"largest log-probability difference {worst:.1e}, ties that went the other way: {ties}")
