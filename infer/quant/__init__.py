"""Quantised arrays: packed values with the laws that turn them back into numbers.

The names below load on first use, so that the host side (`formats`, `blocks`, the file readers
above) needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.quant.formats import Format
    from infer.quant.methods import (
        AWQ,
        FP8,
        GPTQ,
        MX,
        NF4,
        NVFP4,
        RTN,
        LLMInt8,
        Method,
        SmoothQuant,
    )
    from infer.quant.qarray import QArray, dequantize, permute_rows, take_rows

_HOME = {
    "infer.quant.formats": ("Format",),
    "infer.quant.methods": (
        *("AWQ", "FP8", "GPTQ", "LLMInt8", "MX", "Method", "NF4", "NVFP4", "RTN", "SmoothQuant"),
    ),
    "infer.quant.qarray": ("QArray", "dequantize", "permute_rows", "take_rows"),
}
__all__ = [
    "AWQ",
    "FP8",
    "GPTQ",
    "MX",
    "NF4",
    "NVFP4",
    "RTN",
    "Format",
    "LLMInt8",
    "Method",
    "QArray",
    "SmoothQuant",
    "dequantize",
    "permute_rows",
    "take_rows",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
