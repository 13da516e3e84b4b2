"""Requests run together and one by one through the same compiled program, for comparison."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from infer.cache import paged
from infer.generation import host, rows
from infer.generation.host import Job
from infer.generation.prefixes import Prefixes
from infer.generation.prepare import RunOptions
from infer.generation.state import Output, State
from infer.models.params import Params
from infer.sampling import SamplingParams

FOREVER = np.int32(2**31 - 1)


def job_of(
    params: Params,
    prompts: list[list[int]],
    each: Sequence[SamplingParams],
    options: RunOptions,
) -> Job:
    return Job.prepare(params, prompts, None, None, list(each), jax.random.key(0), options)


def run_job(job: Job) -> State:
    """Run a job's requests in the order they have, checking the pool's accounts at the end."""
    job.run_all()
    paged.check_invariants(job.state.cache)
    assert int(job.state.cache.page_refs.sum()) == 0
    assert int(job.state.next_request) == len(job.rows)
    return job.state


def run_in(
    job: Job,
    indices: Sequence[int],
    *,
    alone: bool = False,
    program: Callable[..., State] = host.run_program,
) -> tuple[Output, State]:
    """Run the given rows of a job, in this order, by its program at its caps.

    Args:
        job: gives parameters, caps and rows; its own state is not used.
        indices: rows.
        alone: nobody shares pages.
        program: what runs them.
    """
    caps = job.caps
    chosen = [job.rows[i] for i in indices]
    # Keys belong to the requests, not to where they stand.
    of_all = job.requests.sampling
    at = jnp.asarray([*indices, *[len(job.rows) - 1] * (caps.requests - len(indices))], jnp.int32)
    sampling = jax.tree.map(lambda leaf: leaf[at], of_all)
    prefixes = Prefixes.none(caps.requests)
    if not alone:
        prefixes = host.prefixes_of(chosen, job.params.config, caps)
    requests = rows.request_arrays(chosen, sampling, prefixes, caps)
    state = host.start(job.params, requests, caps=caps, pad_id=0)
    state = program(
        job.params, requests, state, jnp.asarray(FOREVER), jnp.zeros((), bool), caps=caps
    )
    paged.check_invariants(state.cache)
    assert int(state.cache.page_refs.sum()) == 0
    return jax.device_get(state.output), state


def assert_row_equal(got: Output, i: int, want: Output, j: int, name: str = "") -> int:
    """Assert that two rows are bit-equal, tokens and log-probabilities; return their length."""
    n = int(want.lengths[j])
    assert int(got.lengths[i]) == n, name
    np.testing.assert_array_equal(got.tokens[i, :n], want.tokens[j, :n], err_msg=name)
    np.testing.assert_array_equal(got.logprobs[i, :n], want.logprobs[j, :n], err_msg=name)
    assert got.finish[i] == want.finish[j], name
    return n
