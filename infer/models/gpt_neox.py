"""Pythia and other GPT-NeoX: attention and feed-forward side by side, LayerNorm, biases, a part of
each head turns; transformers stores q, k and v head by head.
"""

from typing import Any

from infer.config import Activation, LayerConfig, ModelConfig, Norm, Residual
from infer.models import checkpoint, config_json, gguf_layout
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import Family, Metadata
from infer.models.rows import by_head


def config(meta: Metadata) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `gptneox` describes."""
    fields = gguf_layout.common_fields(meta, "gptneox")
    layer = LayerConfig(rope=gguf_layout.rope(meta, "gptneox", fields["head_dim"]))
    return ModelConfig(
        **fields,
        **_blocks(meta.meta_bool("gptneox.use_parallel_residual", True), attention_bias=True),
        layers=(layer,) * meta.meta_int("gptneox.block_count"),
        activation=Activation.GELU,
    ).validate()


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a GPTNeoXForCausalLM describes."""
    fields = checkpoint.common_fields(hf, "gptneox", max_position_embeddings=2048)
    fields["norm_eps"] = hf.number("layer_norm_eps", 1e-5)
    rope = checkpoint.rope_of(
        hf,
        fields["head_dim"],
        theta_key="rotary_emb_base",
        partial=hf.number("rotary_pct", 0.25),
    )
    parallel, bias = hf.flag("use_parallel_residual", True), hf.flag("attention_bias", True)
    return ModelConfig(
        **fields,
        **_blocks(parallel, attention_bias=bias),
        layers=(LayerConfig(rope=rope),) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="gelu"),
    ).validate()


def _blocks(parallel: bool, *, attention_bias: bool) -> dict[str, Any]:
    return dict(
        norm=Norm.LAYER,
        norm_bias=True,
        residual=Residual.PARALLEL if parallel else Residual.SEQUENTIAL,
        gated_mlp=False,
        mlp_bias=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


def values(config: ModelConfig) -> dict[str, Any]:
    """Return what the config.json of a GPTNeoXForCausalLM says."""
    share = config_json.rope_of(config)
    dim = config.head_dim if share is None else share.dim or config.head_dim
    return config_json.common(config) | dict(
        layer_norm_eps=config_json.shortest(config.norm_eps),
        rotary_pct=dim / config.head_dim,
        use_parallel_residual=config.residual is Residual.PARALLEL,
        attention_bias=config.qkv_bias,
    )


def own_keys(config: ModelConfig) -> dict[str, Any]:
    """Return how the two blocks join, which is required."""
    return {"use_parallel_residual": config.residual is Residual.PARALLEL}


_LAYER = "gpt_neox.layers.{i}."
FAMILY = Family(
    name="gptneox",
    config=config,
    layer_names=gguf_layout.LAYER_NAMES | gguf_layout.QKV,
    global_names=gguf_layout.GLOBAL_NAMES,
    own_keys=own_keys,
    hf=Layout(
        architectures=("GPTNeoXForCausalLM",),
        model_types=("gpt_neox",),
        config=config_from_hf,
        values=values,
        layer_names={
            "attn_norm": _LAYER + "input_layernorm.weight",
            "attn_norm_bias": _LAYER + "input_layernorm.bias",
            **by_head(_LAYER + "attention.query_key_value.weight", "q", "k", "v"),
            **by_head(_LAYER + "attention.query_key_value.bias", "q_bias", "k_bias", "v_bias"),
            "o": _LAYER + "attention.dense.weight",
            "o_bias": _LAYER + "attention.dense.bias",
            "mlp_norm": _LAYER + "post_attention_layernorm.weight",
            "mlp_norm_bias": _LAYER + "post_attention_layernorm.bias",
            "up": _LAYER + "mlp.dense_h_to_4h.weight",
            "up_bias": _LAYER + "mlp.dense_h_to_4h.bias",
            "down": _LAYER + "mlp.dense_4h_to_h.weight",
            "down_bias": _LAYER + "mlp.dense_4h_to_h.bias",
        },
        global_names={
            "embed": "gpt_neox.embed_in.weight",
            "final_norm": "gpt_neox.final_layer_norm.weight",
            "final_norm_bias": "gpt_neox.final_layer_norm.bias",
            "lm_head": "embed_out.weight",
        },
        # What later classes call the head; masks and frequencies of old versions.
        prefixes={"lm_head.": "embed_out."},
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    ),
)
