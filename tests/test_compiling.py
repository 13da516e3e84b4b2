"""What is kept about compiled programs, and what happens before there are too many."""

import builtins
import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from infer import compiling


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
