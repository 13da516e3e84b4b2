"""Batch files on disk: the lines asked, and a file of answers that survives being killed.  No JAX.

Every line of the input has an id made of the line itself and of what answers it, and its answer
carries that id.  So a file of answers says by itself which lines are done, and whether it belongs
to this input at all.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """One line of the input: its number from 1, its id, its bytes."""

    number: int
    id: str
    raw: bytes


def read_lines(data: bytes, answered_by: str) -> list[Line]:
    """Return the lines that are not blank.

    Args:
        data: the input file.
        answered_by: the model and the defaults; other ones give other ids.
    """
    lines = []
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            digest = hashlib.sha256(f"{number}\n{answered_by}\n".encode() + raw.strip())
            lines.append(Line(number, f"batch_req_{digest.hexdigest()[:32]}", raw))
    return lines


def is_openai_batch(data: bytes) -> bool:
    """Return whether any line is an object with a custom_id: the file is OpenAI's, not prompts."""
    return any(b'"custom_id"' in line and line.lstrip()[:1] == b"{" for line in data.split(b"\n"))


class AnswerFile:
    """The file of answers, open for appending whole lines; one process at a time.

    Opening drops a torn last line, which a killed run leaves.

    Attributes:
        done: ids of the lines that have their answer.

    Raises:
        ConfigError: the file has a line that answers none of `lines`, or another process has it.
    """

    def __init__(self, path: Path, lines: Sequence[Line]) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            self.done = self._read({line.id for line in lines})
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{self.path} is being written by another process; wait, or name another file"
            ) from None

    def _read(self, ids: set[str]) -> set[str]:
        """Return the ids of the whole lines, all of which must be of `ids`; cut what is torn."""
        data = Path(self.path).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        torn = data[len(whole) :]
        if torn and not _may_begin_an_answer(torn, ids):
            raise self._foreign(whole.count(b"\n") + 1)
        done: set[str] = set()
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                found = json.loads(line)["id"]
            except (ValueError, LookupError, TypeError, RecursionError):
                found = None
            if not isinstance(found, str) or found not in ids or found in done:
                raise self._foreign(number)
            done.add(found)
        if torn:
            os.ftruncate(self._file, len(whole))
        os.lseek(self._file, 0, os.SEEK_END)
        return done

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path} line {number} answers no line of this input (or one of another model or "
            "other options); nothing was changed: name another --out, or remove that file"
        )

    def append(self, answers: Iterable[dict[str, Any]]) -> None:
        """Write the answers as whole lines, and return when the disk has them."""
        data = b"".join(answer_line(answer) for answer in answers)
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, and let others have it."""
        os.close(self._file)


_START = b'{"id": "batch_req_'


def _may_begin_an_answer(torn: bytes, ids: set[str]) -> bool:
    """Return whether this is the beginning of an answer to one of `ids`: all else stays uncut."""
    return any(
        torn.startswith(whole[: len(torn)]) for whole in (b'{"id": "%b"' % i.encode() for i in ids)
    )


def answer_line(answer: dict[str, Any]) -> bytes:
    """Return the answer as a line of JSON, its id first."""
    line = json.dumps(answer, allow_nan=False).encode() + b"\n"
    assert line.startswith(_START), line[:40]
    return line
