"""Build the library if it is missing or older than its sources; skip where it cannot be built."""

import fcntl

import pytest

from infer import native
from infer.native import build


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    with open(build.__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker builds, the others wait
        if not build.is_fresh():
            try:
                build.build()
            except build.BuildError as error:
                pytest.skip(str(error))
    if not native.available():
        pytest.skip(native.why_not())
