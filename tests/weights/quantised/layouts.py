"""Tiny Llama folders in the exact names and shapes of other tools, packed by loops of our own that
share nothing with the readers; and the float weights that the files stand for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from infer.models.params import random_params
from infer.weights.safetensors_writer import Entry, dtype_name, write_folder
from tests.models import tiny, tiny_folder
from tests.tokenizer import tokenizer_json
from tests.weights import hf_folders

OUT, WIDTH, INNER = 32, 32, 64
Tensors = dict[str, np.ndarray]
Pack = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m] down the first axis into int32 [n * bits / 32, m], as one stream of bits."""
    count = codes.shape[0] * bits // 32
    out = np.zeros((count, codes.shape[1]), np.uint64)
    for i, row in enumerate(codes):
        word, at = divmod(i * bits, 32)
        value = row.astype(np.uint64) << np.uint64(at)
        out[word] |= value & np.uint64(0xFFFFFFFF)
        if at + bits > 32:
            out[word + 1] |= value >> np.uint64(32)
    return out.astype(np.uint32).view(np.int32)


def gptq(bits: int, group: int, *, v2: bool = False, act: bool = False, sym: bool = False) -> Pack:
    """GPTQ's layout; with `act` the groups of the inputs are mixed."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, np.ndarray]:
        groups = width // group
        codes = rng.integers(0, 1 << bits, (out, width))
        zeros = rng.integers(1, 1 << bits, (out, groups))
        if sym:
            zeros = np.full((out, groups), 1 << (bits - 1))
        scales = rng.uniform(0.01, 0.05, (out, groups)).astype(np.float16)
        g_idx = np.arange(width) // group
        if act:
            g_idx = rng.permutation(g_idx)
        w = (codes - zeros[:, g_idx]).astype(np.float32) * scales.astype(np.float32)[:, g_idx]
        stored = zeros if v2 else zeros - 1
        tensors = {
            "qweight": words(codes.T, bits),
            "qzeros": np.ascontiguousarray(words(stored, bits).T),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": g_idx.astype(np.int32),
        }
        return tensors, w

    return pack


def awq(group: int) -> Pack:
    """AWQ's layout, 4 bits."""

    def in_order(codes: np.ndarray) -> np.ndarray:
        found = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return found.view(np.int32)

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, np.ndarray]:
        groups = width // group
        codes = rng.integers(0, 16, (width, out))
        zeros = rng.integers(0, 16, (groups, out))
        scales = rng.uniform(0.01, 0.05, (groups, out)).astype(np.float16)
        of = np.arange(width) // group
        w = (codes - zeros[of]).astype(np.float32) * scales.astype(np.float32)[of]
        tensors = {"qweight": in_order(codes), "qzeros": in_order(zeros), "scales": scales}
        return tensors, w.T

    return pack


def pack_quantized(bits: int, group: int, *, zero: bool = False, act: bool = False) -> Pack:
    """compressed-tensors' words; a group of 0 is the row."""

    def in_words(codes: np.ndarray) -> np.ndarray:
        per = 32 // bits
        found = np.zeros((codes.shape[0], -(-codes.shape[1] // per)), np.uint32)
        for column in range(codes.shape[1]):
            at = np.uint32(column % per * bits)
            found[:, column // per] |= codes[:, column].astype(np.uint32) << at
        return found.view(np.int32)

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, np.ndarray]:
        span = group or width
        half = 1 << (bits - 1)
        q = rng.integers(-half, half, (out, width))
        z = rng.integers(-half, half, (out, width // span)) if zero else np.zeros(1, int)
        scale = rng.uniform(0.01, 0.05, (out, width // span)).astype(ml_dtypes.bfloat16)
        g_idx = np.arange(width) // span
        if act:
            g_idx = rng.permutation(g_idx)
        zeros = z[:, g_idx] if zero else 0
        w = (q - zeros).astype(np.float32) * scale.astype(np.float32)[:, g_idx]
        tensors = {
            "weight_packed": in_words(q + half),
            "weight_shape": np.array([out, width], np.int64),
            "weight_scale": scale,
        }
        if zero:
            tensors["weight_zero_point"] = np.ascontiguousarray(in_words((z + half).T).T)
        if act:
            tensors["weight_g_idx"] = g_idx.astype(np.int32)
        return tensors, w

    return pack


def int_quantized(*, zero: bool = False, static: bool = False) -> Pack:
    """compressed-tensors' int8."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, np.ndarray]:
        q = rng.integers(-128, 128, (out, width)).astype(np.int8)
        scale = rng.uniform(0.001, 0.002, (out, 1)).astype(np.float32)
        z = (
            rng.integers(-100, 100, (out, 1)).astype(np.int8)
            if zero
            else np.zeros((out, 1), np.int8)
        )
        tensors = {"weight": q, "weight_scale": scale}
        if zero:
            tensors["weight_zero_point"] = z
        if static:
            tensors["input_scale"] = np.array([0.03], np.float32)
        return tensors, (q.astype(np.int32) - z).astype(np.float32) * scale

    return pack


def _e4m3(rng: np.random.Generator, out: int, width: int) -> np.ndarray:
    return rng.uniform(-400, 400, (out, width)).astype(ml_dtypes.float8_e4m3fn)


def float8(shape: str, *, static: bool = False, inverse: bool = False) -> Pack:
    """E4M3 with one scale ("tensor"), one a row ("channel"), or one for 128 x 128 ("block")."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, np.ndarray]:
        q = _e4m3(rng, out, width)
        grid = {"tensor": (1,), "channel": (out, 1), "block": (-(-out // 128), -(-width // 128))}
        scale = rng.uniform(1e-4, 2e-4, grid[shape]).astype(np.float32)
        wide = (
            np.repeat(np.repeat(scale, 128, 0)[:out], 128, 1)[:, :width]
            if shape == "block"
            else scale
        )
        tensors = {"weight": q, "weight_scale_inv" if inverse else "weight_scale": scale}
        if static:
            tensors["input_scale"] = np.array(0.02, np.float32)
        return tensors, q.astype(np.float32) * wide

    return pack


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp4(kind: str) -> Pack:
    """NVFP4 of ModelOpt ("modelopt") or compressed-tensors ("divides"), and MXFP4 ("mx")."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 16, (out, width)).astype(np.uint8)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        if kind == "mx":
            e = rng.integers(118, 122, (out, width // 32)).astype(np.uint8)
            scale = np.exp2(e.astype(np.float32) - 127)
            return {"weight_packed": pairs, "weight_scale": e}, _E2M1[codes] * scale.repeat(32, 1)
        s = rng.uniform(100, 400, (out, width // 16)).astype(ml_dtypes.float8_e4m3fn)
        whole = np.float32(2.0**-15)  # a power of two, whose reciprocal is exact
        w = _E2M1[codes] * (s.astype(np.float32) * whole).repeat(16, 1)
        if kind == "modelopt":
            names = {"weight": pairs, "weight_scale": s, "weight_scale_2": np.array(whole)}
            return names | {"input_scale": np.array(0.1, np.float32)}, w
        inverse = np.array([1 / whole], np.float32)
        return {"weight_packed": pairs, "weight_scale": s, "weight_global_scale": inverse}, w

    return pack


def write(
    folder: Path,
    pack: Pack,
    quantisation: dict[str, Any] | None,
    *,
    kept: tuple[str, ...] = ("layers.0.down",),
    extra: dict[str, np.ndarray] | None = None,
    files: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a folder in which all matrices of layers but `kept` are packed; return the float
    tensors that it stands for.
    """
    config = tiny.llama_config(
        vocab_size=268, num_tokens=268, max_context=512, intermediate_size=INNER
    )
    floats = hf_folders.weights_of(random_params(config, seed=4))
    rng = np.random.default_rng(0)
    tensors, want = dict(extra or {}), dict(floats)
    for name, values in floats.items():
        module = name.removesuffix(".weight")
        short = module.removeprefix("model.").replace("mlp.", "").replace("_proj", "")
        if not module.endswith("_proj") or short in kept:
            tensors[name] = values
            continue
        parts, w = pack(rng, *values.shape)
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
        want[name] = w
    folder.mkdir(parents=True)
    values = {**tiny_folder.CONFIG, "intermediate_size": INNER}
    if quantisation is not None:
        values["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(values))
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    entries = {
        name: Entry(dtype=dtype_name(a.dtype), shape=a.shape, read=lambda a=a: a)
        for name, a in tensors.items()
    }
    write_folder(folder, entries, {"format": "pt"})
    special = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
    tokenizer_json.write(folder, tokenizer_json.byte_level(), {"tokenizer_config.json": special})
    return want


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ["lm_head"],
    }


_TOKEN8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}
_STATIC8 = {"num_bits": 8, "type": "float", "dynamic": False}
_GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False}

# Name -> (pack, quantization_config, format of `q` of the first layer).
CASES: dict[str, tuple[Pack, dict[str, Any], str]] = {
    "gptq 4": (gptq(4, 16), {**_GPTQ, "bits": 4, "group_size": 16}, "INT4-G16-ASYM"),
    "gptq 4, symmetric": (
        gptq(4, 16, sym=True),
        {**_GPTQ, "bits": 4, "group_size": 16, "sym": True},
        "INT4-G16",
    ),
    "gptq 4 v2, act-order": (
        gptq(4, 8, v2=True, act=True),
        {**_GPTQ, "bits": 4, "group_size": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
        "INT4-G8-ASYM-ORDERED",
    ),
    "gptq 2": (gptq(2, 16), {**_GPTQ, "bits": 2, "group_size": 16}, "INT2-G16-ASYM"),
    "gptq 3": (gptq(3, 32), {**_GPTQ, "bits": 3, "group_size": 32}, "INT3-ASYM"),
    "gptq 8": (gptq(8, 16), {**_GPTQ, "bits": 8, "group_size": 16}, "INT8-G16-ASYM"),
    "awq": (
        awq(16),
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM", "zero_point": True},
        "INT4-G16-ASYM",
    ),
    "pack-quantized": (
        pack_quantized(4, 16),
        {**group(_INT4), "format": "pack-quantized"},
        "INT4-G16",
    ),
    "pack-quantized, zeros and order": (
        pack_quantized(4, 16, zero=True, act=True),
        {**group({**_INT4, "symmetric": False, "actorder": "group"}), "format": "pack-quantized"},
        "INT4-G16-ASYM-ORDERED",
    ),
    "pack-quantized 3, W3A8": (
        pack_quantized(3, 0),
        {**group({**_INT4, "num_bits": 3}, _TOKEN8), "format": "pack-quantized"},
        "INT3-A:int8",
    ),
    "int-quantized": (
        int_quantized(),
        {**group({**_FLOAT8, "type": "int"}, _TOKEN8), "format": "int-quantized"},
        "INT8-A:int8",
    ),
    "int-quantized, zeros": (
        int_quantized(zero=True),
        {**group({**_FLOAT8, "type": "int", "symmetric": False}), "format": "int-quantized"},
        "INT8-ASYM",
    ),
    "int-quantized, static": (
        int_quantized(static=True),
        {
            **group({**_FLOAT8, "type": "int"}, {"num_bits": 8, "type": "int", "dynamic": False}),
            "format": "int-quantized",
        },
        "INT8-A:int8_static",
    ),
    "float-quantized": (
        float8("channel"),
        {**group(_FLOAT8, {**_TOKEN8, "type": "float"}), "format": "float-quantized"},
        "FP8-E4M3-A:e4m3",
    ),
    "float-quantized, blocks": (
        float8("block"),
        {
            **group({**_FLOAT8, "strategy": "block", "block_structure": [128, 128]}),
            "format": "float-quantized",
        },
        "FP8-E4M3-B128",
    ),
    "naive-quantized, static": (
        float8("tensor", static=True),
        {
            **group(
                {**_FLOAT8, "strategy": "tensor"},
                {"num_bits": 8, "type": "float", "dynamic": False},
            ),
            "format": "naive-quantized",
        },
        "FP8-E4M3-TENSOR-A:e4m3_static",
    ),
    "nvfp4-pack-quantized": (
        fp4("divides"),
        {
            **group({"num_bits": 4, "type": "float", "group_size": 16}),
            "format": "nvfp4-pack-quantized",
        },
        "NVFP4",
    ),
    "mxfp4-pack-quantized": (
        fp4("mx"),
        {
            **group({"num_bits": 4, "type": "float", "group_size": 32}),
            "format": "mxfp4-pack-quantized",
        },
        "MXFP4",
    ),
    "fp8 blocks": (
        float8("block", inverse=True),
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
        },
        "FP8-E4M3-B128-A:e4m3_128",
    ),
    "fbgemm_fp8": (
        float8("channel"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "FP8-E4M3-A:e4m3",
    ),
    "modelopt FP8": (
        float8("tensor", static=True),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "FP8-E4M3-TENSOR-A:e4m3_static",
    ),
    "modelopt NVFP4": (
        fp4("modelopt"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4",
    ),
}
