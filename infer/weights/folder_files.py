"""The small files of a folder in transformers' layout: config.json, generation_config.json and the
tokenizer's.
"""

import json
from pathlib import Path
from typing import Any

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.models.checkpoint import HFConfig, Layout
from infer.models.differences import differences
from infer.models.registry import FAMILIES
from infer.tokenizer import Tokenizer, probes


def described(config: ModelConfig, where: str, way_out: str) -> tuple[Layout, dict[str, Any]]:
    """Return the layout whose config.json says what `config` says, and that config.json.

    One architecture of GGUF may stand for several families: the first that can say all is taken.

    Args:
        config: of the model.
        where: how a message begins.
        way_out: how it ends.

    Raises:
        ConfigError: no config.json says all of it.
    """
    own = FAMILIES.get(config.family)
    if own is None:
        raise ConfigError(f"{where}: {config.family!r} is no family of {', '.join(FAMILIES)}")
    problems = []
    for family in (own, *(f for f in FAMILIES.values() if f.written_as == own.name)):
        layout = family.hf
        if layout is None:
            continue
        values = layout.values(config)
        lost = differences(config, layout.config(HFConfig(values)))
        if not lost:
            names = dict(architectures=[layout.architectures[0]], model_type=layout.model_types[0])
            return layout, names | values
        problems.append(f"as {layout.architectures[0]} {'; '.join(lost)}")
    raise ConfigError(
        f"{where}: no config.json says what this {own.name} model is: {', '.join(problems)};"
        f" {way_out}"
    )


def write(
    folder: Path, values: dict[str, Any], tokenizer: Tokenizer | None, config: ModelConfig
) -> None:
    """Write the small files into a folder; the tokenizer that they make is held against this one.

    Args:
        folder: is there, without these files.
        values: of config.json.
        tokenizer: of the model, if it has one.
        config: of the model.

    Raises:
        WeightFormatError: the tokenizer has no form in a folder.
    """
    generation: dict[str, Any] = {"bos_token_id": config.bos_id}
    ends = list(config.eos_ids if tokenizer is None else tokenizer.eos_ids)
    generation["eos_token_id"] = ends if len(ends) != 1 else ends[0]
    if tokenizer is not None:
        values = values | {"pad_token_id": tokenizer.pad_id}
        generation["pad_token_id"] = tokenizer.pad_id
        for name, text in tokenizer.folder_files(config.max_context).items():
            (folder / name).write_text(text, encoding="utf-8")
    _write_json(folder / "config.json", values)
    known = {key: value for key, value in generation.items() if value not in (None, [])}
    _write_json(folder / "generation_config.json", known)
    if tokenizer is not None:
        probes.check(tokenizer, Tokenizer.from_folder(folder), "as tokenizer.json")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
