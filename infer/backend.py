"""Which backends there are, and which one is used by default."""

from typing import Any

import jax

from infer.errors import ConfigError

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
