"""Tasks with right answers: what an item is, files of items, and the run of a task.

A continuation is generated greedily and judged by exact match; a choice is the one with the largest
log-likelihood after its question.  Two models answer the same items, so their answers are paired:
McNemar's exact test counts only the items that one of them gets right.
"""

import dataclasses
import enum
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from infer.errors import ConfigError, RequestError
from infer.eval import statistics
from infer.eval.measures import Progress
from infer.eval.results import Result
from infer.eval.scoring import log_likelihoods
from infer.eval.statistics import Interval
from infer.model import Model
from infer.sampling import SamplingParams

_LONGEST_LINE = 1 << 20
_MOST_ITEMS = 100_000
# Tokens beyond those of the answer: enough to see that it goes on.
_SLACK = 4
# Items between two reports of progress.
_BATCH = 32


class Match(enum.Enum):
    """How a continuation is read before it is compared."""

    line = "the first line that is not empty"
    number = "the first whole number"

    def read(self, text: str) -> str:
        """Return what a continuation answers."""
        if self is Match.number:
            found = re.search(r"-?\d+", text)
            return found[0] if found else ""
        return text.strip().split("\n", 1)[0].strip()


@dataclass(frozen=True)
class Continuation:
    """A prompt whose greedy continuation must be the answer."""

    prompt: str
    answer: str
    match: Match = Match.line
    group: str = ""  # what a breakdown is by


@dataclass(frozen=True)
class Choice:
    """A question whose right choice must be the likeliest."""

    question: str
    choices: tuple[str, ...]
    answer: int
    group: str = ""


Item = Continuation | Choice


@dataclass(frozen=True)
class Accuracy:
    """Right answers of one model."""

    right: int
    count: int
    accuracy: Interval  # Wilson's


@dataclass(frozen=True)
class TaskResult(Result):
    """Of `run_task`, for one model or two."""

    task: str
    models: list[Accuracy]
    groups: dict[str, list[Accuracy]]  # of each model
    correct: list[list[bool]]  # of each model, of each item in order
    only_first: int | None = None  # items that only the first model got right
    only_second: int | None = None
    p_value: float | None = None  # McNemar's, exact, two-sided
    verdict: str | None = None  # of the second model
    warnings: list[str] = field(default_factory=list)


def read_items(path: Path) -> list[Item]:
    """Return the items of a JSON lines file, each line one of

        {"question": str, "choices": [str, str, ...], "answer": index or the choice's text}
        {"prompt": str, "answer": str}

    with an optional "group": str.  Empty lines are passed over.

    Raises:
        ConfigError: a line is something else; the message has its number.
    """
    items: list[Item] = []
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise ConfigError(f"{path}:{number}: longer than {_LONGEST_LINE} bytes; split it")
            if line.strip():
                try:
                    items.append(_item(line))
                except ValueError as error:
                    raise ConfigError(f"{path}:{number}: {error}") from None
            if len(items) > _MOST_ITEMS:
                raise ConfigError(f"{path} has more than {_MOST_ITEMS} items; split it")
    if not items:
        raise ConfigError(f"{path} has no items; give at least one JSON object a line")
    return items


def _item(line: bytes) -> Item:
    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}; a line is one JSON object")
    group = found.pop("group", "")
    wanted = {"question", "choices", "answer"}, {"prompt", "answer"}
    if set(found) not in wanted:
        raise ValueError(
            f"has the keys {', '.join(sorted(found))[:200] or '(none)'}; an item has question, "
            "choices and answer, or prompt and answer, and may have group"
        )
    if not isinstance(group, str):
        raise ValueError(f"group is {group!r:.40}; it is text")
    if "prompt" in found:
        prompt, answer = _text("prompt", found["prompt"]), _text("answer", found["answer"])
        if not answer.strip() or "\n" in answer.strip():
            raise ValueError(f"answer is {answer!r:.40}; it is one line that is not empty")
        return Continuation(prompt, answer.strip(), group=group)
    question, choices = _text("question", found["question"]), found["choices"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= 100:
        raise ValueError(f"choices is {choices!r:.40}; it is a list of 2 to 100 texts")
    choices = tuple(_text("choice", c) for c in choices)
    if len(set(choices)) < len(choices):
        raise ValueError("two choices are the same")
    answer = found["answer"]
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"answer is {answer!r:.40}; it is an index from 0 to {len(choices) - 1}, or one of the "
            "choices"
        )
    return Choice(question, choices, answer, group)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r:.40}; it is text that is not empty")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{name} has half of a surrogate pair")
    return value


def run_task(
    name: str,
    items: Sequence[Item],
    models: Sequence[Model],
    *,
    normalize: bool = False,
    implementation: str | None = None,
    progress: Progress | None = None,
) -> TaskResult:
    """Let one model, or two, answer every item.

    Args:
        name: of the task, for the result.
        items: continuations are generated in many slots at a time.
        models: one or two.
        normalize: divide a choice's log-likelihood by its bytes in UTF-8, so that long choices are
            not behind for their length.
        implementation: as in `generate`.
        progress: called with (items done, items in all), over all models.

    Raises:
        RequestError: there are no items, or one does not fit a model's context.
    """
    if not items or not 1 <= len(models) <= 2:
        raise RequestError(f"a task is run on items by one or two models, not {len(models)}")
    total = len(items) * len(models)
    right = []
    for nth, model in enumerate(models):
        report: Callable[[int], None] | None = None
        if progress is not None:
            report = lambda done, nth=nth: progress(nth * len(items) + done, total)
        right.append(_answers(model, items, normalize, implementation, report))
    groups = dict.fromkeys(item.group for item in items)
    of_group = lambda group: np.asarray([item.group == group for item in items])
    result = TaskResult(
        task=name,
        models=[_accuracy(x) for x in right],
        groups={g: [_accuracy(x[of_group(g)]) for x in right] for g in groups if g},
        correct=[x.tolist() for x in right],
        warnings=_too_few(len(items)),
    )
    return result if len(models) == 1 else _paired(result, *right)


def _paired(result: TaskResult, first: np.ndarray, second: np.ndarray) -> TaskResult:
    only = int((first & ~second).sum()), int((second & ~first).sum())
    p = statistics.mcnemar(*only)
    better = statistics.BETTER if only[1] > only[0] else statistics.WORSE
    return dataclasses.replace(
        result,
        only_first=only[0],
        only_second=only[1],
        p_value=p,
        verdict=better if p < 0.05 else "no difference that these items can show",
    )


def _too_few(count: int) -> list[str]:
    # Two standard errors where half of them are right.
    if count >= 100:
        return []
    return [
        f"{count} items: an accuracy is known to ±{100 / count**0.5:.0f} points; give 100 or more"
    ]


def _accuracy(right: Bool[np.ndarray, " N"]) -> Accuracy:
    count = int(right.sum())
    return Accuracy(count, len(right), statistics.wilson(count, len(right)))


def _answers(
    model: Model,
    items: Sequence[Item],
    normalize: bool,
    implementation: str | None,
    report: Callable[[int], None] | None,
) -> Bool[np.ndarray, " N"]:
    """Return which items a model gets right."""
    right = np.zeros(len(items), bool)
    done = 0
    continuations = [i for i, item in enumerate(items) if isinstance(item, Continuation)]
    _check_lengths(model, items)
    for start in range(0, len(continuations), _BATCH):
        part = continuations[start : start + _BATCH]
        found = _continued(model, [items[i] for i in part], implementation)  # type: ignore[misc]
        for i, text in zip(part, found, strict=True):
            item = items[i]
            assert isinstance(item, Continuation)
            right[i] = item.match.read(text) == item.answer
        done += len(part)
        if report is not None:
            report(done)
    choices = [i for i, item in enumerate(items) if isinstance(item, Choice)]
    for start in range(0, len(choices), _BATCH):
        part = choices[start : start + _BATCH]
        asked = [item for i in part if isinstance(item := items[i], Choice)]
        chosen = _chosen(model, asked, normalize, implementation)
        right[part] = [c == item.answer for c, item in zip(chosen, asked, strict=True)]
        done += len(part)
        if report is not None:
            report(done)
    return right


def _continued(
    model: Model, items: Sequence[Continuation], implementation: str | None
) -> list[str]:
    encode = lambda text: model.tokenizer.encode(text, add_bos=False)
    room = max(len(encode(item.answer)) for item in items) + _SLACK
    sampling = SamplingParams(temperature=0.0, max_tokens=room)
    prompts = [model.tokenizer.encode(item.prompt) for item in items]
    out = model.generate(prompts, sampling, implementation=implementation)
    assert out.text is not None
    return out.text


def _chosen(
    model: Model, items: Sequence[Choice], normalize: bool, implementation: str | None
) -> list[int]:
    """Return of each item the choice of the largest log-likelihood after the question and a space.

    A choice begins where its ids part from the question's: a token may span the border.
    """
    encode = model.tokenizer.encode
    rows = [encode(_joined(item, choice)) for item in items for choice in item.choices]
    found = iter(zip(rows, log_likelihoods(model.params, rows, implementation), strict=True))
    chosen = []
    for item in items:
        question, values = encode(item.question), []
        for choice in item.choices:
            ids, logp = next(found)
            value = float(logp[max(_common(question, ids), 1) - 1 :].sum(dtype=np.float64))
            size = len(_joined(item, choice).encode()) - len(item.question.encode())
            if math.isnan(value):
                raise RequestError(
                    f"the model gives NaN after {item.question!r:.60}; its weights are damaged, or"
                    " its dtype is too small for it"
                )
            values.append(value / size if normalize else value)
        chosen.append(int(np.argmax(values)))
    return chosen


def _joined(item: Choice, choice: str) -> str:
    return item.question + ("" if item.question[-1].isspace() else " ") + choice


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two sequences begin with in common."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _check_lengths(model: Model, items: Sequence[Item]) -> None:
    most = model.config.max_context
    for number, item in enumerate(items):
        texts = (
            [item.prompt + item.answer]
            if isinstance(item, Continuation)
            else [_joined(item, choice) for choice in item.choices]
        )
        sizes = [len(model.tokenizer.encode(text)) for text in texts]
        longest = max(sizes)
        if min(sizes) < 2:
            raise RequestError(f"item {number} is a single token; nothing can be scored in it")
        if longest + 2 * _SLACK > most:
            raise RequestError(
                f"item {number} has {longest} tokens, and {model.name}'s context is {most}; leave "
                "it out, or ask for a smaller context"
            )
