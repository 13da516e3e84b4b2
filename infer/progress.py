"""A bar that counts, on standard error if that is a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Count = Callable[[int], None]


@contextlib.contextmanager
def counting_bar(what: str, total: int, done: int = 0) -> Iterator[Count | None]:
    """Give a function that sets how many of `total` are done, or None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task(what, total=total, completed=done)
        yield lambda count: bars.update(task, completed=count)
