"""Which backends and devices there are, and which one is used.

Three ways to choose, the nearest wins: `device=` of one call, `use_backend` for the process, JAX's
own default (the first GPU, else the CPU).

dtype policy: `load` gives float32 on a CPU and bfloat16 on a GPU, by the device that the weights
go to, unless told otherwise; a CPU has no fast bfloat16 everywhere, and a GPU's decode step is
bound by the bytes it reads.  After that the dtype belongs to the weights: a call on another device
computes in the dtype they have, and never converts them.
"""

import contextlib
from typing import Any, TypeAlias, TypeVar

import jax
from jax.core import Tracer

from infer.errors import CapacityError, ConfigError
from infer.hardware import available_memory_bytes

_PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm", "gpu")}

T = TypeVar("T")
Device: TypeAlias = Any  # jax.Device, which static checkers take for a variable
DeviceLike: TypeAlias = Device | str | None


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


def find_device(device: DeviceLike) -> Device | None:
    """Return the device that `device` names: itself, the first of "cpu" or "gpu", or "cpu:1".

    Raises:
        ConfigError: it is no device's name, or there is no such device here.
    """
    if device is None or isinstance(device, jax.Device):
        return device
    name, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if name not in _PLATFORMS or (colon and not (number.isascii() and number.isdigit())):
        raise ConfigError(
            f"device is {device!r}; give 'cpu', 'gpu', one of several like 'cpu:1', or a jax.Device"
        )
    found = _devices(name)
    index = int(number) if colon else 0
    if index >= len(found):
        here = ", ".join(f"{n}:0 to {n}:{len(d) - 1}" for n, d in backends().items())
        raise ConfigError(
            f"device {device!r} is not here, only {here}; "
            "jax.config.update('jax_num_cpu_devices', N) makes N CPU devices, "
            "infer[cuda12] or infer[cuda13] finds NVIDIA GPUs"
        )
    return found[index]


def on_device(device: Device | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new arrays go to `device`; None changes nothing."""
    return contextlib.nullcontext() if device is None else jax.default_device(device)


def place(tree: T, device: Device | None) -> tuple[T, int]:
    """Return `tree` on `device`, and how many bytes had to be copied there; None leaves it.

    Raises:
        ConfigError: inside a trace, where arrays have no place yet.
    """
    if device is None:
        return tree, 0
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if any(isinstance(x, Tracer) for x in leaves):
        raise ConfigError(
            f"device={str(device)!r} inside a trace; there the caller's jit places the program: "
            "put its arguments on the device with jax.device_put"
        )
    moved = sum(x.nbytes for x in leaves if x.devices() != {device})
    return jax.device_put(tree, device), moved


def device_of(tree: Any) -> Device | None:
    """Return the one device that holds all arrays of `tree`; None if there are several or none."""
    found = {d for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) for d in x.devices()}
    return found.pop() if len(found) == 1 else None


def default_device() -> Device:
    """Return the device that new arrays go to: of the call, of `use_backend`, or JAX's own."""
    # Not the place of a new array: inside a trace that has none.
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def default_platform() -> str:
    """Return "cpu" or "gpu": where new arrays go.

    Not `jax.default_backend()`, which does not follow `use_backend` or `device=`.
    """
    platform = default_device().platform
    return next((name for name, names in _PLATFORMS.items() if platform in names), platform)


def _devices(name: str) -> list[Any]:
    for platform in _PLATFORMS[name]:
        try:
            return jax.local_devices(backend=platform)
        except RuntimeError:
            continue
    return []


def free_memory_bytes() -> int | None:
    """Return the bytes that the default device can still hold; None where nobody can tell."""
    if default_platform() == "cpu":
        return available_memory_bytes()
    stats = default_device().memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_memory(what: str, need: int, way_out: str) -> None:
    """Raise CapacityError, with the numbers, if `need` bytes do not fit on the default device."""
    free = free_memory_bytes()
    if free is not None and need > free:
        raise CapacityError(
            f"{what} needs {_gib(need)}, {_gib(free)} of {default_platform()} memory are free; "
            f"{way_out}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
