"""Golden NF4, FP4 and int8 of bitsandbytes on CPU.

pip install --no-deps bitsandbytes==0.50.2      # beside torch on CPU and numpy
python scripts/goldens/quant_bitsandbytes.py tests/data/quant/bitsandbytes.npz
"""

import sys
from pathlib import Path

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional
from quant_inputs import activations, save, weights


def four_bits(w: torch.Tensor) -> dict[str, np.ndarray]:
    found = {}
    for levels in ("nf4", "fp4"):
        for double in (False, True):
            data, state = functional.quantize_4bit(
                w, blocksize=64, compress_statistics=double, quant_type=levels
            )
            name = f"{levels}_{'double' if double else 'plain'}"
            found[f"{name}.data"] = data.numpy().reshape(w.shape[0], -1)
            found[f"{name}.values"] = functional.dequantize_4bit(data, state).numpy()
            if double:
                found[f"{name}.absmax"] = state.absmax.numpy()
                found[f"{name}.nested_absmax"] = state.state2.absmax.numpy()
                found[f"{name}.nested_map"] = state.state2.code.numpy()
                found[f"{name}.offset"] = state.offset.numpy()
            else:
                found[f"{name}.absmax"] = state.absmax.numpy()
    return found


def eight_bits(w: torch.Tensor, x: torch.Tensor) -> dict[str, np.ndarray]:
    codes, absmax, _ = functional.int8_vectorwise_quant(w.half())
    state = bitsandbytes.MatmulLtState()
    state.CB, state.SCB, state.has_fp16_weights, state.threshold = codes, absmax, False, 6.0
    state.is_training = False
    products = bitsandbytes.matmul(x.half(), w.half(), state=state, threshold=6.0)
    return {"int8.codes": codes.numpy(), "int8.absmax": absmax.numpy(), "int8.y": products.numpy()}


if __name__ == "__main__":
    w, x = torch.from_numpy(weights()), torch.from_numpy(activations())
    save(Path(sys.argv[1]), ("bitsandbytes", "torch"), four_bits(w) | eight_bits(w, x))
