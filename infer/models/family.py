"""What a model family has to say about itself: its configuration and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from infer.config import ModelConfig
from infer.models.checkpoint import Layout


@runtime_checkable
class Metadata(Protocol):
    """Typed access to a checkpoint's metadata; a missing key gives the default, or an error where
    there is none.
    """

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def tensors(self) -> Mapping[str, Any]: ...  # noqa: D102
    def meta_int(self, key: str, default: int = ...) -> int: ...  # noqa: D102
    def meta_float(self, key: str, default: float = ...) -> float: ...  # noqa: D102
    def meta_str(self, key: str, default: str = ...) -> str: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family as its files describe it.

    Attributes:
        name: the architecture's name in GGUF.
        config: metadata -> ModelConfig; `divisors` are the values of `rope_freqs.weight` where the
            file has it.
        layer_names: LayerParams field -> tensor name, with `{i}` for the layer.
        global_names: Params field -> tensor name.
        permuted_rope: rows of q and k are stored for adjacent-pair rotation and must be put back.
        hf: the same for checkpoints in transformers' layout; None: not read in that layout.
    """

    name: str
    config: Callable[[Metadata, tuple[float, ...]], ModelConfig]
    layer_names: Mapping[str, str]
    global_names: Mapping[str, str]
    permuted_rope: bool = False
    hf: Layout | None = None


GLOBAL_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}

LAYER_NAMES = {
    "attn_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}


def common_fields(meta: Metadata, family: str) -> dict[str, Any]:
    """Return the ModelConfig fields that every GGUF architecture spells alike."""
    num_heads = meta.meta_int(f"{family}.attention.head_count")
    hidden = meta.meta_int(f"{family}.embedding_length")
    key_length = meta.meta_int(f"{family}.attention.key_length", hidden // max(num_heads, 1))
    embedding = meta.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else 0
    eos = meta.meta_int("tokenizer.ggml.eos_token_id", -1)
    bos = meta.meta_int("tokenizer.ggml.bos_token_id", -1)
    return dict(
        family=family,
        vocab_size=rows,
        num_tokens=len(meta.metadata.get("tokenizer.ggml.tokens", ())) or rows,  # type: ignore[attr-defined]
        hidden_size=hidden,
        intermediate_size=meta.meta_int(f"{family}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=meta.meta_int(f"{family}.attention.head_count_kv", num_heads),
        head_dim=key_length,
        max_context=meta.meta_int(f"{family}.context_length"),
        norm_eps=meta.meta_float(f"{family}.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in meta.tensors,
        bos_id=bos if bos >= 0 else None,
        eos_ids=(eos,) if eos >= 0 else (),
    )
