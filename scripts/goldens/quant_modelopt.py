"""Golden NVFP4 of NVIDIA's ModelOpt on CPU.

pip install --no-deps nvidia-modelopt==0.47.0      # beside torch on CPU and numpy
python scripts/goldens/quant_modelopt.py tests/data/quant/modelopt.npz
"""

import sys
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from quant_inputs import save, weights

if __name__ == "__main__":
    packed, scale, whole = NVFP4QTensor.quantize(torch.from_numpy(weights()), 16)
    arrays = {
        "nvfp4.data": packed._quantized_data.numpy(),
        "nvfp4.scale": scale.view(torch.uint8).numpy(),
        "nvfp4.global": whole.numpy(),
    }
    save(Path(sys.argv[1]), ("nvidia-modelopt", "torch"), arrays)
