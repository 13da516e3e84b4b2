"""Golden microscaling formats and NVFP4 of torchao on CPU.

pip install --no-deps torchao==0.18.0      # beside torch on CPU and numpy
python scripts/goldens/quant_torchao.py tests/data/quant/torchao.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from quant_inputs import save, weights
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

ELEMENTS = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e2m3": DTYPE_FP6_E2M3,
    "e3m2": DTYPE_FP6_E3M2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
RULES = ("floor", "ceil", "even", "rceil")


def as_bytes(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def microscaling(w: torch.Tensor) -> dict[str, np.ndarray]:
    found = {}
    for code, dtype in ELEMENTS.items():
        for rule in RULES:
            scale, data = to_mx(w, dtype, 32, ScaleCalculationMode(rule))
            found[f"{code}_{rule}.scale"] = as_bytes(scale)
            found[f"{code}_{rule}.data"] = as_bytes(data)
    return found


if __name__ == "__main__":
    w = torch.from_numpy(weights())
    whole = per_tensor_amax_to_scale(w.abs().max())
    scale, data = nvfp4_quantize(w, 16, whole)
    nvfp4 = {
        "nvfp4.global": whole.numpy(),
        "nvfp4.scale": as_bytes(scale),
        "nvfp4.data": as_bytes(data),
    }
    save(Path(sys.argv[1]), ("torchao", "torch"), microscaling(w) | nvfp4)
