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


class Norm(enum.Enum):
    """How activations are normalised: by their root mean square, or by mean and variance."""

    RMS = "rms"
    LAYER = "layer"


class QkNorm(enum.Enum):
    """What the norms on queries and keys, before rotation, span: nothing, each head, all heads."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"


class Residual(enum.Enum):
    """How attention and feed-forward join the residual stream x.

    SEQUENTIAL: y = x + attention(norm(x)), then y + mlp(norm'(y)).
    PARALLEL: x + attention(norm(x)) + mlp(norm'(x)).
    PARALLEL_ONE_NORM: the same with norm' = norm.
    """

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    PARALLEL_ONE_NORM = "parallel_one_norm"


class RopeScalingKind(enum.Enum):
    """How rotary frequencies are stretched beyond the length a model was trained for."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DIVISORS = "divisors"
    DYNAMIC = "dynamic"
    LONGROPE = "longrope"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Parameters of a frequency scaling; which ones count depends on `kind`.

    `divisors` (one per frequency, GGUF's `rope_freqs.weight`) divide the plain frequencies.
    `attention_factor` None means the YaRN default, 0.1 ln(factor) + 1, or the ratio that `mscale`
    and `mscale_all_dim` give; for LongRoPE sqrt(1 + ln(factor) / ln(original_context)).
    DYNAMIC and LONGROPE depend on the length of the whole sequence, see `by_length`.
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
    short_factors: tuple[float, ...] = ()  # LongRoPE: divisors up to original_context, and beyond
    long_factors: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the planned length of the sequence (its span)."""
        return self.kind in (RopeScalingKind.DYNAMIC, RopeScalingKind.LONGROPE)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer: base, scaling, and how many of a head's dimensions
    turn.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dim: int | None = None  # None: the whole head

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the planned length of the sequence."""
        return self.scaling is not None and self.scaling.by_length


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Attention of one layer: `window` None sees every earlier key, W sees the last W keys, itself
    included; `rope` None turns nothing (NoPE).
    """

    rope: RopeConfig | None = field(default_factory=RopeConfig)
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer: its sizes, and which mechanisms it has.

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
    norm: Norm = Norm.RMS
    norm_eps: float = 1e-5
    norm_bias: bool = False
    pre_norms: bool = True  # norms before attention and before the feed-forward
    post_norms: bool = False  # norms after each of them, before the residual
    residual: Residual = Residual.SEQUENTIAL
    activation: Activation = Activation.SILU
    gated_mlp: bool = True  # down(act(gate x) * up x), or down(act(up x))
    mlp_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    sinks: bool = False  # one logit a head that joins the softmax's denominator only
    learned_positions: bool = False  # a vector for each position, added to the embeddings
    embedding_scale: float | None = None  # Gemma multiplies embeddings by sqrt(D)
    query_scale: float | None = None  # None: head_dim ** -0.5
    residual_scale: float | None = None  # on what attention and feed-forward add
    logit_scale: float | None = None
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
    def ropes_by_length(self) -> bool:
        """Whether a token's rotation depends on the planned length of its sequence."""
        ropes = (layer.rope for layer in self.layers)
        return any(rope is not None and rope.by_length for rope in ropes)

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
            if self.head_dim % 2 and any(r.rope and r.rope.dim is None for r in self.layers):
                problems.append(
                    f"head_dim is {self.head_dim}; rotary embedding needs an even number"
                )
            problems += [
                f"{name} is {cap}, must be positive and finite"
                for name, cap in (
                    ("final_softcap", self.final_softcap),
                    ("attn_softcap", self.attn_softcap),
                )
                if cap is not None and not _positive(cap)
            ]
            if self.max_context < 2:
                problems.append("max_context is 1; a prompt and one new token need 2")
            if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
                problems.append(f"norm_eps is {self.norm_eps}, must be positive and finite")
            if self.residual is Residual.PARALLEL_ONE_NORM and not self.pre_norms:
                problems.append("one norm for both blocks needs pre_norms")
            problems += [
                p for i, layer in enumerate(self.layers) for p in _layer_problems(i, layer, self)
            ]
        if problems:
            raise ConfigError(f"{self.family} configuration: " + "; ".join(problems))
        return self


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _layer_problems(index: int, layer: LayerConfig, config: ModelConfig) -> list[str]:
    problems = []
    if layer.window is not None and not 1 <= layer.window < 2**30:
        problems.append(
            f"layer {index} has a window of {layer.window} tokens, must be 1 to 2^30 - 1"
        )
    if layer.rope is not None:
        problems += [f"layer {index} {p}" for p in _rope_problems(layer.rope, config.head_dim)]
    return problems


def _rope_problems(rope: RopeConfig, head_dim: int) -> list[str]:
    problems = []
    dim = head_dim if rope.dim is None else rope.dim
    if dim % 2 or not 2 <= dim <= head_dim:
        problems.append(
            f"turns {dim} of {head_dim} dimensions; the number must be even, at least 2 and "
            "at most head_dim"
        )
    if not _positive(rope.theta):
        problems.append(f"has rope theta {rope.theta}, must be positive and finite")
    s = rope.scaling
    if s is None:
        return problems
    if not _positive(s.factor):
        problems.append(f"has rope scaling factor {s.factor}, must be positive and finite")
    if s.original_context < 1:
        problems.append(f"has an original context of {s.original_context}, must be at least 1")
    if not all(map(_positive, (*s.divisors, *s.short_factors, *s.long_factors))):
        problems.append("has rope divisors that are not all positive and finite")
    lists = {
        RopeScalingKind.DIVISORS: {"divisors": s.divisors},
        RopeScalingKind.LONGROPE: {
            "short factors": s.short_factors,
            "long factors": s.long_factors,
        },
    }
    problems += [
        f"has {len(values)} rope {name} for {dim // 2} frequencies"
        for name, values in lists.get(s.kind, {}).items()
        if len(values) != dim // 2
    ]
    if s.kind is RopeScalingKind.DYNAMIC and dim < 4:
        problems.append("turns 2 dimensions; dynamic scaling needs at least 4")
    return problems
