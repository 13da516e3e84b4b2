"""Forked samples and shared prefixes: the same bits as alone, and exact accounts of pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from infer.compiling import num_traces
from infer.generation.prefixes import find_prefixes
from infer.generation.prepare import RunOptions
from infer.sampling import SamplingParams
from tests.generation.schedules import assert_row_equal, job_of, run_in, run_job
from tests.models import tiny


def _load(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of mixed length, two of three behind one of two system prompts, some asked
    several times.
    """
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(0, tiny.NUM_TOKENS, n).tolist()
    systems = [ids(24), ids(37)]
    prompts, each = [], []
    for i in range(count):
        head = systems[i % 3] if i % 3 < 2 else []
        prompts.append(head + ids(int(rng.integers(1, 30))))
        each.append(
            SamplingParams(
                n=int(rng.choice([1, 1, 1, 1, 2, 3])),
                temperature=float(rng.choice([0.0, 0.8, 1.3])),
                top_p=0.95,
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                seed=i,
                max_tokens=int(rng.integers(1, 20)),
            )
        )
    for i in range(5, count, 9):
        prompts[i] = list(prompts[i - 3])
    return prompts, each


def test_two_hundred_prompts_through_eight_slots_equal_as_many_solo_runs() -> None:
    prompts, each = _load(200, seed=0)
    # A pool of three long requests: the queue has to wait for pages, and holders to give them back.
    options = RunOptions(num_slots=8, page_size=4, num_pages=72, prefill_chunk=16)
    job = job_of(tiny.llama(), prompts, each, options)
    before = num_traces("generate")
    counters = run_job(job).counters
    assert num_traces("generate") == before + 1
    together = jax.device_get(job.state.output)
    for i in range(len(job.rows)):
        alone, _ = run_in(job, [i], alone=True)
        assert_row_equal(together, i, alone, 0, f"row {i}")
    assert num_traces("generate") == before + 1
    for name in ("page_waits", "refills", "forks", "pages_copied", "shared_tokens"):
        assert int(getattr(counters, name)) > 0, name
    asked = sum(len(row.ids) for row in job.rows)
    # What was not shared went through the layers; what a holder gave back was computed again.
    assert int(counters.prompt_tokens) + int(counters.shared_tokens) == asked


def test_samples_of_one_prompt_cost_one_prefill_whatever_the_slots() -> None:
    prompt = list(range(1, 24))
    sampling = SamplingParams(n=9, temperature=1.0, max_tokens=6, seed=3)
    results = []
    for num_slots, share in ((2, True), (2, False), (9, True)):
        out = infer.generate(
            tiny.llama(),
            [prompt],
            sampling=sampling,
            num_slots=num_slots,
            page_size=4,
            prefill_chunk=8,
            share_prefixes=share,
        )
        results.append(out)
        assert out.stats["prompt_tokens"] == (23 if share else 9 * 23)
        assert out.stats["forks"] == (8 if share else 0)
        # Tokens 20 to 22 lie in a page that is not full: each fork writes behind them.
        assert out.stats["pages_copied"] == (8 if share else 0)
    two, unshared, nine = results
    np.testing.assert_array_equal(two.tokens, unshared.tokens)
    np.testing.assert_array_equal(two.logprobs, unshared.logprobs)
    np.testing.assert_array_equal(two.tokens, nine.tokens)
    assert len({tuple(row) for row in two.tokens.tolist()}) == 9


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 9])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_forks_at_page_borders_and_with_one_token(prompt_len: int, max_tokens: int) -> None:
    run = lambda share: infer.generate(
        tiny.llama(),
        [list(range(prompt_len))],
        sampling=SamplingParams(n=5, temperature=1.0, max_tokens=max_tokens, seed=1, logprobs=1),
        num_slots=2,
        page_size=4,
        prefill_chunk=8,
        share_prefixes=share,
    )
    shared, alone = run(True), run(False)
    np.testing.assert_array_equal(shared.tokens, alone.tokens)
    np.testing.assert_array_equal(shared.logprobs, alone.logprobs)
    assert shared.stats["pages_copied"] == (4 if prompt_len % 4 and max_tokens > 1 else 0)


def test_a_pool_for_one_request_lets_the_holder_go_rather_than_stop() -> None:
    run = lambda share: infer.generate(
        tiny.llama(),
        [list(range(10))],
        sampling=SamplingParams(n=4, temperature=1.0, max_tokens=7, seed=1),
        num_slots=3,
        page_size=4,
        num_pages=4,
        share_prefixes=share,
    )
    shared, alone = run(True), run(False)
    np.testing.assert_array_equal(shared.tokens, alone.tokens)
    assert shared.stats["page_waits"] > 0


def test_inside_jit_samples_share_and_score_their_prompt_once() -> None:
    params, prompts = tiny.llama(), jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=2, prompt_logprobs=2)
    run = jax.jit(
        lambda params, prompts: infer.generate(
            params, prompts, prompt_lens=jnp.asarray([10, 7]), sampling=sampling, num_slots=2
        )
    )
    pure = run(params, prompts)
    host = infer.generate(
        params, [prompts[0].tolist(), prompts[1, :7].tolist()], sampling=sampling, num_slots=2
    )
    np.testing.assert_array_equal(pure.tokens, host.tokens)
    assert int(pure.state.counters.forks) == 4 == host.stats["forks"]
    for row, length in enumerate([10] * 3 + [7] * 3):
        np.testing.assert_allclose(
            pure.prompt_logprobs[row, 1:length], host.prompt_logprobs[row][1:], atol=1e-5
        )
        np.testing.assert_array_equal(
            pure.prompt_top_tokens[row, 1:length, :2], host.prompt_top_tokens[row][1:]
        )


def test_find_prefixes_by_hand() -> None:
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9]
    prompts = [a + b, a + c, a + b, a + b + c, a + b + c + c, c, a]
    found = find_prefixes(prompts, [0] * 7, [False] * 7, 8, block=4)
    assert found.parent.tolist() == [8, 0, 0, 0, 0, 8, 8, 8]
    # Row 6 is one block exactly, and no row is equal: its last token has to be computed, and with
    # it the block.  Row 3 has no third block, only what is left over.
    assert found.shared.tolist() == [0, 4, 8, 8, 8, 0, 0, 0]
    assert found.last_child.tolist() == [4, -1, -1, -1, -1, -1, -1, -1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans(), st.booleans()
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_find_prefixes_against_comparing_everything(rows, block: int) -> None:
    prompts = [ids for ids, _, _ in rows]
    spans, scored = [int(s) for _, s, _ in rows], [s for _, _, s in rows]
    found = find_prefixes(prompts, spans, scored, len(rows), block)
    for i, ids in enumerate(prompts):
        best = 0
        for j in range(i):
            if spans[j] != spans[i] or scored[i]:
                continue
            same = next(
                (k for k, (x, y) in enumerate(zip(ids, prompts[j], strict=False)) if x != y),
                min(len(ids), len(prompts[j])),
            )
            whole = ids == prompts[j]
            best = max(best, len(ids) if whole else min(same, len(ids) - 1) // block * block)
        assert found.shared[i] == best, (i, prompts)
        if best:
            parent = found.parent[i]
            assert parent < i and prompts[parent][:best] == ids[:best]
            assert found.last_child[parent] >= i
        else:
            assert found.parent[i] == len(rows)
