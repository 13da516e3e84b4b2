"""The native library of a test run: built once, by whoever comes first."""

import fcntl
import os

from infer import native
from infer.native import build


def build_if_stale(*, emulate_tiles: bool = False) -> str:
    """Build the library unless it is there and fresh; returns why that cannot be, or "".

    One process builds, others wait.  `emulate_tiles` is the build's.
    """
    with open(build.__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not build.is_fresh(build.EMULATED if emulate_tiles else build.LIBRARY):
            try:
                build.build(emulate_tiles=emulate_tiles)
            except build.BuildError as error:
                return str(error)
    return ""


def description() -> str:
    """Return what the tests run where they force nothing."""
    if os.environ.get("INFER_NATIVE") == "0":
        return "off, INFER_NATIVE is 0"
    if not native.available():
        return f"none, {native.why_not()}"
    return f"{native.isa()}, {native.num_threads()} threads"
