"""Quantised arrays: packed values with the laws that turn them back into numbers.

The names below load on first use, so that the host side (`formats`, `blocks`, the file readers
above) needs no JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.quant.formats import Format
    from infer.quant.qarray import QArray, dequantize, permute_rows, take_rows

__all__ = ["Format", "QArray", "dequantize", "permute_rows", "take_rows"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from infer.quant import qarray

    return getattr(qarray, name)
