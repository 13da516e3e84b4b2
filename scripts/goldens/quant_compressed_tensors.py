"""Golden integers and 8-bit floats of compressed-tensors on CPU.

pip install --no-deps compressed-tensors==0.20.1 loguru pydantic   # beside torch on CPU
python scripts/goldens/quant_compressed_tensors.py tests/data/quant/compressed_tensors.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from quant_inputs import ragged, save, weights

SCHEMES = {
    f"int{bits}_{strategy}_{'symmetric' if symmetric else 'asymmetric'}": dict(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=64 if strategy == "group" else None,
    )
    for bits in (4, 8)
    for strategy in ("group", "channel")
    for symmetric in (True, False)
} | {
    "fp8_channel": dict(num_bits=8, type="float", symmetric=True, strategy="channel"),
    "fp8_block": dict(
        num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[128, 128]
    ),
}


def ranges(w: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    if args.strategy == "block":
        rows, columns = (-(-n // 128) for n in w.shape)
        blocks = [
            [w[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] for j in range(columns)]
            for i in range(rows)
        ]
        take = lambda f: torch.stack([torch.stack([f(b) for b in row]) for row in blocks])
        return take(torch.min), take(torch.max)
    groups = w.reshape(w.shape[0], -1, args.group_size or w.shape[1])
    return groups.amin(-1), groups.amax(-1)


def scheme(name: str) -> dict[str, np.ndarray]:
    args = QuantizationArgs(**SCHEMES[name])
    w = torch.from_numpy(ragged() if args.strategy == "block" else weights())
    scale, zero = calculate_qparams(*ranges(w, args), args)
    if args.type == "float":
        codes = quantize(w, scale, zero, args, dtype=torch.float8_e4m3fn).view(torch.uint8)
        return {f"{name}.codes": codes.numpy(), f"{name}.scale": scale.numpy()}
    half = 1 << (args.num_bits - 1)  # signed codes; ours are not
    codes = quantize(w, scale, zero, args, dtype=torch.int8).short() + half
    return {
        f"{name}.codes": codes.to(torch.uint8).numpy(),
        f"{name}.scale": scale.numpy(),
        f"{name}.zero": (zero.short() + half).to(torch.uint8).numpy(),
    }


if __name__ == "__main__":
    arrays = {key: array for name in SCHEMES for key, array in scheme(name).items()}
    save(Path(sys.argv[1]), ("compressed-tensors", "torch"), arrays)
