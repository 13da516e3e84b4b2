"""Which implementation runs a model on this machine, for `infer info`, and the one line for those
who could have the native operations and have not.
"""

import importlib.util
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from infer import native
from infer.native import build
from infer.native.formats import FORMATS

_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin")


def runs_here(
    params_by_type: Mapping[str, int], planar: Mapping[str, bool] = MappingProxyType({})
) -> dict[str, Any]:
    """Return what `infer generate` would run for a model here.

    Args:
        params_by_type: numbers in the model, by the type that the file has them in.
        planar: those of the types that are formats of `infer.save`: whether there are kernels for
            them.

    Returns:
        backend: "cpu" or "gpu".
        implementation: "native" or "xla" on a CPU; None on a GPU, where each operation chooses.
        isa, num_threads: of the native operations, or None.
        xla_products: types whose products are left to XLA all the same.
        reason: why not native, one line; or None.
    """
    report = dict.fromkeys(("implementation", "isa", "num_threads", "reason"))
    if (backend := _backend()) != "cpu":
        return {"backend": backend, **report, "xla_products": []}
    if not (reason := native.why_not_by_default()):
        # One in a hundred: norms and biases are F32 in every file.
        few = sum(params_by_type.values()) / 100
        rest = sorted(
            t for t, n in params_by_type.items() if n > few and not planar.get(t, t in FORMATS)
        )
        return {
            "backend": "cpu",
            "implementation": "native",
            "isa": native.isa(),
            "num_threads": native.num_threads(),
            "reason": None,
            "xla_products": rest,
        }
    report |= {"implementation": "xla", "reason": reason}
    return {"backend": "cpu", **report, "xla_products": sorted(params_by_type)}


def text_of(report: Mapping[str, Any]) -> str:
    """Return `runs_here` in words."""
    if report["implementation"] is None:
        return f"on the {report['backend'].upper()}, each operation's best implementation"
    if report["implementation"] == "xla":
        return f"plain XLA on the CPU: {report['reason']}"
    threads = f"{report['num_threads']} thread{'s' * (report['num_threads'] != 1)}"
    text = f"native operations on the CPU, {report['isa']}, {threads}"
    if rest := report["xla_products"]:
        text += f"; products of {', '.join(rest)} in plain XLA"
    return text


def say_what_is_missing() -> None:
    """Write one line to standard error if plain XLA will run on a CPU that could do better."""
    from infer.backend import default_platform

    if native.switched_off() or build.unsupported() or default_platform() != "cpu":
        return
    if reason := native.why_not():
        print(f"infer: plain XLA, without the faster native operations: {reason}", file=sys.stderr)


def _backend() -> str:
    """Return "cpu" or "gpu"; imports JAX only where it has a GPU plugin to ask."""
    if not any(importlib.util.find_spec(name) for name in _GPU_PLUGINS):
        return "cpu"
    from infer.backend import default_platform

    return default_platform()
