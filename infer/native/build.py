"""Compile `infer/native/src` into one shared library: `python -m infer.native.build [path]`.

Every source is compiled for plain x86-64 but for the kernels, which are compiled once for each
instruction set, in files named for it; the CPU's is chosen at run time.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "_native.so"

# -ffp-contract=off: a multiplication and an addition are fused where the source says so and nowhere
# else, so that all compilers and instruction sets round alike.
_FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off"
    " -fno-math-errno -pthread"
).split()
_LINK_FLAGS = "-shared -pthread -static-libgcc -Wl,-O1 -Wl,--gc-sections -s".split()
_FLAGS_BY_SUFFIX = {
    "_avx2": "-mavx2 -mfma -mf16c".split(),
    "_avx512": (
        "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c"
        " -mprefer-vector-width=512"
    ).split(),
}
_COMPILERS = ("c++", "g++", "clang++")


class BuildError(RuntimeError):
    """The library cannot be built here; the message is one line."""


def source_hash() -> str:
    """Return a digest of all sources, which the library carries to be told from a stale one."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cc", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_fresh(library: Path = LIBRARY) -> bool:
    """Return whether the library is there and made of the present sources."""
    return library.exists() and source_hash().encode() in library.read_bytes()


def build(output: str | os.PathLike[str] | None = None) -> Path:
    """Compile and link the library.

    Args:
        output: Where to write it; None for `infer/native/_native.so`.  It is replaced at once, so a
            process that has the old one loaded keeps it.

    Raises:
        BuildError: The machine is no x86-64 Linux, there is no compiler, or it failed.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not sys.platform.startswith("linux"):
        raise BuildError(
            f"the native operations are for x86-64 Linux, not {platform.machine()} {sys.platform};"
            " everything works without them, in plain XLA"
        )
    import jax.ffi  # here, so that the checks above need no JAX

    output = Path(output) if output is not None else LIBRARY
    compiler = [*_compiler(), *_FLAGS, f'-DINFER_SOURCE_HASH="{source_hash()}"']
    compiler += ["-isystem", jax.ffi.include_dir()]
    sources = sorted(SOURCES.glob("*.cc"), key=_slow_first)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
        objects = [str(Path(folder) / f"{s.stem}.o") for s in sources]
        commands = [
            [*compiler, *_flags_of(s), "-c", str(s), "-o", o]
            for s, o in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        library = str(Path(folder) / "library.so")
        _run([*_compiler(), *objects, *_LINK_FLAGS, "-o", library])
        os.replace(library, output)
    return output


def _slow_first(source: Path) -> tuple[bool, str]:
    return (not _flags_of(source), source.name)


def _flags_of(source: Path) -> Sequence[str]:
    for suffix, flags in _FLAGS_BY_SUFFIX.items():
        if source.stem.endswith(suffix):
            return flags
    return ()


def _compiler() -> list[str]:
    """Return the command in CXX, or the first C++ compiler on the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [[c] for c in _COMPILERS]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler: {', '.join(c[0] for c in candidates)} not found; install g++ or clang++,"
        " or name one in CXX"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error: " in line]
        first = errors[0] if errors else done.stderr.strip()[:200]
        raise BuildError(f"{shlex.join(command[:1])} failed with {done.returncode}: {first}")


if __name__ == "__main__":
    try:
        print(build(*sys.argv[1:2]))
    except BuildError as error:
        sys.exit(f"native operations: not built: {error}")
