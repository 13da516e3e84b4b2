"""What the formulas need to know of a model: counts and bytes, no weights, no JAX."""

from collections.abc import Iterable
from dataclasses import dataclass

# Bits of a cached number, and the bytes of the scale that the numbers of a head share, by the names
# of `kv_dtype`.
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "float8_e4m3": 8, "int4": 4}
_SCALE_BYTES = {"int8": 4, "float8_e4m3": 4, "int4": 4}
# int4_hadamard stores what int4 does.
_BITS["int4_hadamard"], _SCALE_BYTES["int4_hadamard"] = _BITS["int4"], _SCALE_BYTES["int4"]
# KIVI: a scale and a least number, 2 bytes each, for a channel of a page's keys and for 32 channels
# of a value.
_KIVI_BITS = {"kivi4": 4, "kivi2": 2}
_KIVI_GROUP, _KIVI_BYTES = 32, 4


def bytes_per_number(kv_dtype: str, head_dim: float, page_size: int = 16) -> float:
    """Return the bytes of a cached number, bits / 8 + scale bytes / head_dim.

    Args:
        kv_dtype: what keys and values are cached in, a name that `generate` takes.
        head_dim: numbers of a head, which share a scale in a quantised cache.
        page_size: tokens of a page, which share scales under KIVI; its floats of the page in
            progress, 2 pages for each slot, are not counted.
    """
    if kv_dtype in _KIVI_BITS:
        across = _KIVI_GROUP if head_dim % _KIVI_GROUP == 0 else head_dim
        return _KIVI_BITS[kv_dtype] / 8 + _KIVI_BYTES * (1 / page_size + 1 / across) / 2
    return _BITS[kv_dtype] / 8 + _SCALE_BYTES.get(kv_dtype, 0) / head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What one layer caches for a token.

    MHA and GQA: `num_kv_heads` keys of `k_head_dim` and values of `v_head_dim` numbers.
    MLA: one latent of `latent_dim` and one rotary key of `rope_dim` numbers, whatever the number of
    heads (DeepSeek-V2, section 2.1, arXiv:2405.04434); the head fields are 0.
    `window` is the number of tokens that a sliding layer sees, the query's own included; None: all.
    `kv_bytes` is the bytes of a cached number, its share of scales included in a quantised cache.
    """

    num_kv_heads: int = 0
    k_head_dim: int = 0
    v_head_dim: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    window: int | None = None
    kv_bytes: float = 2

    @property
    def bytes_per_token(self) -> float:
        """Bytes that this layer caches for one token."""
        heads = self.num_kv_heads * (self.k_head_dim + self.v_head_dim)
        return (heads + self.latent_dim + self.rope_dim) * self.kv_bytes

    def visible(self, context: int) -> int:
        """Return how many of `context` cached tokens the next query attends to."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as the planner sees it: `layers` has one entry a layer that caches keys and values.

    `weight_bytes` are the bytes in memory, quantised weights as they are packed.  `num_params`
    counts those that one token multiplies with: for a mixture of experts the active ones.
    """

    num_params: int
    weight_bytes: int
    layers: tuple[AttentionShape, ...]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)


def uniform(num_layers: int, layer: AttentionShape) -> tuple[AttentionShape, ...]:
    """Return `num_layers` equal layers."""
    return (layer,) * num_layers


def kv_bytes_per_token(layers: Iterable[AttentionShape]) -> float:
    """Return the bytes that all layers cache for one token: 2 * L * K * H * bytes for plain GQA."""
    return sum(layer.bytes_per_token for layer in layers)
