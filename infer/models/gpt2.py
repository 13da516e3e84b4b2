"""GPT-2: learned positions, LayerNorm, no gate; transformers stores its matrices as [in, out]."""

from collections.abc import Collection
from typing import Any

from infer.config import LayerConfig, ModelConfig, Norm
from infer.errors import ConfigError
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata

_BLOCKS: dict[str, Any] = dict(
    norm=Norm.LAYER,
    norm_bias=True,
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    learned_positions=True,
)


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `gpt2` describes."""
    fields = gguf_layout.common_fields(meta, "gpt2")
    return ModelConfig(
        **fields,
        **_BLOCKS,
        layers=(LayerConfig(rope=None),) * meta.meta_int("gpt2.block_count"),
        activation=hf_layout.activation("gelu_new"),
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `gpt2`."""
    if hf.get("scale_attn_by_inverse_layer_idx") or not hf.get("scale_attn_weights", True):
        raise ConfigError(
            "this gpt2 scales attention by its layer or not at all; this version has 1 / sqrt(H)"
        )
    width = hf_layout.integer(hf, "n_embd")
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    }
    renamed = {**hf, **{key: hf_layout.integer(hf, old) for key, old in names.items()}}
    renamed["intermediate_size"] = hf.get("n_inner") or 4 * width
    fields = hf_layout.common_fields(renamed, tensors)
    fields["activation"] = hf_layout.activation(hf.get("activation_function", "gelu_new"))
    fields["norm_eps"] = hf.get("layer_norm_epsilon", 1e-5)
    return ModelConfig(
        **fields, **_BLOCKS, layers=(LayerConfig(rope=None),) * renamed["num_hidden_layers"]
    ).validate()


_LAYER = "transformer.h.{i}."
_QKV, _QKV_BIAS = _LAYER + "attn.c_attn.weight", _LAYER + "attn.c_attn.bias"
FAMILY = Family(
    name="gpt2",
    config=config,
    gguf=Layout(
        layer_names=gguf_layout.LAYER_NAMES | gguf_layout.FUSED_QKV_NAMES,
        global_names=gguf_layout.GLOBAL_NAMES,
        fused=gguf_layout.FUSED_QKV,
    ),
    model_types=("gpt2",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names={
            "attn_norm": _LAYER + "ln_1.weight",
            "attn_norm_bias": _LAYER + "ln_1.bias",
            "q": _QKV,
            "k": _QKV,
            "v": _QKV,
            "q_bias": _QKV_BIAS,
            "k_bias": _QKV_BIAS,
            "v_bias": _QKV_BIAS,
            "o": _LAYER + "attn.c_proj.weight",
            "o_bias": _LAYER + "attn.c_proj.bias",
            "mlp_norm": _LAYER + "ln_2.weight",
            "mlp_norm_bias": _LAYER + "ln_2.bias",
            "up": _LAYER + "mlp.c_fc.weight",
            "up_bias": _LAYER + "mlp.c_fc.bias",
            "down": _LAYER + "mlp.c_proj.weight",
            "down_bias": _LAYER + "mlp.c_proj.bias",
        },
        global_names={
            "embed": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
            "final_norm": "transformer.ln_f.weight",
            "final_norm_bias": "transformer.ln_f.bias",
            "lm_head": "lm_head.weight",
        },
        fused={_QKV: ("q", "k", "v"), _QKV_BIAS: ("q_bias", "k_bias", "v_bias")},
        transposed=frozenset({"q", "k", "v", "o", "up", "down"}),
        renamed=((r"^(h\.|wte\.|wpe\.|ln_f\.)", r"transformer.\1"),),
        ignored=(r".*\.attn\.(masked_)?bias",),
    ),
)
