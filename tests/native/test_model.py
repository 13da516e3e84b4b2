"""A whole model through the native operations: same tokens as plain XLA, same bits in any batch."""

import dataclasses

import jax
import numpy as np
import pytest

import infer
from infer.config import LayerConfig, RopeConfig
from infer.models.params import random_params
from infer.native.repack import repack
from infer.sampling import SamplingParams
from tests.models import tiny

# Bits between programs: of the code that XLA makes for users.
pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def params():
    """Two layers, one with a window, of widths that the kernels take."""
    config = tiny.gemma3_config()
    layers = (LayerConfig(rope=RopeConfig(theta=1e4), window=5), LayerConfig())
    config = dataclasses.replace(config, hidden_size=64, intermediate_size=96, layers=layers)
    return random_params(config, seed=2)


PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [21], [5, 5, 5, 5]]
SAMPLING = [
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=5, temperature=1.0, seed=3),
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=4, temperature=0),
]


def _run(params, implementation: str, prompts=PROMPTS, sampling=SAMPLING):
    return infer.generate(
        params,
        prompts,
        sampling=sampling,
        num_slots=2,
        page_size=4,
        share_prefixes=False,
        implementation=implementation,
    )


def test_attention_and_cache_writes_give_the_tokens_of_plain_xla(params) -> None:
    native, plain = _run(params, "native"), _run(params, "xla")
    np.testing.assert_array_equal(native.tokens, plain.tokens)
    np.testing.assert_allclose(native.logprobs, plain.logprobs, atol=1e-5)
    ran = native.stats["implementations"]
    assert (ran["paged_attention"], ran["rope_write"]) == ("native", "native")


def test_packed_float_weights_give_them_too(params) -> None:
    """Float weights are multiplied unrounded: only the order of sums differs."""
    is_matrix = lambda x: hasattr(x, "ndim") and x.ndim == 2
    packed = jax.tree.map(lambda x: repack(x) if is_matrix(x) else x, params)
    native, plain = _run(packed, "native"), _run(params, "xla")
    np.testing.assert_array_equal(native.tokens, plain.tokens)
    np.testing.assert_allclose(native.logprobs, plain.logprobs, atol=2e-5)
    assert native.stats["implementations"]["linear"] == "native"
    for i, prompt in enumerate(PROMPTS):
        alone = _run(packed, "native", [prompt], [SAMPLING[i]])
        np.testing.assert_array_equal(alone.token_ids(0), native.token_ids(i))
        count = len(alone.token_ids(0))
        np.testing.assert_array_equal(alone.logprobs[0, :count], native.logprobs[i, :count])


def test_packed_weights_have_no_plain_form(params) -> None:
    packed = dataclasses.replace(params, embed=repack(params.embed))
    with pytest.raises(
        NotImplementedError, match=r"load a GGUF file with packed='blocks', a folder with"
    ):
        _run(packed, "xla")
