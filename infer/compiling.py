"""Which programs were compiled, when, and why: nothing recompiles in silence.

A program calls `record_trace` while JAX traces it, with the static caps that shape it.  Tracing is
what a second call within the same caps must not do again, so the count of traces is the count of
compiled variants.
"""

import contextlib
import ctypes
import gc
import logging
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

# Compiler options with which XLA:GPU makes the whole generation loop one CUDA graph, loops on the
# device included: no kernel is launched and no condition read from the host.
COMMAND_BUFFERS: Mapping[str, Any] = types.MappingProxyType(
    {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
        ),
        "xla_gpu_graph_min_graph_size": 1,
    }
)

logger = logging.getLogger(__name__)

# Seconds of compiling that nobody needs to be told of.
_PATIENCE = 2.0

# Share of the allowed memory maps from which on another program is too many: one takes up to about
# 1,000 of 65,530, and libraries map files too.
_MOST_MAPS = 0.8


@dataclass
class _Program:
    traces: int = 0
    caps: list[dict[str, object]] = field(default_factory=list)


_programs: dict[str, _Program] = {}
_lock = threading.Lock()


def record_trace(program: str, caps: Mapping[str, object]) -> None:
    """Count one trace of `program` under `caps`.  Call it from the traced function itself."""
    with _lock:
        entry = _programs.setdefault(program, _Program())
        entry.traces += 1
        entry.caps.append(dict(caps))


@contextlib.contextmanager
def told_when_slow() -> Iterator[None]:
    """Log one line (INFO) if what happens inside takes more than two seconds."""
    line = "compiling a program for this model and these sizes (once for each)"
    timer = threading.Timer(_PATIENCE, logger.info, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def compile_stats() -> dict[str, dict[str, object]]:
    """Return, for each program, how often it was traced and which caps made the last trace differ.

    Returns:
        {program: {"traces": int, "caps": [dict, ...], "changed": {cap: (before, after)}}};
        `changed`
        compares the last trace with the one before it and is empty after the first.
    """
    with _lock:
        return {
            name: {
                "traces": entry.traces,
                "caps": [dict(c) for c in entry.caps],
                "changed": _difference(entry.caps),
            }
            for name, entry in _programs.items()
        }


def make_room_for_programs() -> None:
    """Drop JAX's compiled programs, with a warning, where another may end the process.

    On Linux a compiled program of XLA:CPU holds hundreds of memory maps; past the kernel's limit
    (vm.max_map_count, usually 65,530) XLA ends the process with a segmentation fault.  Call it
    before a program that is not compiled yet, outside any trace.
    """
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            limit = int(file.read())
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
    except (OSError, ValueError):
        return
    if count < limit * _MOST_MAPS:
        return
    jax.clear_caches()
    gc.collect()
    warnings.warn(
        f"{count} of the {limit} memory maps that Linux allows a process are in use, most of them "
        "by compiled programs: these were dropped, and compile again when they are called; let "
        "calls share shapes, or raise vm.max_map_count",
        RuntimeWarning,
        stacklevel=2,
    )


def give_back_memory() -> None:
    """Give freed memory back to the system, where the C library is glibc.

    Compiling a model's program leaves 100 to 200 MB freed and resident: glibc keeps them in the
    arenas of XLA's threads.  A few milliseconds; for after a compilation or a load, not for a step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def num_traces(program: str) -> int:
    """Return how often `program` was traced."""
    with _lock:
        return _programs[program].traces if program in _programs else 0


def _difference(caps: list[dict[str, object]]) -> dict[str, tuple[object, object]]:
    if len(caps) < 2:
        return {}
    before, after = caps[-2:]
    return {k: (before.get(k), after[k]) for k in after if before.get(k) != after[k]}
