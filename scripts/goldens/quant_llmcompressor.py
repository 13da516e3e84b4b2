"""Golden GPTQ of llm-compressor on CPU: scales from the original weights, columns in their own
order or by falling energy.

    pip install --no-deps llmcompressor==0.14.0.1 compressed-tensors==0.20.1 loguru pydantic
    python scripts/goldens/quant_llmcompressor.py tests/data/quant/llmcompressor.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from quant_inputs import gptq_case, save

SCHEMES = {
    "int4_channel": dict(num_bits=4, symmetric=True, strategy="channel"),
    "int3_channel": dict(num_bits=3, symmetric=False, strategy="channel"),
    "int4_ordered": dict(
        num_bits=4, symmetric=True, strategy="group", group_size=64, actorder="weight"
    ),
    "int4_ordered_asymmetric": dict(
        num_bits=4, symmetric=False, strategy="group", group_size=64, actorder="weight"
    ),
}


def scheme(name: str) -> dict[str, np.ndarray]:
    w, h = (torch.from_numpy(a)[None] for a in gptq_case())
    args = QuantizationArgs(type="int", **SCHEMES[name])
    groups = w[0].reshape(w.shape[1], -1, args.group_size or w.shape[2])
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    values, _, fallback = quantize_weight(
        w.clone(), h.clone(), scale[None], zero[None], None, args, blocksize=128, percdamp=0.01
    )
    assert not fallback.any(), name
    return {f"{name}.values": values[0].numpy(), f"{name}.scale": scale.numpy()}


if __name__ == "__main__":
    arrays = {key: array for name in SCHEMES for key, array in scheme(name).items()}
    save(Path(sys.argv[1]), ("llmcompressor", "compressed-tensors", "torch"), arrays)
