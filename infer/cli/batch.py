"""`infer generate --batch-file` with a file in OpenAI's batch format."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from infer.cli.interrupt import interruptible
from infer.cli.loading import use_compilation_cache
from infer.errors import ConfigError
from infer.progress import counting_bar
from infer.serve.batch_file import AnswerFile, answer_line, read_lines


class Batch:
    """One run over a batch file.

    Args:
        name, data: the input.
        out: the file of answers; None writes them to standard output, where nothing is resumed.
        model: the name that is loaded, and reported.
        defaults: of requests that do not say; None is not given.
        as_json: print one object with the counts, instead of a line for people.
    """

    def __init__(
        self,
        name: str,
        data: bytes,
        *,
        out: str | None,
        model: str,
        defaults: dict[str, Any],
        as_json: bool,
    ) -> None:
        if as_json and out is None:
            raise ConfigError("--json of a batch needs --out: standard output has the answers")
        if out is not None and name != "standard input" and _same_file(name, out):
            raise ConfigError(f"--out {out} is the --batch-file itself; name another file")
        self.model, self.out, self.as_json = model, out, as_json
        self.defaults = {n: value for n, value in defaults.items() if value is not None}
        self.lines = read_lines(data, json.dumps([model, self.defaults], sort_keys=True))

    def run(self, load: Callable[[], tuple[Any, float]], options: dict[str, Any]) -> None:
        """Answer what has no answer yet, and report the counts; `load` gives a Model, and may
        add to `options` what depends on it.
        """
        start = time.perf_counter()
        file = None if self.out is None else AnswerFile(Path(self.out), self.lines)
        with nullcontext() if file is None else closing(file):
            done = set() if file is None else file.done
            left = len(self.lines) - len(done)
            counts = {"answered": 0, "refused": 0, "skipped": len(done)}
            if left:
                write = _print if file is None else file.append
                counts = self._answer(load, options, done, write)
        self._report(counts, time.perf_counter() - start)

    def _answer(
        self,
        load: Callable[[], tuple[Any, float]],
        options: dict[str, Any],
        done: set[str],
        write: Callable[[list[dict[str, Any]]], None],
    ) -> dict[str, int]:
        use_compilation_cache()
        from infer.llm import LLM
        from infer.serve.batch import answer_batch

        model = load()[0]  # which may add to the options
        llm = LLM(model, **options)
        with counting_bar("requests", len(self.lines), len(done)) as progress:
            return interruptible(
                lambda: answer_batch(
                    llm,
                    self.lines,
                    model=self.model,
                    defaults=self.defaults,
                    done=done,
                    write=write,
                    progress=progress,
                )
            )

    def _report(self, counts: dict[str, int], seconds: float) -> None:
        if self.as_json:
            figures = {"model": self.model, "out": self.out, **counts, "seconds": seconds}
            print(json.dumps(figures))
            return
        where = "" if self.out is None else f", in {self.out}"
        skipped = f", {counts['skipped']} were done" if counts["skipped"] else ""
        print(
            f"{counts['answered']} answered, {counts['refused']} refused{skipped} in "
            f"{seconds:.1f} s{where}",
            file=sys.stderr,
        )


def _same_file(a: str, b: str) -> bool:
    return Path(b).exists() and Path(a).samefile(b)


def _print(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        sys.stdout.write(answer_line(answer).decode())
    sys.stdout.flush()
