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
        scratch = Path(tempfile.mkdtemp(prefix=".infer-", dir=to.parent))
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
    """Raise ConfigError if `to` is there and not an empty folder, or cannot be made."""
    if "\0" in str(to):
        raise ConfigError(f"{str(to)!r} has a NUL in it; name a new folder")
    try:
        there, is_link = to.exists(), to.is_symlink()
    except OSError as error:
        raise ConfigError(f"{str(to)!r:.200}: {error.strerror}; name a new folder") from None
    if is_link:
        raise ConfigError(f"{to} is a link; name a new folder")
    if there and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not empty; name a new folder")
    parent = next(p for p in to.parents if p.exists())
    if not parent.is_dir():
        raise ConfigError(f"{parent} is a file, and {to} cannot lie in it; name a new folder")
    if not os.access(parent, os.W_OK):
        raise ConfigError(
            f"{parent} is not writable, so {to} cannot be made; name a folder of yours"
        )


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
