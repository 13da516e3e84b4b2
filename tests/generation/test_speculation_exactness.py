"""Speculation through `generate` has exactly the target's distribution.

32,768 requests a setting run to five tokens in batches of 4,096 slots, and their joint
distribution (1,024 cells) is compared with an enumeration, as in tests/spec/test_exactness.py.  The
rate of false alarms is 1e-4 for the file: 32 comparisons.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.spec import Drafter, DraftModel, Lookahead, NGram, Suffix
from tests.spec import stub_pair
from tests.spec.agreement import compare
from tests.spec.stub_pair import SETTINGS, V
from tests.spec.table_model import Table, logits_of, model_of, target

RUNS, BATCH, LENGTH = 32_768, 4_096, 5
FALSE_ALARMS = 1e-4 / 32
PROMPT = (1,)
# The second changes the number of drafts by what earlier rounds brought; Table has weights.
DRAFTERS = {
    "token, n-gram": NGram(k=3, min_match=1, rule="token", adaptive=False),
    "block, suffix, tiers": Suffix(
        k=3, spec_factor=4.0, min_token_prob=0.0, tiers=(0, 1, 3), costs=(1.0, 1.2, 1.5)
    ),
    "block, lookahead": Lookahead(k=3, n=2, pool=8, tiers=(0, 2, 3), costs=(1.0, 1.4, 1.5)),
    "token, drawn": Table.of_draft(k=3, rule="token", adaptive=False),
    "block, drawn, tiers": Table.of_draft(k=3, tiers=(0, 1, 3), costs=(1.0, 1.2, 1.4)),
    "token, a model": DraftModel(model_of(stub_pair.DRAFT), k=3, rule="token", adaptive=False),
    "block, a model, tiers": DraftModel(
        model_of(stub_pair.DRAFT), k=3, tiers=(0, 1, 3), costs=(1.0, 1.2, 1.4)
    ),
    "coupled, n-gram": NGram(k=3, min_match=1, rule="coupled", adaptive=False),
}


def test_the_models_weights_are_the_stubs_table() -> None:
    got = logits_of(target(), jnp.arange(V, dtype=jnp.int32))
    np.testing.assert_allclose(got, stub_pair.TARGET, atol=1e-5)


@functools.partial(jax.jit, static_argnames="drafter_tree")
def _run(params, leaves, state, *, drafter_tree):
    drafter = jax.tree.unflatten(drafter_tree, leaves)
    prompts = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (BATCH, len(PROMPT)))
    out = infer.generate(
        params, prompts, sampling=state, max_tokens=LENGTH, num_slots=BATCH, draft=drafter
    )
    s = out.state.speculation
    return out.tokens, s.drafted, s.accepted, s.passes


@functools.lru_cache(maxsize=1)
def _batches() -> list:
    """Return all requests as batches, each with every setting."""
    state = stub_pair.states(SETTINGS, RUNS)
    order = np.arange(len(SETTINGS) * RUNS).reshape(len(SETTINGS), RUNS).T.reshape(-1, BATCH)
    return [jax.tree.map(lambda leaf, at=at: leaf[at], state) for at in order]


@functools.lru_cache(maxsize=1)
def _expected() -> list[np.ndarray]:
    return [stub_pair.exact(setting, PROMPT, LENGTH) for setting in SETTINGS]


@pytest.mark.slow
@pytest.mark.optimized  # at -O0 the runs take longer than XLA's compiler does otherwise
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_distribution_is_exactly_the_target(name: str) -> None:
    drafter: Drafter = DRAFTERS[name]
    leaves, tree = jax.tree.flatten(drafter)
    runs = [_run(target(), leaves, state, drafter_tree=tree) for state in _batches()]
    tokens = np.concatenate([np.asarray(run[0]) for run in runs])
    drafted, accepted, passes = (
        np.sum([np.asarray(r[i]) for r in runs], axis=0) for i in (1, 2, 3)
    )
    cells = tokens @ V ** np.arange(LENGTH - 1, -1, -1)
    for i, setting in enumerate(SETTINGS):
        counts = np.bincount(cells[i :: len(SETTINGS)], minlength=V**LENGTH)
        agreement = compare(counts, _expected()[i], false_alarms=FALSE_ALARMS)
        print(name, setting, agreement)
        assert agreement.holds(FALSE_ALARMS), (setting, agreement)
    # The drafts matter: at each position some stand and some do not.
    met = drafted > 0  # how far one drafter reaches depends on the text
    drafted, accepted = drafted[met], accepted[met]
    assert met[0] and (drafted > 1000).all()
    assert (0 < accepted).all() and (accepted < drafted).all()
    assert (passes[1:] > 0).any()
