"""Which backends there are, and which one is used by default."""

from typing import Any

import jax

from infer.errors import CapacityError, ConfigError
from infer.hardware import available_memory_bytes

_PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm", "gpu")}


def backends() -> dict[str, list[str]]:
    """Return the devices of each backend that works here, e.g. {"cpu": ["TFRT_CPU_0"]}."""
    found = {}
    for name in _PLATFORMS:
        if devices := _devices(name):
            found[name] = [str(d) for d in devices]
    return found


def use_backend(name: str) -> None:
    """Make `name` ("cpu" or "gpu") the default for new arrays and programs in this process.

    Arrays that exist stay where they are: load weights after the switch, or move them with
    `jax.device_put`.

    Raises:
        ConfigError: the backend is unknown or not available here.
    """
    if name not in _PLATFORMS:
        raise ConfigError(f"backend is {name!r}; there are 'cpu' and 'gpu'")
    devices = _devices(name)
    if not devices:
        raise ConfigError(
            f"backend {name!r} is not available here, only {sorted(backends())}; "
            "for an NVIDIA GPU install infer[cuda12] or infer[cuda13]"
        )
    jax.config.update("jax_default_device", devices[0])


def _devices(name: str) -> list[Any]:
    for platform in _PLATFORMS[name]:
        try:
            return jax.local_devices(backend=platform)
        except RuntimeError:
            continue
    return []


def free_memory_bytes() -> int | None:
    """Return the bytes that the default device can still hold; None where nobody can tell."""
    if jax.default_backend() == "cpu":
        return available_memory_bytes()
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_memory(what: str, need: int, way_out: str) -> None:
    """Raise CapacityError, with the numbers, if `need` bytes do not fit on the default device."""
    free = free_memory_bytes()
    if free is not None and need > free:
        raise CapacityError(
            f"{what} needs {_gib(need)}, {_gib(free)} of {jax.default_backend()} memory are free; "
            f"{way_out}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
