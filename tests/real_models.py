"""Real models in tests: from the cache, fetched if INFER_TEST_PULL=1, else the test is skipped."""

import os
from pathlib import Path

import pytest

from infer.weights import bundled


def real_model_path(name: str) -> Path:
    """Return the file of the known model `name`, or skip the calling test."""
    found = bundled.cached(name)
    if found is not None:
        return found
    if os.environ.get("INFER_TEST_PULL") == "1":
        return bundled.pull(name)
    pytest.skip(f"{name} is not in the cache; run `infer pull {name}` or set INFER_TEST_PULL=1")
