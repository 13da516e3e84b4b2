"""A real model: perplexity against transformers in float32, and what packed products cost."""

from pathlib import Path

import numpy as np
import pytest

import infer
from infer import native
from tests.real_models import real_model_path

pytestmark = [pytest.mark.real, pytest.mark.optimized]
GOLDEN = Path(__file__).parents[1] / "data" / "real_smollm2.npz"
LENGTH = 200


def test_perplexity_is_that_of_transformers() -> None:
    """The golden file is made by scripts/goldens/decoder.py --real."""
    golden = dict(np.load(GOLDEN))
    path = real_model_path("smollm2-135m")
    params = infer.load(path, packed=False).params
    names = ("prose", "code", "facts")
    texts = {name: golden[f"{name}_tokens"][None, :LENGTH] for name in names}
    got = infer.eval.perplexity(params, texts, scored="all")
    for name, found in zip(names, got.texts, strict=True):
        nll = golden[f"{name}_nll"][: LENGTH - 1]
        assert found.num_scored == nll.size
        assert np.log(found.perplexity.value) == pytest.approx(nll.mean(), rel=1e-3)
    if not native.by_default():
        pytest.skip("no native operations here, so no packed products to measure")
    packed = infer.load(path, packed=True).params
    near = infer.eval.divergence(params, packed, texts, scored="all").overall
    # Activations rounded to 8 bits: docs/evaluation.md has the figures of whole texts.
    assert 0 < near.kl.mean.value < 0.01
    assert near.same_top.value > 0.93
    assert infer.eval.control(packed, texts, scored="all").exact
