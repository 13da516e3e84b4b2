"""What can be asked of `infer.quantize`: one frozen object a method, checked when it is made.

The data-free ones carry their whole rule (`pack`); what GPTQ, AWQ and SmoothQuant do needs a
model's activations and stands in `infer.quantization`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from infer.errors import ConfigError
from infer.quant import rtn
from infer.quant.formats import PlanarFormat
from infer.quant.hadamard import transform
from infer.quant.paley import factor
from infer.quant.qarray import QArray

# Weights along the input that share a scale, or "channel" (a scale an output row), or "tensor".
GroupSize = int | Literal["channel", "tensor"]


class Method:
    """A way to quantise a weight [out, in]."""

    # Whether the method looks at activations.
    calibrated = False

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """Return the format of a weight of this shape.

        Raises:
            ConfigError: the groups do not divide it.
        """
        raise NotImplementedError

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """Return the weight in packed form: pure, jit-able, from the weight's own numbers."""
        raise NotImplementedError

    def pack_experts(self, w: Float[Array, "E O I"]) -> QArray:
        """Return the weights of E experts in packed form, each from its own numbers.

        Raises:
            ConfigError: a format that experts do not have: nested scales, turned inputs, rounded
                activations.
        """
        packed = jax.vmap(self.pack)(w)
        parts = {
            name: getattr(packed, name)
            for name in ("data", "scale", "zero", "global_scale")
            if getattr(packed, name) is not None
        }
        format, shape = packed.format, (w.shape[0], w.shape[1], w.shape[2])
        assert isinstance(format, PlanarFormat)
        try:
            return QArray.planar(**parts, format=format, shape=shape)
        except ValueError as error:
            raise ConfigError(f"{type(self).__name__} for experts: {error}") from None


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise ConfigError(f"{name} is {value!r:.60}; use {', '.join(map(repr, allowed))}")


# Inputs that a Hadamard matrix turns together: a number, or "full" for the whole row.
Hadamard = int | Literal["full"] | None


def _check_hadamard(hadamard: Hadamard) -> None:
    whole = isinstance(hadamard, str) and hadamard == "full"
    if hadamard is not None and not whole and not (type(hadamard) is int and hadamard > 1):
        raise ConfigError(
            f"hadamard is {hadamard!r:.60}; use None, 'full', or the number of inputs of a block"
        )
    if type(hadamard) is int:
        try:
            factor(hadamard)
        except ValueError as error:
            raise ConfigError(f"hadamard is {hadamard}: {error}") from None


def _with_hadamard(
    format: PlanarFormat, hadamard: Hadamard, shape: tuple[int, int]
) -> PlanarFormat:
    """Return the format of a weight of this shape whose inputs are turned.

    Raises:
        ConfigError: the blocks do not divide the width, or there is no matrix for it.
    """
    if hadamard is None:
        return format
    size = shape[1] if isinstance(hadamard, str) else hadamard
    if shape[1] % size:
        raise ConfigError(
            f"hadamard {size} does not divide the width {shape[1]} of a weight {list(shape)}; use"
            f" {shape[1] & -shape[1]}, or leave this weight out in a recipe"
        )
    try:
        factor(size)
    except ValueError as error:
        raise ConfigError(f"a weight {list(shape)}: {error}") from None
    return dataclasses.replace(format, name=f"{format.name}-H{size}", rotated=size)


def _turned(w: Float[Array, "O I"], format: PlanarFormat) -> Float[Array, "O I"]:
    """Return the weight for turned inputs, which is what is rounded."""
    return transform(w.astype(jnp.float32), format.rotated) if format.rotated else w


def _share(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r:.60}; use a number from {low:g} to {high:g}")


def _check_group(group: GroupSize) -> None:
    if not (type(group) is int and group >= 8) and not (
        isinstance(group, str) and group in ("channel", "tensor")
    ):
        raise ConfigError(
            f"group_size is {group!r:.60}; use a number of weights (8 or more), 'channel' or"
            " 'tensor'"
        )


def _grid(group: GroupSize, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the fields group and rows of the format."""
    if group == "channel":
        return 0, 1
    if group == "tensor":
        return 0, 0
    assert isinstance(group, int)
    if shape[1] % group:
        fits = [g for g in (256, 128, 64, 32, 16) if shape[1] % g == 0]
        raise ConfigError(
            f"group_size {group} does not divide the width {shape[1]} of a weight {list(shape)};"
            f" use {', '.join(map(str, fits))}{' or' if fits else ''} 'channel', or leave this"
            " weight out in a recipe"
        )
    return group, 1


@dataclass(frozen=True, kw_only=True)
class RTN(Method):
    """Integers, rounded to nearest.

    Args:
        bits: 8, 6, 5, 4, 3 or 2.
        group_size: weights that share a scale; "channel" or "tensor".
        symmetric: without a zero point.
        convention: of symmetric scales, see `rtn.CONVENTIONS`.
        scale_dtype: in which scales are stored.
        activations: None, or rounded too, a scale a token: "int8", "int4".
        hadamard: inputs that the product turns together by a Hadamard matrix, and the weight is
            rounded for those: a number, or "full" (QuaRot's R4, of `down`).
    """

    bits: int = 4
    group_size: GroupSize = 128
    symmetric: bool = True
    convention: str = "full"
    scale_dtype: str = "float16"
    activations: str | None = None
    hadamard: Hadamard = None

    def __post_init__(self) -> None:
        _check_hadamard(self.hadamard)
        _one_of("bits", self.bits, (8, 6, 5, 4, 3, 2))
        _one_of("symmetric", self.symmetric, (True, False))
        _check_group(self.group_size)
        _one_of("convention", self.convention, tuple(rtn.CONVENTIONS))
        _one_of("scale_dtype", self.scale_dtype, ("float16", "bfloat16", "float32"))
        _one_of("activations", self.activations, (None, "int8", "int4"))
        if not self.symmetric and self.convention != "full":
            raise ConfigError(
                f"convention is {self.convention!r} and symmetric is False; a convention is of"
                " scales without zero points: set symmetric=True, or leave convention out"
            )

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        group, rows = _grid(self.group_size, shape)
        format = rtn.int_format(
            self.bits, group, rows, self.symmetric, self.scale_dtype, self.activations or ""
        )
        return _with_hadamard(format, self.hadamard, shape)

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """See `Method`."""
        format = self.format_for((w.shape[0], w.shape[1]))
        return rtn.quantize_int(_turned(w, format), format, self.convention)


@dataclass(frozen=True, kw_only=True)
class LLMInt8(Method):
    """Weights and activations in int8, entries of 6 and more of the activations left as they are.

    Source: arXiv 2208.07339; `infer.ops.quantized` says where we differ.
    """

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        return rtn.int_format(8, scale_dtype="float32", activations="outliers")

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """See `Method`."""
        return rtn.quantize_int(w, self.format_for((w.shape[0], w.shape[1])), "restricted")


@dataclass(frozen=True, kw_only=True)
class FP8(Method):
    """8-bit floats.

    Args:
        code: "e4m3" or "e5m2".
        granularity: a scale for the "tensor", the "channel", or a "block" of 128 x 128.
        activations: None; "token": rounded to E4M3 too, a scale a token; "block": one for 128 of
            its entries.

    Source: FP8 Formats for Deep Learning (arXiv 2209.05433); blocks: DeepSeek-V3 (2412.19437).
    """

    code: str = "e4m3"
    granularity: str = "channel"
    activations: str | None = None

    def __post_init__(self) -> None:
        _one_of("code", self.code, ("e4m3", "e5m2"))
        _one_of("granularity", self.granularity, ("channel", "tensor", "block"))
        _one_of("activations", self.activations, (None, "token", "block"))

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        acts = {None: "", "token": "e4m3", "block": "e4m3_128"}[self.activations]
        rows, group = {"channel": (1, 0), "tensor": (0, 0), "block": (128, 128)}[self.granularity]
        name = f"FP8-{self.code.upper()}"
        name += {"channel": "", "tensor": "-TENSOR", "block": "-B128"}[self.granularity]
        return dataclasses.replace(
            rtn.FORMATS[f"FP8-{self.code.upper()}"],
            name=f"{name}-A:{acts}" if acts else name,
            rows=rows,
            group=group,
            activations=acts,
        )

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """See `Method`."""
        return rtn.quantize_float(w, self.format_for((w.shape[0], w.shape[1])))


@dataclass(frozen=True, kw_only=True)
class NF4(Method):
    """4-bit levels under the largest magnitude of a group, at the quantiles of a normal law (NF4),
    or bitsandbytes' 4-bit floats (FP4).

    Args:
        group_size: weights that share a scale.
        double: scales quantised to 8 bits themselves.
        levels: "nf4" or "fp4".

    Source: QLoRA (arXiv 2305.14314).
    """

    group_size: int = 64
    double: bool = True
    levels: str = "nf4"

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size < 8:
            raise ConfigError(
                f"group_size is {self.group_size!r:.60}; use a number of weights, 8 or more"
            )
        _one_of("double", self.double, (True, False))
        _one_of("levels", self.levels, ("nf4", "fp4"))

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        group, _ = _grid(self.group_size, shape)
        name = self.levels.upper() + (f"-G{group}" if group != 64 else "")
        return dataclasses.replace(
            rtn.FORMATS[self.levels.upper()],
            name=f"{name}-DQ" if self.double else name,
            group=group,
            scale_dtype="nested" if self.double else "float32",
        )

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """See `Method`."""
        return rtn.quantize_float(w, self.format_for((w.shape[0], w.shape[1])))


@dataclass(frozen=True, kw_only=True)
class MX(Method):
    """Microscaling: small floats, 32 of them under a power of two.

    Args:
        code: "e2m1" (MXFP4), "e2m3" or "e3m2" (MXFP6), "e4m3" or "e5m2" (MXFP8).
        scale_rule: how the power follows from the largest magnitude, see `rtn.e8m0_scale`.
        hadamard: as of RTN; the blocks' own 32 are usual.

    Source: OCP Microscaling Formats 1.0; arXiv 2310.10537.
    """

    code: str = "e2m1"
    scale_rule: str = "floor"
    hadamard: Hadamard = None

    def __post_init__(self) -> None:
        _check_hadamard(self.hadamard)
        _one_of("code", self.code, ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2"))
        _one_of("scale_rule", self.scale_rule, rtn.E8M0_RULES)

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        _grid(32, shape)
        names = {"e2m1": "MXFP4", "e2m3": "MXFP6-E2M3", "e3m2": "MXFP6-E3M2"}
        format = rtn.FORMATS[names.get(self.code, f"MXFP8-{self.code.upper()}")]
        return _with_hadamard(format, self.hadamard, shape)

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """See `Method`."""
        format = self.format_for((w.shape[0], w.shape[1]))
        return rtn.quantize_mx(_turned(w, format), format, self.scale_rule)


@dataclass(frozen=True, kw_only=True)
class NVFP4(Method):
    """E2M1 under an E4M3 scale for 16 and a float32 for the matrix (NVIDIA's FP4).

    Args:
        hadamard: as of RTN.
    """

    hadamard: Hadamard = None

    def __post_init__(self) -> None:
        _check_hadamard(self.hadamard)

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        _grid(16, shape)
        return _with_hadamard(rtn.FORMATS["NVFP4"], self.hadamard, shape)

    def pack(self, w: Float[Array, "O I"]) -> QArray:
        """See `Method`."""
        format = self.format_for((w.shape[0], w.shape[1]))
        return rtn.quantize_nvfp4(_turned(w, format), format)


@dataclass(frozen=True, kw_only=True)
class GPTQ(RTN):
    """Integers, column by column, each column's error spread over those that follow.

    Args:
        bits: as of RTN, like `group_size` to `activations`.
        damping: added to the Hessian's diagonal, as a share of its mean; raised tenfold, up to
            twice, where the factorisation fails.
        act_order: columns in the order of their activations' energy, the largest first.
        static_groups: with `act_order`, the scales are those of the original columns, so that no
            order has to be kept.

    Source: arXiv 2210.17323, and the reference implementation for `act_order`.
    """

    calibrated = True
    damping: float = 0.01
    act_order: bool = False
    static_groups: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("damping", self.damping, 1e-15, 1)
        _one_of("act_order", self.act_order, (True, False))
        _one_of("static_groups", self.static_groups, (True, False))
        if self.static_groups and not self.act_order:
            raise ConfigError(
                "static_groups only means something with act_order=True; leave it out, or set both"
            )
        if self.act_order and self.group_size in ("channel", "tensor") and not self.static_groups:
            raise ConfigError(
                f"act_order with group_size={self.group_size!r} has one group a row: set"
                " static_groups=True, which is the same and keeps no order"
            )


@dataclass(frozen=True, kw_only=True)
class AWQ(RTN):
    """Integers, inputs that matter scaled up before rounding, by a search on the block's output.

    Args:
        bits: as of RTN, like `group_size` to `activations`; not symmetric by default.
        clip: search the share of each group's range too (not of queries and keys).
        rounding: how codes are found under the scales of the search: "rtn", to nearest; "gptq",
            with columns of most energy first.
        damping: of "gptq", see `GPTQ`.

    Source: arXiv 2306.00978; GPTQ after it is ours, with the inputs' Hessian scaled likewise.
    """

    calibrated = True
    symmetric: bool = False
    clip: bool = True
    rounding: str = "rtn"
    damping: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("clip", self.clip, (True, False))
        _one_of("rounding", self.rounding, ("rtn", "gptq"))
        if self.hadamard is not None:
            raise ConfigError(
                f"hadamard is {self.hadamard!r:.40}, and AWQ scales inputs that stand apart, which"
                " turning mixes; use RTN or GPTQ, or leave it out"
            )
        _share("damping", self.damping, 1e-15, 1)
        if self.rounding == "rtn" and self.damping != 0.01:
            raise ConfigError(
                f"damping is {self.damping:g} and rounding 'rtn', which damps nothing; leave it"
                " out, or set rounding='gptq'"
            )


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Method):
    """Weights and activations in int8, part of the activations' range moved into the weights.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), X / s and W s, folded into the norm before.

    Args:
        alpha: the share that moves; 0.8 and more for models with large outliers.
        static: one stored scale for the activations of each product, instead of one a token.
        weights: how the weights are rounded: RTN or GPTQ of 8 bits and "channel".

    Source: arXiv 2211.10438.
    """

    calibrated = True
    alpha: float = 0.5
    static: bool = False
    weights: RTN = RTN(bits=8, group_size="channel", scale_dtype="float32")

    def __post_init__(self) -> None:
        _share("alpha", self.alpha, 0, 1)
        _one_of("static", self.static, (True, False))
        if not isinstance(self.weights, RTN) or isinstance(self.weights, AWQ):
            raise ConfigError("weights of SmoothQuant is an RTN or a GPTQ")
        if self.weights.activations is not None:
            raise ConfigError(
                "weights of SmoothQuant has activations of its own; leave them out, `static` says"
                " how activations are rounded"
            )
        if self.weights.hadamard is not None:
            raise ConfigError(
                f"weights of SmoothQuant has hadamard {self.weights.hadamard!r:.40}, and"
                " SmoothQuant scales inputs that stand apart, which turning mixes; leave it out"
            )

    def format_for(self, shape: tuple[int, int]) -> PlanarFormat:
        """See `Method`."""
        acts = "int8_static" if self.static else "int8"
        weights = self.weights.format_for(shape)
        return dataclasses.replace(weights, name=f"{weights.name}-A:{acts}", activations=acts)
