"""Turn by turn: the loop's own state, bit for bit, and what is read of each turn."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

import infer
from infer.compiling import num_traces
from infer.generation import turns
from infer.generation.host import Job
from infer.generation.prepare import RunOptions
from infer.generation.state import Finish
from infer.generation.turns import Turns, read
from infer.sampling import SamplingParams
from infer.spec import NGram
from tests.models import tiny

# Bits between programs: of the code that XLA makes for users.
pytestmark = pytest.mark.optimized

_LENGTHS = (5, 1, 9, 3)


def _job(**options: Any) -> Job:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.NUM_TOKENS, n).tolist() for n in (3, 40, 1, 17)]
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in _LENGTHS]
    run = RunOptions(**({"num_slots": 2, "prefill_chunk": 16} | options))
    return Job.prepare(tiny.llama(), prompts, None, None, each, None, run)


def _turns(job: Job, per_call: int = 1) -> Turns:
    return Turns(job.params, job.requests, job.state, caps=job.caps, per_call=per_call)


def _assert_equal_states(one: Job, state: object) -> None:
    pairs = zip(jax.tree.leaves(one.state), jax.tree.leaves(state), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("per_call", [1, 3])
def test_the_state_is_that_of_the_loop_bit_for_bit_and_compiles_once(per_call: int) -> None:
    whole, before = _job(), num_traces(turns.PROGRAM)
    whole.run_all()
    for _ in range(2):
        stepped = _turns(_job(), per_call)
        seen = list(stepped)
        _assert_equal_states(whole, stepped.state)
        assert [t.turns for t in seen] == list(range(1, int(whole.state.counters.turns) + 1))
        assert [t.running for t in seen] == [True] * (len(seen) - 1) + [False]
    assert num_traces(turns.PROGRAM) - before <= 1


def test_a_turn_says_each_token_once_and_why_a_request_ended() -> None:
    job = _job()
    tokens: dict[int, list[int]] = {}
    finish: dict[int, int] = {}
    for turn in _turns(job):
        for b, row in enumerate(turn.request.tolist()):
            if row == job.caps.requests:
                continue
            found = tokens.setdefault(row, [])
            if turn.num_generated[b] > len(found):
                found.append(int(turn.token[b]))
            assert len(found) == turn.num_generated[b]
            finish[row] = int(turn.finish[b])
    whole = _job()
    whole.run_all()
    result = whole.result()
    assert tokens == {i: result.token_ids(i) for i in range(4)}
    assert finish == dict.fromkeys(range(4), int(Finish.LENGTH))


def test_a_turn_of_a_drafter_says_all_tokens_it_adds() -> None:
    draft = NGram(k=3, min_match=1, adaptive=False)
    whole, job = _job(draft=draft), _job(draft=draft)
    whole.run_all()
    stepped = Turns(job.params, job.requests, job.state, caps=job.caps, drafter=draft)
    found: dict[int, list[int]] = {}
    most = 0
    for turn in stepped:
        for b, row in enumerate(turn.request.tolist()):
            if row == job.caps.requests:
                continue
            tokens = found.setdefault(row, [])
            new = int(turn.num_generated[b]) - len(tokens)
            most = max(most, new)
            tokens += turn.tokens[b, turn.tokens.shape[1] - new :].tolist()
    result = whole.result()
    assert found == {i: result.token_ids(i) for i in range(4)}
    assert most > 1
    _assert_equal_states(whole, stepped.state)
    with pytest.raises(ValueError, match="drafter is None, and the state's is NGram"):
        Turns(job.params, job.requests, _job(draft=draft).state, caps=job.caps)


def test_a_call_with_nothing_to_do_changes_nothing() -> None:
    whole = _job()
    whole.run_all()
    stepped = _turns(_job())
    for _ in stepped:
        pass
    for _ in range(3):
        (turn,) = read(stepped.start())
        assert not turn.running and turn.turns == int(whole.state.counters.turns)
        assert turn.request.tolist() == [whole.caps.requests] * 2
    _assert_equal_states(whole, stepped.state)


def test_goes_on_where_the_loop_stopped() -> None:
    job, whole = _job(), _job()
    whole.run_all()
    job.run_to_first_tokens()
    stepped = _turns(job)
    for _ in stepped:
        pass
    _assert_equal_states(whole, stepped.state)


def test_who_leaves_off_early_has_run_one_turn_more() -> None:
    stepped = _turns(_job())
    third = next(t for t in stepped if t.turns == 3)
    assert third.running and int(stepped.state.counters.turns) == 4


def test_a_pool_that_is_too_small_ends_it() -> None:
    job = _job(page_size=4)
    cache = dataclasses.replace(job.state.cache, overflow=np.array(True))
    job.state = dataclasses.replace(job.state, cache=cache)
    (turn,) = list(_turns(job))
    assert turn.overflow and turn.running and turn.turns == 0


@pytest.mark.parametrize("given", [1, 4])
def test_it_decodes_what_generate_does(given: int) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, tiny.NUM_TOKENS, 6).tolist() for _ in range(given)]
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
    job = Job.prepare(tiny.llama(), prompts, None, None, sampling, None, RunOptions())
    stepped = _turns(job)
    for _ in stepped:
        pass
    job.state = stepped.state
    want = infer.generate(tiny.llama(), prompts, sampling=sampling)
    assert np.array_equal(job.result().tokens, want.tokens)


@pytest.mark.parametrize("per_call", [0, -1, True])
def test_a_call_of_no_turns_is_refused(per_call: int) -> None:
    with pytest.raises(
        ValueError, match=f"per_call is {per_call}, must be an integer of at least 1"
    ):
        _turns(_job(), per_call)


@pytest.mark.parametrize("per_call", [1, 3])
def test_no_pool_is_copied(per_call: int) -> None:
    job = _job()
    stepped = _turns(job, per_call)
    text = stepped._program.lower(stepped._bound, stepped._leaves).compile().as_text()
    pool = ",".join(map(str, stepped.state.cache.k_pages[0].shape))
    assert f"f32[{pool}]" in text
    assert not re.findall(rf"= f32\[{pool}\]\S* copy\(", text)
