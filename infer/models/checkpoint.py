"""What a checkpoint in transformers' layout says of a model, read with types checked.

`HFConfig` is a config.json; `Layout` is what a family has to say about such checkpoints: which
`architectures` are its own, how the configuration maps, how tensors are called and what is done to
them.  A field of the model that is a part of a larger tensor (a fused qkv_proj) is a `Part`.

Two spellings of rotary embedding are read: `rope_theta` with a `rope_scaling` object, and
transformers 5's `rope_parameters`, one object for all layers or one for each type of layer.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.config import (
    Activation,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    RopeScalingKind,
)
from infer.errors import ConfigError, WeightFormatError
from infer.models.rows import Part

_REQUIRED: Any = object()

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
}


@dataclass(frozen=True)
class HFConfig:
    """An object of a config.json; `null` counts as absent.

    Attributes:
        values: what the file says.
        where: how messages begin.
    """

    values: Mapping[str, Any]
    where: str = "config.json"

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as it is, or `default`."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer; without a default the key is required.

        Raises:
            WeightFormatError: it is missing and required, or of another type.
        """
        return self._typed(key, default, "an integer", lambda v: type(v) is int)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a finite number as a float.  Otherwise as `integer`."""
        value = self._typed(key, default, "a finite number", _is_number)
        return None if value is None else float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Return a truth value.  Otherwise as `integer`."""
        return self._typed(key, default, "true or false", lambda v: type(v) is bool)

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a string.  Otherwise as `integer`."""
        return self._typed(key, default, "a string", lambda v: type(v) is str)

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; an absent one is empty."""
        is_list = lambda v: type(v) is list and all(type(s) is str for s in v)
        return self._typed(key, [], "a list of strings", is_list)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers, which must be there."""
        is_list = lambda v: type(v) is list and all(_is_number(x) for x in v)
        values = self._typed(key, _REQUIRED, "a list of finite numbers", is_list)
        return tuple(float(value) for value in values)

    def section(self, key: str) -> "HFConfig | None":
        """Return an object in this one, or None if it is absent."""
        value = self._typed(key, None, "an object", lambda v: type(v) is dict)
        return None if value is None else HFConfig(value, f"{self.where} {key}")

    def window(self, key: str, default: int | None = None) -> int | None:
        """Return the keys that a sliding layer sees; `null` is None, an absent key `default`."""
        return self.integer(key, None if key in self.values else default)

    def ids(self, key: str) -> tuple[int, ...]:
        """Return token ids, given as one integer or a list of them; () if absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise WeightFormatError(f"{self.where}: {key} is {value!r:.60}, must be token ids")
        return tuple(dict.fromkeys(ids))

    def activation(self, *keys: str, default: str) -> Activation:
        """Return the nonlinearity that the first of `keys` names.

        Raises:
            ConfigError: this version does not have it.
        """
        name = next((self.text(k) for k in keys if self.get(k) is not None), default)
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"{self.where}: activation {name!r} is not supported; known are"
                f" {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def refuse(self, key: str, *, unless: Any = False) -> None:
        """Refuse a setting that this version does not run.

        Raises:
            ConfigError: `key` is there and not `unless`.
        """
        value = self.get(key, unless)
        if value != unless:
            raise ConfigError(
                f"{self.where}: {key} is {value!r:.60}, and this version runs {unless!r} only"
            )

    def _typed(self, key: str, default: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise WeightFormatError(f"{self.where}: has no {key}, must have {wanted}")
            return default
        if not fits(value):
            raise WeightFormatError(f"{self.where}: {key} is {value!r:.60}, must be {wanted}")
        return value


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 64
    return type(value) is float and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A family's checkpoints in transformers' layout.

    Attributes:
        architectures: the names in config.json's `architectures`.
        model_types: the names in its `model_type`, which count where there is no architecture.
        config: config.json -> ModelConfig; token ids are filled in by the loader.
        values: ModelConfig -> what a config.json says of it, but for the two names above.
        layer_names: LayerParams field -> tensor, with `{i}` for the layer.
        global_names: Params field -> tensor.
        prefixes: beginnings of names -> what they are read as; None: not a part of the text model
            and left out.  The first that fits counts.
        ignored: patterns of whole names (after `prefixes`) that older checkpoints hold and nothing
            reads.
        norm_plus_one: norms are stored as w where the model uses 1 + w; the one is added in
            float32.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: Callable[[HFConfig], ModelConfig]
    values: Callable[[ModelConfig], dict[str, Any]]
    layer_names: Mapping[str, str | Part]
    global_names: Mapping[str, str | Part]
    prefixes: Mapping[str, str | None] = field(default_factory=dict)
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    norm_plus_one: bool = False

    def canonical(self, name: str) -> str | None:
        """Return the name under which a tensor of the file is known here; None: left out."""
        for prefix, replacement in self.prefixes.items():
            if name.startswith(prefix):
                if replacement is None:
                    return None
                name = replacement + name[len(prefix) :]
                break
        return None if any(re.fullmatch(p, name) for p in self.ignored) else name


GLOBAL_NAMES: dict[str, str | Part] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "lm_head": "lm_head.weight",
}

LAYER_NAMES: dict[str, str | Part] = {
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "attn_norm_bias": "model.layers.{i}.input_layernorm.bias",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_norm_bias": "model.layers.{i}.post_attention_layernorm.bias",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
    "up_bias": "model.layers.{i}.mlp.up_proj.bias",
    "down_bias": "model.layers.{i}.mlp.down_proj.bias",
}

# Norms on both sides of each block.
SANDWICH_NAMES: dict[str, str | Part] = {
    "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
QKV_NAME = "model.layers.{i}.self_attn.qkv_proj.weight"
GATE_UP_NAME = "model.layers.{i}.mlp.gate_up_proj.weight"

FULL, SLIDING = "full_attention", "sliding_attention"


def common_fields(
    config: HFConfig, family: str, *, tied: bool = False, **defaults: Any
) -> dict[str, Any]:
    """Return the ModelConfig fields that config.json spells alike for most families.

    Args:
        config: what the file says of the text model.
        family: its name here.
        tied: what an absent `tie_word_embeddings` means.
        defaults: what other absent keys mean, by their names in config.json.
    """
    d = lambda key, otherwise=_REQUIRED: defaults.get(key, otherwise)
    num_heads = config.integer("num_attention_heads", d("num_attention_heads"))
    hidden = config.integer("hidden_size", d("hidden_size"))
    vocab = config.integer("vocab_size", d("vocab_size"))
    bos = config.ids("bos_token_id")
    return dict(
        family=family,
        vocab_size=vocab,
        num_tokens=vocab,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", d("intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", d("num_key_value_heads", num_heads)),
        head_dim=config.integer("head_dim", d("head_dim", hidden // max(num_heads, 1))),
        max_context=_context(config, d("max_position_embeddings")),
        norm_eps=config.number("rms_norm_eps", d("rms_norm_eps", 1e-6)),
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        bos_id=bos[0] if bos else None,
        eos_ids=config.ids("eos_token_id"),
    )


def _context(config: HFConfig, default: Any) -> int:
    """Return the longest sequence; dynamic scaling stretches what the file says."""
    length = config.integer("max_position_embeddings", default)
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    if scaling is not None and scaling.get("rope_type", scaling.get("type")) == "dynamic":
        return int(length * scaling.number("factor"))
    return length


def num_layers(config: HFConfig, default: int | None = None) -> int:
    """Return the number of layers, refused beyond 4096: a header that claims more only costs."""
    count = config.integer("num_hidden_layers", _REQUIRED if default is None else default)
    if not 1 <= count <= 4096:
        raise ConfigError(f"{config.where}: num_hidden_layers is {count}, must be 1 to 4096")
    return count


def rope_of(
    config: HFConfig,
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    scaled: bool = True,
    partial: float = 1.0,
) -> RopeConfig:
    """Return the rotary embedding of the layers of one type.

    Args:
        config: what the file says of the text model.
        head_dim: width of a head.
        layer_type: of transformers' `layer_types`, where the types differ.
        theta: the base where the file gives none.
        theta_key: where the older spelling has this type's base.
        scaled: whether the older spelling's `rope_scaling` holds for this type.
        partial: the share of a head that turns, where the file does not say.

    Raises:
        ConfigError: a scaling that this version does not have.
        WeightFormatError: a value of a wrong type.
    """
    parameters = config.section("rope_parameters")
    if parameters is not None:
        nested = [v for v in parameters.values.values() if isinstance(v, dict)]
        if nested and layer_type is not None:
            parameters = parameters.section(layer_type)
            if parameters is None:
                raise ConfigError(f"{config.where}: rope_parameters has none for {layer_type}")
        theta = parameters.number("rope_theta", config.number(theta_key, theta))
        scaling = parameters
    else:
        theta = config.number(theta_key, theta)
        scaling = config.section("rope_scaling") if scaled else None
    share = config.number("partial_rotary_factor", partial)
    if scaling is not None:
        share = scaling.number("partial_rotary_factor", share)
    dim = int(head_dim * share)
    return RopeConfig(
        theta=theta,
        scaling=None if scaling is None else _scaling(scaling, config),
        dim=None if dim == head_dim else dim,
    )


def _scaling(scaling: HFConfig, config: HFConfig) -> RopeScaling | None:
    """Return a frequency scaling; `type` is what `rope_type` was called before."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return None
    original = scaling.integer(
        "original_max_position_embeddings",
        config.integer(
            "original_max_position_embeddings", config.integer("max_position_embeddings", 8192)
        ),
    )
    if kind == "linear":
        return RopeScaling(kind=RopeScalingKind.LINEAR, factor=scaling.number("factor"))
    if kind == "dynamic":
        return RopeScaling(
            kind=RopeScalingKind.DYNAMIC,
            factor=scaling.number("factor"),
            original_context=config.integer("max_position_embeddings"),
        )
    if kind in ("longrope", "su"):  # "su" in the first Phi-3 files
        # config.json's own original length goes before the section's, as in transformers.
        original = config.integer("original_max_position_embeddings", original)
        stretch = config.integer("max_position_embeddings", original) / max(original, 1)
        return RopeScaling(
            kind=RopeScalingKind.LONGROPE,
            factor=scaling.number("factor", stretch),
            original_context=original,
            attention_factor=scaling.number("attention_factor", None),
            short_factors=scaling.numbers("short_factor"),
            long_factors=scaling.numbers("long_factor"),
        )
    if kind == "llama3":
        return RopeScaling(
            kind=RopeScalingKind.LLAMA3,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_context=original,
        )
    if kind == "yarn":
        return RopeScaling(
            kind=RopeScalingKind.YARN,
            factor=scaling.number("factor"),
            original_context=original,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=scaling.flag("truncate", True),
            attention_factor=scaling.number("attention_factor", None),
            mscale=scaling.number("mscale", None),
            mscale_all_dim=scaling.number("mscale_all_dim", None),
        )
    raise ConfigError(
        f"{scaling.where}: rope type {kind!r} is not supported; this version has default, linear,"
        " dynamic, llama3, yarn and longrope"
    )


def layers_of(
    config: HFConfig, full: LayerConfig, sliding: LayerConfig, default: Sequence[str]
) -> tuple[LayerConfig, ...]:
    """Return the layers by `layer_types`, or where the file has none by `default`.

    Raises:
        ConfigError: a type that this version does not have, or not one for each layer.
    """
    kinds = {FULL: full, SLIDING: sliding}
    types = config.texts("layer_types") or list(default)
    if len(types) != num_layers(config, len(default)) or set(types) - set(kinds):
        raise ConfigError(
            f"{config.where}: layer_types has {len(types)} entries of {sorted(set(types))}; must be"
            f" {len(default)} of {sorted(kinds)}"
        )
    return tuple(kinds[kind] for kind in types)


def every(count: int, period: int) -> list[str]:
    """Return `count` layer types where every `period`-th layer is full and the others slide."""
    if period < 1:
        raise ConfigError(f"every {period}-th layer is full; the number must be at least 1")
    return [SLIDING if (i + 1) % period else FULL for i in range(count)]
