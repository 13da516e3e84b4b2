"""Batch files in OpenAI's format: many requests, a chunk of them at a time through one program.

The static sizes of that program are those of the whole file, so every chunk runs it, and a request
is computed alike whichever chunk it falls into: a run that was killed and resumed writes what an
uninterrupted one would have.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.errors import CapacityError, RequestError
from infer.llm import LLM
from infer.outputs import RequestOutput
from infer.sampling import SamplingParams
from infer.serve.batch_file import Line
from infer.serve.openai_format import (
    CHAT,
    BodyError,
    BodyRequest,
    error_body,
    read_body,
    response_body,
)

# Rows of a chunk, in slots: enough that the slots are full nearly all the time, few enough that
# answers reach the disk every minute or so.
_ROUNDS = 4
# Sequences of one request: OpenAI's limit on n, and on the prompts of a completion.
_MOST_SAMPLES, _MOST_PROMPTS = 128, 2048
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, kw_only=True)
class Todo:
    """One request that can be served."""

    line: Line
    custom_id: str
    request: BodyRequest
    prompts: list[list[int]]
    sampling: SamplingParams

    @property
    def num_rows(self) -> int:
        """Sequences it generates."""
        return len(self.prompts) * self.sampling.n


def answer_batch(
    llm: LLM,
    lines: Sequence[Line],
    *,
    model: str,
    defaults: Mapping[str, Any],
    done: set[str],
    write: Callable[[list[dict[str, Any]]], None],
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Answer every line that is not done; return how many were answered, refused and skipped.

    Args:
        llm: what answers.
        lines: the whole input, so that a resumed run has the sizes of the first.
        model: the name to report.
        defaults: SamplingParams of requests that do not say; with a "seed" in it, each line
            without one gets its own, drawn from that and the line.
        done: ids of lines that have their answer.
        write: takes the answers of a chunk, and keeps them before it returns.
        progress: called with the number of lines that are done.
    """
    todo, errors = _read(llm, lines, defaults)
    counts = {"answered": 0, "refused": 0, "skipped": sum(line.id in done for line in lines)}

    def put(answers: list[dict[str, Any]]) -> None:
        write(answers)
        refused = sum(answer["error"] is not None for answer in answers)
        counts["refused"] += refused
        counts["answered"] += len(answers) - refused
        if progress is not None:
            progress(sum(counts.values()))

    put([error for line_id, error in errors.items() if line_id not in done])
    for answers in _run(llm, todo, done, model):
        put(answers)
    return counts


def _read(
    llm: LLM, lines: Sequence[Line], defaults: Mapping[str, Any]
) -> tuple[list[Todo], dict[str, dict[str, Any]]]:
    """Return what can be served, and the error answer of every other line by the line's id."""
    todo: list[Todo] = []
    errors: dict[str, dict[str, Any]] = {}
    first: dict[str, int] = {}
    for line in lines:
        custom_id = None
        try:
            fields = _fields(line.raw)
            custom_id = fields["custom_id"]
            if custom_id in first:
                raise BodyError(
                    f"custom_id {custom_id!r:.80} is that of line {first[custom_id]} already; give "
                    "every line its own",
                    "custom_id",
                )
            first[custom_id] = line.number
            todo.append(_todo(llm, line, fields, defaults))
        except (ValueError, TypeError, CapacityError) as error:
            errors[line.id] = _refusal(line, custom_id, error)
    return todo, errors


def _fields(raw: bytes) -> dict[str, Any]:
    """Return a line's object, its envelope checked."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BodyError(f"not a line of JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise BodyError("the line is not a JSON object")
    if not isinstance(fields.get("custom_id"), str) or not fields["custom_id"]:
        # Without a string there is nothing to report the error under but the line itself.
        raise BodyError("custom_id is missing; it is a string that no other line has", "custom_id")
    return fields


def _todo(llm: LLM, line: Line, fields: dict[str, Any], defaults: Mapping[str, Any]) -> Todo:
    if fields.get("method") != "POST":
        raise BodyError(f"method is {fields.get('method')!r:.40}; it is 'POST'", "method")
    if unknown := sorted(set(fields) - _FIELDS):
        raise BodyError(f"unknown field {unknown[0]!r:.80} beside the body", unknown[0])
    request = read_body(fields.get("url", ""), fields.get("body"))
    given = dict(defaults) | request.sampling
    if "seed" in defaults and "seed" not in request.sampling:
        digest = hashlib.sha256(f"{defaults['seed']}\n{line.number}".encode()).digest()
        given["seed"] = int.from_bytes(digest[:8], "little") >> 1
    sampling = SamplingParams(**given)
    if sampling.n > _MOST_SAMPLES:
        raise BodyError(f"n is {sampling.n}, must be at most {_MOST_SAMPLES}", "n")
    if len(request.prompts) > _MOST_PROMPTS:
        raise BodyError(
            f"prompt has {len(request.prompts)} prompts, a line has at most {_MOST_PROMPTS}; make "
            "several lines",
            "prompt",
        )
    tokenizer = llm.get_tokenizer()
    if request.url == CHAT:
        prompts = [tokenizer.apply_chat_template(request.messages, **request.template)]
    else:
        encode = lambda p: tokenizer.encode(p, parse_special=True) if isinstance(p, str) else p
        prompts = [encode(prompt) for prompt in request.prompts]
    for ids in prompts:
        llm.check(ids, sampling)
    return Todo(
        line=line,
        custom_id=fields["custom_id"],
        request=request,
        prompts=prompts,
        sampling=sampling,
    )


def _run(
    llm: LLM, todo: Sequence[Todo], done: set[str], model: str
) -> Iterator[list[dict[str, Any]]]:
    """Yield the answers of chunk after chunk."""
    if all(t.line.id in done for t in todo):
        return
    slots = llm.options.slots(sum(t.num_rows for t in todo))
    most = max(_ROUNDS * slots, *(t.num_rows for t in todo))
    options = dataclasses.replace(
        llm.options,
        num_slots=slots,
        room=llm.room_for([(ids, t.sampling) for t in todo for ids in t.prompts], most),
    )
    for chunk in _chunks([t for t in todo if t.line.id not in done], most):
        flat = [(ids, t.sampling) for t in chunk for ids in t.prompts]
        outputs = iter(
            llm.run([f[0] for f in flat], [None] * len(flat), [f[1] for f in flat], options)
        )
        yield [_answer(llm, t, [next(outputs) for _ in t.prompts], model) for t in chunk]


def _chunks(todo: Sequence[Todo], most: int) -> Iterator[list[Todo]]:
    """Yield the requests in order, as many at a time as give at most `most` rows."""
    chunk: list[Todo] = []
    for request in todo:
        if chunk and sum(t.num_rows for t in chunk) + request.num_rows > most:
            yield chunk
            chunk = []
        chunk.append(request)
    if chunk:
        yield chunk


def _answer(llm: LLM, todo: Todo, outputs: list[RequestOutput], model: str) -> dict[str, Any]:
    reasons = {c.finish_reason for o in outputs for c in o.outputs}
    if not reasons <= {"stop", "length"}:
        message = "the model's logits are not numbers; try another dtype"
        return _envelope(todo.line, todo.custom_id, 500, error_body(message, server=True))
    kind = "chatcmpl" if todo.request.url == CHAT else "cmpl"
    body = response_body(
        todo.request,
        outputs,
        request_id=f"{kind}-{todo.line.id.removeprefix('batch_req_')}",
        created=int(time.time()),
        model=model,
        token_bytes=llm.get_tokenizer().token_bytes,
    )
    return _envelope(todo.line, todo.custom_id, 200, body)


def _refusal(line: Line, custom_id: str | None, error: Exception) -> dict[str, Any]:
    param = error.param if isinstance(error, BodyError) else None
    kind = RequestError if isinstance(error, (ValueError, CapacityError)) else type(error)
    message = str(error) if kind is RequestError else f"{kind.__name__}: {error}"
    text = f"line {line.number}: {' '.join(message.split())}"
    return _envelope(line, custom_id, 400, error_body(text, param))


def _envelope(
    line: Line, custom_id: str | None, status: int, body: dict[str, Any]
) -> dict[str, Any]:
    failed = body.get("error")
    return {
        "id": line.id,
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": line.id.replace("batch_req", "req"),
            "body": body,
        },
        "error": failed and {"code": failed["type"], "message": failed["message"]},
    }
