"""What a folder in transformers' layout says of itself, for `infer info`.  Headers only; no JAX."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.errors import ConfigError, WeightFormatError
from infer.model_files import ModelFolder
from infer.models.checkpoint import HFConfig
from infer.plan.shape import AttentionShape
from infer.tokenizer.folder import chat_templates
from infer.weights.folder_config import describe, read_config
from infer.weights.shards import SafetensorsFolder
from infer.weights.summary import Summary, totals


def summarise_folder(path: Path) -> Summary:
    """Return the summary of a folder; of an architecture that is not run, what config.json says.

    Raises:
        WeightFormatError: a file is broken, or there are no safetensors files.
    """
    folder = ModelFolder(path)
    hf = read_config(folder)
    text = hf.section("text_config") or hf
    with SafetensorsFolder.open(folder) as files:
        tensors = list(files.tensors.values())
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
    )


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
