"""These tests ask for native operations by name; they are skipped where there can be none."""

import pytest

from infer import native
from tests import native_library


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    if reason := native_library.build_if_stale() or native.why_not():
        pytest.skip(reason)
