"""Compile `infer/native/src` into one shared library: `python -m infer.native.build [path]`.

Every source is compiled for plain x86-64 but for the kernels, which are compiled once for each
instruction set, in files named for it; the CPU's is chosen at run time.  Nothing is needed but a
compiler: XLA's headers are in `third_party/` (why: its README).

With `--sanitize` the library checks itself with ASan and UBSan and becomes `_native_sanitize.so`;
`scripts/sanitize.sh` runs the tests with it.  With `--emulate-tiles` it computes AMX's tile
instructions in plain C++, slowly, and becomes `_native_emulated.so`: for tests where there is no
AMX.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
HEADERS = Path(__file__).parent / "third_party"
LIBRARY = Path(__file__).parent / "_native.so"
SANITIZED = Path(__file__).parent / "_native_sanitize.so"
EMULATED = Path(__file__).parent / "_native_emulated.so"

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
# Beside the flags above.  The first finding ends the process, so that no test can pass over it.
_SANITIZE = (
    "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
).split()
_EMULATE_TILES = ("-DINFER_EMULATE_TILES",)
_COMPILERS = ("c++", "g++", "clang++")


class BuildError(RuntimeError):
    """The library cannot be built here; the message is one line."""


def source_hash() -> str:
    """Return a digest of all sources and flags, which the library carries to be told from a stale
    one.
    """
    digest = hashlib.sha256(repr((_FLAGS, _LINK_FLAGS, _FLAGS_BY_SUFFIX)).encode())
    for folder in (SOURCES, HEADERS):
        for path in sorted(folder.rglob("*.*")):
            if path.suffix in (".cc", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def unsupported() -> str:
    """Return why this machine can never have the library, in one line; empty if it can."""
    if platform.machine() in ("x86_64", "AMD64") and sys.platform.startswith("linux"):
        return ""
    return (
        f"the native operations are for x86-64 Linux, not {platform.machine()} {sys.platform};"
        " everything works without them, in plain XLA"
    )


def is_fresh(library: Path = LIBRARY) -> bool:
    """Return whether the library is there, whole, and made of the present sources."""
    return (
        library.exists()
        and not is_cut_short(library)
        and source_hash().encode() in library.read_bytes()
    )


def is_cut_short(library: str | os.PathLike[str]) -> bool:
    """Return whether an ELF file ends before its own headers say that it does.

    The loader maps such a file all the same, and the first touch of what is missing ends the
    process (SIGBUS).  False for what is no 64-bit ELF file, which the loader refuses.

    Source: the System V ABI, "Object files": Elf64_Ehdr and Elf64_Phdr.

    Raises:
        OSError: It cannot be read.
    """
    with open(library, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
            return False
        segments_at, sections_at = struct.unpack_from("<QQ", head, 32)
        segment, num_segments, section, num_sections = struct.unpack_from("<HHHH", head, 54)
        ends = [segments_at + segment * num_segments, sections_at + section * num_sections]
        if max(ends) > size:
            return True
        file.seek(segments_at)
        table = file.read(segment * num_segments)
    for at in range(0, len(table) - 39, max(segment, 1)):
        (offset,), (length,) = (struct.unpack_from("<Q", table, at + field) for field in (8, 32))
        ends.append(offset + length)
    return max(ends) > size


def build(
    output: str | os.PathLike[str] | None = None,
    *,
    sanitize: bool = False,
    emulate_tiles: bool = False,
) -> Path:
    """Compile and link the library.

    Args:
        output: Where to write it; None for `infer/native/_native.so`, or `_native_sanitize.so` or
            `_native_emulated.so`.  It is replaced at once, so a process that has the old one loaded
            keeps it.
        sanitize: Build in ASan and UBSan.
        emulate_tiles: Compute AMX's tile instructions in plain C++.

    Raises:
        BuildError: The machine is no x86-64 Linux, there is no compiler or it failed, or the place
            cannot be written.
    """
    if reason := unsupported():
        raise BuildError(reason)
    path = output_path(output, sanitize=sanitize, emulate_tiles=emulate_tiles)
    extra = [*(_SANITIZE if sanitize else ()), *(_EMULATE_TILES if emulate_tiles else ())]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            os.replace(_link(compiler(), Path(folder), extra), path)
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def output_path(
    output: str | os.PathLike[str] | None, *, sanitize: bool, emulate_tiles: bool
) -> Path:
    """Return where `build` writes."""
    if output is not None:
        return Path(output)
    return SANITIZED if sanitize else EMULATED if emulate_tiles else LIBRARY


def _link(command: list[str], folder: Path, extra: Sequence[str]) -> Path:
    """Compile all sources in `folder` and return the linked library there."""
    compile_ = [*command, *_FLAGS, *extra, f'-DINFER_SOURCE_HASH="{source_hash()}"']
    compile_ += ["-isystem", str(HEADERS)]
    sources = sorted(SOURCES.glob("*.cc"), key=_slow_first)
    objects = [str(folder / f"{s.stem}.o") for s in sources]
    commands = [
        [*compile_, *_flags_of(s), "-c", str(s), "-o", o]
        for s, o in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_run, commands))
    library = folder / "library.so"
    link_flags = [f for f in _LINK_FLAGS if not (extra and f == "-s")]  # reports name lines
    _run([*command, *objects, *link_flags, *extra, "-o", str(library)])
    return library


def _slow_first(source: Path) -> tuple[bool, str]:
    return (not _flags_of(source), source.name)


def _flags_of(source: Path) -> Sequence[str]:
    for suffix, flags in _FLAGS_BY_SUFFIX.items():
        if source.stem.endswith(suffix):
            return flags
    return ()


def compiler() -> list[str]:
    """Return the command in CXX, or the first C++ compiler on the path.

    Raises:
        BuildError: There is none.
    """
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


def _main() -> None:
    parser = argparse.ArgumentParser("python -m infer.native.build", description=__doc__)
    parser.add_argument("path", nargs="?", help="where to write the library [default: here]")
    parser.add_argument("--sanitize", action="store_true", help="build in ASan and UBSan")
    parser.add_argument("--emulate-tiles", action="store_true", help="AMX in plain C++, for tests")
    parser.add_argument("--if-stale", action="store_true", help="not if it is there and fresh")
    options = parser.parse_args()
    kind = {"sanitize": options.sanitize, "emulate_tiles": options.emulate_tiles}
    if options.if_stale and is_fresh(output_path(options.path, **kind)):
        return
    try:
        print(build(options.path, **kind))
    except BuildError as error:
        sys.exit(f"native operations: not built: {error}")


if __name__ == "__main__":
    _main()
