"""Quantising a model: `quantize(params, method_or_recipe, calibration)`, a pytree for a pytree."""

from infer.quantization.calibration import Sequences, sequences
from infer.quantization.driver import quantize
from infer.quantization.recipe import Recipe
from infer.quantization.rotation import Rotations, hadamard_rotations, rotate, turning_down
from infer.weights.packed_form import Calibration

__all__ = [
    "Calibration",
    "Recipe",
    "Rotations",
    "Sequences",
    "hadamard_rotations",
    "quantize",
    "rotate",
    "sequences",
    "turning_down",
]
