"""GPT-2: learned positions, LayerNorm, no gate; transformers stores its matrices as [in, out]."""

import dataclasses
from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig, Norm
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata
from infer.models.rows import Part, stacked

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
        activation=Activation.GELU_TANH,
    ).validate()


# What all published files say; config.json has other names for the same form.
_ACTIVATION = "gelu_new"

# What other families call its keys.
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a GPT-2 describes."""
    hf.refuse("scale_attn_by_inverse_layer_idx")
    hf.refuse("scale_attn_weights", unless=True)
    renamed = {key: hf.integer(old) for key, old in _KEYS.items()}
    renamed["intermediate_size"] = hf.integer("n_inner", 4 * renamed["hidden_size"])
    common = dataclasses.replace(hf, values={**hf.values, **renamed})
    fields = checkpoint.common_fields(common, "gpt2", tied=True)
    fields["norm_eps"] = hf.number("layer_norm_epsilon", 1e-5)
    return ModelConfig(
        **fields,
        **_BLOCKS,
        layers=(LayerConfig(rope=None),) * checkpoint.num_layers(common),
        activation=hf.activation("activation_function", default="gelu_new"),
    ).validate()


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a GPT-2 says."""
    common = config_json.common(config)
    # Its class calls them otherwise; the width of a head and of keys follows.
    for key in ("num_key_value_heads", "head_dim", "hidden_act"):
        del common[key]
    renamed = {old: common.pop(key) for key, old in _KEYS.items()}
    return renamed | dict(
        n_inner=common.pop("intermediate_size"),
        activation_function=_ACTIVATION,
        layer_norm_epsilon=config_json.shortest(config.norm_eps),
        **common,
    )


_LAYER = "transformer.h.{i}."
FAMILY = Family(
    name="gpt2",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES | gguf_layout.QKV,
    global_names=gguf_layout.GLOBAL_NAMES,
    hf=Layout(
        architectures=("GPT2LMHeadModel",),
        model_types=("gpt2",),
        config=config_from_hf,
        values=values,
        layer_names={
            "attn_norm": _LAYER + "ln_1.weight",
            "attn_norm_bias": _LAYER + "ln_1.bias",
            **stacked(_LAYER + "attn.c_attn.weight", "q", "k", "v", transposed=True),
            **stacked(_LAYER + "attn.c_attn.bias", "q_bias", "k_bias", "v_bias"),
            "o": Part(_LAYER + "attn.c_proj.weight", transposed=True),
            "o_bias": _LAYER + "attn.c_proj.bias",
            "mlp_norm": _LAYER + "ln_2.weight",
            "mlp_norm_bias": _LAYER + "ln_2.bias",
            "up": Part(_LAYER + "mlp.c_fc.weight", transposed=True),
            "up_bias": _LAYER + "mlp.c_fc.bias",
            "down": Part(_LAYER + "mlp.c_proj.weight", transposed=True),
            "down_bias": _LAYER + "mlp.c_proj.bias",
        },
        global_names={
            "embed": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
            "final_norm": "transformer.ln_f.weight",
            "final_norm_bias": "transformer.ln_f.bias",
            "lm_head": "lm_head.weight",
        },
        # The published files have the names of the inner model.
        prefixes={name: f"transformer.{name}" for name in ("h.", "wte.", "wpe.", "ln_f.")},
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    ),
)
