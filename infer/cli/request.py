"""From options, files and standard input to prompts and SamplingParams."""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# With one of these given, the temperature's default is the sampler's own; else decoding is greedy.
_SAMPLING = ("top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, its own sampling fields, and what to call it in an error."""

    text: str
    where: str
    sampling: dict[str, Any] = field(default_factory=dict)


def read_batch(batch_file: str) -> tuple[str, bytes]:
    """Return the name of a batch file for people, and what is in it; "-" is standard input."""
    if batch_file == "-":
        return "standard input", sys.stdin.buffer.read()
    return batch_file, Path(batch_file).read_bytes()


def read_prompts(arguments: list[str], batch: tuple[str, bytes] | None) -> list[Prompt]:
    """Return the prompts: of the arguments, of `read_batch`, or else standard input as one.

    Raises:
        ValueError: there is none, or one is empty or broken; the message says which.
    """
    if batch is not None:
        prompts = _batch_prompts(*batch)
    elif arguments:
        prompts = [
            Prompt(text=text, where=f"prompt {i}") for i, text in enumerate(arguments, start=1)
        ]
    elif sys.stdin.isatty():
        raise ValueError("no prompt: give one in quotes, use --batch-file, or pipe one in")
    else:
        text = _decode(sys.stdin.buffer.read(), "standard input")
        prompts = [Prompt(text=text.removesuffix("\n"), where="standard input")]
    for prompt in prompts:
        if not prompt.text:
            raise ValueError(f"{prompt.where}: the prompt is empty; give at least one character")
        _check_text(prompt)
    return prompts


def _batch_prompts(name: str, data: bytes) -> list[Prompt]:
    """Read one prompt a line: a JSON object with "prompt" and sampling fields, or plain text."""
    lines = _decode(data, name).split("\n")
    prompts = [
        _batch_line(line, f"{name} line {number}")
        for number, line in enumerate((line.removesuffix("\r") for line in lines), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{name} has no prompt; it needs one a line, plain or as a JSON object")
    return prompts


def _batch_line(line: str, where: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(text=line, where=where)
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from None
    text = fields.pop("prompt", None)
    if not isinstance(text, str):
        raise ValueError(f'{where}: needs "prompt" with a string')
    return Prompt(text=text, where=where, sampling=fields)


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: bad byte at {error.start}") from None


def _check_text(prompt: Prompt) -> None:
    try:
        prompt.text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{prompt.where}: the prompt is not valid Unicode") from None


def sampling_fields(**options: Any) -> dict[str, Any]:
    """Return the options that were given; without a sampling option decoding is greedy."""
    given = {name: value for name, value in options.items() if value is not None}
    if not any(name in given for name in _SAMPLING):
        given.setdefault("temperature", 0.0)
    return given


def sampling_params(base: dict[str, Any], prompt: Prompt) -> Any:
    """Return the infer.SamplingParams of one prompt: the options, overridden by its own fields.

    Raises:
        ValueError: a field is unknown or out of range; the message says where.
    """
    import infer

    known = {f.name for f in dataclasses.fields(infer.SamplingParams)}
    for name in prompt.sampling:
        if name not in known:
            raise ValueError(
                f"{prompt.where}: unknown field {name!r}; known: prompt, {', '.join(sorted(known))}"
            )
    try:
        return infer.SamplingParams(**(base | prompt.sampling))
    except (ValueError, TypeError) as error:
        if not prompt.sampling:
            raise
        raise ValueError(f"{prompt.where}: {error}") from error
