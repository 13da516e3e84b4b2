"""What a measurement says about the machine: the CPU, its cores, its read bandwidth."""

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

# Past the last-level cache of every machine this has run on.
_READ_BYTES = 512 << 20


def use_threads(count: int | None) -> int:
    """Bind this process, and all that it starts, to `count` cores; return how many it has.

    To be called before JAX starts its pool.

    Raises:
        ValueError: there are not so many cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        if count is not None:
            raise ValueError("threads can be chosen on Linux only; leave the option out")
        return os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if count is None:
        return len(cores)
    if not 1 <= count <= len(cores):
        raise ValueError(f"threads is {count}; this process may use 1 to {len(cores)} cores")
    os.sched_setaffinity(0, cores[:count])
    os.environ.setdefault("INFER_NUM_THREADS", str(count))
    return count


def cpu_name() -> str:
    """Return the CPU's model name and its widest vector features, as Linux knows them."""
    try:
        fields = dict(
            line.split(":", 1)
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if ":" in line
        )
        fields = {key.strip(): value.strip() for key, value in fields.items()}
    except OSError:
        return platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    notable = [f for f in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(notable)})"


class ReadBandwidth:
    """Bytes/s that `threads` threads read from memory together.

    Each thread takes the maximum of its own part of 512 MB of int32 numbers: numpy's loop is
    vectorised and writes nothing, and it runs without the interpreter's lock.
    """

    def __init__(self, threads: int, num_bytes: int = _READ_BYTES) -> None:
        # Made by the thread that reads it, so that its pages lie near that thread.
        self._pool = ThreadPoolExecutor(threads)
        each = num_bytes // threads // 4
        self._parts = list(self._pool.map(lambda _: np.ones(each, np.int32), range(threads)))

    def measure(self, times: int = 3) -> float:
        """Return the best of `times` passes, each over all parts."""
        num_bytes = sum(part.nbytes for part in self._parts)
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            list(self._pool.map(np.max, self._parts))
            seconds.append(time.perf_counter() - start)
        return num_bytes / min(seconds)


def busy_cores(seconds: float = 0.3) -> float:
    """Return how many cores the whole machine keeps busy while this process sleeps (Linux)."""

    def ticks() -> int:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        return user + nice + system + irq + softirq + steal

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
