"""What a folder in transformers' layout says of itself, for `infer info`.  Headers only; of packed
weights, which are held against the model as loading does, scales and orders too, and JAX.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.errors import ConfigError, WeightFormatError
from infer.model_files import ModelFolder, shown
from infer.models.checkpoint import HFConfig
from infer.native.formats import FORMATS, planar_refusal
from infer.plan.shape import AttentionShape
from infer.quant.format_json import to_json
from infer.quant.formats import Format, PlanarFormat
from infer.tokenizer.folder import chat_templates
from infer.weights import packed_form
from infer.weights.folder_config import describe, quantised_by, read_config
from infer.weights.new_folder import refuse_leftover
from infer.weights.packed_form import PARTS, PackedForm
from infer.weights.safetensors import TensorInfo
from infer.weights.shards import SafetensorsFolder
from infer.weights.summary import Quantisation, Summary, totals

if TYPE_CHECKING:
    from infer.weights.quantised.translate import TranslatedFolder


def summarise_folder(path: Path) -> Summary:
    """Return the summary of a folder; of an architecture that is not run, what config.json says.

    Raises:
        WeightFormatError: a file is broken, or there are no safetensors files.
    """
    folder = ModelFolder(path)
    hf = read_config(folder)
    text = hf.section("text_config") or hf
    refuse_leftover(path)
    with SafetensorsFolder.open(folder) as files:
        form, quantised = packed_form.of_config(hf.values, hf.where), None
        if form is None:
            quantised = quantised_by(folder, hf)
        if quantised is not None:
            files = _translated(folder, files, quantised) or files
            form = getattr(files, "form", None)
        if form is not None:
            _check(folder, files, form)
        tensors = logical_tensors(files.tensors, form)
    layers = _layers(folder, text, len(tensors))
    sliding = [layer.window for layer in layers if layer.window is not None]
    num_params = sum(math.prod(t.shape) for t in tensors)
    weight_bytes = sum(t.nbytes for t in tensors)
    names = hf.texts("architectures")
    return Summary(
        architecture=names[0] if names else hf.text("model_type", "unknown"),
        name=hf.text("_name_or_path", "") or None,
        context_length=_count(text, "max_position_embeddings"),
        vocab_size=_count(text, "vocab_size"),
        hidden_size=_count(text, "hidden_size"),
        intermediate_size=_count(text, "intermediate_size"),
        num_heads=_count(text, "num_attention_heads"),
        num_kv_heads=max((layer.num_kv_heads for layer in layers), default=None),
        head_dim=layers[0].k_head_dim or None if layers else None,
        window=max(sliding) if sliding else None,
        num_sliding_layers=len(sliding),
        num_experts=_count(text, "num_local_experts") or _count(text, "num_experts") or 0,
        num_experts_used=_count(text, "num_experts_per_tok") or 0,
        num_params=num_params,
        weight_bytes=weight_bytes,
        active_params=num_params,
        active_bytes=weight_bytes,
        types=totals(tensors),
        layers=layers,
        tokenizer="tokenizer.json" if folder.member("tokenizer.json") else None,
        pre_tokenizer=None,
        chat_template=bool(chat_templates(folder)),
        quantisation=None if form is None else _quantisation(form, tensors, quantised),
    )


def _translated(
    folder: ModelFolder, files: SafetensorsFolder, quantised: HFConfig
) -> "TranslatedFolder | None":
    """Return a folder of another tool as one of our own form; None of an architecture that is not
    run.
    """
    from infer.weights.quantised.translate import TranslatedFolder  # brings JAX

    try:
        described = describe(folder)
    except ConfigError:
        return None
    return TranslatedFolder(files, described.layout, described.model, quantised)


def _check(folder: ModelFolder, files: SafetensorsFolder, form: PackedForm) -> None:
    """Refuse what loading a folder of packed weights refuses."""
    from infer.weights.packed_folder import check, check_values  # brings JAX

    described = describe(folder)
    _, places = check(files, described.layout, described.model, form)
    check_values(files, places)


@dataclass(frozen=True)
class LogicalTensor:
    """A weight as the model sees it: a tensor of the file, or the parts of a packed one together.

    `type_name` is a format's name where it is packed.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    nbytes: int


def logical_tensors(
    tensors: Mapping[str, TensorInfo], form: PackedForm | None
) -> list[LogicalTensor]:
    """Return the weights of a folder; shapes of packed ones follow from their bytes.

    Raises:
        WeightFormatError: the data of a packed weight are missing, or no rows of its format.
    """
    found, parts = [], set()
    for name, format in ({} if form is None else form.weights).items():
        mine = [tensors[n] for part in PARTS if (n := f"{name}.{part}") in tensors]
        parts |= {info.name for info in mine}
        data = tensors.get(f"{name}.data")
        if data is None or len(data.shape) != 2:
            raise WeightFormatError(
                f"{shown(name)} is said to be packed, and has no matrix {shown(name + '.data')};"
                " get the folder again"
            )
        bits = 8 * format.block_bytes / format.group if format.block_bytes else format.bits
        shape = (data.shape[0], int(8 * data.shape[1] / bits))
        size = sum(info.nbytes for info in mine)
        found.append(LogicalTensor(name, shape, format.name, size))
    return found + [
        LogicalTensor(info.name, info.shape, info.type_name, info.nbytes)
        for info in tensors.values()
        if info.name not in parts
    ]


# What a configuration says of how a model was quantised, whichever tool's.
_SAID = (
    *("bits", "group_size", "desc_act", "sym", "zero_point", "version", "format", "damp_percent"),
    *("checkpoint_format", "quant_algo", "activation_scheme", "weight_block_size", "ignore"),
    *("modules_to_not_convert", "exclude_modules", "bnb_4bit_quant_type", "dataset", "producer"),
)


def _quantisation(
    form: PackedForm, tensors: list[LogicalTensor], quantised: HFConfig | None
) -> Quantisation:
    """Return what a folder's form says."""
    packed = [t for t in tensors if t.name in form.weights]
    found = totals(packed)
    return Quantisation(
        formats={format.name: to_json(format) for format in form.weights.values()},
        stayed={
            t.name: t.type_name for t in tensors if t.name not in form.weights and len(t.shape) == 2
        },
        bits_per_weight={
            name: 8 * total.num_bytes / max(total.params, 1) for name, total in found.items()
        },
        calibration=None if form.calibration is None else form.calibration.to_json(),
        in_xla=tuple(
            sorted({t.type_name for t in packed if not _has_kernel(t, form.weights[t.name])})
        ),
        method=None if quantised is None else quantised.text("quant_method"),
        says={k: v for k in _SAID if quantised is not None and (v := quantised.get(k)) is not None},
    )


def _has_kernel(tensor: LogicalTensor, format: Format) -> bool:
    """Return whether the CPU's native operations multiply a packed weight."""
    if not isinstance(format, PlanarFormat):
        return format.name in FORMATS and tensor.shape[1] % 32 == 0
    return not planar_refusal(format.code, format.group, tensor.shape[1], format.activations)


def _layers(folder: ModelFolder, text: HFConfig, num_tensors: int) -> tuple[AttentionShape, ...]:
    """Return what each layer caches: as the model is run here, or else as config.json reads."""
    try:
        config = describe(folder).model
    except (ConfigError, WeightFormatError):
        return _plain_layers(text, num_tensors)
    return tuple(
        AttentionShape(
            num_kv_heads=config.num_kv_heads,
            k_head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            window=layer.window,
        )
        for layer in config.layers
    )


def _plain_layers(text: HFConfig, num_tensors: int) -> tuple[AttentionShape, ...]:
    count, heads = _count(text, "num_hidden_layers"), _count(text, "num_attention_heads")
    hidden = _count(text, "hidden_size")
    if not count or not heads or not hidden or count > num_tensors:
        return ()
    dim = _count(text, "head_dim") or hidden // heads
    kv_heads = _count(text, "num_key_value_heads") or heads
    layer = AttentionShape(num_kv_heads=kv_heads, k_head_dim=dim, v_head_dim=dim, window=None)
    return (layer,) * count


def _count(text: HFConfig, key: str) -> int | None:
    values: Mapping[str, Any] = text.values
    value = values.get(key)
    return value if type(value) is int and 0 <= value < 1 << 40 else None
