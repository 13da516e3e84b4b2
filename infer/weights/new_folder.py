"""A folder that is there whole or not at all."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infer.errors import ConfigError, WeightFormatError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PREFIX = ".infer-"


@contextlib.contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Give a folder beside `to` that takes its place when all went well.

    Folders that `to` lies in are made, and taken away again if nothing comes of it.  What writers
    of `to` left that were killed is removed; a writer holds a lock, so none that lives loses
    anything.

    Raises:
        ConfigError: `to` is there and not an empty folder, or has become one meanwhile.
    """
    check_new(to)
    with parent_of(to):
        scratch, lock = _scratch(to)
        try:
            yield scratch
            os.chmod(scratch, 0o755)
            _put(scratch, to)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)


def refuse_leftover(path: Path) -> None:
    """Raise WeightFormatError if a folder is what a writer that was killed has left."""
    if Path(path).absolute().name.startswith(_PREFIX):
        raise WeightFormatError(
            f"{path} is a folder that is being written, or that a save which was killed has left;"
            " delete it if no save is running, and save the model again"
        )


def _put(scratch: Path, to: Path) -> None:
    """Let the folder take the place of `to`, which is not there or empty."""
    try:
        if to.exists():
            to.rmdir()
        os.replace(scratch, to)
    except OSError:
        check_new(to)
        raise


def _scratch(to: Path) -> tuple[Path, int | None]:
    """Return a new folder for what becomes `to`, and the lock on it where there are locks."""
    prefix = f"{_PREFIX}{hashlib.sha256(to.name.encode(errors='replace')).hexdigest()[:12]}-"
    for left in to.parent.glob(f"{prefix}*"):
        if (descriptor := _lock(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=to.parent))
        # Another writer may hold it: one that took it for a leftover before it was locked, and
        # lets go when it is gone.  The parent is not locked: `flock FOLDER infer ...` does that.
        lock = _lock(scratch, wait=True)
        if scratch.is_dir():
            return scratch, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Return a descriptor that locks a folder until it is closed or the process ends; None where
    somebody else does, or nobody can.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


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
