"""Golden tensors of one quantised matrix as compressed-tensors and bitsandbytes store it, and the
floats that they decode it to, on CPU.

pip install torch==2.13.0 compressed-tensors==0.20.1 bitsandbytes==0.50.2
python scripts/goldens/quant_layouts.py tests/data/quant/layouts.npz
"""

import json
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from quant_inputs import save

OUT, WIDTH = 16, 128
INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
FLOAT8 = dict(num_bits=8, type="float", symmetric=True, strategy="channel")
SCHEMES = {
    "pack-quantized": ("pack-quantized", INT4),
    "pack-quantized zero": ("pack-quantized", INT4 | dict(symmetric=False)),
    "int-quantized": ("int-quantized", FLOAT8 | dict(type="int")),
    "int-quantized zero": ("int-quantized", FLOAT8 | dict(type="int", symmetric=False)),
    "float-quantized": ("float-quantized", FLOAT8),
    "nvfp4-pack-quantized": (
        "nvfp4-pack-quantized",
        dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16),
    ),
}


def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(OUT, WIDTH, generator=generator)


def compressed(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    form, args = SCHEMES[name]
    w, groups = weight(), WIDTH // args.get("group_size", WIDTH)
    parts = w.reshape(OUT, groups, -1)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    most = torch.maximum(-low, high)
    state = {"weight": w}
    if args["type"] == "float" and args["num_bits"] == 4:
        whole = torch.tensor([6 * 448.0]) / most.max()
        state["weight_global_scale"] = whole
        state["weight_scale"] = (whole * most / 6).to(torch.float8_e4m3fn).float()
    elif args["type"] == "float":
        state["weight_scale"] = most / 448
    elif args["symmetric"]:
        state["weight_scale"] = most / ((1 << args["num_bits"]) - 1) * 2
    else:
        scale = (high - low) / ((1 << args["num_bits"]) - 1)
        half = 1 << (args["num_bits"] - 1)
        state["weight_scale"] = scale
        state["weight_zero_point"] = (-half - low / scale).round().clamp(-half, half - 1).char()
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    kind = BaseCompressor.get_value_from_registry(form)
    packed = {k: v for k, v in kind.compress(dict(state), scheme).items() if v is not None}
    floats = kind.decompress(dict(packed), scheme)["weight"]
    return packed, floats


def four_bits(kind: str, double: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    data, state = bnb.quantize_4bit(
        weight(), blocksize=64, quant_type=kind, compress_statistics=double
    )
    parts = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    return {"weight": data} | parts, bnb.dequantize_4bit(data, state)


def eight_bits() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    data, scale, _ = bnb.int8_vectorwise_quant(weight().half())
    return {"weight": data, "SCB": scale}, bnb.int8_vectorwise_dequant(data, scale)


def numpy_of(x: torch.Tensor) -> np.ndarray:
    if x.dtype in (torch.float8_e4m3fn, torch.bfloat16):
        return x.contiguous().view(torch.uint8 if x.itemsize == 1 else torch.int16).numpy()
    return x.numpy()


def main(path: str) -> None:
    cases = {name: compressed(name) for name in SCHEMES}
    cases |= {
        "nf4": four_bits("nf4", False),
        "nf4 double": four_bits("nf4", True),
        "fp4": four_bits("fp4", False),
        "int8": eight_bits(),
    }
    arrays, dtypes = {}, {}
    for name, (tensors, floats) in cases.items():
        for part, tensor in tensors.items():
            arrays[f"{name}/{part}"] = numpy_of(tensor)
            dtypes[f"{name}/{part}"] = str(tensor.dtype).removeprefix("torch.")
        arrays[f"{name}/="] = floats.float().numpy()
    arrays["dtypes"] = np.array(json.dumps(dtypes))
    save(Path(path), ("torch", "compressed-tensors", "bitsandbytes"), arrays)


if __name__ == "__main__":
    main(sys.argv[1])
