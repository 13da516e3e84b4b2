"""A folder's safetensors files as one source of tensors.

`model.safetensors` alone, or the files that `model.safetensors.index.json` names.  The index is not
believed: a name in it that leaves the folder, a file that is not there, a tensor that its file
lacks, that several files hold or that the index does not know are all listed in one error.  Other
kinds of weight files are never opened.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import Shaped

from infer.errors import WeightFormatError
from infer.model_files import ModelFolder, shown
from infer.weights.safetensors import SafetensorsFile, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
# Weight files of other kinds, which may hold pickles: a folder with nothing else is refused.
_OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pkl")
_SHOWN = 20


class SafetensorsFolder:
    """The open safetensors files of a folder: `path`, `tensors`, `metadata`, and their bytes."""

    def __init__(self, folder: ModelFolder, files: Mapping[str, SafetensorsFile]):
        """Join `files`, which hold no tensor twice; see `open`."""
        self.path = folder.label
        self.files = dict(files)
        self._home = {name: file for file in files.values() for name in file.tensors}
        self.tensors: dict[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._home.items()
        }
        self.metadata: dict[str, str] = {}
        for file in files.values():
            self.metadata |= file.metadata

    @classmethod
    def open(cls, path: str | os.PathLike[str] | ModelFolder) -> "SafetensorsFolder":
        """Open the weights of a folder and check every header.

        Args:
            path: A folder with model.safetensors, or with an index and the files it names.

        Raises:
            OSError: It is no folder, or a file may not be read.
            WeightFormatError: There are no safetensors files, or they do not belong together.
        """
        folder = path if isinstance(path, ModelFolder) else ModelFolder(path)
        if single := folder.member(SINGLE):
            return cls(folder, {SINGLE: SafetensorsFile.open(single)})
        index = folder.json(INDEX)
        if index is None:
            return cls(folder, {name: _opened(folder, name) for name in _only_file(folder)})
        return cls(folder, _indexed(folder, index))

    def close(self) -> None:
        """Let go of the files; see `SafetensorsFile.close`."""
        for file in self.files.values():
            file.close()

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def array(self, name: str) -> Shaped[Any, "..."]:
        """Return a tensor as a view of its file; see `SafetensorsFile.array`."""
        return self._file(name).array(name)

    def release(self, name: str) -> None:
        """Let the system drop a tensor's pages; see `SafetensorsFile.release`."""
        self._file(name).release(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._home:
            raise WeightFormatError(f"{self.path}: has no tensor {shown(name)}; see `tensors`")
        return self._home[name]


def listed(path: str, problems: Iterable[str]) -> WeightFormatError:
    """Return one error that lists all problems, the first twenty of them in full."""
    problems = list(problems)
    more = len(problems) - _SHOWN
    text = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return WeightFormatError(f"{path}: {text}")


def _opened(folder: ModelFolder, name: str) -> SafetensorsFile:
    path = folder.member(name)
    assert path is not None, name
    return SafetensorsFile.open(path)


def _only_file(folder: ModelFolder) -> list[str]:
    """Return the name of the one safetensors file, whatever it is called."""
    names = folder.names()
    found = [name for name in names if name.endswith(_SUFFIX)]
    if len(found) == 1:
        return found
    if found:
        raise WeightFormatError(
            f"{folder.label}: has {len(found)} safetensors files ({', '.join(found[:3])}, ...) and"
            f" neither {SINGLE} nor {INDEX}; get the index, or keep one file"
        )
    if others := [name for name in names if name.endswith(_OTHERS)]:
        raise WeightFormatError(
            f"{folder.label}: has its weights as {shown(others[0])} and no safetensors file;"
            " pickles are never read: convert it to safetensors where you trust its source"
        )
    raise WeightFormatError(
        f"{folder.label}: has no {SINGLE} and no {INDEX}; give a folder in transformers' layout"
    )


def _indexed(folder: ModelFolder, index: Mapping[str, Any]) -> dict[str, SafetensorsFile]:
    """Open the files that an index names and hold their tensors against it."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightFormatError(f"{folder.label}/{INDEX}: has no weight_map object; get it again")
    problems: list[str] = []
    files: dict[str, SafetensorsFile] = {}
    for name in dict.fromkeys(v for v in weight_map.values() if isinstance(v, str)):
        try:
            if not name.endswith(_SUFFIX):
                problems.append(f"{shown(name)} is no safetensors file: convert it to one")
            elif folder.member(name) is None:
                problems.append(f"{shown(name)} is missing")
            else:
                files[name] = _opened(folder, name)
        except WeightFormatError as error:
            problems.append(str(error).removeprefix(f"{folder.label}: "))
    homes: dict[str, list[str]] = {}
    for file_name, file in files.items():
        for tensor in file.tensors:
            homes.setdefault(tensor, []).append(file_name)
    for tensor, home in weight_map.items():
        if not isinstance(home, str):
            problems.append(f"{shown(tensor)} is in {home!r:.40}, must be the name of a file")
        elif home in files and tensor not in files[home].tensors:
            problems.append(f"{shown(tensor)} is not in {shown(home)}, where the index has it")
    for tensor, found in homes.items():
        if len(found) > 1:
            problems.append(f"{shown(tensor)} is in {' and '.join(map(shown, found))}")
        elif tensor not in weight_map:
            problems.append(f"{shown(tensor)} is in {shown(found[0])} and not in the index")
    if problems:
        raise listed(f"{folder.label}/{INDEX}", problems)
    return files
