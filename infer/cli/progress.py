"""Progress on standard error: bars and lines on a terminal, nothing when piped."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

Update = Callable[[str, int, int], None]


class _OnTerminal(logging.Handler):
    """Prints records on standard error while that is a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():
            print(self.format(record), file=sys.stderr)


def tell_of_compiling() -> None:
    """On a terminal, let a line say that a program is compiled, if that takes long."""
    logger = logging.getLogger("infer.compiling")
    logger.handlers = [_OnTerminal()]
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def progress_bars() -> Iterator[Update | None]:
    """Give a function update(step, bytes done, bytes in all), or None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def update(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done)  # type: ignore[arg-type]

        yield update
