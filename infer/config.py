"""What a model is.  How it is run (slots, pages, chunk sizes) is an argument of the run, never a
part of this.
"""

import enum
import math
from dataclasses import dataclass, field

from infer.errors import ConfigError


class Activation(enum.Enum):
    """The gate's nonlinearity in the feed-forward block."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


class RopeScalingKind(enum.Enum):
    """How rotary frequencies are stretched beyond the length a model was trained for."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DIVISORS = "divisors"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Parameters of a frequency scaling; which ones count depends on `kind`.

    `divisors` (one per frequency, GGUF's `rope_freqs.weight`) divide the plain frequencies.
    `attention_factor` None means the YaRN default, 0.1 ln(factor) + 1, or the ratio that `mscale`
    and `mscale_all_dim` give.
    """

    kind: RopeScalingKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer: base, scaling, and how many of a head's dimensions
    turn.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dim: int | None = None  # None: the whole head


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Attention of one layer: `window` None sees every earlier key, W sees the last W keys, itself
    included.
    """

    rope: RopeConfig = field(default_factory=RopeConfig)
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer.

    `vocab_size` is the width of embedding and logits; `num_tokens` the number of ids that the
    tokenizer knows. Logits of ids in [num_tokens, vocab_size) are padding and are masked out
    everywhere.
    """

    family: str
    vocab_size: int
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_context: int
    norm_eps: float = 1e-5
    activation: Activation = Activation.SILU
    embedding_scale: float | None = None  # Gemma multiplies embeddings by sqrt(D)
    query_scale: float | None = None  # None: head_dim ** -0.5
    qk_norm: bool = False
    qkv_bias: bool = False
    post_norms: bool = (
        False  # norms after attention and after the feed-forward, before the residual
    )
    attn_softcap: float | None = None
    final_softcap: float | None = None
    tied_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def softmax_scale(self) -> float:
        """The factor on q·k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def validate(self) -> "ModelConfig":
        """Return self, or raise ConfigError with everything that cannot work, one problem a
        line.
        """
        problems = [
            f"{name} is {value}, must be at least 1"
            for name, value in (
                ("vocab_size", self.vocab_size),
                ("num_tokens", self.num_tokens),
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("num_heads", self.num_heads),
                ("num_kv_heads", self.num_kv_heads),
                ("head_dim", self.head_dim),
                ("num_layers", self.num_layers),
                ("max_context", self.max_context),
            )
            if value < 1
        ]
        if not problems:
            if self.num_heads % self.num_kv_heads:
                problems.append(
                    f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} "
                    "key/value heads"
                )
            if self.num_tokens > self.vocab_size:
                problems.append(
                    f"the tokenizer has {self.num_tokens} ids, the embedding only "
                    f"{self.vocab_size} rows"
                )
            if self.head_dim % 2:
                problems.append(
                    f"head_dim is {self.head_dim}; rotary embedding needs an even number"
                )
            if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
                problems.append(f"norm_eps is {self.norm_eps}, must be positive and finite")
            problems += [
                p for i, layer in enumerate(self.layers) for p in _layer_problems(i, layer, self)
            ]
        if problems:
            raise ConfigError(f"{self.family} configuration: " + "; ".join(problems))
        return self


def _layer_problems(index: int, layer: LayerConfig, config: ModelConfig) -> list[str]:
    problems = []
    if layer.window is not None and layer.window < 1:
        problems.append(f"layer {index} has a window of {layer.window} tokens, must be at least 1")
    rope = layer.rope
    dim = rope.dim or config.head_dim
    if dim % 2 or dim > config.head_dim:
        problems.append(
            f"layer {index} turns {dim} of {config.head_dim} dimensions; "
            "the number must be even and at most head_dim"
        )
    if not rope.theta > 0:
        problems.append(f"layer {index} has rope theta {rope.theta}, must be positive")
    scaling = rope.scaling
    if (
        scaling is not None
        and scaling.kind is RopeScalingKind.DIVISORS
        and len(scaling.divisors) != dim // 2
    ):
        problems.append(
            f"layer {index} has {len(scaling.divisors)} rope divisors for {dim // 2} frequencies"
        )
    return problems
