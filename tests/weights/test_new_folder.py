"""A folder that is there whole or not at all, with several writers."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer.errors import ConfigError
from infer.weights.new_folder import _scratch, new_folder

fcntl = pytest.importorskip("fcntl")

WRITER = """
import sys
from pathlib import Path
from infer.weights.new_folder import new_folder
with new_folder(Path(sys.argv[1])) as scratch:
    (scratch / "x").write_text("whole")
"""


def test_of_two_writers_the_first_that_is_done_stays(tmp_path: Path) -> None:
    to = tmp_path / "m"
    with pytest.raises(ConfigError, match="m is not empty; name a new folder"):
        with new_folder(to) as slow:
            (slow / "x").write_text("slow")
            with new_folder(to) as quick:
                (quick / "x").write_text("quick")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert (to / "x").read_text() == "quick"


def test_a_lock_on_the_folder_around_it_is_nobodys_business(tmp_path: Path) -> None:
    """`flock FOLDER infer quantize ... --out FOLDER/m` waits for nothing."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / "m")], check=True, timeout=120)
    finally:
        os.close(descriptor)
    assert (tmp_path / "m" / "x").read_text() == "whole"


def test_writers_that_begin_at_once_take_nothing_from_each_other(tmp_path: Path) -> None:
    def begin(_: int) -> bool:
        scratch, lock = _scratch(tmp_path / "m")
        there = scratch.is_dir()
        shutil.rmtree(scratch, ignore_errors=True)
        assert lock is not None
        os.close(lock)
        return there

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(begin, range(400)))
    assert not list(tmp_path.iterdir())
