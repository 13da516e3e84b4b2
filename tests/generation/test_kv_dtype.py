"""Keys and values cached in another dtype than the activations'."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import SamplingParams
from infer.errors import ConfigError, RequestError
from infer.generation.prepare import RunOptions
from tests.generation.test_generate import Letters
from tests.models import tiny

_PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [4, 4, 4]]
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_a_row_alone_has_the_tokens_of_the_batch(kv_dtype: str) -> None:
    params = tiny.llama()
    out = infer.generate(params, _PROMPTS, sampling=_GREEDY, kv_dtype=kv_dtype)
    for i, prompt in enumerate(_PROMPTS):
        alone = infer.generate(params, [prompt], sampling=_GREEDY, kv_dtype=kv_dtype)
        assert alone.token_ids(0) == out.token_ids(i)
    if kv_dtype == "float32":
        plain = infer.generate(params, _PROMPTS, sampling=_GREEDY)
        assert [plain.token_ids(i) for i in range(3)] == [out.token_ids(i) for i in range(3)]


def test_pools_have_the_dtype_inside_a_trace() -> None:
    prompts = jnp.asarray([[5, 6, 7, 8]], jnp.int32)
    run = lambda p, x: infer.generate(p, x, sampling=_GREEDY, kv_dtype="bfloat16").state.cache
    cache = jax.eval_shape(run, tiny.llama(), prompts)
    assert {x.dtype for x in (*cache.k_pages, *cache.v_pages)} == {jnp.dtype(jnp.bfloat16)}


def test_logprobs_move_by_the_rounding_alone() -> None:
    first = dataclasses.replace(_GREEDY, max_tokens=1)
    of = lambda kv: infer.generate(tiny.llama(), _PROMPTS, sampling=first, kv_dtype=kv).logprobs
    np.testing.assert_allclose(of("float16"), of(None), atol=2e-3)
    assert not np.array_equal(of("float16"), of(None))


@pytest.mark.parametrize("dtype", ["int3", "int8", jnp.float64, np.dtype("int32"), float])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype is .*; there are 'float32', 'bfloat16', 'fl"):
        RunOptions(kv_dtype=dtype)


@pytest.mark.parametrize(
    "dtype",
    ["float16", jnp.float16, np.float16, np.dtype("float16"), jnp.zeros(1, "float16").dtype],
)
def test_a_dtype_is_what_jax_takes_for_one(dtype: Any) -> None:
    assert RunOptions(kv_dtype=dtype) == RunOptions(kv_dtype="float16")
    assert RunOptions(kv_dtype=dtype).kv_dtype == "float16"


def test_a_dtype_object_gives_the_tokens_of_its_name() -> None:
    run = lambda d: infer.generate(tiny.llama(), _PROMPTS, sampling=_GREEDY, kv_dtype=d)
    by_name, by_class = run("bfloat16"), run(jnp.bfloat16)
    assert by_class.stats["compiles"] == 0
    np.testing.assert_array_equal(by_name.tokens, by_class.tokens)


def test_a_stream_goes_on_with_the_dtype_of_its_state() -> None:
    params, tokenizer = tiny.llama(), Letters()
    stream = infer.stream(
        params, "HELLO", tokenizer=tokenizer, sampling=_GREEDY, kv_dtype="float16"
    )
    "".join(stream)
    with pytest.raises(RequestError, match="the state's float16"):
        infer.stream(params, "HELLO THERE", tokenizer=tokenizer, state=stream.state)
