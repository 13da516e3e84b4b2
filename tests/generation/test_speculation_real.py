"""Speculation on the two real models with native operations: plain decoding's tokens and bits.

50 prompts, the coupled mode and drawn distributions are in scripts/prove_speculation.py.
"""

import numpy as np
import pytest

import infer
from infer import native
from infer.spec import NGram
from tests.real_models import real_model_path

pytestmark = [
    pytest.mark.real,
    pytest.mark.optimized,
    pytest.mark.skipif(not native.by_default(), reason="native operations are not built, or off"),
]
PROMPTS = [
    "one two three one two three one",
    "def double(x):\n    return x * 2\n\ndef triple(x):\n    return x",
    "The sea is",
]


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_greedy_and_coupled_tokens_are_those_of_plain_decoding(name: str) -> None:
    model = infer.load(real_model_path(name), packed=True)
    each = [
        infer.SamplingParams(temperature=t, top_p=0.95, seed=i, max_tokens=32, stop=stop)
        for i, (t, stop) in enumerate([(0.0, ()), (0.7, ()), (0.0, ("\n\n",))])
    ]
    draft = NGram(k=4, min_match=1, rule="coupled", adaptive=False)
    plain = model.generate(PROMPTS, each, num_slots=2)
    drafted = model.generate(PROMPTS, each, num_slots=2, draft=draft)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-4)
    assert drafted.text == plain.text and drafted.finish_reason == plain.finish_reason
    assert drafted.stats["accepted"] > 0
