"""A folder in transformers' layout as one GGUF file: tensors under llama.cpp's names, the keys of
the architecture, and the tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.model_files import ModelFolder
from infer.models import gguf_keys
from infer.models.differences import differences
from infer.models.family import Family
from infer.models.registry import FAMILIES, family_of
from infer.tokenizer import Tokenizer, gguf_export, probes
from infer.tokenizer.folder import Parts, parts_of_folder
from infer.weights.folder import CanonicalTensors, planned
from infer.weights.folder_config import describe, refuse_quantised
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_metadata import TypedMetadata
from infer.weights.gguf_writer import GGUFTensor, head_bytes, write_gguf
from infer.weights.regroup import DTYPES, Held, Regrouped, cast, common_dtype, regroup
from infer.weights.safetensors_writer import Progress
from infer.weights.shards import SafetensorsFolder
from infer.weights.slots import Slot, plan

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's LLAMA_FTYPE_*


def write_as_gguf(
    folder: ModelFolder,
    target: Path,
    *,
    dtype: np.dtype | None,
    max_part_bytes: int | None,
    progress: Progress | None,
) -> list[Path]:
    """Write a folder as a GGUF file and return it, or the files of a split model.

    Vectors and learned positions are written as float32, as llama.cpp's converter does.

    Args:
        folder: what to read.
        target: of the new file.
        dtype: of matrices; None: as they are.
        max_part_bytes: tensor bytes of one file; None: one file.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: the folder is broken, its weights are quantised, or GGUF cannot say what
            its tokenizer does.
        ConfigError: GGUF, or llama.cpp's names in it, cannot say what config.json says.
    """
    described = describe(folder)
    if described.packed is not None:
        refuse_quantised(folder, described.hf)
    with SafetensorsFolder.open(folder) as files:
        source = CanonicalTensors(files, described.layout)
        old = planned(described.model, source)
        family = _gguf_family(old.config, folder.label)
        new = plan(old.config, family.layer_names, family.global_names)
        tensors = list(_tensors(source, regroup(old, new), dtype))
        tensors += [
            GGUFTensor.of(name, array) for name, array in gguf_keys.tensors(old.config).items()
        ]
        return list(
            write_gguf(
                target,
                _metadata(folder, family, old.config, tensors),
                tensors,
                max_part_bytes=max_part_bytes,
                progress=progress,
            )
        )


def _metadata(
    folder: ModelFolder, family: Family, config: ModelConfig, tensors: list[GGUFTensor]
) -> dict[str, Any]:
    """Return all keys; what a reader makes of them is held against the folder."""
    has_tokenizer = folder.member("tokenizer.json") is not None
    parts = parts_of_folder(folder) if has_tokenizer else None
    embed = next(t for t in tensors if t.name == family.global_names["embed"])
    metadata = {
        "general.architecture": family.name,
        "general.type": "model",
        "general.name": _name(folder, parts),
        "general.file_type": _FILE_TYPES[embed.type_name],
    }
    metadata |= _tokenizer_keys(parts, config)
    metadata |= _model_keys(family, config, metadata, tensors, folder.label)
    if parts is not None:
        written = Tokenizer.from_gguf(_Draft(metadata, []).metadata)
        probes.check(Tokenizer(parts), written, f"{folder.label}: as GGUF")
    return metadata


class _Draft(TypedMetadata):
    """A GGUF file before it is written, as a family reads one."""

    def __init__(self, metadata: dict[str, Any], tensors: list[GGUFTensor]):
        self.path = "the new file"
        self.metadata = GGUFFile(self.path, head_bytes([], metadata)).metadata
        self.tensors = {tensor.name: tensor for tensor in tensors}

    def array(self, name: str, dtype: Any = None) -> np.ndarray:
        """Return a tensor that is a part of the configuration."""
        data = self.tensors[name].data
        assert isinstance(data, np.ndarray), name
        return data if dtype is None else data.astype(dtype)


def _gguf_family(config: ModelConfig, label: str) -> Family:
    own = FAMILIES[config.family]
    family = FAMILIES[own.written_as or own.name]
    if family.config is None:
        raise ConfigError(f"{label}: llama.cpp has no architecture for {own.name}; keep the folder")
    return family_of(family.name)


def _model_keys(
    family: Family,
    config: ModelConfig,
    metadata: dict[str, Any],
    tensors: list[GGUFTensor],
    label: str,
) -> dict[str, Any]:
    """Return the architecture's keys, which read back as `config`; ConfigError if none do."""
    assert family.config is not None
    plain = gguf_keys.common(config) | family.own_keys(config)
    lost: list[str] = []
    # Published files have no list of layers where the architecture's own pattern says the same.
    for values in (plain, plain | gguf_keys.window_pattern(config)):
        keys = {f"{family.name}.{key}": value for key, value in values.items()}
        lost = differences(config, family.config(_Draft(metadata | keys, tensors)))
        if not lost:
            return keys
    raise ConfigError(
        f"{label}: no GGUF file of the architecture {family.name} says what config.json says:"
        f" {'; '.join(lost)}; keep the folder"
    )


def _tokenizer_keys(parts: Parts | None, config: ModelConfig) -> dict[str, Any]:
    if parts is not None:
        return gguf_export.gguf_keys(parts, config.vocab_size)
    ids = {"bos": config.bos_id, "eos": config.eos_ids[0] if config.eos_ids else None}
    named = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
    return {"tokenizer.ggml.model": "none"} | named


def _name(folder: ModelFolder, parts: Parts | None) -> str:
    name = folder.path.resolve().name
    # Tokens that take the whitespace after them: readers know it by the model's name alone.
    if parts is not None and gguf_export.strips_right(parts):
        return f"Phi-3 ({name})"
    return name


def _tensors(
    source: CanonicalTensors, tensors: list[Regrouped], dtype: np.dtype | None
) -> Iterator[GGUFTensor]:
    plus_one, held = source.layout.norm_plus_one, Held(source.release)

    def read(tensor: Regrouped, to: np.dtype) -> np.ndarray:
        adds_one = plus_one and tensor.field.endswith("norm")

        def weight(slot: Slot) -> np.ndarray:
            values = slot.taken(source.array(slot.tensor))
            return values.astype(np.float32) + np.float32(1) if adds_one else values

        held.swap(tensor.sources)
        return cast(tensor.build(weight), to, tensor.name, source.path)

    for tensor in tensors:
        kinds = {source.tensors[name].type_name for name in tensor.sources}
        to = common_dtype(kinds, DTYPES["float32"]) if dtype is None else dtype
        if len(tensor.shape) == 1 or tensor.field == "positions":
            to = DTYPES["float32"]
        yield GGUFTensor(
            name=tensor.name,
            shape=tensor.shape,
            type_name=_TYPES[to.name],
            data=lambda tensor=tensor, to=to: read(tensor, to),
        )
