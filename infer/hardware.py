"""The chips that formulas, tuned tables and results name, as their makers state them.

Peaks are dense (no structured sparsity) and, on tensor cores, with float32 accumulation.  Where a
data sheet gives only the sparse rate, half of it stands here.  `cpu-local` is measured.
"""

import functools
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from infer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator or CPU: bytes of memory, bytes/s, and peaks in FLOP/s (int8: operations/s).

    A peak of None means that the chip has no unit for that type.  `link_bandwidth` is that of the
    links between chips of one node, `host_bandwidth` that of PCIe; both count both directions
    together, as data sheets do.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    f32_flops: float
    bf16_flops: float
    fp8_flops: float | None = None
    int8_flops: float | None = None
    fp4_flops: float | None = None
    link_bandwidth: float | None = None
    host_bandwidth: float | None = None
    compute_capability: tuple[int, int] | None = None
    num_cores: int | None = None  # CPUs only

    def peak_flops(self, dtype: str) -> float:
        """Return the peak for matrix products in `dtype`: f32, bf16, fp8, int8 or fp4.

        Raises:
            ConfigError: the chip has no unit for `dtype`, or there is no such type.
        """
        peaks = {
            "f32": self.f32_flops,
            "bf16": self.bf16_flops,
            "fp8": self.fp8_flops,
            "int8": self.int8_flops,
            "fp4": self.fp4_flops,
        }
        peak = peaks.get(dtype)
        if peak is None:
            has = ", ".join(name for name, value in peaks.items() if value is not None)
            raise ConfigError(f"{self.name} multiplies no {dtype} matrices; it has {has}")
        return peak


_GPUS = (
    Chip(  # NVIDIA H100 Tensor Core GPU data sheet, SXM5
        name="h100-80gb",
        memory_bytes=80_000_000_000,
        bandwidth=3.35e12,
        f32_flops=67e12,
        bf16_flops=989e12,
        fp8_flops=1979e12,
        int8_flops=1979e12,
        link_bandwidth=900e9,
        host_bandwidth=128e9,
        compute_capability=(9, 0),
    ),
    Chip(  # NVIDIA H200 Tensor Core GPU data sheet, SXM
        name="h200-141gb",
        memory_bytes=141_000_000_000,
        bandwidth=4.8e12,
        f32_flops=67e12,
        bf16_flops=989e12,
        fp8_flops=1979e12,
        int8_flops=1979e12,
        link_bandwidth=900e9,
        host_bandwidth=128e9,
        compute_capability=(9, 0),
    ),
    Chip(  # NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM4
        name="a100-80gb",
        memory_bytes=80_000_000_000,
        bandwidth=2.039e12,
        f32_flops=19.5e12,
        bf16_flops=312e12,
        int8_flops=624e12,
        link_bandwidth=600e9,
        host_bandwidth=64e9,
        compute_capability=(8, 0),
    ),
    Chip(  # NVIDIA DGX B200 data sheet, one of eight
        name="b200-180gb",
        memory_bytes=180_000_000_000,
        bandwidth=8e12,
        f32_flops=75e12,
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        int8_flops=4500e12,
        fp4_flops=9000e12,
        link_bandwidth=1800e9,
        host_bandwidth=128e9,
        compute_capability=(10, 0),
    ),
    Chip(  # NVIDIA L4 Tensor Core GPU data sheet
        name="l4-24gb",
        memory_bytes=24_000_000_000,
        bandwidth=300e9,
        f32_flops=30.3e12,
        bf16_flops=121e12,
        fp8_flops=242.5e12,
        int8_flops=242.5e12,
        host_bandwidth=64e9,
        compute_capability=(8, 9),
    ),
    Chip(  # NVIDIA L40S data sheet
        name="l40s-48gb",
        memory_bytes=48_000_000_000,
        bandwidth=864e9,
        f32_flops=91.6e12,
        bf16_flops=362e12,
        fp8_flops=733e12,
        int8_flops=733e12,
        host_bandwidth=64e9,
        compute_capability=(8, 9),
    ),
    Chip(  # NVIDIA Ada GPU Architecture whitepaper, appendix A
        name="rtx-4090-24gb",
        memory_bytes=24_000_000_000,
        bandwidth=1008e9,
        f32_flops=82.6e12,
        bf16_flops=165.2e12,
        fp8_flops=330.3e12,
        int8_flops=660.6e12,
        host_bandwidth=64e9,
        compute_capability=(8, 9),
    ),
    # GeForce RTX 5060 specifications: 3840 cores at 2.497 GHz, 128 bits of GDDR7 at 28 Gbit/s,
    # PCIe 5.0 x8.  No data sheet gives its dense tensor rates; they are the float32 rate times 2,
    # 4, 8 and 16, the ratios that the NVIDIA RTX Blackwell whitepaper gives for the RTX 5070 (30.9
    # to 61.7, 123.5, 246.9, 493.9).
    Chip(
        name="rtx-5060-8gb",
        memory_bytes=8_000_000_000,
        bandwidth=448e9,
        f32_flops=19.2e12,
        bf16_flops=38.4e12,
        fp8_flops=76.7e12,
        int8_flops=153.4e12,
        fp4_flops=306.8e12,
        host_bandwidth=64e9,
        compute_capability=(12, 0),
    ),
)

GPUS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _GPUS})
CPU_LOCAL = "cpu-local"


def chip_of_kind(kind: str) -> str | None:
    """Return the name here of the GPU that a driver calls `kind`, such as "NVIDIA H200"; None if it
    is not listed.
    """
    words = re.sub(r"[^a-z0-9]+", "-", kind.lower())
    for name in GPUS:
        model = name.rsplit("-", 1)[0]
        if re.search(rf"(^|-){model}(-|$)", words):
            return name
    return None


def chip_names() -> tuple[str, ...]:
    """Return the names that `get_chip` knows."""
    return (*GPUS, CPU_LOCAL)


def get_chip(name: str) -> Chip:
    """Return the chip called `name`; `cpu-local` is measured the first time (about half a second).

    Raises:
        ConfigError: no chip has this name.
    """
    if name == CPU_LOCAL:
        return _cpu_local()
    try:
        return GPUS[name]
    except KeyError:
        raise ConfigError(f"no chip is called {name!r}; known: {', '.join(chip_names())}") from None


@functools.cache
def _cpu_local() -> Chip:
    num_cores = _usable_cores()
    flops = _measure_f32_flops()
    return Chip(
        name=CPU_LOCAL,
        memory_bytes=_memory_bytes(),
        bandwidth=_measure_bandwidth(num_cores),
        f32_flops=flops,
        bf16_flops=flops,  # of float32 arithmetic on widened weights; matrix units do not count
        num_cores=num_cores,
    )


def _usable_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    """Return the machine's memory, or the container's limit where that is smaller."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(machine, int(file.read()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def _measure_bandwidth(num_cores: int) -> float:
    """Return the bytes/s that all cores together copy, reads and writes counted, best of ten."""
    import numpy as np

    size = 32 << 20  # bytes a core: together past the last-level cache of most machines
    pairs = [(np.ones(size, np.uint8), np.zeros(size, np.uint8)) for _ in range(num_cores)]
    with ThreadPoolExecutor(num_cores) as pool:  # numpy copies without the interpreter's lock
        times = []
        for _ in range(10):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            times.append(time.perf_counter() - start)
    return 2 * size * num_cores / min(times)


def _measure_f32_flops() -> float:
    """Return the FLOP/s of numpy's float32 matrix product, best of ten."""
    import numpy as np

    n = 768
    a = np.ones((n, n), np.float32)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        np.matmul(a, a)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def available_memory_bytes() -> int | None:
    """Return the bytes that this process can still take; None where unknown."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no such file, or "max"
        return free
