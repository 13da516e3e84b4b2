"""What folders in transformers' layout share: config.json's fields and the names of tensors."""

from collections.abc import Collection
from typing import Any

from infer.config import Activation, LayerConfig, RopeConfig, RopeScaling, RopeScalingKind
from infer.errors import ConfigError
from infer.models.family import HfConfig

GLOBAL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "lm_head": "lm_head.weight",
}

_LAYER = "model.layers.{i}."
LAYER_NAMES = {
    "attn_norm": _LAYER + "input_layernorm.weight",
    "attn_norm_bias": _LAYER + "input_layernorm.bias",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "o": _LAYER + "self_attn.o_proj.weight",
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "o_bias": _LAYER + "self_attn.o_proj.bias",
    "q_norm": _LAYER + "self_attn.q_norm.weight",
    "k_norm": _LAYER + "self_attn.k_norm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm_bias": _LAYER + "post_attention_layernorm.bias",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "gate_bias": _LAYER + "mlp.gate_proj.bias",
    "up_bias": _LAYER + "mlp.up_proj.bias",
    "down_bias": _LAYER + "mlp.down_proj.bias",
}
# Norms on both sides of each block.
SANDWICH_NAMES = {
    "post_attn_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "post_mlp_norm": _LAYER + "post_feedforward_layernorm.weight",
}
_QKV, _GATE_UP = _LAYER + "self_attn.qkv_proj.weight", _LAYER + "mlp.gate_up_proj.weight"
FUSED_QKV_NAMES = {"q": _QKV, "k": _QKV, "v": _QKV}
FUSED_QKV = {_QKV: ("q", "k", "v")}
FUSED_GATE_NAMES = {"gate": _GATE_UP, "up": _GATE_UP}
FUSED_GATE = {_GATE_UP: ("gate", "up")}
# Buffers that old versions of transformers saved.
IGNORED = (r".*\.rotary_emb\.inv_freq",)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
}


def common_fields(hf: HfConfig, tensors: Collection[str]) -> dict[str, Any]:
    """Return the ModelConfig fields that most config.json files spell alike."""
    num_heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    eos = hf.get("eos_token_id")
    vocab_size = integer(hf, "vocab_size")
    return dict(
        family=hf["model_type"],
        vocab_size=vocab_size,
        num_tokens=vocab_size,
        hidden_size=hidden,
        intermediate_size=integer(hf, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hidden // max(num_heads, 1),
        max_context=integer(hf, "max_position_embeddings"),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=activation(hf.get("hidden_act", "silu")),
        tied_embeddings=tied(hf, tensors),
        bos_id=hf.get("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
    )


def integer(hf: HfConfig, key: str) -> int:
    """Return a number that config.json must have."""
    value = hf.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"config.json has {key} {value!r}, must be an integer")
    return value


def tied(hf: HfConfig, tensors: Collection[str], head: str = "lm_head.weight") -> bool:
    """Return whether the head is the embedding: as config.json says, else as the tensors do."""
    return bool(hf.get("tie_word_embeddings", head not in tensors))


def activation(name: str) -> Activation:
    """Return the activation that transformers calls `name`."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation is {name!r}; this version has {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope(
    hf: HfConfig, head_dim: int, *, layer_type: str | None = None, partial: float = 1.0
) -> RopeConfig:
    """Return base, scaling and number of turned dimensions.

    Newer files have `rope_parameters`, flat or one object a layer type; older ones `rope_theta` and
    `rope_scaling`.

    Args:
        hf: config.json.
        head_dim: width of a head.
        layer_type: which object, where there is one a layer type.
        partial: the share of a head that turns, where the file does not say.
    """
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if layer_type is not None and isinstance(found.get(layer_type), dict):
        found = found[layer_type]
    share = found.get("partial_rotary_factor", hf.get("partial_rotary_factor", partial))
    dim = int(head_dim * share)
    return RopeConfig(
        theta=float(found.get("rope_theta", hf.get("rope_theta", 10000.0))),
        scaling=rope_scaling(hf, found),
        dim=None if dim == head_dim else dim,
    )


def rope_scaling(hf: HfConfig, found: HfConfig) -> RopeScaling | None:
    """Return the frequency scaling that `found` describes (`rope_parameters` or `rope_scaling`)."""
    name = found.get("rope_type", found.get("type", "default"))
    if name in ("default", None):
        return None
    kinds = {kind.value: kind for kind in RopeScalingKind if kind is not RopeScalingKind.DIVISORS}
    kinds["su"] = RopeScalingKind.LONGROPE  # the name in the first Phi-3 files
    if name not in kinds:
        raise ConfigError(f"rope type is {name!r}; this version has default, {sorted(kinds)}")
    kind, context = kinds[name], integer(hf, "max_position_embeddings")
    original = hf.get(
        "original_max_position_embeddings", found.get("original_max_position_embeddings", context)
    )
    fields: dict[str, Any] = {
        key: found[key]
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        )
        if found.get(key) is not None
    }
    if kind is RopeScalingKind.DYNAMIC:
        original = context  # transformers counts from the model's own maximum
    if kind is RopeScalingKind.LONGROPE:
        fields |= {"short_factors": tuple(found["short_factor"])}
        fields |= {"long_factors": tuple(found["long_factor"])}
        fields.setdefault("factor", context / original)
    return RopeScaling(kind=kind, original_context=original, **fields)


def layers(
    hf: HfConfig, full: LayerConfig, sliding: LayerConfig, default: Collection[str] | None = None
) -> tuple[LayerConfig, ...]:
    """Return the layers by `layer_types`; where config.json has none, by `default`, or all full."""
    num_layers = integer(hf, "num_hidden_layers")
    kinds = {"full_attention": full, "sliding_attention": sliding}
    names = hf.get("layer_types") or default or ["full_attention"] * num_layers
    unknown = sorted({name for name in names if name not in kinds})
    if unknown:
        raise ConfigError(f"layer_types has {unknown[0]!r}; this version runs {sorted(kinds)}")
    if len(names) != num_layers:
        raise ConfigError(f"layer_types has {len(names)} entries for {num_layers} layers")
    return tuple(kinds[name] for name in names)


def every(num_layers: int, period: int) -> list[str]:
    """Return the layer types where every `period`-th layer is full and the others slide."""
    return [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention"
        for i in range(num_layers)
    ]
