"""What is kept about compiled programs, and what happens before there are too many."""

import builtins
import io
import mmap
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from infer import compiling


def test_only_what_takes_long_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infer.compiling"):
        with compiling.told_when_slow():
            pass
        assert not caplog.records
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "_PATIENCE", 0.0)
            with compiling.told_when_slow():
                end = time.monotonic() + 10
                while not caplog.records and time.monotonic() < end:
                    time.sleep(0.01)
    assert [r.message for r in caplog.records] == [
        "compiling a program for this model and these sizes (once for each)"
    ]


def _with_maps(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the process seem to hold so many memory maps of 1,000 that are allowed."""
    files = {"/proc/sys/vm/max_map_count": "1000\n", "/proc/self/maps": b"map\n" * count}
    real = builtins.open

    def fake(path: Any, *args: Any, **kwargs: Any) -> Any:
        content = files.get(path)
        if content is None:
            return real(path, *args, **kwargs)
        return io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content)

    monkeypatch.setattr(builtins, "open", fake)


def test_programs_are_dropped_with_a_warning_before_memory_maps_run_out(monkeypatch) -> None:
    traces = []

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        traces.append(1)
        return 2 * x

    double(jnp.ones(3))
    _with_maps(monkeypatch, 799)
    compiling.make_room_for_programs()
    double(jnp.ones(3))
    assert len(traces) == 1
    _with_maps(monkeypatch, 801)
    with pytest.warns(RuntimeWarning, match=r"801 of the 1000 memory maps.*vm\.max_map_count"):
        compiling.make_room_for_programs()
    double(jnp.ones(3))
    assert len(traces) == 2


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give back")
def test_freed_memory_is_given_back() -> None:
    kept: list[bytes] = []
    blocks: list[bytes] = []
    for i in range(2000):  # 120 MB below the size that is mapped, with blocks in use between
        (kept if i % 50 == 0 else blocks).append(b"x" * 60_000)
    full = _resident()
    blocks.clear()
    compiling.give_back_memory()
    assert full - _resident() > 80 << 20
    assert len(kept) == 40
