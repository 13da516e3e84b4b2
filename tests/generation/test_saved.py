"""Streams that stop and go on with the same bits: from memory, from a file, with a next message."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import infer
from infer.errors import RequestError, WeightFormatError
from infer.generation.facade import TextStream
from infer.sampling import SamplingParams
from infer.weights.safetensors import SafetensorsFile
from infer.weights.safetensors_writer import write_file
from tests.generation.test_generate import Letters
from tests.models import tiny

SAMPLING = SamplingParams(temperature=1.0, max_tokens=30, seed=5, repetition_penalty=1.1)
PROMPT = list(range(3, 20))


def _stream(prompt=None, params=None, **options) -> TextStream:
    return infer.stream(params or tiny.llama(), prompt, tokenizer=Letters(), **options)


def _bits(stream: TextStream) -> tuple[list[int], np.ndarray]:
    """Return the tokens and log-probabilities so far."""
    output = stream.state.state.output
    n = int(output.lengths[0])
    return np.asarray(output.tokens)[0, :n].tolist(), np.asarray(output.logprobs)[0, :n]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_a_stream_goes_on_with_the_same_bits(pieces: int, through_a_file: bool, tmp_path) -> None:
    whole = _stream(PROMPT, sampling=SAMPLING)
    text = "".join(whole)
    first = _stream(PROMPT, sampling=SAMPLING)
    said = [next(first) for _ in range(pieces)]
    state = first.state
    if through_a_file:
        infer.save_state(tmp_path / "state", state)
        state = infer.load_state(tmp_path / "state", tiny.llama())
    rest = _stream(state=state)
    assert "".join(said) + "".join(rest) == text
    assert _bits(rest)[0] == _bits(whole)[0]
    np.testing.assert_array_equal(_bits(rest)[1], _bits(whole)[1])
    # The state is still good: what went on had a copy.
    assert "".join(said) + "".join(_stream(state=state)) == text
    # And so is the stream it was taken from.
    assert "".join(said) + "".join(first) == text


def test_a_stream_that_has_not_begun_goes_on_through_a_file(tmp_path) -> None:
    infer.save_state(tmp_path / "state", _stream(PROMPT, sampling=SAMPLING).state)
    state = infer.load_state(tmp_path / "state", tiny.llama())
    assert "".join(_stream(state=state)) == "".join(_stream(PROMPT, sampling=SAMPLING))


def test_a_state_is_a_pytree() -> None:
    stream = _stream(PROMPT, sampling=SAMPLING)
    next(stream)
    state = stream.state
    moved = jax.tree.map(lambda leaf: leaf + 0 if leaf.dtype == np.int32 else leaf, state)
    assert "".join(_stream(state=moved)) == "".join(stream)


@pytest.mark.parametrize("finished", [True, False])
def test_the_next_message_prefills_only_what_is_new(finished: bool, tmp_path) -> None:
    first = _stream(PROMPT, sampling=SAMPLING)
    if finished:
        "".join(first)
    else:
        next(first)
    infer.save_state(tmp_path / "state", first.state)
    state = infer.load_state(tmp_path / "state", tiny.llama())
    conversation = [*PROMPT, *_bits(first)[0], 7, 8, 9, 10, 11]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    fresh, on = (
        _stream(conversation, sampling=greedy),
        _stream(conversation, sampling=greedy, state=state),
    )
    assert "".join(on) == "".join(fresh)
    np.testing.assert_allclose(_bits(on)[1], _bits(fresh)[1], atol=1e-5)
    # The last generated token was never fed back.
    assert on.stats["prompt_tokens"] == 6
    assert on.stats["shared_tokens"] == len(conversation) - 6
    assert fresh.stats["prompt_tokens"] == len(conversation)


def test_only_what_is_common_is_taken() -> None:
    first = _stream(PROMPT, sampling=SAMPLING)
    "".join(first)
    other = [*PROMPT[:9], 80, 81, 82]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    on = _stream(other, sampling=greedy, state=first.state)
    assert "".join(on) == "".join(_stream(other, sampling=greedy))
    assert on.stats["shared_tokens"] == 9
    # A prompt that is there entirely still computes its last token; one that begins otherwise, all.
    again = _stream(PROMPT, sampling=greedy, state=first.state)
    "".join(again)
    assert again.stats["prompt_tokens"] == 1
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    again = _stream(PROMPT, sampling=scored, state=first.state)
    "".join(again)
    assert again.stats["prompt_tokens"] == len(PROMPT)


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    stream = _stream(PROMPT, sampling=SAMPLING)
    next(stream)
    state, path = stream.state, tmp_path / "state"
    with pytest.raises(RequestError, match="go on with the model it comes from"):
        _stream(state=state, params=tiny.gemma3())
    with pytest.raises(RequestError, match="page_size is 4, the state's 16"):
        _stream(PROMPT, sampling=SAMPLING, state=state, page_size=4)
    with pytest.raises(RequestError, match="neither prompt nor state"):
        _stream()
    with pytest.raises(RequestError, match="leave sampling, key, device and options out"):
        _stream(state=state, sampling=SAMPLING)
    infer.save_state(path, state)
    with pytest.raises(RequestError, match="go on with the model it comes from"):
        infer.load_state(path, tiny.gemma3())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(WeightFormatError):
        infer.load_state(path, tiny.llama())


@pytest.mark.parametrize(
    "name, value",
    [
        ("[0].prompt_lens", 2**31 - 1),
        ("[0].prompt_lens", -5),
        ("[1].cache.lengths", 2**31 - 1),
        ("[1].cache.page_table", 3),
        ("[1].num_generated", 2**31 - 1),
        ("[1].source", -5),
        ("[1].request", 7),
        ("[1].output.lengths", 99),
        ("[1].output.tokens", 2**31 - 1),
        ("[1].counters.turns", 2**31 - 1),
        ("[0].sampling.max_tokens", 2**31 - 1),
    ],
)
def test_a_file_whose_numbers_cannot_be_is_refused(name: str, value: int, tmp_path) -> None:
    path = _edited(tmp_path, {name: value}, {})
    with pytest.raises(WeightFormatError, match="contradict each other"):
        infer.load_state(path, tiny.llama())


@pytest.mark.parametrize(
    "change",
    [
        dict(caps="3"),
        dict(caps="{}"),
        dict(slots=-1),
        dict(requests=0),
        dict(prompt=10**12),
        dict(prompt=10**8),
        dict(pages="x"),
        dict(processed_logprobs=[1]),
        dict(sampling="{}"),
        dict(sampling='{"logit_bias": null}'),
        dict(sampling='{"logit_bias": {"abc": 1}}'),
        dict(sampling='{"n": 3, "logit_bias": {}}'),
        dict(sampling="["),
    ],
    ids=str,
)
def test_a_file_whose_description_cannot_be_is_refused(change: dict, tmp_path) -> None:
    path = _edited(tmp_path, {}, change)
    with pytest.raises((WeightFormatError, RequestError)):
        infer.load_state(path, tiny.llama())


def _edited(folder: Path, numbers: dict[str, int], change: dict) -> Path:
    """Return the file of a running stream with all numbers of a tensor, or metadata, changed."""
    stream = _stream(PROMPT, sampling=SAMPLING)
    next(stream)
    infer.save_state(folder / "state", stream.state)
    with SafetensorsFile.open(folder / "state") as file:
        tensors = {name: np.array(file.array(name)) for name in file.tensors}
        metadata = dict(file.metadata)
    for name, value in numbers.items():
        tensors[name] = np.full_like(tensors[name], value)
    caps = json.loads(metadata["caps"])
    for key, value in change.items():
        if key in metadata:
            metadata[key] = value
        else:
            metadata["caps"] = json.dumps(caps | {key: value})
    write_file(folder / "edited", tensors, metadata)
    return folder / "edited"
