"""What a GGUF file says of itself: sizes, types, cache bytes.  Reads the header only; no JAX."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from infer.errors import WeightFormatError
from infer.plan.shape import AttentionShape, ModelShape

# Every how many layers one sees the whole context, where the file does not say: the others slide.
# Source: the model cards and llama.cpp's hyperparameters of these architectures.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4}
# Architectures whose every layer slides when the file has a window.
_ALL_SLIDE = {"phi3"}


@runtime_checkable
class _Tensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


@runtime_checkable
class _File(Protocol):
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class TypeTotal:
    """All tensors of one type together."""

    tensors: int
    params: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """What a folder says of its packed weights.

    Attributes:
        formats: by name, field by field.
        stayed: matrices in floats, with their dtype.
        bits_per_weight: of each format's weights, scales included.
        calibration: of which text, or None.
        in_xla: formats of weights for which the CPU's native operations have no kernel.
        method: by which tool's `quant_method` they are, None for those of `infer.save`.
        says: what that configuration says besides.
    """

    formats: Mapping[str, Mapping[str, Any]]
    stayed: Mapping[str, str]
    bits_per_weight: Mapping[str, float]
    calibration: Mapping[str, Any] | None
    in_xla: tuple[str, ...] = ()
    method: str | None = None
    says: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A model file in numbers; None is what the file does not say.

    `layers` is empty for a file that describes no decoder.  For a mixture of experts the active
    parameters and bytes are those that one token uses.
    """

    architecture: str
    name: str | None
    context_length: int | None
    vocab_size: int | None
    hidden_size: int | None
    intermediate_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    window: int | None
    num_sliding_layers: int
    num_experts: int
    num_experts_used: int
    num_params: int
    weight_bytes: int
    active_params: int
    active_bytes: int
    types: Mapping[str, TypeTotal]
    layers: tuple[AttentionShape, ...]
    tokenizer: str | None
    pre_tokenizer: str | None
    chat_template: bool
    quantisation: Quantisation | None = None

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    def layers_with(self, kv_bytes: float) -> tuple[AttentionShape, ...]:
        """Return the layers with a cache of `kv_bytes` bytes a number."""
        return tuple(dataclasses.replace(layer, kv_bytes=kv_bytes) for layer in self.layers)

    def shape(self, kv_bytes: float = 2) -> ModelShape:
        """Return what the planner's formulas take: of experts, those that one token uses."""
        return ModelShape(
            num_params=self.active_params,
            weight_bytes=self.active_bytes,
            layers=self.layers_with(kv_bytes),
        )


def summarise(file: _File) -> Summary:
    """Return the summary of an open GGUF file.

    Raises:
        WeightFormatError: metadata of a wrong type or of numbers that cannot be.
    """
    meta = _Metadata(file.metadata)
    tensors: list[_Tensor] = list(file.tensors.values())
    _check_tokenizer(meta)
    heads = meta.hyper("attention.head_count")
    hidden = meta.hyper("embedding_length")
    layers = _layers(meta, hidden, heads, len(tensors))
    kv_heads = [layer.num_kv_heads for layer in layers]
    sliding = [layer.window for layer in layers if layer.window is not None]
    experts, used = meta.hyper("expert_count") or 0, meta.hyper("expert_used_count") or 0
    share = used / experts if experts else 1.0
    params = {t.name: math.prod(t.shape) for t in tensors}
    routed = [t for t in tensors if "_exps." in t.name]
    idle = 1.0 - share if 0.0 < share < 1.0 else 0.0
    num_params, weight_bytes = sum(params.values()), sum(t.nbytes for t in tensors)
    return Summary(
        architecture=meta.architecture,
        name=meta.get("general.name", str),
        context_length=meta.hyper("context_length"),
        vocab_size=_vocab_size(meta, params.get("token_embd.weight"), hidden),
        hidden_size=hidden,
        intermediate_size=meta.hyper("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=max(kv_heads) if kv_heads else None,
        head_dim=layers[0].k_head_dim or None if layers else None,
        window=max(sliding) if sliding else None,
        num_sliding_layers=len(sliding),
        num_experts=experts,
        num_experts_used=used,
        num_params=num_params,
        weight_bytes=weight_bytes,
        active_params=num_params - int(idle * sum(params[t.name] for t in routed)),
        active_bytes=weight_bytes - int(idle * sum(t.nbytes for t in routed)),
        types=totals(tensors),
        layers=layers,
        tokenizer=meta.get("tokenizer.ggml.model", str),
        pre_tokenizer=meta.get("tokenizer.ggml.pre", str),
        chat_template=bool(meta.get("tokenizer.chat_template", str)),
    )


class _Metadata:
    """Metadata with types checked; `hyper` reads a hyperparameter of the file's architecture."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.architecture = self.get("general.architecture", str)
        if self.architecture is None:
            raise WeightFormatError("the file does not say general.architecture: it is no model")

    def get(self, key: str, kind: type) -> Any:
        """Return the value, or None if the file has none."""
        value = self.values.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise WeightFormatError(f"{key} is a {type(value).__name__}, must be {kind.__name__}")
        return value

    def hyper(self, key: str) -> int | None:
        """Return a count: an integer of at least 0; of one number a layer, the largest."""
        key = f"{self.architecture}.{key}"
        value = self.values.get(key)
        if value is None or isinstance(value, (str, bool)):
            return self.get(key, int)
        numbers = [_as_int(key, number) for number in _listed(value)]
        if not numbers or min(numbers) < 0:
            raise WeightFormatError(f"{key} is {_short(value)}, must be at least 0")
        return max(numbers)

    def per_layer(self, key: str, count: int) -> list[int] | None:
        """Return `count` numbers: the file has one for all layers or one a layer."""
        key = f"{self.architecture}.{key}"
        value = self.values.get(key)
        if value is None:
            return None
        numbers = [_as_int(key, number) for number in _listed(value)]
        if len(numbers) == 1:
            numbers *= count
        if len(numbers) != count or min(numbers, default=0) < 0:
            raise WeightFormatError(f"{key} is {_short(value)}, must be one or {count} counts")
        return numbers


def _listed(value: Any) -> list[Any]:
    """Return the items of a list or an array; of a scalar, a list of it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, list) else [value]


def _as_int(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightFormatError(f"{key} is {_short(value)}, must be an integer")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _layers(
    meta: _Metadata, hidden: int | None, heads: int | None, num_tensors: int
) -> tuple[AttentionShape, ...]:
    """Return what each decoder layer caches; () if the file describes no decoder."""
    count = meta.hyper("block_count")
    if count is None or heads is None:
        return ()
    if count > num_tensors:  # before anything of that size is made
        raise WeightFormatError(
            f"{meta.architecture}.block_count is {count}, but the file has {num_tensors} tensors"
        )
    kv_heads = meta.per_layer("attention.head_count_kv", count) or [heads] * count
    default = (hidden or 0) // heads if heads else 0
    k_dim, v_dim = (meta.hyper(f"attention.{x}_length") for x in ("key", "value"))
    latent = meta.hyper("attention.kv_lora_rank")
    windows = _windows(meta, count)
    if latent:
        rope = meta.hyper("rope.dimension_count") or 0
        return tuple(AttentionShape(latent_dim=latent, rope_dim=rope, window=w) for w in windows)
    return tuple(
        AttentionShape(
            num_kv_heads=num,
            k_head_dim=default if k_dim is None else k_dim,
            v_head_dim=default if v_dim is None else v_dim,
            window=window,
        )
        for num, window in zip(kv_heads, windows, strict=True)
    )


def _windows(meta: _Metadata, count: int) -> list[int | None]:
    """Return each layer's window; a layer of an unknown pattern counts as seeing everything."""
    window = meta.hyper("attention.sliding_window")
    if not window:
        return [None] * count
    key = f"{meta.architecture}.attention.sliding_window_pattern"
    pattern = meta.values.get(key)
    if pattern is not None and not isinstance(pattern, int):  # one truth value a layer: it slides
        slides = [bool(item) for item in _listed(pattern)]
        if len(slides) != count:
            raise WeightFormatError(f"{key} has {len(slides)} entries for {count} layers")
        return [window if slide else None for slide in slides]
    if meta.architecture in _ALL_SLIDE:
        return [window] * count
    every = pattern if type(pattern) is int else _FULL_EVERY.get(meta.architecture, 1)
    if every < 1:
        raise WeightFormatError(f"{key} is {every}, must be at least 1")
    return [None if i % every == every - 1 else window for i in range(count)]


def _vocab_size(meta: _Metadata, embed_params: int | None, hidden: int | None) -> int | None:
    """Return the tokenizer's number of ids, or else the rows of the embedding."""
    tokens = meta.values.get("tokenizer.ggml.tokens")
    if tokens is not None:
        return len(tokens)
    return embed_params // hidden if embed_params and hidden else meta.hyper("vocab_size")


def _check_tokenizer(meta: _Metadata) -> None:
    """Refuse a vocabulary that no tokenizer could be built from."""
    tokens = meta.get("tokenizer.ggml.tokens", list)
    for key, kinds, what in (("scores", "f", "floats"), ("token_type", "iu", "integers")):
        key = f"tokenizer.ggml.{key}"
        values = meta.values.get(key)
        if values is None:
            continue
        kind = getattr(getattr(values, "dtype", None), "kind", None)
        if kind is None or kind not in kinds:
            raise WeightFormatError(f"{key} must be an array of {what}")
        if tokens is not None and len(values) != len(tokens):
            raise WeightFormatError(f"{key} has {len(values)} entries for {len(tokens)} tokens")


def totals(tensors: Sequence[_Tensor]) -> dict[str, TypeTotal]:
    """Return the totals of each tensor type, the one with most bytes first."""
    groups: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.type_name, []).append(tensor)
    totals = {
        name: TypeTotal(
            tensors=len(group),
            params=sum(math.prod(t.shape) for t in group),
            num_bytes=sum(t.nbytes for t in group),
        )
        for name, group in groups.items()
    }
    return dict(sorted(totals.items(), key=lambda item: -item[1].num_bytes))
