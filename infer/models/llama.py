"""The Llama family (Llama 1-3, SmolLM2, TinyLlama, Mistral in Llama's layout)."""

from infer.config import LayerConfig, ModelConfig, RopeConfig, RopeScaling, RopeScalingKind
from infer.errors import ConfigError
from infer.models import checkpoint
from infer.models.checkpoint import HFConfig, Layout
from infer.models.family import GLOBAL_NAMES, LAYER_NAMES, Family, Metadata, common_fields


def config(meta: Metadata, divisors: tuple[float, ...] = ()) -> ModelConfig:
    """Return the configuration that a GGUF file of architecture `llama` describes."""
    if experts := meta.meta_int("llama.expert_count", 0):
        raise ConfigError(
            f"llama with {experts} experts is a mixture of experts, which this version does not run"
        )
    fields = common_fields(meta, "llama")
    dim = meta.meta_int("llama.rope.dimension_count", fields["head_dim"])
    rope = RopeConfig(
        theta=meta.meta_float("llama.rope.freq_base", 10000.0),
        scaling=rope_scaling(meta, "llama", divisors),
        dim=None if dim == fields["head_dim"] else dim,
    )
    layers = (LayerConfig(rope=rope),) * meta.meta_int("llama.block_count")
    has_bias = "blk.0.attn_q.bias" in meta.tensors
    return ModelConfig(**fields, layers=layers, qkv_bias=has_bias).validate()


def rope_scaling(meta: Metadata, family: str, divisors: tuple[float, ...]) -> RopeScaling | None:
    """Return the frequency scaling of a GGUF file: the divisor tensor where there is one, else its
    metadata.
    """
    if divisors:
        return RopeScaling(kind=RopeScalingKind.DIVISORS, divisors=divisors)
    kind = meta.meta_str(f"{family}.rope.scaling.type", "none")
    factor = meta.meta_float(f"{family}.rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind=RopeScalingKind.LINEAR, factor=factor)
    if kind == "yarn":
        original = meta.meta_int(f"{family}.rope.scaling.original_context_length", 8192)
        return RopeScaling(kind=RopeScalingKind.YARN, factor=factor, original_context=original)
    raise ConfigError(f"rope scaling type is {kind!r}; this version has none, linear and yarn")


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Return the configuration that the config.json of a LlamaForCausalLM describes."""
    hf.refuse("mlp_bias")
    fields = checkpoint.common_fields(hf, "llama", max_position_embeddings=2048)
    rope = checkpoint.rope_of(hf, fields["head_dim"])
    return ModelConfig(
        **fields,
        layers=(LayerConfig(rope=rope),) * checkpoint.num_layers(hf),
        activation=hf.activation("hidden_act", default="silu"),
        qkv_bias=hf.flag("attention_bias", False),
    ).validate()


FAMILY = Family(
    name="llama",
    config=config,
    layer_names=LAYER_NAMES,
    global_names=GLOBAL_NAMES,
    permuted_rope=True,
    hf=Layout(
        architectures=("LlamaForCausalLM",),
        model_types=("llama",),
        config=config_from_hf,
        layer_names=checkpoint.LAYER_NAMES,
        global_names=checkpoint.GLOBAL_NAMES,
    ),
)
