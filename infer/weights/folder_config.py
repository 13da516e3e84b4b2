"""What the JSON files of a folder in transformers' layout say of its model.  No JAX in here."""

import dataclasses
from typing import Any

from infer.config import ModelConfig
from infer.errors import WeightFormatError
from infer.model_files import ModelFolder
from infer.models.checkpoint import HFConfig, Layout
from infer.models.registry import layout_of
from infer.weights import packed_form
from infer.weights.packed_form import PackedForm

# Beside config.json, where tools of their own wrote it: file -> method.
_QUANTISED_BY = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """A folder's config.json, and the family that reads it; `packed` where weights are packed in
    the form of `infer.save`, `quantised` where another tool has quantised them in a form that is
    read (`infer.weights.quantised`).
    """

    hf: HFConfig
    layout: Layout
    model: ModelConfig
    packed: PackedForm | None = None
    quantised: HFConfig | None = None


def read_config(folder: ModelFolder) -> HFConfig:
    """Return the config.json of a folder.

    Raises:
        WeightFormatError: there is none, or it is broken.
    """
    values = folder.json("config.json")
    if values is None:
        raise WeightFormatError(
            f"{folder.label}: has no config.json; give a folder in transformers' layout"
        )
    return HFConfig(values, f"{folder.label}/config.json")


def describe(folder: ModelFolder) -> FolderConfig:
    """Return the model that a folder holds.

    Token ids that end a generation are those of generation_config.json, then of config.json.

    Raises:
        WeightFormatError: a file is broken, or the weights are quantised in a form that is not
            read.
        ConfigError: the architecture, or something it asks for, is not supported.
    """
    hf = read_config(folder)
    packed = packed_form.of_config(hf.values, hf.where)
    quantised = None if packed is not None else quantised_by(folder, hf)
    if packed is None and quantised is None:
        refuse_quantised(folder, hf)
    layout = layout_of(hf.texts("architectures"), hf.text("model_type", ""))
    model = layout.config(hf)
    generation = HFConfig(
        folder.json("generation_config.json") or {}, f"{folder.label}/generation_config.json"
    )
    bos = generation.ids("bos_token_id")
    eos = dict.fromkeys([*generation.ids("eos_token_id"), *model.eos_ids])
    model = dataclasses.replace(
        model, bos_id=bos[0] if bos else model.bos_id, eos_ids=tuple(eos)
    ).validate()
    return FolderConfig(hf=hf, layout=layout, model=model, packed=packed, quantised=quantised)


# Methods that are read: keys of `infer.weights.quantised.translate.READERS`.
QUANTISED = (
    *("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes"),
)


def quantised_by(folder: ModelFolder, hf: HFConfig) -> HFConfig | None:
    """Return the configuration of a quantisation that is read, its `quant_method` a key of
    READERS; None for a folder of plain numbers, and for a method that is not read.

    Raises:
        WeightFormatError: the configuration is broken.
    """
    method = _method(hf.values)
    if method is not None:
        text = hf if _method({**hf.values, "text_config": None}) else hf.section("text_config")
        assert text is not None
        keys = ("quantization_config", "compression_config")
        if not any(isinstance(text.get(key), dict) for key in keys):
            return None  # what it is, `refuse_quantised` says
        found = text.section(keys[0]) or text.section(keys[1])
        assert found is not None
        name = found.get("quant_method", "modelopt" if found.get("quant_algo") else None)
        if name is None and ("load_in_4bit" in found.values or "load_in_8bit" in found.values):
            name = "bitsandbytes"
        if name is None and text.values.get("compression_config") is not None:
            name = "compressed-tensors"
        return _named(found, name)
    for file, name in _QUANTISED_BY.items():
        values = folder.json(file) if folder.member(file) is not None else None
        if values is not None:
            found = HFConfig(values, f"{folder.label}/{file}")
            if name == "modelopt":
                found = found.section("quantization") or found
            return _named(found, name)
    return None


def _named(found: HFConfig, name: Any) -> HFConfig | None:
    if not isinstance(name, str) or name not in QUANTISED:
        return None
    return HFConfig({**found.values, "quant_method": name}, found.where)


def refuse_quantised(folder: ModelFolder, hf: HFConfig) -> None:
    """Refuse weights that are packed by a method: they are never read as plain numbers.

    Raises:
        WeightFormatError: the folder says that it is quantised; the message names the method.
    """
    method = _method(hf.values)
    if method is None:
        beside = (m for file, m in _QUANTISED_BY.items() if folder.member(file) is not None)
        method = next(beside, None)
    if packed_form.is_own(hf.values):
        raise WeightFormatError(
            f"{folder.label}: its weights are packed by infer.quantize, and this takes plain"
            " numbers; take the model that was quantised"
        )
    if method is not None:
        raise WeightFormatError(
            f"{folder.label}: its weights are quantised by {method}, which this version does not"
            " read; take the original weights or a GGUF file of the model"
        )


def _method(values: Any) -> str | None:
    """Return the quantisation method that a config.json names, or None if it names none."""
    for key in ("quantization_config", "compression_config"):
        found = values.get(key)
        if found is None:
            continue
        if not isinstance(found, dict):
            return "an unknown method"
        if "load_in_4bit" in found or "load_in_8bit" in found:
            return "bitsandbytes"
        name = found.get("quant_method", found.get("quant_algo"))
        if name is None and key == "compression_config":
            return "compressed-tensors"
        return repr(name)[:60] if isinstance(name, str) else "an unknown method"
    text = values.get("text_config")
    return _method(text) if isinstance(text, dict) else None
