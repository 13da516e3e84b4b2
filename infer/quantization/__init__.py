"""Quantising a model: `quantize(params, method_or_recipe, calibration)`, a pytree for a pytree."""

from infer.quantization.calibration import Sequences, sequences
from infer.quantization.driver import quantize
from infer.quantization.recipe import Recipe
from infer.weights.packed_form import Calibration

__all__ = ["Calibration", "Recipe", "Sequences", "quantize", "sequences"]
