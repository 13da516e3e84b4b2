"""`generate` on tiny models: against the uncached forward, in any batch, chunk, slot and form."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import native
from infer.cache import paged
from infer.compiling import compile_stats, num_traces
from infer.errors import CapacityError, RequestError
from infer.generation import host
from infer.generation.prepare import RunOptions
from infer.models import decoder
from infer.models.params import Params
from infer.sampling import SamplingParams, SamplingState
from infer.spec import NGram
from tests.models import tiny

MODELS = {"llama": tiny.llama, "gemma3": tiny.gemma3}
GREEDY = functools.partial(SamplingParams, temperature=0.0)
_forward = jax.jit(decoder.forward)


def _prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.NUM_TOKENS, n).tolist() for n in lengths]


def _uncached(params: Params, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities by the plain forward over the whole sequence, again
    for each token.
    """
    ids, logprobs = list(prompt), []
    for _ in range(steps):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        row = np.asarray(_forward(params, jnp.asarray(padded))[0, len(ids) - 1], np.float64)
        ids.append(int(row.argmax()))
        logprobs.append(row.max() - np.log(np.exp(row - row.max()).sum()) - row.max())
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.kernels
def test_greedy_output_and_logprobs_equal_the_uncached_forward(name: str) -> None:
    params, prompts = MODELS[name](), _prompts(1, 16, 17, 37)
    out = infer.generate(params, prompts, sampling=GREEDY(max_tokens=9), num_slots=2)
    for row, prompt in enumerate(prompts):
        tokens, logprobs = _uncached(params, prompt, 9)
        assert out.token_ids(row) == tokens
        np.testing.assert_allclose(out.logprobs[row], logprobs, atol=1e-4)
    assert out.finish_reason == ["length"] * 4


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_matches_single_prefill(name: str) -> None:
    params, prompts = MODELS[name](), _prompts(37)
    runs = {
        chunk: [
            infer.generate(params, prompts, sampling=s, prefill_chunk=chunk)
            for s in (GREEDY(max_tokens=6), SamplingParams(temperature=0.8, seed=5, max_tokens=6))
        ]
        for chunk in (1, 3, 7, 16, 64)
    }
    for chunk, outs in runs.items():
        for out, whole in zip(outs, runs[64], strict=True):
            np.testing.assert_array_equal(out.tokens, whole.tokens, err_msg=f"chunk {chunk}")
            np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=1e-4)
    assert runs[1][0].stats["prefill_passes"] == 36
    assert runs[64][0].stats["prefill_passes"] == 1


def test_many_prompts_through_few_slots_equal_solo_runs_and_the_pool_is_whole_again() -> None:
    params = tiny.llama()
    lengths = [5, 37, 1, 16, 2, 30, 9, 17, 33, 12]
    prompts = _prompts(*lengths)
    each = [
        SamplingParams(temperature=0.9 * (i % 2), top_k=30, top_p=0.9, seed=i, max_tokens=3 + 2 * i)
        for i in range(10)
    ]
    run = functools.partial(infer.generate, params, num_slots=3, page_size=4, num_pages=40)
    together = run(prompts, sampling=each)
    for row, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
        solo = run([prompt], sampling=sampling)
        assert solo.token_ids(0) == together.token_ids(row), f"prompt {row}"
        np.testing.assert_allclose(
            solo.logprobs[0, : solo.lengths[0]],
            together.logprobs[row, : solo.lengths[0]],
            atol=1e-5,
        )
    job = host.Job.prepare(
        params,
        prompts,
        None,
        None,
        each,
        None,
        RunOptions(num_slots=3, page_size=4, num_pages=40, prefill_chunk=256),
    )
    job.run_all()
    paged.check_invariants(job.state.cache)
    assert int(job.state.cache.page_refs.sum()) == 0
    assert int(job.state.next_request) == 10


def test_a_seeded_request_is_the_same_in_any_company() -> None:
    params, (prompt, other) = tiny.llama(), _prompts(9, 21)
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=8)
    free = SamplingParams(temperature=1.0, max_tokens=8)
    run = functools.partial(infer.generate, params, num_slots=4)
    alone = run([prompt], sampling=seeded).token_ids(0)
    assert run([other, prompt], sampling=[free, seeded]).token_ids(1) == alone
    assert (
        run([prompt, other, prompt], sampling=[seeded, free, seeded], prefill_chunk=4).token_ids(2)
        == alone
    )
    both = run(
        [prompt, prompt], sampling=[seeded, SamplingParams(temperature=0.8, seed=43, max_tokens=8)]
    )
    assert both.token_ids(0) == alone != both.token_ids(1)


def test_a_drawn_seed_is_reported_and_reproduces_the_call() -> None:
    params, prompts = tiny.llama(), _prompts(9, 21)
    sampling = SamplingParams(temperature=1.0, max_tokens=8)
    out = infer.generate(params, prompts, sampling=sampling)
    again = infer.generate(
        params, prompts, sampling=sampling, key=jax.random.key(out.stats["seed"])
    )
    np.testing.assert_array_equal(out.tokens, again.tokens)
    assert "seed" not in again.stats


def test_a_second_call_in_the_same_buckets_compiles_nothing() -> None:
    params = tiny.llama()
    infer.generate(params, _prompts(20, 30, 25), sampling=GREEDY(max_tokens=10))
    before = num_traces("generate")
    infer.generate(
        params,
        _prompts(17, 31, 18, 22, seed=1),
        sampling=SamplingParams(top_p=0.5, seed=1, max_tokens=16),
    )
    infer.generate(
        params,
        _prompts(19, 18, 20),
        sampling=SamplingParams(top_k=3, min_p=0.1, max_tokens=3, stop_token_ids=[7, 8]),
    )
    assert num_traces("generate") == before
    infer.generate(params, _prompts(40, 3, 3), sampling=GREEDY(max_tokens=3))
    changed = compile_stats()["generate"]["changed"]
    assert num_traces("generate") == before + 1
    assert changed["prompt"] == (32, 64)


@pytest.mark.parametrize("draft", [None, NGram(k=3, tiers=(0, 1, 3))], ids=["plain", "drafts"])
def test_the_compiled_program_copies_no_page_pool_and_updates_it_in_place(draft) -> None:
    params = tiny.gemma3()
    job = host.Job.prepare(
        params,
        _prompts(9, 5),
        None,
        None,
        None,
        None,
        RunOptions(num_slots=2, page_size=4, num_pages=41, prefill_chunk=8, draft=draft),
    )
    # A fresh wrapper, so that this trace is this test's own.
    program = jax.jit(host.traced_run, static_argnames="caps", donate_argnames="state")
    lowered = program.lower(
        params, job.requests, job.state, jnp.int32(1), jnp.zeros((), bool), draft, caps=job.caps
    )
    compiled = lowered.compile()
    text = compiled.as_text()
    pool = re.escape("f32[41,2,4,8]")
    assert re.search(pool, text), (
        "the pool's shape must be in the program for this test to mean anything"
    )
    assert not re.findall(rf"= {pool}[^=\n]* copy(?:-start)?\(", text)
    pool_bytes = sum(x.nbytes for x in (*job.state.cache.k_pages, *job.state.cache.v_pages))
    assert compiled.memory_analysis().alias_size_in_bytes >= pool_bytes


def test_ids_past_the_tokenizer_are_never_drawn_and_carry_no_mass() -> None:
    params = tiny.llama()
    # Padding rows of the tied embedding made to win every argmax.
    embed = params.embed.at[tiny.NUM_TOKENS :].set(100 * params.embed[0])
    loud = Params(**(vars(params) | {"embed": embed}))
    out = infer.generate(
        loud,
        _prompts(9, 9),
        sampling=[
            GREEDY(max_tokens=12, logprobs=20),
            SamplingParams(temperature=5.0, seed=1, max_tokens=12),
        ],
    )
    assert out.tokens.max() < tiny.NUM_TOKENS
    assert out.top_tokens.max() < tiny.NUM_TOKENS
    logits = decoder.forward(loud, jnp.asarray(_prompts(9), jnp.int32))[0, -1]
    assert np.all(np.isneginf(logits[tiny.NUM_TOKENS :]))
    total = np.exp(np.asarray(logits[: tiny.NUM_TOKENS]) - float(jax.nn.logsumexp(logits))).sum()
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_stop_ids_end_a_request_and_eos_is_data() -> None:
    params, prompts = tiny.llama(), _prompts(9)
    plain = infer.generate(params, prompts, sampling=GREEDY(max_tokens=12)).token_ids(0)
    stop = plain[4]
    at = plain.index(stop)
    before = num_traces("generate")
    out = infer.generate(params, prompts, sampling=GREEDY(max_tokens=12, stop_token_ids=[stop]))
    assert (out.token_ids(0), out.finish_reason, out.stop_reason) == (
        plain[: at + 1],
        ["stop"],
        [stop],
    )
    later = infer.generate(
        params, prompts, sampling=GREEDY(max_tokens=12, stop_token_ids=[stop], min_tokens=at + 2)
    )
    assert stop not in later.token_ids(0)[: at + 1]
    assert num_traces("generate") == before


def test_the_models_own_end_of_sequence_ids_count_unless_ignored() -> None:
    prompts = _prompts(9)
    plain = infer.generate(tiny.llama(), prompts, sampling=GREEDY(max_tokens=12)).token_ids(0)
    config = tiny.llama_config(eos_ids=(plain[3],))
    ending = Params(**(vars(tiny.llama()) | {"config": config}))
    assert infer.generate(ending, prompts, sampling=GREEDY(max_tokens=12)).finish_reason == ["stop"]
    ignored = infer.generate(ending, prompts, sampling=GREEDY(max_tokens=12, ignore_eos=True))
    assert ignored.token_ids(0) == plain


def test_top_logprobs_are_the_raw_models() -> None:
    params, prompts = tiny.llama(), _prompts(11)
    out = infer.generate(
        params, prompts, sampling=SamplingParams(temperature=3.0, seed=1, max_tokens=2, logprobs=3)
    )
    row = np.asarray(
        jax.nn.log_softmax(decoder.forward(params, jnp.asarray(prompts, jnp.int32))[0, -1])
    )
    order = np.argsort(-row, kind="stable")[:3]
    assert out.top_tokens[0, 0].tolist() == order.tolist()
    np.testing.assert_allclose(out.top_logprobs[0, 0], row[order], atol=1e-4)
    np.testing.assert_allclose(out.logprobs[0, 0], row[out.tokens[0, 0]], atol=1e-4)


def test_the_bare_call_is_greedy_with_128_tokens_within_the_context() -> None:
    out = infer.generate(tiny.llama(), _prompts(9))
    assert out.tokens.shape == (1, 119)  # the context of 128 ends it first
    assert out.finish_reason == ["length"]
    assert out.token_ids(0)[:9] == _uncached(tiny.llama(), _prompts(9)[0], 9)[0]


# ---- the pure form -------------------------------------------------------------------------------


def test_inside_jit_and_scan_and_vmap_it_gives_the_same_tokens() -> None:
    params = tiny.llama()
    prompts = np.asarray(_prompts(12, 12), np.int32)
    lens = np.asarray([12, 7], np.int32)
    sampling = [GREEDY(max_tokens=5), SamplingParams(temperature=0.7, seed=3, max_tokens=4)]
    host = infer.generate(params, prompts, prompt_lens=lens, sampling=sampling, num_slots=2)

    pure = jax.jit(
        chex.assert_max_traces(
            lambda p, t, n: infer.generate(p, t, prompt_lens=n, sampling=sampling, num_slots=2), 1
        )
    )
    out = pure(params, jnp.asarray(prompts), jnp.asarray(lens))
    np.testing.assert_array_equal(out.tokens, host.tokens)
    assert out.finish_reason.tolist() == [2, 2]
    assert out.lengths.tolist() == [5, 4]
    pure(params, jnp.asarray(prompts[::-1].copy()), jnp.asarray(lens))

    def step(carry, batch):
        return carry, infer.generate(params, batch, sampling=GREEDY(max_tokens=3)).tokens

    _, scanned = jax.lax.scan(step, 0, jnp.asarray(prompts)[:, None])
    mapped = jax.vmap(
        lambda t: infer.generate(params, t[None], sampling=GREEDY(max_tokens=3)).tokens[0]
    )(jnp.asarray(prompts))
    want = infer.generate(params, prompts, sampling=GREEDY(max_tokens=3)).tokens
    np.testing.assert_array_equal(scanned[:, 0], want)
    np.testing.assert_array_equal(mapped, want)


def test_a_traced_sampling_state_switches_features_without_a_new_trace() -> None:
    params = tiny.llama()
    prompts = jnp.asarray(_prompts(8, 8), jnp.int32)
    states: list[SamplingState] = []

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def run(state: SamplingState):
        return infer.generate(params, prompts, sampling=state, max_tokens=6).tokens

    for sampling in (
        GREEDY(max_tokens=6),
        SamplingParams(temperature=1.0, top_k=3, seed=1, max_tokens=6),
    ):
        states.append(infer.sampling_state(params, sampling, 2, key=jax.random.key(0)))
    greedy, drawn = (np.asarray(run(s)) for s in states)
    assert (greedy != drawn).any()
    np.testing.assert_array_equal(
        greedy, infer.generate(params, np.asarray(prompts), sampling=GREEDY(max_tokens=6)).tokens
    )


def test_inside_a_trace_a_pool_too_small_ends_with_capacity_not_with_a_hang() -> None:
    params, prompts = tiny.llama(), jnp.asarray(_prompts(20, 20), jnp.int32)
    out = jax.jit(
        lambda t: infer.generate(params, t, sampling=GREEDY(max_tokens=8), page_size=4, num_pages=3)
    )(prompts)
    assert out.finish_reason.tolist() == [3, 3]
    assert bool(out.state.cache.overflow)
    assert out.lengths.tolist() == [0, 0]


def test_inside_a_trace_host_work_and_missing_keys_are_refused() -> None:
    params, prompts = tiny.llama(), jnp.asarray(_prompts(8), jnp.int32)
    with pytest.raises(RequestError, match="needs key= or a seed"):
        jax.jit(lambda t: infer.generate(params, t, sampling=SamplingParams()))(prompts)
    with pytest.raises(RequestError, match="tokenizer is host work"):
        jax.jit(lambda t: infer.generate(params, t, tokenizer=Letters()))(prompts)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 90]], {}, "prompt 0 has id 90; ids of this model are 0..89"),
        ([[-1]], {}, "prompt 0 has id -1"),
        ([[1] * 128], {}, "prompt 0 has 128 tokens, the model's context is 128"),
        ([1, 2, 3], {}, "flat list of ids"),
        (["text"], {}, "prompt 0 is a string and no tokenizer was given"),
        (
            [[1.5]],
            {},
            "prompt 0 is a list with float in it; pass a string or a list of integer ids",
        ),
        (np.ones((2, 3)), {}, "integer ids"),
        (np.ones((2, 3), np.int32), {"prompt_lens": [3]}, r"pass one integer per row, \[2\]"),
        (np.ones((2, 3), np.int32), {"prompt_lens": [3, 4]}, "prompt_lens spans 3..4"),
        ([[1]], {"prompt_lens": [1]}, "prompt_lens goes with an array"),
        ([[1]], {"sampling": [GREEDY(), GREEDY()]}, "2 SamplingParams for 1 prompts"),
        ([[1]], {"sampling": GREEDY(stop_token_ids=[95])}, "stop_token_ids has 95"),
        ([[1]], {"num_slots": 0}, "num_slots is 0"),
        ([[1]], {"num_slots": 10**30, "num_pages": 4}, "num_slots is 1000"),
        ([[1]], {"prefill_chunk": -1}, "prefill_chunk is -1"),
        ([[1]], {"key": jnp.zeros(2, jnp.uint32)}, "pass one typed key"),
        ([[1]], {"max_tokens": 5}, "max_tokens goes into SamplingParams"),
    ],
)
def test_bad_input_is_one_clear_line(prompts, options, message) -> None:
    before = num_traces("generate")
    with pytest.raises(RequestError, match=message) as error:
        infer.generate(tiny.llama(), prompts, **options)
    assert "\n" not in str(error.value)
    assert num_traces("generate") == before


def test_a_request_that_can_never_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(
        CapacityError, match=r"prompt 1 .* needs 8 pages of 4 tokens, the pool has 6"
    ):
        infer.generate(
            tiny.llama(), _prompts(3, 20), sampling=GREEDY(max_tokens=12), page_size=4, num_pages=6
        )


# ---- text ----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one character per id, enough for the facade."""

    eos_ids = (3,)
    pad_id = 0

    def encode(self, text: str, *, add_bos=None, parse_special: bool = False) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, ids, *, continuation: bool = False) -> str:
        return "".join(chr(i + 32) for i in ids)

    def stream(self, *, skip_special_tokens: bool = True, continuation: bool = False):
        codec = self

        class Stream:
            def put(self, token: int) -> str:
                return codec.decode([token])

            def flush(self) -> str:
                return ""

        return Stream()


@pytest.mark.parametrize(
    "sampling", [GREEDY(max_tokens=20), SamplingParams(seed=8, temperature=1.5, max_tokens=20)]
)
def test_streamed_text_equals_the_text_of_one_call(sampling: SamplingParams) -> None:
    params, tokenizer = tiny.llama(), Letters()
    whole = infer.generate(params, ["HELLO THERE"], tokenizer=tokenizer, sampling=sampling)
    growing = infer.stream(params, "HELLO THERE", tokenizer=tokenizer, sampling=sampling)
    pieces = list(growing)
    assert growing.stats["num_output_tokens"] == whole.stats["num_output_tokens"]
    assert "".join(pieces) == whole.text[0]
    assert len(pieces) > 1
    ids = whole.token_ids(0)
    assert whole.text[0] == tokenizer.decode(ids[:-1] if whole.finish_reason == ["stop"] else ids)
    assert whole.stats["num_prompt_tokens"] == [11]
    assert whole.stats["backend"] == "cpu"
    assert whole.stats["implementation"] == ("native+xla" if native.by_default() else "xla")
