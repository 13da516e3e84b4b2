"""What pip runs to build the package: setuptools, and the CPU's native library beside its files.

A wheel has the library, and the tag py3-none-linux_x86_64 (ctypes loads it, so that it is of no
Python version), where it can be compiled; elsewhere it is py3-none-any and the build log has one
line that says why.  `pip install -C native=required .` fails instead, `-C native=no` leaves it out.
An editable install compiles the library in place unless it is there and fresh.

Nothing is asked of the build environment: XLA's headers are in `infer/native/third_party`.
"""

import base64
import hashlib
import os
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  # hooks that are setuptools' own
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from infer.native import build

Settings = Mapping[str, object] | None

_IN_WHEEL = "infer/native/_native.so"


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Write the wheel and return its name (PEP 517)."""
    native, settings = _native_setting(config_settings)
    name = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "_native.so"
        if not _build(native, library):
            return name
        return add_library(Path(wheel_directory) / name, library).name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Write the wheel of an editable install and return its name (PEP 660)."""
    native, settings = _native_setting(config_settings)
    if not build.is_fresh():
        _build(native, build.LIBRARY)
    return build_meta.build_editable(wheel_directory, settings, metadata_directory)


def _native_setting(given: Settings) -> tuple[str | None, dict[str, object]]:
    """Return `native` of the settings, and the others."""
    settings = dict(given or {})
    native = settings.pop("native", None)
    if native not in (None, "required", "no"):
        _stop(
            f"config setting native={native!r}; it can be 'required' or 'no', and without it the"
            " native library is built where it can be"
        )
    return native, settings


def _build(native: str | None, library: Path) -> bool:
    """Compile the library; returns whether it is there, and says so if not."""
    if native == "no":
        return False
    try:
        build.build(library)
    except build.BuildError as error:
        if native == "required":
            _stop(
                f"native=required, and the CPU's native operations cannot be built: {error}; or"
                " leave -C native=required out, which installs without them, in plain XLA"
            )
        print(
            f"infer: installing without the CPU's native operations: {error}.  Later:"
            " python -m infer.native.build",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True


def _stop(message: str) -> NoReturn:
    """End the build with one line; pip would show an exception as a traceback."""
    sys.exit(f"infer: {message}")


def add_library(wheel: Path, library: Path) -> Path:
    """Replace a py3-none-any wheel by one with the library and this machine's platform tag.

    The file format's words: https://packaging.python.org/specifications/binary-distribution-format
    """
    pure, here = "py3-none-any", f"py3-none-{_platform_tag()}"
    target = wheel.with_name(wheel.name.replace(pure, here))
    with zipfile.ZipFile(wheel) as old:
        files = [(entry, old.read(entry)) for entry in old.infolist()]
    (record, rows), *others = sorted(files, key=lambda x: not x[0].filename.endswith("/RECORD"))
    changed = [(_entry(_IN_WHEEL), library.read_bytes())]
    for entry, data in others:
        if entry.filename.endswith(".dist-info/WHEEL"):
            data = data.replace(f"Tag: {pure}".encode(), f"Tag: {here}".encode())
            data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            changed.append((entry, data))
    names = {entry.filename for entry, _ in changed}
    kept = [row for row in rows.decode().splitlines() if row.split(",")[0] not in names]
    new_rows = [_record(entry.filename, data) for entry, data in changed]
    changed.append((record, "\n".join([*new_rows, *kept, ""]).encode()))
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry, data in [x for x in others if x[0].filename not in names] + changed:
            new.writestr(entry, data, zipfile.ZIP_DEFLATED)
    os.remove(wheel)
    return target


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # dated 1980, like all that is to be reproducible
    entry.external_attr = 0o100755 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _record(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"
