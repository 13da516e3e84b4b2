"""GPTQ's layout (AutoGPTQ, GPTQModel) and AWQ's: words of codes, zero points and scales by group.

GPTQ, weight logically [N, K]:

    qweight int32 [K b / 32, N]   codes of a column of the tensor, the low bits first
    qzeros  int32 [K / g, N b / 32]  likewise along N; version 1 stores z - 1, modulo 2^b,
                                     version 2 z
    scales  float16 [K / g, N]
    g_idx   int32 [K]   the group of each input

AWQ ("gemm"): qweight int32 [K, N / 8], the nibbles of a word in the order 0, 2, 4, 6, 1, 3, 5, 7;
qzeros [K / g, N / 8] alike, z as it is.  w = (code - z) * scale in both.

Source: AutoGPTQ and AutoAWQ's packing; GPTQModel for `checkpoint_format`.
"""

import dataclasses
import logging
import re

import numpy as np

from infer.errors import WeightFormatError
from infer.models.checkpoint import HFConfig
from infer.quant import rtn
from infer.weights.quantised.matrix import (
    FLOATS,
    SCALE_DTYPES,
    Matrix,
    Part,
    Tensors,
    bytes_of_words,
    order_of_groups,
    pack,
    unpacked,
)

logger = logging.getLogger(__name__)

_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def gptq(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of a GPTQ checkpoint by their modules.

    Raises:
        WeightFormatError: a layout that is not read, or tensors that do not fit it.
    """
    bits = _checked_bits(config)
    kind = config.text("checkpoint_format", config.text("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        raise WeightFormatError(
            f"{config.where}: checkpoint_format is {kind!r:.40}; 'gptq' and 'gptq_v2' are read: "
            "take a checkpoint in one of them"
        )
    modules = tensors.ending("qweight")
    added = 1 if kind == "gptq" else 0
    if added and config.get("sym") is True and modules:
        stored = bytes_of_words(tensors.read(f"{modules[0]}.qzeros"))
        if (unpacked(stored, bits) == 1 << (bits - 1)).all():
            logger.warning(
                "%s: says 'gptq', whose zero points are stored less one, and symmetric, and stores"
                " %d: they are read as those of 'gptq_v2', or every weight would be off by a step",
                config.where,
                1 << (bits - 1),
            )
            added = 0
    found = {}
    for module in modules:
        own = _of_module(config, module)
        found[module] = _gptq_matrix(
            module, tensors, _checked_bits(own), own.integer("group_size"), added
        )
    return found


def _checked_bits(config: HFConfig) -> int:
    bits = config.integer("bits")
    if bits not in (2, 3, 4, 8):
        raise WeightFormatError(f"{config.where}: bits is {bits}; GPTQ is read with 2, 3, 4 and 8")
    return bits


def _of_module(config: HFConfig, module: str) -> HFConfig:
    """Return what holds for a module: `dynamic` has patterns with values of their own (GPTQModel),
    of which the first that matches counts.
    """
    dynamic = config.section("dynamic")
    for pattern in () if dynamic is None else dynamic.values:
        own = dynamic.get(pattern)  # type: ignore[union-attr]
        try:
            matches = re.match(pattern.removeprefix("+:"), module) is not None
        except re.error as error:
            raise WeightFormatError(
                f"{config.where}: dynamic: {pattern!r:.80} is no pattern ({error})"
            ) from None
        if matches and isinstance(own, dict):
            return HFConfig({**config.values, **own}, f"{config.where} dynamic {pattern[:60]!r}")
    return config


def _gptq_matrix(module: str, tensors: Tensors, bits: int, group: int, added: int) -> Matrix:
    name = lambda part: f"{module}.{part}"
    words, out = tensors.get(name("qweight"), ("I32",), (None, None)).shape
    width = words * 32 // bits
    if group == -1 or group >= width:
        group = width
    if group < 1 or width % group or words * 32 % bits or width % 8:
        raise tensors.error(
            name("qweight"),
            f"has {words} words of {bits} bits a column, no whole groups of {group}",
        )
    groups = width // group
    scales = tensors.get(name("scales"), FLOATS, (groups, out))
    tensors.get(name("qzeros"), ("I32",), (groups, out * bits // 32))
    sources = [name("qweight"), name("scales"), name("qzeros")]
    order = None
    if name("g_idx") in tensors.infos:
        tensors.get(name("g_idx"), ("I32",), (width,))
        sources.append(name("g_idx"))
        order = order_of_groups(tensors.read(name("g_idx")), group, f"{tensors.path}: {module}")

    def zeros() -> np.ndarray:
        stream = bytes_of_words(tensors.read(name("qzeros")))
        # A zero point of 0 is stored as all ones.
        codes = (unpacked(stream, bits) + np.uint8(added)) & np.uint8((1 << bits) - 1)
        return np.ascontiguousarray(codes.T)

    def data() -> np.ndarray:
        stream = bytes_of_words(tensors.read(name("qweight")).T)  # [N, bytes]
        if order is None and bits != 3:
            return stream
        codes = unpacked(stream, bits)
        return pack(codes if order is None else codes[:, order], bits)

    symmetric = bool((zeros() == 1 << (bits - 1)).all())
    parts = {
        "data": Part("U8", (out, width * bits // 8), data),
        "scale": Part(
            scales.dtype,
            (out, groups),
            lambda: np.ascontiguousarray(tensors.read(name("scales")).T),
        ),
    }
    if not symmetric:
        parts["zero"] = Part("U8", (out, groups), zeros)
    format = rtn.int_format(
        bits, 0 if group == width else group, 1, symmetric, SCALE_DTYPES[scales.dtype]
    )
    if order is not None:
        format = dataclasses.replace(format, name=f"{format.name}-ORDERED", ordered=True)
        parts["perm"] = Part("I32", (width,), lambda: order)
    return Matrix((out, width), format, parts, tuple(sources))


def awq(config: HFConfig, tensors: Tensors) -> dict[str, Matrix]:
    """Return the quantised matrices of an AWQ checkpoint by their modules.

    Raises:
        WeightFormatError: a layout that is not read, or tensors that do not fit it.
    """
    bits = config.integer("bits", config.integer("w_bit", 4))
    group = config.integer("group_size", config.integer("q_group_size", 128))
    version = config.text("version", "gemm").lower()
    if bits != 4 or version != "gemm":
        raise WeightFormatError(
            f"{config.where}: AWQ of {bits} bits in the version {version!r:.40}; 4 bits in 'gemm'"
            " are read"
        )
    return {module: _awq_matrix(module, tensors, group) for module in tensors.ending("qweight")}


def _awq_matrix(module: str, tensors: Tensors, group: int) -> Matrix:
    name = lambda part: f"{module}.{part}"
    width, words = tensors.get(name("qweight"), ("I32",), (None, None)).shape
    out = words * 8
    if group == -1:
        group = width
    if group < 1 or width % group or width % 8:
        raise tensors.error(name("qweight"), f"has {width} inputs, no whole groups of {group}")
    groups = width // group
    scales = tensors.get(name("scales"), FLOATS, (groups, out))
    tensors.get(name("qzeros"), ("I32",), (groups, words))

    def codes(part: str) -> np.ndarray:
        nibbles = unpacked(bytes_of_words(tensors.read(name(part))), 4)
        nibbles = nibbles.reshape(-1, words, 8)
        found = np.empty_like(nibbles)
        found[..., _AWQ_ORDER] = nibbles
        return np.ascontiguousarray(found.reshape(-1, out).T)  # [N, K] or [N, K / g]

    parts = {
        "data": Part("U8", (out, width // 2), lambda: pack(codes("qweight"), 4)),
        "scale": Part(
            scales.dtype,
            (out, groups),
            lambda: np.ascontiguousarray(tensors.read(name("scales")).T),
        ),
        "zero": Part("U8", (out, groups), lambda: codes("qzeros")),
    }
    format = rtn.int_format(4, 0 if group == width else group, 1, False, SCALE_DTYPES[scales.dtype])
    sources = tuple(name(part) for part in ("qweight", "qzeros", "scales"))
    return Matrix((out, width), format, parts, sources)
