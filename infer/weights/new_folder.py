"""A folder that is there whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infer.errors import ConfigError


@contextlib.contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Give a folder beside `to` that takes its place when all went well.

    Folders that `to` lies in are made, and taken away again if nothing comes of it.

    Raises:
        ConfigError: `to` is there and not an empty folder.
    """
    check_new(to)
    with parent_of(to):
        scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        try:
            yield scratch
            os.chmod(scratch, 0o755)
            if to.exists():
                to.rmdir()
            os.replace(scratch, to)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def check_new(to: Path) -> None:
    """Raise ConfigError if `to` is there and not an empty folder."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not empty; name a new folder")


@contextlib.contextmanager
def parent_of(to: Path) -> Iterator[None]:
    """Make the folder that `to` lies in, and take it away again if nothing comes of it."""
    missing = [p for p in to.parents if not p.exists()]
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
