"""Keys and values cached in another dtype than the activations'."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from infer import SamplingParams, native
from infer.cache.pool import KV_DTYPES, QuantizedPool
from infer.config import LayerConfig, RopeConfig
from infer.errors import ConfigError, RequestError
from infer.generation import host
from infer.generation.prepare import RunOptions
from infer.models.params import random_params
from infer.ops.rope import apply_rope, rope_table
from infer.quant.hadamard import transform
from infer.quant.kv import KV_FORMATS
from infer.spec import NGram
from tests.generation.test_generate import Letters
from tests.models import tiny

_PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [4, 4, 4]]
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
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


@pytest.mark.parametrize("dtype", ["int3", "fp8_e5m2", jnp.float64, np.dtype("int32"), float])
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


# ---- Quantised -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_every_implementation_says_what_it_ran(kv_dtype: str, implementation: str | None) -> None:
    first = dataclasses.replace(_GREEDY, max_tokens=2)
    out = infer.generate(
        tiny.llama(), _PROMPTS, sampling=first, kv_dtype=kv_dtype, implementation=implementation
    )
    want = infer.generate(
        tiny.llama(), _PROMPTS, sampling=first, kv_dtype=kv_dtype, implementation="xla"
    )
    np.testing.assert_allclose(out.logprobs[:, 0], want.logprobs[:, 0], atol=2e-3)
    ran = out.stats["implementations"]
    if implementation == "interpret":  # the Triton kernel writes floats only
        assert (ran["paged_attention"], ran["rope_write"]) == ("interpret", "xla")
    else:
        of = implementation or ("native" if native.by_default() else "xla")
        assert (ran["paged_attention"], ran["rope_write"]) == (of, of)


@pytest.mark.parametrize(
    ("kv_dtype", "atol"), [("int8", 0.02), ("fp8", 0.15), ("int4", 0.4), ("int4_hadamard", 0.4)]
)
def test_quantised_logprobs_move_by_the_rounding_alone(kv_dtype: str, atol: float) -> None:
    prompts = [np.random.default_rng(i).integers(3, 90, 40).tolist() for i in range(3)]
    first = dataclasses.replace(_GREEDY, max_tokens=1)
    of = lambda kv: infer.generate(tiny.llama(), prompts, sampling=first, kv_dtype=kv).logprobs
    np.testing.assert_allclose(of(kv_dtype), of(None), atol=atol)
    assert not np.array_equal(of(kv_dtype), of(None))


@pytest.mark.optimized
@pytest.mark.parametrize("kv_dtype", [*KV_FORMATS, "int4_hadamard"])
def test_chunks_slots_and_shared_prefixes_do_not_change_a_bit(kv_dtype: str) -> None:
    """Refill, forks of one prompt, common beginnings and chunks; natively all bits are equal."""
    if not native.by_default():
        pytest.skip("plain XLA promises equal bits at equal shapes only")
    begin = np.random.default_rng(0).integers(3, 90, 37).tolist()
    prompts = [[*begin, 5], [*begin, 6, 7], [9, 8], [*begin, 5], [4] * 20]
    sampling = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=9, ignore_eos=True)
    run = lambda prompts, **more: infer.generate(
        tiny.llama(), prompts, sampling=sampling, kv_dtype=kv_dtype, page_size=4, **more
    )
    whole = run(prompts)
    refilled = run(prompts, num_slots=3, prefill_chunk=8)
    alone = run(prompts[1:2], share_prefixes=False)
    np.testing.assert_array_equal(whole.tokens, refilled.tokens)
    np.testing.assert_array_equal(whole.logprobs, refilled.logprobs)
    np.testing.assert_array_equal(whole.logprobs[2:4], alone.logprobs)
    assert whole.stats["shared_tokens"] and whole.stats["pages_copied"]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_requests_bits_in_random_company(data: st.DataObject) -> None:
    """Of one program: other requests, slots and seeds beside it change nothing."""
    kv_dtype = data.draw(st.sampled_from(KV_FORMATS))
    mine = data.draw(st.lists(st.integers(3, 89), min_size=1, max_size=16))
    others = data.draw(
        st.lists(st.lists(st.integers(3, 89), min_size=1, max_size=16), min_size=3, max_size=3)
    )
    at = data.draw(st.integers(0, 3))
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    run = lambda prompts: infer.generate(
        tiny.llama(), prompts, sampling=sampling, kv_dtype=kv_dtype, num_slots=2, page_size=4
    )
    together = run([*others[:at], mine, *others[at:]])
    beside_itself = run([mine] * 4)
    np.testing.assert_array_equal(together.tokens[at], beside_itself.tokens[0])
    np.testing.assert_array_equal(together.logprobs[at], beside_itself.logprobs[0])


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_a_saved_stream_goes_on_with_the_same_bits(kv_dtype: str, tmp_path: Path) -> None:
    params, tokenizer = tiny.llama(), Letters()
    begin = lambda: infer.stream(
        params, "HELLO", tokenizer=tokenizer, sampling=_GREEDY, kv_dtype=kv_dtype
    )
    whole = "".join(begin())
    stream = begin()
    said = "".join(next(stream) for _ in range(4))
    infer.save_state(tmp_path / "state.safetensors", stream.state)
    state = infer.load_state(tmp_path / "state.safetensors", params)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(stream.state), strict=True):
        assert a.dtype == b.dtype
    assert isinstance(state.state.cache.k_pages[0], QuantizedPool)
    assert said + "".join(infer.stream(params, tokenizer=tokenizer, state=state)) == whole
    # The next message of the conversation starts from what is cached, and only with this cache.
    more = infer.stream(params, "HELLO THERE", tokenizer=tokenizer, state=state, kv_dtype=kv_dtype)
    next(more)
    assert more.state.state.counters.shared_tokens >= 5
    with pytest.raises(RequestError, match=f"kv_dtype is float16, the state's {kv_dtype}"):
        infer.stream(params, "HELLO YOU", tokenizer=tokenizer, state=state, kv_dtype="float16")


def test_beam_search_and_scores_take_it() -> None:
    params = tiny.llama()
    search = lambda kv: infer.beam_search(
        params, _PROMPTS, num_beams=3, max_tokens=6, page_size=4, kv_dtype=kv
    )
    plain, found = search(None), search("int8")
    assert found.stats["pages_copied"] > 0
    np.testing.assert_allclose(found.scores, plain.scores, atol=0.02)
    assert search("float32").token_ids == plain.token_ids
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 90, (2, 30)), jnp.int32)
    exact = infer.score(params, tokens)
    near = infer.score(params, tokens, paged=True, kv_dtype="int8")
    np.testing.assert_allclose(near, exact, atol=0.05)
    assert not np.array_equal(near, infer.score(params, tokens, paged=True))
    with pytest.raises(ConfigError, match="'int8' without paged=True"):
        infer.score(params, tokens, kv_dtype="int8")


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_the_compiled_program_copies_neither_data_nor_scales(implementation: str | None) -> None:
    options = RunOptions(
        num_slots=2, page_size=4, num_pages=41, kv_dtype="int8", implementation=implementation
    )
    params = tiny.llama()
    job = host.Job.prepare(params, _PROMPTS, None, None, None, None, options)
    program = jax.jit(host.traced_run, static_argnames="caps", donate_argnames="state")
    compiled = program.lower(
        params, job.requests, job.state, jnp.int32(1), jnp.zeros((), bool), caps=job.caps
    ).compile()
    for pool in (r"s8\[41,2,4,8\]", r"f32\[41,2,4\]"):
        assert re.search(pool, compiled.as_text())
        assert not re.findall(rf"= {pool}[^=\n]* copy(?:-start)?\(", compiled.as_text())
    pools = jax.tree.leaves((job.state.cache.k_pages, job.state.cache.v_pages))
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in pools)


def test_odd_heads_have_no_int4() -> None:
    layers = (LayerConfig(rope=RopeConfig(dim=6)),) * 2
    params = random_params(tiny.llama_config(head_dim=7, layers=layers), seed=0)
    with pytest.raises(ConfigError, match="even head width, not 7"):
        infer.generate(params, _PROMPTS, sampling=_GREEDY, kv_dtype="int4")


def test_turned_heads_without_rounding_are_the_same_heads() -> None:
    """Scores and sums of values are those of heads that are not turned, rotary or not."""
    from infer.models import paged_forward

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 20)), jnp.float32) for _ in range(3))
    turn = rope_table(RopeConfig(), 20, jnp.arange(3, dtype=jnp.int32))
    for each in (turn, None):
        a, b = (q, k) if each is None else (apply_rope(q, *each), apply_rope(k, *each))
        tq, tk, tv, left = paged_forward._turned(q, k, v, each)
        assert left is None
        np.testing.assert_allclose((tq * tk).sum(-1), (a * b).sum(-1), atol=2e-5)
        np.testing.assert_allclose(transform(tv, 20, back=True), v, atol=2e-6)


# ---- KIVI: pages that are quantised as a whole ---------------------------------------------------

_LONG = [np.random.default_rng(i).integers(3, 90, n).tolist() for i, n in enumerate((37, 5, 24, 9))]


@functools.cache
def _kivi(**options: Any) -> infer.generation.result.GenerationResult:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=14, ignore_eos=True)
    more = {"kv_dtype": "kivi4", "page_size": 8, "prefill_chunk": 8} | options
    return infer.generate(tiny.llama(), _LONG, sampling=sampling, **more)


@pytest.mark.parametrize(
    "options",
    [
        dict(prefill_chunk=64),
        dict(prefill_chunk=2),  # a page all the same
        dict(num_slots=2),
        dict(draft=NGram(k=3), draft_rule="coupled"),
    ],
)
def test_kivi_depends_on_no_chunk_slot_or_draft(options: dict[str, Any]) -> None:
    if "draft" in options:
        options = {"draft": NGram(k=3, rule=options["draft_rule"], adaptive=False)}
    want, have = _kivi(), _kivi(**options)
    np.testing.assert_array_equal(have.tokens, want.tokens)
    np.testing.assert_allclose(have.logprobs, want.logprobs, atol=1e-4)
    if "draft" in options:
        assert have.stats["accepted"] < have.stats["drafted"]  # some were taken back


def test_kivi_shares_full_pages_and_whole_prompts_that_end_with_one() -> None:
    begin = np.random.default_rng(9).integers(3, 90, 16).tolist()
    sampling = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=10, ignore_eos=True)
    prompts = [[*begin, 5, 6, 7], begin, [*begin, 5, 6, 7], [*begin, 8]]
    run = lambda **more: infer.generate(
        tiny.llama(),
        prompts,
        sampling=sampling,
        kv_dtype="kivi2",
        page_size=8,
        prefill_chunk=8,
        **more,
    )
    shared, apart = run(), run(share_prefixes=False)
    np.testing.assert_array_equal(shared.tokens, apart.tokens)
    np.testing.assert_allclose(shared.logprobs, apart.logprobs, atol=1e-4)
    # A page of `begin` for the first row of it, whose last token goes through the layers; two pages
    # for all other rows but the first.
    assert shared.stats["shared_tokens"] == 8 + 6 * 16 and shared.stats["pages_copied"] == 0


def test_kivi_in_beams_and_scores() -> None:
    """A beam that goes on from another has its tokens of the page in progress."""
    params, prompts = tiny.llama(), _LONG[:2]
    of = lambda kv, size: infer.beam_search(
        params, prompts, num_beams=3, max_tokens=20, kv_dtype=kv, page_size=size
    )
    # With pages longer than any sequence, nothing is ever quantised.
    exact, whole = of(None, 16), of("kivi2", 64)
    np.testing.assert_allclose(
        [s for each in whole.scores for s in each],
        [s for each in exact.scores for s in each],
        atol=1e-5,
    )
    assert all(len(each) == 20 for each in of("kivi4", 8).token_ids[0])
    score = lambda **more: infer.score(params, jnp.asarray([_LONG[0]], jnp.int32), **more)
    near = score(paged=True, kv_dtype="kivi4")
    np.testing.assert_allclose(near, score(), atol=0.5)
    assert not np.array_equal(near, score())


def test_kivi_takes_no_more_drafts_than_a_page() -> None:
    with pytest.raises(RequestError, match=r"draft\.k is 9, and kivi2 keeps pages of 8 tokens"):
        infer.generate(tiny.llama(), [[5]], kv_dtype="kivi2", page_size=8, draft=NGram(k=9))
