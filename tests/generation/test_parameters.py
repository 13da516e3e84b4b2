"""Every sampling parameter through `generate`, against the same rule applied by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.compiling import num_traces
from infer.errors import RequestError
from infer.models import decoder
from infer.models.params import Params
from infer.sampling import SamplingParams
from tests.generation.test_generate import GREEDY, Letters, _forward, _prompts
from tests.models import tiny

VOCAB = tiny.NUM_TOKENS


def _by_hand(prompt: list[int], s: SamplingParams) -> list[int]:
    """Greedy decoding by the plain forward, the rules written out in numpy."""
    ids: list[int] = []
    for _ in range(s.max_tokens):
        padded = np.zeros((1, 64), np.int32)
        sequence = prompt + ids
        padded[0, : len(sequence)] = sequence
        x = np.array(_forward(tiny.llama(), jnp.asarray(padded))[0, len(sequence) - 1])
        if s.allowed_token_ids is not None:
            x[[i for i in range(x.size) if i not in s.allowed_token_ids]] = -np.inf
        for word in s.bad_words:
            if tuple(ids[len(ids) - len(word) + 1 :]) == tuple(word[:-1]):
                x[word[-1]] = -np.inf
        for token, bias in s.logit_bias.items():
            x[token] += bias
        for token in set(sequence):
            x[token] *= s.repetition_penalty if x[token] < 0 else 1 / s.repetition_penalty
        for token in ids:
            x[token] -= s.frequency_penalty
        for token in set(ids):
            x[token] -= s.presence_penalty
        ids.append(int(x.argmax()))
    return ids


def test_mixed_parameters_in_one_batch_are_one_program_and_follow_the_rules() -> None:
    prompts = _prompts(9, 14, 11, 7, 12, 10)
    plain = infer.generate(tiny.llama(), prompts[5:], sampling=GREEDY(max_tokens=8)).token_ids(0)
    each = [
        GREEDY(max_tokens=8, repetition_penalty=1.7),
        GREEDY(max_tokens=8, frequency_penalty=0.9, presence_penalty=0.4),
        GREEDY(max_tokens=8, logit_bias={5: 2.5, 6: -100}),
        GREEDY(max_tokens=8, allowed_token_ids=[1, 3, 5, 7, 9, 11]),
        GREEDY(max_tokens=8, bad_words=[plain[:1], plain[1:3]]),
        GREEDY(max_tokens=8, bad_words=[plain[:1], plain[1:3]]),
    ]
    out = infer.generate(tiny.llama(), prompts, sampling=each, num_slots=3)
    for row, (prompt, s) in enumerate(zip(prompts, each, strict=True)):
        assert out.token_ids(row) == _by_hand(prompt, s), f"row {row}"
    before = num_traces("generate")
    switched = [*each[1:], each[0]]
    infer.generate(tiny.llama(), prompts, sampling=switched, num_slots=3)
    assert num_traces("generate") == before


def test_parallel_samples_differ_repeat_and_do_not_depend_on_company() -> None:
    params, (prompt, other) = tiny.llama(), _prompts(9, 21)
    two = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=8)
    out = infer.generate(params, [prompt, other], sampling=[two, GREEDY(n=3)], num_slots=4)
    assert out.prompt_index == [0, 0, 1, 1, 1]
    assert out.choice == [0, 1, 0, 1, 2]
    assert out.token_ids(0) != out.token_ids(1)
    assert out.token_ids(2) == out.token_ids(3) == out.token_ids(4)
    again = infer.generate(params, [prompt], sampling=two, num_slots=4)
    assert [again.token_ids(i) for i in (0, 1)] == [out.token_ids(i) for i in (0, 1)]
    one = infer.generate(
        params,
        [prompt],
        sampling=SamplingParams(temperature=1.0, seed=7, max_tokens=8),
        num_slots=4,
    )
    assert one.token_ids(0) == out.token_ids(0)
    pure = jax.jit(lambda t: infer.generate(params, t, sampling=two, num_slots=4).tokens)
    np.testing.assert_array_equal(pure(jnp.asarray([prompt], jnp.int32)), again.tokens)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_logprobs_have_one_entry_a_token_whatever_the_chunk(chunk: int) -> None:
    params, (prompt, other) = tiny.gemma3(), _prompts(37, 12)
    each = [GREEDY(max_tokens=2, prompt_logprobs=3), GREEDY(max_tokens=2)]
    out = infer.generate(params, [prompt, other], sampling=each, prefill_chunk=chunk, num_slots=2)
    score = jax.nn.log_softmax(decoder.forward(params, jnp.asarray([prompt], jnp.int32))[0])
    assert out.prompt_logprobs[1] is None
    first = out.prompt_logprobs[0]
    assert first is not None
    assert first.shape == (37,)
    assert np.isnan(first[0])
    np.testing.assert_allclose(first[1:], score[jnp.arange(36), jnp.asarray(prompt[1:])], atol=1e-4)
    top = out.prompt_top_tokens[0]
    assert top is not None
    np.testing.assert_array_equal(top[1:], np.argsort(-score[:36], axis=1, kind="stable")[:, :3])


def test_processed_logprobs_are_those_of_the_distribution_that_is_sampled() -> None:
    params, prompts = tiny.llama(), _prompts(11)
    s = SamplingParams(temperature=2.0, top_k=2, seed=1, max_tokens=1, logprobs=3)
    out = infer.generate(params, prompts, sampling=s, logprobs_mode="processed")
    row = np.asarray(decoder.forward(params, jnp.asarray(prompts, jnp.int32))[0, -1]) / 2
    two = np.sort(row)[::-1][:2]
    want = two - np.log(np.exp(two).sum())
    np.testing.assert_allclose(out.top_logprobs[0, 0], [*want, -np.inf], atol=1e-5)
    assert out.logprobs[0, 0] in out.top_logprobs[0, 0, :2]


def test_stop_strings_cut_text_and_tokens_and_free_the_slot() -> None:
    params, tokenizer = tiny.llama(), Letters()
    base = dict(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    whole = infer.generate(
        params, ["HELLO THERE"], tokenizer=tokenizer, sampling=SamplingParams(**base)
    )
    text = whole.text[0]
    stop = text[5:8]
    at = text.index(stop)
    sampling = SamplingParams(**base, stop=stop)
    for prompts in (["HELLO THERE"], ["HELLO THERE", "OTHER", "THIRD"]):
        out = infer.generate(params, prompts, tokenizer=tokenizer, sampling=sampling, num_slots=1)
        assert out.text[0] == text[:at]
        assert out.stop_reason[0] == stop
        assert out.finish_reason[0] == "stop"
        assert out.token_ids(0) == whole.token_ids(0)[: at + len(stop)]
    kept = infer.generate(
        params,
        ["HELLO THERE"],
        tokenizer=tokenizer,
        sampling=SamplingParams(**base, stop=[stop], include_stop_str_in_output=True),
    )
    assert kept.text[0] == text[: at + len(stop)]
    streamed = infer.stream(params, "HELLO THERE", tokenizer=tokenizer, sampling=sampling)
    assert "".join(streamed) == text[:at]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (GREEDY(stop="x"), "stop strings need tokenizer="),
        (GREEDY(bad_words=["x"]), "bad_words has the string 'x' and no tokenizer"),
        (GREEDY(bad_words=[[95]]), "bad_words has 95"),
        (GREEDY(allowed_token_ids=[90]), "allowed_token_ids has 90"),
        (GREEDY(logit_bias={91: 1.0}), "logit_bias has 91"),
        (GREEDY(allowed_token_ids=[4], bad_words=[[4]]), "leave no id to draw"),
        (GREEDY(allowed_token_ids=[4], stop_token_ids=[4], min_tokens=1), "leave no id to draw"),
    ],
)
def test_what_cannot_be_served_is_refused(sampling, message) -> None:
    with pytest.raises(RequestError, match=message):
        infer.generate(tiny.llama(), [[1, 2]], sampling=sampling)


def test_a_row_without_a_number_to_compare_is_aborted_and_its_neighbours_are_not() -> None:
    params = tiny.llama()
    embed = params.embed.at[77].set(jnp.nan)
    head = params.embed
    config = tiny.llama_config(tied_embeddings=False)
    broken = Params(**(vars(params) | {"embed": embed, "lm_head": head, "config": config}))
    prompts = [[1, 2, 3], [1, 77, 3], [4, 5, 6]]
    out = infer.generate(broken, prompts, sampling=GREEDY(max_tokens=4), num_slots=2)
    assert out.finish_reason == ["length", "abort", "length"]
    assert out.lengths.tolist() == [4, 0, 4]
    clean = infer.generate(params, prompts, sampling=GREEDY(max_tokens=4), num_slots=2)
    assert out.token_ids(0) == clean.token_ids(0)
    assert out.token_ids(2) == clean.token_ids(2)


def test_inside_a_trace_a_length_that_cannot_be_ends_its_row_alone() -> None:
    params, prompts = tiny.llama(), jnp.asarray(_prompts(8, 8, 8), jnp.int32)
    run = jax.jit(
        lambda n: infer.generate(params, prompts, prompt_lens=n, sampling=GREEDY(max_tokens=3))
    )
    out = run(jnp.asarray([8, 0, 9], jnp.int32))
    assert out.finish_reason.tolist() == [2, 4, 4]
    assert out.lengths.tolist() == [3, 0, 0]
    whole = run(jnp.asarray([8, 8, 8], jnp.int32))
    np.testing.assert_array_equal(out.tokens[0], whole.tokens[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt_lens=jnp.asarray([2], jnp.int32)), r"pass one integer per row, \[2\]"),
        (dict(prompt_lens=jnp.asarray([2.7, 1.0])), "prompt_lens is float32"),
        (dict(key=jnp.zeros(2, jnp.uint32), sampling=SamplingParams()), "pass one typed key"),
        (dict(sampling=SamplingParams(stop="x", temperature=0)), "stop strings are host work"),
    ],
)
def test_inside_a_trace_what_is_static_is_checked(options, message) -> None:
    prompts = jnp.asarray(_prompts(8, 8), jnp.int32)
    with pytest.raises(RequestError, match=message):
        jax.jit(lambda t: infer.generate(tiny.llama(), t, **options))(prompts)


def test_bytes_are_not_token_ids() -> None:
    with pytest.raises(RequestError, match="prompt 0 is a bytes"):
        infer.generate(tiny.llama(), [b"hello"])
    with pytest.raises(RequestError, match="prompt 0 is a list with bool in it"):
        infer.generate(tiny.llama(), [[True, 1]])
