"""Fused CPU operations in C++ behind `jax.ffi`: what XLA:CPU is slow at.

The library is optional and loaded on first use: where it is missing or does not fit the CPU,
`available()` is False, `why_not()` says why, and plain XLA does the work.
"""

import ctypes
import functools
import os
from typing import Any

from infer.errors import ConfigError

# The exported handlers; each is registered under its own name.
OPERATIONS = (
    "infer_dense_attention",
    "infer_embed",
    "infer_expert_mlp",
    "infer_gated_mlp",
    "infer_linear",
    "infer_logsumexp",
    "infer_paged_attention",
    "infer_rms_norm",
    "infer_rope_write",
    "infer_rope_write_quantized",
    "infer_sample",
)


# What INFER_NUM_THREADS can ask for at most; as in src/threads.cc.
MOST_THREADS = 1024


def available() -> bool:
    """Return whether the native operations can be used in this process.

    Raises:
        ConfigError: INFER_NUM_THREADS is no number of threads.
    """
    return not why_not()


def by_default() -> bool:
    """Return whether the native operations are used where nobody forces an implementation.

    INFER_NATIVE=0 leaves them to those who do.
    """
    return not why_not_by_default()


def why_not_by_default() -> str:
    """Return why `by_default` is False, in one line; empty if it is True.  Needs no JAX."""
    return "INFER_NATIVE is 0" if switched_off() else why_not()


def switched_off() -> bool:
    """Return whether INFER_NATIVE=0 leaves the native operations to those who ask by name.

    Raises:
        ConfigError: INFER_NATIVE is neither 0 nor 1.
    """
    value = os.environ.get("INFER_NATIVE", "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"INFER_NATIVE is {value!r:.40}; 0 leaves the native operations to those who ask by "
            "name, and 1, as without it, uses them where they can be"
        )
    return value == "0"


def why_not() -> str:
    """Return why the native operations cannot be used, in one line that says what to do about it;
    empty if they can.  Needs no JAX.
    """
    return _open()[1]


def isa() -> str:
    """Return the instruction set in use: "avx2", "avx512", "amx", or "none".

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

    _check_num_threads()
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
        if build.is_cut_short(path):
            return None, f"{path} is cut short; {way_out}"
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


def _check_num_threads() -> None:
    """Refuse an INFER_NUM_THREADS that the library would not follow."""
    text = os.environ.get("INFER_NUM_THREADS", "")
    digits = text.isascii() and text.isdecimal() and len(text) <= 9
    if text and not (digits and 1 <= int(text) <= MOST_THREADS):
        raise ConfigError(
            f"INFER_NUM_THREADS is {text!r:.40}; it must be a number from 1 to {MOST_THREADS}, and "
            "without it all cores are used that the process may use"
        )
