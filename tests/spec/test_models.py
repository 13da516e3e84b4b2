"""Drafters that are models, inside `generate`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.errors import ConfigError, RequestError
from infer.models.params import random_params
from infer.sampling import SamplingParams
from infer.spec import DraftModel, SelfDraft, policy
from infer.spec.vocabulary import intersect
from tests import typecheck
from tests.generation.test_sharing import _load
from tests.models import tiny
from tests.real_models import real_model_path
from tests.spec import model_pairs

# Refilled slots, prompts in several chunks, pages that are waited for.
OPTIONS = dict(num_slots=3, page_size=4, num_pages=48, prefill_chunk=16)
K = 3


@functools.cache
def _requests():
    """Mixed prompts, some shared, some asked several times; greedy and sampled rows, penalties."""
    return _load(24, seed=4)


@functools.cache
def _plain(params_name: str):
    return _generate(TARGETS[params_name]())


def _generate(params, draft=None):
    prompts, each = _requests()
    return infer.generate(
        params, prompts, sampling=each, key=jax.random.key(0), draft=draft, **OPTIONS
    )


TARGETS = {
    "llama": tiny.llama,
    "half idle": lambda: model_pairs.late_layers_idle(tiny.llama(), 1),
}


def _equal(out, plain, atol: float = 1e-4) -> None:
    np.testing.assert_array_equal(out.lengths, plain.lengths)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.finish_reason == plain.finish_reason
    # Passes over more tokens: plain XLA's sums have another order.
    np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=atol)


def _coupled(params, **options) -> DraftModel:
    return DraftModel(params, k=K, rule="coupled", adaptive=False, **options)


def test_the_target_drafting_for_itself_is_always_right() -> None:
    # What the drafter has read is what the target has, through forks, refills, chunks and pages
    # that are given back: a wrong or missing key would show as a draft that falls.
    out = _generate(tiny.llama(), _coupled(tiny.llama()))
    _equal(out, _plain("llama"))
    assert out.stats["acceptance_rate"] == 1.0
    assert out.stats["forks"] > 0 and out.stats["refills"] > 0 and out.stats["pages_copied"] > 0


def test_a_drafter_that_is_sometimes_right_changes_no_token() -> None:
    out = _generate(tiny.llama(), _coupled(model_pairs.noisy(tiny.llama(), 0.25)))
    _equal(out, _plain("llama"))
    assert 0.1 < out.stats["acceptance_rate"] < 0.9


def test_drafting_again_after_turns_without_drafts_reads_what_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Drafts are asked for in each sixth turn, of a drafter that is always right: what it missed
    # must be there.  (Costs that no other test has: the program is traced here.)
    monkeypatch.setattr(policy, "limit_now", lambda known: (known.idle >= 5).astype(jnp.int32))
    draft = DraftModel(tiny.llama(), k=K, rule="coupled", costs=(1.0, 1.0078125))
    out = _generate(tiny.llama(), draft)
    _equal(out, _plain("llama"))
    assert out.stats["acceptance_rate"] == 1.0


def test_a_drafter_with_other_heads_windows_and_vocabulary_width() -> None:
    config = dataclasses.replace(tiny.gemma3_config(), vocab_size=90)
    out = _generate(tiny.llama(), _coupled(random_params(config, seed=2)))
    _equal(out, _plain("llama"))
    assert out.stats["acceptance_rate"] < 0.2


def test_self_drafting_with_the_layers_that_count_is_always_right() -> None:
    params = TARGETS["half idle"]()
    draft = SelfDraft(layers=1, k=K, rule="coupled", adaptive=False)
    out = _generate(params, draft)
    _equal(out, _plain("half idle"))
    assert out.stats["acceptance_rate"] == 1.0


def test_self_drafting_with_too_few_layers_changes_no_token() -> None:
    out = _generate(tiny.llama(), SelfDraft(layers=1, k=K, rule="coupled", adaptive=False))
    _equal(out, _plain("llama"))
    assert out.stats["acceptance_rate"] < 0.5


# ---- another vocabulary --------------------------------------------------------------------------

# The drafter's ids are the target's, in another order; of some tokens it has other bytes.
_ORDER = np.random.default_rng(3).permutation(tiny.NUM_TOKENS)
_BYTES = [b"%d." % i for i in range(tiny.NUM_TOKENS)]
_PADDING = [None] * (tiny.llama_config().vocab_size - tiny.NUM_TOKENS)


def _mapped(lacks: int) -> DraftModel:
    """Return the target under other ids as a drafter that lacks some of its tokens."""
    theirs = [b"other" if i < lacks else _BYTES[i] for i in _ORDER]
    mapping = intersect(theirs + _PADDING, _BYTES + _PADDING)
    return _coupled(model_pairs.permuted(tiny.llama(), _ORDER), vocabulary=mapping)


def test_a_drafter_of_other_ids_that_has_all_tokens_is_always_right() -> None:
    out = _generate(tiny.llama(), _mapped(lacks=0))
    _equal(out, _plain("llama"))
    assert out.stats["acceptance_rate"] == 1.0


def test_a_drafter_that_lacks_tokens_changes_no_token() -> None:
    out = _generate(tiny.llama(), _mapped(lacks=10))
    _equal(out, _plain("llama"))
    assert 0.1 < out.stats["acceptance_rate"] < 1.0


# ---- real models ---------------------------------------------------------------------------------

# Natively where that can be built; plain XLA multiplies floats in other orders for one token and
# for several: near enough.
_TEXTS = ["The history of the Roman Empire began", "def fibonacci(n):\n    if n < 2:\n"]


@pytest.mark.real
@pytest.mark.optimized
def test_smollm2_drafts_for_gemma3_in_another_vocabulary() -> None:
    target = infer.load(real_model_path("gemma3-270m"), packed=None)
    small = infer.load(real_model_path("smollm2-135m"), packed=None)
    draft = DraftModel.of(small, target, k=2, adaptive=False)
    assert draft.vocabulary is not None
    sampling = SamplingParams(temperature=0, max_tokens=24)
    plain = target.generate(_TEXTS, sampling)
    out = target.generate(_TEXTS, sampling, draft=draft)
    _equal(out, plain, atol=1e-3)
    assert 0.2 < out.stats["acceptance_rate"] < 1


@pytest.mark.real
@pytest.mark.optimized
def test_smollm2s_first_layers_draft_for_it() -> None:
    model = infer.load(real_model_path("smollm2-135m"), packed=None)
    sampling = SamplingParams(temperature=0, max_tokens=24)
    plain = model.generate(_TEXTS, sampling)
    out = model.generate(_TEXTS, sampling, draft=SelfDraft(layers=24, k=2, adaptive=False))
    _equal(out, plain, atol=1e-3)
    assert 0.1 < out.stats["acceptance_rate"] < 1


# ---- what is refused -----------------------------------------------------------------------------


def test_drafters_that_cannot_draft_are_refused_by_name() -> None:
    other = random_params(tiny.llama_config(num_tokens=80), seed=0)
    cases = {
        r"knows 80 tokens .* 90: .*DraftModel\.of": DraftModel(other),
        r"map is from 8 ids to 96, its logits are over 96": DraftModel(
            tiny.llama(), vocabulary=intersect([b"a"] * 8, [b"a"] * 96)
        ),
        r"layers is 2, and the model has 2; .*1 to 1": SelfDraft(layers=2),
    }
    with typecheck.unchecked():
        cases[r"params are a str; pass a model's weights"] = DraftModel("smollm2-135m")
        with pytest.raises(RequestError, match=r"model is a Params; .*DraftModel\(params\)"):
            DraftModel.of(tiny.llama(), tiny.llama())
    for text, draft in cases.items():
        with pytest.raises(RequestError, match=text):
            _generate(tiny.llama(), draft)
    with pytest.raises(RequestError, match="k is 0; it must be an integer from 1"):
        DraftModel(tiny.llama(), k=0)
    with pytest.raises(RequestError, match="layers is 0; it must be an integer of at least 1"):
        SelfDraft(layers=0)
    with pytest.raises(ConfigError, match="none in common"):
        intersect([b"a"], [b"b"])
