"""Fingerprints, the share of a text that another one has, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infer
from infer import fingerprint
from infer.errors import RequestError
from infer.eval import overlap, read_text
from infer.eval.windows import cut, cut_ids
from infer.fingerprint import Fingerprint
from infer.tokenizer import Tokenizer
from infer.weights.safetensors_writer import write_file
from tests.models import tiny_folder
from tests.tokenizer import tokenizer_json


def _words(count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(str(n) for n in rng.integers(0, 10**6, count))


def test_every_shingle_has_the_hash_of_its_own_text() -> None:
    """Where it stands does not matter, one other byte does."""
    shingle = "0123456789abcdef" * 4
    (alone,) = fingerprint.text_hashes(shingle)
    inside = fingerprint.text_hashes("xyz" + shingle + "uvw")
    assert len(inside) == 7 and inside[3] == alone and (inside == alone).sum() == 1
    (other,) = fingerprint.text_hashes(shingle[:-1] + "e")
    assert other != alone
    assert len(fingerprint.text_hashes(shingle[:-1])) == 0


def test_case_and_white_space_are_nothing() -> None:
    a, b = ("The  Quick\n Brown fox, " * 9, "the quick brown FOX,\t" * 9)
    np.testing.assert_array_equal(fingerprint.text_hashes(a), fingerprint.text_hashes(b))


def test_different_texts_have_different_hashes() -> None:
    """No collision among 200,000 shingles: with 64 bits the odds are 1e-9."""
    hashes = fingerprint.text_hashes(_words(30_000, 0))
    assert len(np.unique(hashes)) == len(hashes) > 200_000
    # Uniform: the share below a bound is that bound.
    assert np.mean(hashes < np.uint64(2**62)) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_the_share_is_estimated_from_a_sample(share: float) -> None:
    calibration, other = _words(60_000, 1), _words(60_000, 2)
    size = len(other)
    text = calibration[: int(share * size)] + other[: size - int(share * size)]
    known = fingerprint.of_text(calibration)
    assert len(known.hashes) == fingerprint.KEPT
    got = fingerprint.share_in(fingerprint.text_hashes(text), known)
    # Shingles are sampled: four standard deviations of 4,096 of them.
    assert got == pytest.approx(share, abs=4 * 0.5 / 64 if 0 < share < 1 else 0)


def test_a_short_text_keeps_all_its_shingles() -> None:
    known = fingerprint.of_text("0123456789abcdef" * 5)
    assert known.bound == 2**64 - 1 and len(known.hashes) == 16  # a period of 16
    empty = fingerprint.of_text("short")
    assert fingerprint.share_in(fingerprint.text_hashes(_words(100, 0)), empty) == 0.0


def test_tokens_have_fingerprints_too() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, (8, 100))
    known = fingerprint.of_tokens(ids)
    again = cut_ids("x", ids[:4].reshape(-1), context=25)
    assert overlap.share(again, known) == 1.0
    # Of [8, 100] cut anew, shingles over the border of two rows are not in it.
    flat = fingerprint.share_in(fingerprint.token_hashes(ids.reshape(1, -1)), known)
    assert flat == pytest.approx(8 * 85 / 785)
    assert overlap.share(cut_ids("x", ids + 1), known) == 0.0


def test_a_fingerprint_comes_back_from_metadata() -> None:
    known = fingerprint.of_text(_words(30_000, 3))
    text = known.to_json()
    assert len(text) < 44_100
    back = Fingerprint.from_json(text)
    np.testing.assert_array_equal(back.hashes, known.hashes)
    assert (back.kind, back.bound) == ("text", known.bound)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "words"},
        {"bound": -1},
        {"bound": 2**64},
        {"bound": True},
        {"hashes": "AAA"},
        {"hashes": "AAAAAAA="},
        {"hashes": 5},
        {"hashes": "AAAAAAAAAAAAAAAAAAAAAA=="},  # twice the same
    ],
    ids=str,
)
def test_a_broken_record_is_refused(change: dict[str, Any]) -> None:
    good = json.loads(fingerprint.of_text("0123456789abcdef" * 5).to_json())
    with pytest.raises(ValueError, match="calibration_fingerprint"):
        Fingerprint.from_json(json.dumps(good | change))
    for text in ("", "[]", "null", "{}", "[" * 10_000):
        with pytest.raises(ValueError, match="is not a fingerprint"):
            Fingerprint.from_json(text)


def test_a_model_calibrated_on_the_text_is_refused(tmp_path: Path) -> None:
    """As a quantiser writes it: one entry in a safetensors file of the folder."""
    folder = tiny_folder.write(tmp_path / "tiny")
    model = infer.load(folder)
    text = read_text("en")[:20_000]
    assert overlap.calibration_of(folder) is None
    record = {fingerprint.METADATA_KEY: fingerprint.of_text(text[:10_000]).to_json()}
    write_file(folder / "quantised.safetensors", {"x": np.zeros(1)}, metadata=record)
    measure = lambda **options: infer.eval.perplexity(
        model, {"manual": text}, context=48, **options
    )
    with pytest.raises(
        RequestError, match=r"(49|50)% of manual .* calibrated .*allow_overlap=True"
    ):
        measure()
    with pytest.raises(RequestError, match=r"100% of manual .* calibrated"):
        measure(windows=4)
    measure(windows=4, allow_overlap=True)
    other = infer.eval.perplexity(model, {"russian": read_text("ru")}, context=48, windows=1)
    assert other.overall.num_windows == 1


def test_what_is_not_evaluated_does_not_count() -> None:
    """Of the first windows of a long text, the share is theirs."""
    text = _words(20_000, 5)
    tokenizer = Tokenizer.from_tokenizer_json(
        tokenizer_json.byte_level().to_str(), config={"eos_token": "<|im_end|>"}
    )
    used = fingerprint.of_text(text[:900])
    first = cut("x", text, tokenizer, context=64, limit=4)
    assert first.ids.size == 256 and overlap.share(first, used) > 0.9
    whole = cut("x", text, tokenizer, context=64)
    assert overlap.share(whole, used) < overlap.ALLOWED and whole.text == text
    rest = fingerprint.of_text(text[len(text) // 2 :])
    assert overlap.share(first, rest) == 0.0 and overlap.share(whole, rest) > 0.4
