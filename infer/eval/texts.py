"""Texts to evaluate on: a user's files, those of the package, Python's standard library.

The package's are the same pages of GNOME's user documentation in four languages, under CC BY-SA
3.0 (corpora/README.md).  They are public: a model may have been trained on them.  That does not
favour one of two forms of the same model.
"""

import hashlib
import sysconfig
from importlib import resources
from pathlib import Path

from infer.errors import ConfigError

LANGUAGES = ("en", "te", "ja", "ru")
STDLIB = "python-stdlib"
BUILT_IN = (*LANGUAGES, STDLIB)
# Of each kind of text.
_STDLIB_BYTES = 120_000
# A file longer than this is no text that somebody means to evaluate on.
_LARGEST = 1 << 30


def read_text(name: str | Path) -> str:
    """Return the text that `name` stands for: a built-in one of BUILT_IN, or a file in UTF-8.

    Raises:
        ConfigError: it is neither, or not UTF-8, or empty.
    """
    if str(name) == STDLIB:
        return python_stdlib()
    if str(name) in LANGUAGES:
        return (resources.files("infer.eval") / "corpora" / f"{name}.txt").read_text("utf-8")
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{str(name)!r} is no file and no built-in text; those are {', '.join(BUILT_IN)}"
        )
    if path.stat().st_size > _LARGEST:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes; texts of up to 1 GiB are read")
    try:
        # newline="": a carriage return is part of the text.
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 at byte {error.start}; convert it, with iconv for example"
        ) from None
    if not text.strip():
        raise ConfigError(f"{path} has no text in it")
    return text


def python_stdlib() -> str:
    """Return source code of the running Python's standard library, 120 kB at most.

    Top-level modules in the order of a fixed hash of their names, whole.  Another version of Python
    has another text: figures of one version belong together.

    Raises:
        ConfigError: this Python has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    order = lambda path: hashlib.sha256(path.name.encode()).digest()
    parts: list[str] = []
    room = _STDLIB_BYTES
    for path in sorted(folder.glob("*.py"), key=order):
        source = path.read_text("utf-8", errors="replace")
        size = len(source.encode())
        # Long modules would be the whole text.
        if not path.name.startswith("_") and 2_000 < size <= min(room, _STDLIB_BYTES // 4):
            parts.append(source)
            room -= size
    if not parts:
        raise ConfigError(
            f"this Python has no sources of its standard library in {folder}; give a file of code"
        )
    return "\n\n".join(parts)
