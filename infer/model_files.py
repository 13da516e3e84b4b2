"""The small files of a model folder: which of them may be read, and JSON that is read strictly.

A folder may come from anywhere, so a name in it is believed only after it is resolved.  The rule:
a file is read if it really lies inside the folder.  In the cache of huggingface_hub

    CACHE/models--ORG--NAME/snapshots/REVISION/config.json -> ../../blobs/DIGEST

a link may also lead into the `blobs` of that repository or of the cache, and nowhere else.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from infer.errors import WeightFormatError

# Ours: the largest config.json, index or tokenizer.json in the wild is below 40 MB.
MAX_JSON_BYTES = 1 << 28
MAX_TEXT_BYTES = 1 << 22


class RepeatedKey(ValueError):
    """A key that comes twice in a JSON object."""


def unique_pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of `items`, as json.loads calls it; RepeatedKey names a key that comes
    twice.
    """
    found = dict(items)
    if len(found) < len(items):
        seen: set[str] = set()
        raise RepeatedKey(next(k for k, _ in items if k in seen or seen.add(k)))
    return found


def shown(name: str) -> str:
    """Return a name from a file as it may stand in a message: one printable line, not too long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def label(path: str | os.PathLike[str]) -> str:
    """Return a path as it may begin a message."""
    name = os.fspath(path)
    return name if name.isprintable() else repr(name)


class ModelFolder:
    """A folder in transformers' layout: its path, and its files by name."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise NotADirectoryError(20, "is no folder", str(path))
        self.label = label(self.path)
        self._real = self.path.resolve()
        self._roots = [self._real, *_hub_blobs(self._real)]

    def member(self, name: str) -> Path | None:
        """Return the real path of a file of this folder, or None if there is none.

        Raises:
            WeightFormatError: The name is absolute, climbs with "..", leads out of the folder
                through a link, or is no regular file.
        """
        parts = name.replace("\\", "/").split("/")
        if os.path.isabs(name) or ".." in parts or "\0" in name or not name:
            raise WeightFormatError(
                f"{self.label}: {shown(name)} leaves the folder; name files inside it"
            )
        try:
            real = (self.path / name).resolve()
            info = os.stat(real)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
            reason = getattr(error, "strerror", None) or "a loop of links"
            raise WeightFormatError(
                f"{self.label}: {shown(name)} cannot be read ({reason}); get the folder again"
            ) from None
        if not any(real.is_relative_to(root) for root in self._roots):
            raise WeightFormatError(
                f"{self.label}: {shown(name)} is a link that leaves the folder; put the file itself"
                " there (links are followed only inside the folder, and into the blobs of a hub"
                " cache)"
            )
        if not stat.S_ISREG(info.st_mode):
            raise WeightFormatError(f"{self.label}: {shown(name)} is no regular file; replace it")
        return real

    def names(self) -> list[str]:
        """Return the names of what lies directly in the folder, sorted."""
        return sorted(os.listdir(self._real))

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if there is no such file; see `read_json`."""
        path = self.member(name)
        return None if path is None else read_json(path, f"{self.label}/{name}")

    def text(self, name: str) -> str | None:
        """Return a short text file, or None if there is no such file."""
        path = self.member(name)
        if path is None:
            return None
        data = _read(path, f"{self.label}/{name}", MAX_TEXT_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise WeightFormatError(f"{self.label}/{name}: is not UTF-8; get it again") from None


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: Of the file.
        what: What messages call it.

    Raises:
        WeightFormatError: It is too large, no UTF-8, no JSON, no object, or has a key twice.
    """
    value = parse_json(_read(path, what, MAX_JSON_BYTES), what)
    if not isinstance(value, dict):
        raise WeightFormatError(f"{what}: holds a {type(value).__name__}, must hold an object")
    return value


def parse_json(data: bytes, what: str) -> Any:
    """Return the value that `data` spells; a key that comes twice in an object is refused.

    Raises:
        WeightFormatError: It is no JSON in UTF-8.
    """

    try:
        return json.loads(data.decode(), object_pairs_hook=unique_pairs)
    except RepeatedKey as error:
        raise WeightFormatError(
            f"{what}: has the key {shown(str(error))} twice; get it again"
        ) from None
    except RecursionError:
        raise WeightFormatError(f"{what}: is nested too deeply; get it again") from None
    except UnicodeDecodeError:
        raise WeightFormatError(f"{what}: is not UTF-8; get it again") from None
    except ValueError as error:  # no JSON, or a number of thousands of digits
        reason = " ".join(str(error).split())[:120]
        raise WeightFormatError(f"{what}: is no JSON ({reason}); get it again") from None


def _read(path: Path, what: str, limit: int) -> bytes:
    size = os.stat(path).st_size
    if size > limit:
        raise WeightFormatError(f"{what}: has {size} bytes, and {limit} is the limit")
    return path.read_bytes()


def _hub_blobs(real: Path) -> list[Path]:
    """Return where the links of a snapshot in a hub cache lead; [] for any other folder."""
    repository = real.parent.parent
    if real.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return []
    return [repository / "blobs", repository.parent / "blobs"]
