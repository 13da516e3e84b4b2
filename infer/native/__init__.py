"""Fused CPU operations in C++ behind `jax.ffi`: what XLA:CPU is slow at.

The library is optional and loaded on first use: where it is missing or does not fit the CPU,
`available()` is False, `why_not()` says why, and plain XLA does the work.
"""

import ctypes
import functools
import os
from typing import Any

# The exported handlers; each is registered under its own name.
OPERATIONS = (
    "infer_dense_attention",
    "infer_embed",
    "infer_expert_mlp",
    "infer_gated_mlp",
    "infer_linear",
    "infer_logsumexp",
    "infer_paged_attention",
    "infer_rope_write",
    "infer_sample",
)


def available() -> bool:
    """Return whether the native operations can be used in this process."""
    return not why_not()


def by_default() -> bool:
    """Return whether the native operations are used where nobody forces an implementation.

    INFER_NATIVE=0 leaves them to those who do.
    """
    return os.environ.get("INFER_NATIVE") != "0" and available()


def why_not() -> str:
    """Return why the native operations cannot be used, in one line that says what to do about it;
    empty if they can.  Needs no JAX.
    """
    return _open()[1]


def isa() -> str:
    """Return the instruction set in use: "avx2", "avx512", or "none".

    INFER_NATIVE_ISA, read once, chooses a lesser one.
    """
    opened = _open()[0]
    return "none" if opened is None else opened.infer_native_isa().decode()


def num_threads() -> int:
    """Return how many threads an operation uses at most; INFER_NUM_THREADS, read once, sets it.

    1 where the library is not available.
    """
    opened = _open()[0]
    return 1 if opened is None else opened.infer_native_num_threads()


@functools.cache
def library() -> Any:
    """Return the loaded library with all operations registered.

    Raises:
        NotImplementedError: It cannot be used here.
    """
    opened, reason = _open()
    if opened is None:
        raise NotImplementedError(f"no native operations: {reason}")
    import jax.ffi

    for name in OPERATIONS:
        handler = jax.ffi.pycapsule(getattr(opened, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return opened


@functools.cache
def _open() -> tuple[Any, str]:
    """Return the library and "", or None and why not."""
    from infer.native import build  # here, or `python -m infer.native.build` would load it twice

    path = os.environ.get("INFER_NATIVE_LIBRARY") or str(build.LIBRARY)
    way_out = "run python -m infer.native.build"
    if not os.path.exists(path):
        if reason := build.unsupported():
            return None, reason
        try:
            build.compiler()
        except build.BuildError as error:
            return None, f"{path} is not built, and there is {error}; then {way_out}"
        return None, f"{path} is not built; {way_out}"
    try:
        library = ctypes.CDLL(path)
        for name in ("isa", "error", "sources"):
            getattr(library, f"infer_native_{name}").restype = ctypes.c_char_p
        for name in OPERATIONS:
            getattr(library, name)
        sources = library.infer_native_sources().decode()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded ({error}); {way_out}"
    if build.SOURCES.is_dir() and sources != build.source_hash():
        return None, f"{path} was built from other sources; {way_out}"
    return (None, reason) if (reason := library.infer_native_error().decode()) else (library, "")
