"""Tasks: made and read items, hostile files, and answers of a model that knows them."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.errors import ConfigError, RequestError
from infer.eval import generated_tasks, read_text, tasks
from infer.eval.tasks import Choice, Continuation, Match, read_items, run_task
from tests.models import tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> infer.Model:
    return infer.load(tiny_folder.write(tmp_path_factory.mktemp("m") / "tiny"))


class Bytes:
    """A token a byte."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return list(text.encode())


class Knowing(infer.Model):
    """Answers a prompt as it is told to."""

    config = types.SimpleNamespace(max_context=4096)  # type: ignore[assignment]

    def __init__(self, answers: dict[str, str]) -> None:
        for name, value in {"tokenizer": Bytes(), "name": "knowing", "answers": answers}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "calls", [])

    def __repr__(self) -> str:
        return "Knowing"

    def generate(self, prompts: Any, sampling: Any = None, **_: Any) -> Any:
        assert sampling.temperature == 0
        self.calls.append(len(prompts))
        return types.SimpleNamespace(text=[self.answers[bytes(p).decode()] for p in prompts])


def _run(items: list[Any], *models: Any) -> tasks.TaskResult:
    return run_task("t", items, models)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_stands_at_its_depth_in_a_context_of_its_length(depth: float) -> None:
    items = generated_tasks.needle(
        read_text("en"), Bytes(), context=2000, depths=(depth,), count=30, seed=3
    )
    assert items == generated_tasks.needle(
        read_text("en"), Bytes(), context=2000, depths=(depth,), count=30, seed=3
    )
    assert len({item.prompt for item in items}) == 30
    for item in items:
        fact = item.prompt.index("The secret number of")
        assert item.prompt.count(item.answer) == 1
        city = item.prompt[fact:].split()[4]
        assert item.prompt.endswith(f"Answer: The secret number of {city} is")
        size = len(item.prompt.encode())
        assert size <= 2000
        filler = item.prompt.index("\nQuestion:") - len(f"The secret number of {city} is 12345.\n")
        # To the nearest line: those of the text have up to 800 bytes.
        assert abs(fact / filler - depth) < 0.35 if 0 < depth < 1 else fact / filler == depth
    assert np.mean([len(item.prompt.encode()) for item in items]) > 1700


def test_needles_that_cannot_be_made_are_refused() -> None:
    make = lambda **changed: generated_tasks.needle(
        "a line\n" * 50, Bytes(), **({"context": 300} | changed)
    )
    assert len(make(count=1)) == 5
    for changed, message in (
        ({"context": 40}, "no room"),
        ({"context": 900}, "give a longer text"),
        ({"depths": (1.5,)}, "from 0 to 1"),
        ({"count": 0}, "give 1 to 100000"),
    ):
        with pytest.raises(RequestError, match=message):
            make(**changed)


def test_arithmetic_is_right_and_shows_no_question_beforehand() -> None:
    items = generated_tasks.arithmetic(count=40, digits=3, shots=5, seed=2)
    for nth, item in enumerate(items):
        *shots, asked = item.prompt.split("\n")
        assert len(shots) == 5
        sign = "*" if nth % 2 else "+"
        assert item.group == ("multiplication" if nth % 2 else "addition")
        for line in [*shots, f"{asked} {item.answer}"]:
            left, right = line.split(" = ")
            assert sign in left and eval(left) == int(right)
        assert asked not in "\n".join(shots)
    assert items == generated_tasks.arithmetic(count=40, digits=3, shots=5, seed=2)
    assert items != generated_tasks.arithmetic(count=40, digits=3, shots=5, seed=3)
    for changed in ({"count": 0}, {"digits": 13}, {"shots": -1}):
        with pytest.raises(RequestError, match=f"{next(iter(changed))} is"):
            generated_tasks.arithmetic(**changed)


def test_continuations_are_read_by_their_rule() -> None:
    assert Match.number.read(" 57.\nBut 3") == "57"
    assert Match.number.read(" minus: -4") == "-4"
    assert Match.number.read("none") == ""
    assert Match.line.read(" \n Paris \nand more") == "Paris"
    assert Match.line.read("") == ""


def test_two_models_are_paired() -> None:
    items = [Continuation(str(i), "yes", group="odd" if i % 2 else "even") for i in range(100)]
    first = Knowing({str(i): " yes\n" if i < 50 else " no" for i in range(100)})
    second = Knowing({str(i): " yes\n" if 40 <= i < 70 else " no" for i in range(100)})
    got = _run(items, first, second)
    assert [x.right for x in got.models] == [50, 30]
    assert (got.only_first, got.only_second) == (40, 20)
    assert got.p_value == pytest.approx(0.0134, abs=1e-4)
    assert got.verdict == "worse"
    assert got.correct[0] == [True] * 50 + [False] * 50
    assert got.groups["even"][0].right == 25 and got.groups["even"][0].count == 50
    assert _run(items, second, first).verdict == "better"
    same = _run(items, first, first)
    assert (same.only_first, same.p_value) == (0, 1.0)
    assert same.verdict == "no difference that these items can show"
    alone = _run(items[:10], first)
    assert alone.verdict is None and "10 items" in alone.warnings[0]
    assert first.calls[:4] == [32, 32, 32, 4]
    with pytest.raises(RequestError, match="one or two models, not 3"):
        _run(items, first, first, first)


def test_a_choice_is_the_likeliest_continuation(model: infer.Model) -> None:
    """By hand, through score: sum of log p of the choice's ids, over its bytes if normalised."""
    choice = Choice("Which one?", ("a", "bb and much more text", "ccc"), 0)

    def by_hand(normalize: bool) -> int:
        values = []
        for text in choice.choices:
            ids = model.tokenizer.encode(f"{choice.question} {text}")
            skip = len(model.tokenizer.encode(choice.question))
            logp = np.asarray(infer.score(model.params, jnp.asarray([ids], jnp.int32)))[0]
            value = logp[skip - 1 :].sum()
            values.append(value / (len(text.encode()) + 1) if normalize else value)
        return int(np.argmax(values))

    for normalize in (False, True):
        right = dataclasses.replace(choice, answer=by_hand(normalize))
        wrong = dataclasses.replace(choice, answer=(right.answer + 1) % 3)
        got = run_task("t", [right, wrong], [model], normalize=normalize)
        assert got.models[0].right == 1


def test_a_model_of_nan_answers_nothing(model: infer.Model) -> None:
    norm = jnp.full_like(model.params.final_norm, jnp.nan)
    broken = dataclasses.replace(model, params=dataclasses.replace(model.params, final_norm=norm))
    with pytest.raises(RequestError, match="the model gives NaN after"):
        _run([Choice("q", ("a", "b"), 0)], broken)


def test_a_real_run_of_generated_items(model: infer.Model) -> None:
    """A random model knows nothing; it answers all the same, greedily and in slots."""
    items = [*generated_tasks.arithmetic(count=3, shots=1), Continuation("Say", "x")]
    seen: list[tuple[int, int]] = []
    got = run_task("t", items, [model], progress=lambda *x: seen.append(x))
    prompts = [model.tokenizer.encode(item.prompt) for item in items]
    out = model.generate(prompts, infer.SamplingParams(temperature=0, max_tokens=8))
    want = [item.match.read(t) == item.answer for item, t in zip(items, out.text, strict=True)]
    assert got.models[0].right == sum(want)
    assert seen == [(4, 4)]
    with pytest.raises(RequestError, match="item 0 has"):
        run_task("t", [Continuation("x" * 600, "y")], [model])


def test_files_of_items(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    lines = [
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1, "group": "sums"},
        {"question": "2 + 1?", "choices": ["3", "4"], "answer": "3"},
        {"prompt": "The capital of France is", "answer": " Paris "},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read_items(file) == [
        Choice("2 + 2?", ("3", "4"), 1, "sums"),
        Choice("2 + 1?", ("3", "4"), 0),
        Continuation("The capital of France is", "Paris"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "a list; a line is one JSON object"),
        (b'{"prompt": "a"}', "has the keys prompt; an item has"),
        (b'{"prompt": "a", "answer": "b", "x": 1}', "has the keys answer, prompt, x"),
        (b'{"prompt": "a", "prompt": "b", "answer": "c"}', "stands there twice"),
        (b'{"prompt": "", "answer": "c"}', "prompt is ''"),
        (b'{"prompt": "a", "answer": 5}', "answer is 5; it is text"),
        (b'{"prompt": "a", "answer": "b\\nc"}', "it is one line"),
        (b'{"prompt": "\\ud800", "answer": "b"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "answer": "b", "group": 1}', "group is 1"),
        (b'{"question": "a", "choices": ["b"], "answer": 0}', "a list of 2 to 100"),
        (b'{"question": "a", "choices": ["b", "b"], "answer": 0}', "two choices are the same"),
        (b'{"question": "a", "choices": ["b", "c"], "answer": 2}', "an index from 0 to 1"),
        (b'{"question": "a", "choices": ["b", "c"], "answer": true}', "an index from 0 to 1"),
        (b'{"question": "a", "choices": ["b", "c"], "answer": "d"}', "an index from 0 to 1"),
        (b'{"question": "a", "choices": ["b", ""], "answer": 0}', "choice is ''"),
        (b'{"prompt": "\xff", "answer": "b"}', "not UTF-8 at byte 12"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, ""),
    ],
    ids=lambda x: x[:30],
)
def test_hostile_lines_are_refused_by_number(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "items.jsonl"
    file.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        read_items(file)
    assert str(caught.value).startswith(f"{file}:2: ") and message in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(file))


def test_files_without_items_and_with_endless_lines(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match="no items"):
        read_items(file)
    file.write_bytes(b'{"prompt": "' + b"a" * (1 << 20))
    with pytest.raises(ConfigError, match=":1: longer than"):
        read_items(file)
