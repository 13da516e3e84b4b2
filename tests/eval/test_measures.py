"""Measures of tiny models against the whole forward pass, worked by hand in numpy."""

import copy
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.errors import ConfigError, RequestError
from infer.eval import measures, scoring
from infer.models import decoder
from infer.models.params import Params, random_params
from tests.models import tiny, tiny_folder

CONTEXT = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> infer.Model:
    return infer.load(tiny_folder.write(tmp_path_factory.mktemp("m") / "tiny"))


def _windows(count: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.NUM_TOKENS, (count, length))


def _logp(params: Params, windows: np.ndarray) -> np.ndarray:
    y = decoder.forward(params, jnp.asarray(windows, jnp.int32))[..., : tiny.NUM_TOKENS]
    return np.asarray(jax.nn.log_softmax(y, axis=-1), np.float64)


def _other() -> Params:
    return random_params(tiny.llama_config(), seed=7)


@pytest.mark.parametrize("params", [tiny.llama, tiny.gemma3], ids=["llama", "gemma3"])
@pytest.mark.parametrize("length", [20, 100])
def test_perplexity_is_that_of_the_whole_forward(params, length: int) -> None:
    windows = _windows(3, length)
    first = length // 2 + 1
    logp = _logp(params(), windows)[:, first - 1 : -1]
    nll = -np.take_along_axis(logp, windows[:, first:, None], -1)[..., 0]
    got = infer.eval.perplexity(params(), windows)
    assert got.overall.perplexity.value == pytest.approx(math.exp(nll.mean()), rel=2e-5)
    assert got.overall.num_scored == nll.size == 3 * (length - first)
    assert got.overall.top1 == pytest.approx((logp.argmax(-1) == windows[:, first:]).mean())
    assert got.how.scored_tokens_per_window == length - first
    assert got.overall.bits_per_byte is None


def test_several_passes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = _windows(2, 100)
    whole = infer.eval.perplexity(tiny.gemma3(), windows, scored="all")
    monkeypatch.setitem(scoring._PASS, "cpu", 32)
    jax.clear_caches()
    parts = infer.eval.perplexity(tiny.gemma3(), windows, scored="all")
    jax.clear_caches()
    assert parts.overall.perplexity.value == pytest.approx(whole.overall.perplexity.value, rel=1e-5)
    assert whole.overall.num_scored == 2 * 99


def test_divergence_is_that_of_the_whole_forward() -> None:
    windows = _windows(4, 20)
    base, other = (_logp(p, windows)[:, :-1] for p in (tiny.llama(), _other()))
    targets = windows[:, 1:, None]
    kl = np.sum(np.exp(base) * (base - other), -1)
    delta = np.take_along_axis(np.exp(other) - np.exp(base), targets, -1)
    nll = [-np.take_along_axis(x, targets, -1).mean() for x in (base, other)]
    got = infer.eval.divergence(tiny.llama(), _other(), windows, scored="all").overall
    assert got.kl.mean.value == pytest.approx(kl.mean(), rel=1e-4)
    assert got.kl.median == pytest.approx(np.median(kl), rel=1e-4)
    assert got.kl.max == pytest.approx(kl.max(), rel=1e-4)
    assert got.same_top.value == pytest.approx((base.argmax(-1) == other.argmax(-1)).mean())
    assert got.rms_delta_p == pytest.approx(math.sqrt(np.square(delta).mean()), rel=1e-4)
    assert got.ratio.value == pytest.approx(math.exp(nll[1] - nll[0]), rel=1e-4)
    assert got.kl_by_position[0].first == 1 and got.kl_by_position[-1].last == 19
    middle = kl[:, : got.kl_by_position[0].last].mean()
    assert got.kl_by_position[0].kl == pytest.approx(middle, rel=1e-4)


@pytest.mark.parametrize("params", [tiny.llama, tiny.gemma3], ids=["llama", "gemma3"])
def test_the_identity_control_is_exact(params) -> None:
    windows = _windows(5, 20)
    got = infer.eval.divergence(params(), params(), windows).overall
    assert (got.ratio.value, got.ratio.low, got.ratio.high) == (1.0, 1.0, 1.0)
    assert (got.kl.mean.value, got.kl.p99, got.kl.max) == (0.0, 0.0, 0.0)
    assert (got.same_top.value, got.rms_delta_p) == (1.0, 0.0)
    assert got.verdict.startswith("identical")
    assert infer.eval.control(params(), windows).exact
    assert infer.eval.compare(params(), params(), windows).overall.verdict.startswith("identical")


def test_a_broken_measure_fails_its_control(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = scoring._log_probabilities, iter(range(1000))
    shifted = lambda *x: real(*x) + 1e-6 * (next(calls) % 2)
    monkeypatch.setattr(scoring, "_log_probabilities", shifted)
    assert not infer.eval.control(tiny.llama(), _windows(5, 20)).exact


def test_compare_with_a_base_and_memory() -> None:
    base, windows = tiny.llama(), _windows(60, 20)
    noise = lambda size: jax.tree.map(
        lambda x: x + size * jax.random.normal(jax.random.key(x.size), x.shape), base
    )
    near, far = noise(0.01), noise(0.1)
    got = infer.eval.compare(far, near, windows, base=base)
    assert got.overall.kl_a > 5 * got.overall.kl_b > 0  # type: ignore[operator]
    assert got.overall.kl_verdict == "better"
    assert got.overall.kl_difference.high < 0  # type: ignore[union-attr]
    assert got.bytes_a == got.bytes_b == sum(x.nbytes for x in jax.tree.leaves(base))
    assert got.warnings == []
    without = infer.eval.compare(far, near, windows)
    assert without.overall.kl_a is None
    assert without.overall.ratio == got.overall.ratio
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    (hint,) = infer.eval.compare(base, half, windows).warnings
    num_params = sum(x.size for x in jax.tree.leaves(base))
    assert f"bf16 model of about {num_params / 1e3:.3g} k parameters" in hint


def test_the_cache_has_a_dtype_of_its_own() -> None:
    params, windows = tiny.llama(), _windows(3, 40)
    measure = lambda kv_dtype: infer.eval.divergence(params, params, windows, kv_dtype=kv_dtype)
    half = measure((None, "bfloat16")).overall
    assert 0 < half.kl.mean.value < 1e-3
    assert measure("bfloat16").overall.kl.max == 0.0
    assert infer.eval.compare(
        params, params, windows, base=params, kv_dtype=("bfloat16", None, None)
    ).overall.kl_a == pytest.approx(half.kl.mean.value)
    with pytest.raises(ConfigError, match="kv_dtype is 'int3'"):
        measure("int3")
    with pytest.raises(ConfigError, match="3 entries for 2 models"):
        measure((None, None, None))


def test_texts_are_apart_and_together(model: infer.Model) -> None:
    texts = {"low": "abcdefg" * 50, "high": "zyxwvut, " * 30}
    got = infer.eval.perplexity(model, texts, context=CONTEXT)
    low, high = got.texts
    assert (low.name, high.name, got.overall.name) == ("low", "high", "all")
    assert got.overall.num_windows == low.num_windows + high.num_windows
    weighted = sum(x.num_scored * math.log(x.perplexity.value) for x in (low, high))
    assert math.log(got.overall.perplexity.value) == pytest.approx(
        weighted / got.overall.num_scored, rel=1e-9
    )
    (warning,) = got.warnings
    assert f"low ({low.num_windows}), high ({high.num_windows})" in warning
    found = got.to_json()
    assert found["texts"][0]["perplexity"]["low"] < found["texts"][0]["perplexity"]["high"]
    # A byte is a token here, so bits a byte are bits a token.
    assert low.bits_per_byte == pytest.approx(math.log2(low.perplexity.value), rel=0.02)


def test_windows_are_those_of_llama_cpp(model: infer.Model) -> None:
    from infer.eval.windows import cut

    text = "".join(chr(97 + i % 26) for i in range(200))
    got = cut("x", text, model.tokenizer, context=50, limit=3)
    ids = model.tokenizer.encode(text)
    want = np.asarray(ids[:150]).reshape(3, 50)
    if model.tokenizer.add_bos:
        want[:, 0] = model.tokenizer.bos_id
    np.testing.assert_array_equal(got.ids, want)
    assert got.num_bytes == 200


def test_rows_of_different_lengths_have_the_likelihoods_of_score() -> None:
    params = tiny.llama()
    rows = [row[:n].tolist() for row, n in zip(_windows(3, 90), (2, 64, 90), strict=True)]
    for row, got in zip(rows, scoring.log_likelihoods(params, rows), strict=True):
        want = infer.score(params, jnp.asarray([row], jnp.int32))[0]
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_cannot_be_measured_is_refused(model: infer.Model) -> None:
    params = tiny.llama()
    few = dataclasses.replace(tiny.llama_config(), num_tokens=80)
    smaller = random_params(few, seed=1)
    cases = [
        (lambda: infer.eval.perplexity(params, "text"), RequestError, "is no tokenizer"),
        (lambda: infer.eval.perplexity(params, {}), RequestError, "no text"),
        (lambda: infer.eval.perplexity(params, np.zeros(3, int)), RequestError, "fewer than one"),
        (lambda: infer.eval.perplexity(params, np.zeros((2, 2), int)), RequestError, "at least 4"),
        (lambda: infer.eval.perplexity(params, np.zeros((2, 9))), RequestError, "integer ids"),
        (lambda: infer.eval.perplexity(params, _windows(1, 200)), ConfigError, "context is 128"),
        (
            lambda: infer.eval.perplexity(params, np.full((1, 9), 90)),
            RequestError,
            "have the id 90",
        ),
        (lambda: infer.eval.perplexity(params, _windows(1, 9), scored="x"), ConfigError, "second"),
        (lambda: measures._params("m"), RequestError, "a model is a str"),
        (lambda: infer.eval.perplexity(model, "abc " * 99, windows=0), RequestError, "at least 1"),
        (
            lambda: infer.eval.divergence(params, smaller, _windows(1, 9)),
            RequestError,
            "90 and 80 tokens",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_a_model_of_nan_is_refused() -> None:
    params = tiny.llama()
    broken = dataclasses.replace(params, final_norm=params.final_norm * jnp.nan)
    with pytest.raises(RequestError, match="NaN in window 0 of text"):
        infer.eval.perplexity(broken, _windows(3, 20))


def test_the_same_texts_by_another_tokenizer_are_refused(
    model: infer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(model, tokenizer=copy.copy(model.tokenizer))
    encode = lambda text: [5 if n == 9 else x for n, x in enumerate(model.tokenizer.encode(text))]
    monkeypatch.setattr(other.tokenizer, "encode", encode)
    with pytest.raises(RequestError, match="bits per byte"):
        infer.eval.compare(model, other, "abcdefgh" * 42, context=CONTEXT)


def test_nothing_compiles_again_for_another_text(model: infer.Model) -> None:
    infer.eval.perplexity(model, "abcdefgh" * 40, context=CONTEXT)
    before = scoring._states._cache_size(), scoring._log_probabilities._cache_size()
    infer.eval.perplexity(model, "hgfedcba" * 90, context=CONTEXT)
    assert before == (scoring._states._cache_size(), scoring._log_probabilities._cache_size())
    assert measures.CONTEXT == 512
