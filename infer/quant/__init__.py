"""Quantised arrays: packed values with the laws that turn them back into numbers."""

from infer.quant.qarray import Format, QArray, dequantize

__all__ = ["Format", "QArray", "dequantize"]
