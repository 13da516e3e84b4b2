"""StarCoder2: LayerNorm, biases everywhere, a feed-forward without gate."""

from collections.abc import Collection
from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig, Norm
from infer.models import gguf_layout, hf_layout
from infer.models.family import Family, HfConfig, Layout, Metadata


def _blocks(bias: bool) -> dict[str, Any]:
    return dict(
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `starcoder2` describes."""
    fields = gguf_layout.common_fields(meta, "starcoder2")
    layer = LayerConfig(
        rope=gguf_layout.rope(meta, "starcoder2", fields["head_dim"]),
        window=gguf_layout.window(meta, "starcoder2"),
    )
    return ModelConfig(
        **fields,
        **_blocks(gguf_layout.has_bias(meta, "attn_q")),
        layers=(layer,) * meta.meta_int("starcoder2.block_count"),
        activation=Activation.GELU_TANH,
    ).validate()


def config_from_hf(hf: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Return the configuration of a folder whose model type is `starcoder2`."""
    fields = hf_layout.common_fields(hf, tensors)
    fields["activation"] = hf_layout.activation(hf.get("hidden_act", "gelu_pytorch_tanh"))
    fields["norm_eps"] = hf.get("norm_epsilon", 1e-5)
    layer = LayerConfig(
        rope=hf_layout.rope(hf, fields["head_dim"]), window=hf.get("sliding_window")
    )
    return ModelConfig(
        **fields,
        **_blocks(hf.get("use_bias", True)),
        layers=(layer,) * hf_layout.integer(hf, "num_hidden_layers"),
    ).validate()


_MLP = "model.layers.{i}.mlp."
FAMILY = Family(
    name="starcoder2",
    config=config,
    gguf=Layout(layer_names=gguf_layout.LAYER_NAMES, global_names=gguf_layout.GLOBAL_NAMES),
    model_types=("starcoder2",),
    config_from_hf=config_from_hf,
    hf=Layout(
        layer_names=hf_layout.LAYER_NAMES
        | {
            "up": _MLP + "c_fc.weight",
            "up_bias": _MLP + "c_fc.bias",
            "down": _MLP + "c_proj.weight",
            "down_bias": _MLP + "c_proj.bias",
        },
        global_names=hf_layout.GLOBAL_NAMES,
        ignored=hf_layout.IGNORED,
    ),
)
