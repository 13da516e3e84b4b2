"""No call kills the process, and no wrong call runs: see tests/native/hostile.py."""

import subprocess
import sys

import pytest

from tests.native import hostile

COUNT = 120


@pytest.mark.parametrize("name", hostile.BUILD)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_wrong_calls_are_refused(name: str, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.hostile", name, str(seed), str(COUNT)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    last = "\n".join(done.stdout.splitlines()[-12:])
    assert done.returncode == 0, f"{last}\n{done.stderr[-2000:]}"


def test_all_operations_are_called() -> None:
    from infer import native

    assert sorted(hostile.BUILD) == sorted(native.OPERATIONS)
