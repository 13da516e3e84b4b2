"""NVIDIA ModelOpt's layouts: FP8 with one scale, NVFP4 with weight_scale and weight_scale_2, which
both multiply.

    FP8     weight E4M3, weight_scale, input_scale
    NVFP4   weight uint8 [N, K / 2], low nibble first; weight_scale E4M3 [N, K / 16]; weight_scale_2
"""

from infer.errors import WeightFormatError
from infer.models.checkpoint import HFConfig
from infer.weights.quantised.compressed_tensors import fp4
from infer.weights.quantised.floats8 import one_number, scaled
from infer.weights.quantised.matrix import Matrix, Tensors


def modelopt(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of a checkpoint by their modules.

    Raises:
        WeightFormatError: an algorithm that is not read, or tensors that do not fit it.
    """
    algorithm = config.text("quant_algo", "")
    if algorithm not in ("FP8", "NVFP4"):
        raise WeightFormatError(
            f"{config.where}: quant_algo is {algorithm!r:.40}; FP8 and NVFP4 are read"
        )
    return {
        module: _matrix(module, tensors, algorithm) for module in tensors.ending("weight_scale")
    }


def _matrix(module: str, tensors: Tensors, algorithm: str) -> Matrix:
    if algorithm == "FP8":
        return scaled(module, tensors, static=f"{module}.input_scale" in tensors.infos)
    name = f"{module}.weight"
    acts = [n for n in (f"{module}.input_scale",) if n in tensors.infos]
    return fp4(
        tensors,
        name,
        f"{name}_scale",
        one_number(tensors, f"{name}_scale_2"),
        sources=(name, f"{name}_scale", f"{name}_scale_2", *acts),
        unused=dict.fromkeys(acts, "activations stay as they are"),
    )
