"""Methods by name and options, as the command line and recipe files spell them."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infer.errors import ConfigError
from infer.model_files import parse_json
from infer.quant.methods import (
    AWQ,
    FP8,
    GPTQ,
    MX,
    NF4,
    NVFP4,
    RTN,
    GroupSize,
    LLMInt8,
    Method,
    SmoothQuant,
)
from infer.quantization.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Named:
    """A method as it is called: what makes it, with which options, and with which values set."""

    make: Callable[..., Method]
    options: tuple[str, ...]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration text."""
        return (isinstance(self.make, type) and self.make.calibrated) or self.make is _smoothquant


_INTEGERS = ("bits", "group_size", "symmetric", "convention", "scale_dtype", "activations")
_TURNED = (*_INTEGERS, "hadamard")
_DEFAULT_GROUPS = (128, 64, 32)
_FLAGS = ("symmetric", "act_order", "static_groups", "clip", "double", "static")
_NUMBERS = ("damping", "alpha")
_WORDS = (
    "convention",
    "scale_dtype",
    "activations",
    "rounding",
    "code",
    "granularity",
    "scale_rule",
)


def _smoothquant(*, rounding: str = "rtn", **options: Any) -> SmoothQuant:
    own = {k: options.pop(k) for k in ("alpha", "static") if k in options}
    if rounding not in ("rtn", "gptq"):
        raise ConfigError(f"rounding is {rounding!r:.40}; use 'rtn' or 'gptq'")
    kind = GPTQ if rounding == "gptq" else RTN
    if kind is RTN and (wrong := sorted({"damping", "act_order", "static_groups"} & set(options))):
        raise ConfigError(
            f"{', '.join(wrong)} needs rounding 'gptq'; set it, or leave {', '.join(wrong)} out"
        )
    defaults: dict[str, Any] = dict(bits=8, group_size="channel", scale_dtype="float32")
    return SmoothQuant(**own, weights=kind(**(defaults | options)))


METHODS: dict[str, Named] = {
    "rtn": Named(RTN, _TURNED),
    "gptq": Named(GPTQ, (*_TURNED, "damping", "act_order", "static_groups")),
    "awq": Named(AWQ, (*_INTEGERS, "clip", "rounding", "damping")),
    "smoothquant": Named(
        _smoothquant,
        (
            *("alpha", "static", "rounding", "bits", "group_size", "symmetric", "convention"),
            *("scale_dtype", "damping", "act_order", "static_groups"),
        ),
    ),
    "llm-int8": Named(LLMInt8, ()),
    "fp8": Named(FP8, ("code", "granularity", "activations")),
    "nf4": Named(NF4, ("group_size", "double"), {"levels": "nf4"}),
    "fp4": Named(NF4, ("group_size", "double"), {"levels": "fp4"}),
    "mxfp4": Named(MX, ("scale_rule", "hadamard"), {"code": "e2m1"}),
    "mxfp6": Named(MX, ("code", "scale_rule", "hadamard"), {"code": "e2m3"}),
    "mxfp8": Named(MX, ("code", "scale_rule", "hadamard"), {"code": "e4m3"}),
    "nvfp4": Named(NVFP4, ("hadamard",)),
}
# The codes of a method that takes one.
_CODES = {"mxfp6": ("e2m3", "e3m2"), "mxfp8": ("e4m3", "e5m2")}


def method_of(name: str, options: Mapping[str, Any], widths: Iterable[int] = ()) -> Method:
    """Return the method of a name and options.

    Args:
        name: a key of METHODS.
        options: fields of the method by name; what is not given has the method's default.
        widths: of the matrices it is for.  Where no group size is given and 128 does not divide
            them, the largest of 64 and 32 that does is taken.

    Raises:
        ConfigError: the name is not known, or an option does not go with it or has a wrong value.
    """
    if name not in METHODS:
        raise ConfigError(f"method is {name!r:.60}; use {', '.join(METHODS)}")
    named = METHODS[name]
    if wrong := [key for key in options if key not in named.options]:
        takes = ", ".join(named.options) or "no options"
        raise ConfigError(
            f"{', '.join(wrong)} does not go with {name}, which takes {takes}; leave it out"
        )
    if name in _CODES and options.get("code", _CODES[name][0]) not in _CODES[name]:
        raise ConfigError(
            f"code is {options['code']!r:.40}; {name} has {' or '.join(_CODES[name])}"
        )
    for key, value in options.items():
        if key in _FLAGS and type(value) is not bool:
            raise ConfigError(f"{key} is {value!r:.40}; use true or false")
        if key == "bits" and type(value) is not int:
            raise ConfigError(f"bits is {value!r:.40}; use 8, 6, 5, 4, 3 or 2")
        if key == "group_size" and not _is_group(value):
            raise ConfigError(
                f"group_size is {value!r:.40}; use a number of weights (8 or more), 'channel' or"
                " 'tensor'"
            )
        if key == "hadamard" and type(value) is not int and value != "full":
            raise ConfigError(f"hadamard is {value!r:.40}; use a number of inputs, or 'full'")
        if key in _WORDS and not isinstance(value, str):
            raise ConfigError(f"{key} is {value!r:.40}; use a word in quotes")
        if key in _NUMBERS and type(value) not in (int, float):
            raise ConfigError(f"{key} is {value!r:.40}; use a number")
    values = {**named.fixed, **options}
    if "convention" in options and values.get("symmetric", name != "awq") is False:
        raise ConfigError(
            f"convention is {options['convention']!r:.40}, which is of scales without zero points,"
            f" and {'awq' if 'symmetric' not in options else 'this'} has zero points; add"
            " symmetric, or leave convention out"
        )
    if name == "awq" and "damping" in options and options.get("rounding") != "gptq":
        raise ConfigError("damping needs rounding 'gptq'; set it, or leave damping out")
    if named.make in (RTN, GPTQ, AWQ) and "group_size" not in values:
        values["group_size"] = default_group(widths)
    return named.make(**values)


def _is_group(value: Any) -> bool:
    return type(value) is int or (isinstance(value, str) and value in ("channel", "tensor"))


def default_group(widths: Iterable[int]) -> GroupSize:
    """Return the largest of 128, 64 and 32 that divides every width; 128 where none does."""
    widths = tuple(widths)
    fits = (g for g in _DEFAULT_GROUPS if all(width % g == 0 for width in widths))
    return next(fits, _DEFAULT_GROUPS[0])


_SHORT = re.compile(r"(rtn)([2-68])(?:-g(\d{1,6})|-(channel|tensor))?")
_SHORT_NAMES = {
    "int8": RTN(bits=8, group_size="channel", activations="int8"),
    "llm-int8": LLMInt8(),
    "fp8": FP8(),
    "nf4": NF4(),
    "fp4": NF4(levels="fp4"),
    "mxfp4": MX(),
    "mxfp6": MX(code="e2m3"),
    "mxfp8": MX(code="e4m3"),
    "nvfp4": NVFP4(),
}


def short(name: str, widths: Iterable[int] = ()) -> Method:
    """Return the data-free method of a short name: "rtn4", "rtn4-g32", "rtn8-channel", "int8"
    (activations too), "llm-int8", "fp8", "nf4", "fp4", "mxfp4", "mxfp6", "mxfp8", "nvfp4".

    Args:
        name: of the method.
        widths: of the matrices; see `method_of`.

    Raises:
        ConfigError: the name is not known, or of a method that needs calibration text.
    """
    if name in _SHORT_NAMES:
        return _SHORT_NAMES[name]
    if match := _SHORT.fullmatch(name):
        group: Any = int(match[3]) if match[3] else match[4] or default_group(widths)
        return RTN(bits=int(match[2]), group_size=group)
    calibrated = next((m for m, n in METHODS.items() if n.calibrated and name.startswith(m)), None)
    if calibrated is not None:
        raise ConfigError(
            f"{name} needs calibration text: `infer quantize MODEL --method {calibrated}"
            " --calibration FILE --out FOLDER` makes a model of it, which is then given by its"
            " folder"
        )
    raise ConfigError(
        f"{name!r:.60} is no method without calibration; use rtn8 to rtn2 (rtn4-g32,"
        f" rtn8-channel), {', '.join(_SHORT_NAMES)}"
    )


def recipe_of(text: bytes, what: str, widths: Iterable[int] = ()) -> Recipe:
    """Return the recipe of a JSON file: patterns of paths -> {"method": name, options}, or null
    for "leave as it is"; the first pattern that matches holds.

    Args:
        text: the file.
        what: what messages call it.
        widths: of the matrices; see `method_of`.

    Raises:
        ConfigError: it is none; WeightFormatError: it is no JSON.
    """
    values = parse_json(text, what)
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            f"{what} holds {values!r:.80}; write an object of patterns, such as"
            ' {"layers.0.*": null, "layers.*": {"method": "gptq", "bits": 4}}'
        )
    rules: dict[str, Method | None] = {}
    for pattern, rule in values.items():
        if rule is None:
            rules[pattern] = None
            continue
        if not isinstance(rule, dict) or not isinstance(rule.get("method"), str):
            raise ConfigError(
                f"{what}: {pattern!r:.80} has the rule {rule!r:.80}; write null, or an object with"
                f' "method", one of {", ".join(METHODS)}, and its options'
            )
        options = {key: value for key, value in rule.items() if key != "method"}
        try:
            rules[pattern] = method_of(rule["method"], options, widths)
        except ConfigError as error:
            raise ConfigError(f"{what}: {pattern!r:.80}: {error}") from None
    return Recipe.of(rules)
